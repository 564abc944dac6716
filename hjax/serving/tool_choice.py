"""Tools of a request: which there are, whether one must be called, and which (tool_choice).

If that asks for more than the model's own text ensures, a grammar constrains the answer: free text,
and calls in the chat template's form whose arguments the function's schema allows.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, FailFast, Field

from hjax.data.tool_call_forms import CallForm
from hjax.errors import ConfigError
from hjax.rollout.constrained_decoding import JSON_WHITESPACE
from hjax.rollout.constraint import Constraint
from hjax.serving.fields import RequestFields, invalid_field
from hjax.serving.request_errors import RequestRefused
from hjax.serving.response_format import TextFormat
from hjax.serving.tool_calls import AllowedCalls

_AUTO, _NONE, _REQUIRED = "auto", "none", "required"
_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolFunction(RequestFields, extra="ignore"):
    """A function that may be called.

    Attributes:
      name: of it.
      parameters: the JSON schema of its arguments.
      strict: whether the schema is enforced even if the call is not forced.
    """

    name: str = Field(max_length=256)  # an answer's text is searched for it as it comes
    parameters: Annotated[dict[str, Any], AfterValidator(lambda x: x or _NO_ARGUMENTS)] = (
        _NO_ARGUMENTS
    )
    strict: bool = False


class _Tool(RequestFields, extra="ignore"):
    type: Literal["function"] = "function"
    function: ToolFunction


@dataclasses.dataclass(frozen=True)
class RequestTools:
    """The tools of a request.

    Attributes:
      given: as the chat template takes them; none if none may be called.
      functions: those that may be called, by the field that has each.
      choice: ``auto``, ``none``, ``required``, or ``function``: the only one of ``functions``.
      several: whether an answer may have several calls.
    """

    given: tuple[dict[str, Any], ...]
    functions: Mapping[str, ToolFunction]
    choice: str
    several: bool

    @property
    def forced(self) -> bool:
        """Whether the answer must be calls."""
        return self.choice not in (_AUTO, _NONE)

    def constrained(self, form: CallForm | None) -> bool:
        """Whether a grammar constrains the answer, if calls have this form."""
        strict = any(function.strict for function in self.functions.values())
        fewer = not self.several and (form is None or form.several)
        return bool(self.functions) and (self.forced or strict or fewer)

    def calls(
        self, form: CallForm | None, name: str, text: TextFormat | None = None
    ) -> AllowedCalls | None:
        """The calls that the answer may have; None: none are looked for.

        Args:
          form: that the chat template of the model ``name`` says; None: none.
          text: the format of an answer without calls; None: any.

        Raises:
          RequestRefused: a grammar is needed and there is no form.
        """
        if not self.functions:
            return None
        is_constrained = text is not None or self.constrained(form)
        if form is None or (form.in_tags and is_constrained):
            if not is_constrained:
                return None
            said = (
                "has calls written in tags, which no grammar forces"
                if form is not None
                else "does not say how calls are written (as JSON between <tool_call> and "
                "</tool_call>, or as Llama 3 does)"
            )
            raise RequestRefused(
                f"{self._field}: the chat template of {name} {said}; leave it out",
                param=self._field,
            )
        # As OpenAI does: a call of a named function ends with "stop".
        finish = "stop" if self.choice == "function" else "tool_calls"
        names = tuple(function.name for function in self.functions.values())
        # Where the text has a format too, only the whole answer says which of both it is.
        streamed = self.forced or (text is None and self.constrained(form))
        parameters = {each.name: each.parameters for each in self.functions.values()}
        return AllowedCalls(form, names, streamed, self.forced, finish, parameters)

    def format(self, form: CallForm, text: TextFormat | None = None) -> TextFormat | None:
        """The grammar that constrains the answer; None: nothing does.

        Args:
          form: of calls.
          text: the format of an answer without calls; None: any.

        Raises:
          RequestRefused: a schema that arguments cannot have; a text that is not JSON.
        """
        if self.forced:
            text = None
        elif text is not None and text.constraint.json_schema is None:
            raise RequestRefused(
                f"tools: {text.field} has the answer in a form that is not JSON, which calls do "
                'not have; tool_choice "none", or leave one of them out',
                param="tools",
            )
        if text is None and not self.constrained(form):
            return None
        schemas = {
            f"{field}.parameters": self._schema(f"{field}.parameters", function)
            for field, function in self.functions.items()
        }
        parts = []
        for name, schema in schemas.items():
            try:
                parts.append((name, Constraint.of_json(schema)))
            except ConfigError as error:
                raise RequestRefused(f"{name}: {error}", param=name) from None
        if text is not None:
            parts.append((text.field, text.constraint))
        try:
            grammar = self._grammar(form, list(schemas.values()), text)
            constraint = Constraint(grammar=grammar)
        except ConfigError as error:
            raise RequestRefused(f"tools: {error}", param="tools") from None
        return TextFormat(constraint, self._field, tuple(parts))

    @property
    def _field(self) -> str:
        if self.forced:
            return "tool_choice"
        return "tools" if self.several else "parallel_tool_calls"

    def _schema(self, name: str, function: ToolFunction) -> dict[str, Any]:
        if not (self.forced or function.strict):
            return _ANY_OBJECT
        if function.parameters.get("type", "object") != "object":
            raise RequestRefused(f"{name}: of type object, as arguments are", param=name)
        return function.parameters | _ANY_OBJECT

    def _grammar(
        self, form: CallForm, schemas: Sequence[dict[str, Any]], text: TextFormat | None
    ) -> str:
        several = self.several and form.several
        names = [f"f{i}" for i in range(len(schemas))]
        lines = []
        functions = self.functions.values()
        for name, function, schema in zip(names, functions, schemas, strict=True):
            own, key = _string(function.name), _string(form.arguments)
            value = json.dumps(schema | JSON_WHITESPACE)
            lines.append(f'{name}: {own} "," SPACE {key} ":" SPACE %json {value}')
        lines += [r"NEWLINE: /\n?/", "SPACE: / ?/"]
        if text is not None:
            schema = json.loads(text.constraint.json_schema or "")
            lines.append(f"json: %json {json.dumps(schema | JSON_WHITESPACE)}")
        # In the lexemes of %json, as a text that is JSON may begin like a call.
        each = f'"{{" {_string("name")} ":" SPACE ({" | ".join(names)}) "}}"'
        if not form.begin:
            lines.append(f"call: {each}")
            free = "" if self.forced else r' | /[^\s{](?s:.*)/ | ""'
            lines.append(f"start: call{free if text is None else ' | json'}")
            return "\n".join(lines)
        lines.append(f"call: NEWLINE {each} NEWLINE {_text(form.end)}")
        more = f"(NEWLINE {_text(form.begin)} call)*" if several else ""
        if self.forced or text is not None:
            lines.append(f"start: {_text(form.begin)} call {more}{' | json' if text else ''}")
        else:
            tag = form.begin
            lines += [
                f"start: TEXT | begun call {more}",
                rf"begun[lazy]: /(?s:.*){tag}/",
                rf"TEXT: /(?s:.*)/ & ~/(?s:.*){tag}(?s:.*)/",
            ]
        return "\n".join(lines)


def _text(text: str) -> str:
    """A string literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _string(text: str) -> str:
    """The literal of a JSON string."""
    return _text(json.dumps(text, ensure_ascii=False))


class ToolFields(RequestFields):
    """The fields of a request about tools."""

    tools: Annotated[list[_Tool], FailFast()] = []
    tool_choice: Any = _AUTO
    parallel_tool_calls: bool = True

    def requested_tools(self, body: Mapping[str, Any]) -> RequestTools:
        """The tools of the request ``body``.

        Raises:
          RequestRefused: a choice of a tool that does not exist, or a required call without tools.
        """
        given = tuple(body.get("tools") or ())  # unchanged, for the template
        functions = {f"tools[{i}].function": tool.function for i, tool in enumerate(self.tools)}
        several, choice = self.parallel_tool_calls, self.tool_choice
        match choice:
            case "none":
                return RequestTools((), {}, choice, several)
            case "auto" | "required":
                if choice == _REQUIRED and not functions:
                    said = "tool_choice: required, and there are no tools"
                    raise RequestRefused(said, param="tool_choice")
                return RequestTools(given, functions, choice, several)
            case {"type": "function", "function": {"name": str(name)}}:
                for field, function in functions.items():
                    if function.name == name:
                        return RequestTools(given, {field: function}, "function", False)
                raise invalid_field("tool_choice", choice, "the name of one of the tools")
        wanted = '"auto", "none", "required", or {"type": "function", "function": {"name": ...}}'
        raise invalid_field("tool_choice", choice, wanted)
