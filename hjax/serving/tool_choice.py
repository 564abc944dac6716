"""What a request says of its tools: which there are, whether one is called, and which.

Where that says more than the model's own text may, the answer is held to a grammar: text as it
comes, and calls in the form that the chat template has the model write, with arguments that the
function's schema allows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import FailFast

from hjax.errors import ConfigError
from hjax.rollout.constraint import Constraint
from hjax.rollout.matching import SPACES
from hjax.serving.fields import Fields, wrong
from hjax.serving.formats import Format
from hjax.serving.refusal import Refused
from hjax.serving.tool_calls import CallForm, Calls

_AUTO, _NONE, _REQUIRED = "auto", "none", "required"
_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclasses.dataclass(frozen=True)
class Function:
    """A function that may be called.

    Attributes:
      name: of it.
      parameters: the JSON schema of its arguments.
      strict: whether a call's arguments are held to it though nobody forces the call.
      field: by which the request says it.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    field: str


@dataclasses.dataclass(frozen=True)
class Tools:
    """Of a request.

    Attributes:
      given: as the chat template takes them; none where none may be called.
      functions: those that may be called.
      choice: ``auto``, ``none``, ``required``, or ``function``: the only one of ``functions``.
      several: whether an answer may have more calls than one.
    """

    given: tuple[dict[str, Any], ...]
    functions: tuple[Function, ...]
    choice: str
    several: bool

    @property
    def forced(self) -> bool:
        """Whether the answer is calls, whatever the model would say."""
        return self.choice not in (_AUTO, _NONE)

    def held(self, form: CallForm | None) -> bool:
        """Whether the answer is held to a grammar, where calls are written so."""
        strict = any(function.strict for function in self.functions)
        fewer = not self.several and (form is None or form.several)
        return bool(self.functions) and (self.forced or strict or fewer)

    def calls(self, form: CallForm | None, name: str) -> Calls | None:
        """What calls the answer may have; None: none are looked for.

        Args:
          form: that the chat template of the model ``name`` says; None: none.

        Raises:
          Refused: a grammar is wanted and there is no form.
        """
        if not self.functions:
            return None
        if form is None:
            if not self.held(form):
                return None
            raise Refused(
                f"{self._field}: the chat template of {name} does not say how calls are written "
                "(as JSON between <tool_call> and </tool_call>, or as Llama 3 does); leave it out",
                param=self._field,
            )
        # OpenAI's: where the request names the function its call is no news.
        finish = "stop" if self.choice == "function" else "tool_calls"
        names = tuple(function.name for function in self.functions)
        return Calls(form, names, self.held(form), self.forced, finish)

    def format(self, form: CallForm) -> Format | None:
        """What the answer is held to; None: nothing.

        Raises:
          Refused: what cannot be arguments.
        """
        if not self.held(form):
            return None
        schemas = [self._schema(function) for function in self.functions]
        parts = []
        for function, schema in zip(self.functions, schemas, strict=True):
            name = f"{function.field}.parameters"
            try:
                parts.append((name, Constraint.of_json(schema)))
            except ConfigError as error:
                raise Refused(f"{name}: {error}", param=name) from None
        several = self.several and form.several
        try:
            constraint = Constraint(grammar=self._grammar(form, schemas, several))
        except ConfigError as error:
            raise Refused(f"tools: {error}", param="tools") from None
        return Format(constraint, self._field, tuple(parts))

    @property
    def _field(self) -> str:
        if self.forced:
            return "tool_choice"
        return "tools" if self.several else "parallel_tool_calls"

    def _schema(self, function: Function) -> dict[str, Any]:
        if not (self.forced or function.strict):
            return _ANY_OBJECT
        if function.parameters.get("type", "object") != "object":
            name = f"{function.field}.parameters"
            raise Refused(f"{name}: of type object, as arguments are", param=name)
        return function.parameters | _ANY_OBJECT

    def _grammar(self, form: CallForm, schemas: Sequence[dict[str, Any]], several: bool) -> str:
        names = [f"f{i}" for i in range(len(schemas))]
        lines = []
        for name, function, schema in zip(names, self.functions, schemas, strict=True):
            head = f"{_text(json.dumps(function.name, ensure_ascii=False) + ',')} SPACE"
            key = _text(f'"{form.arguments}":')
            lines.append(f"{name}: {head} {key} SPACE %json {json.dumps(schema | SPACES)}")
        lines += [r"NEWLINE: /\n?/", "SPACE: / ?/"]
        each = f"{_text('{' + _quoted('name') + ':')} SPACE ({' | '.join(names)}) {_text('}')}"
        if not form.begin:
            lines.append(f"call: {each}")
            text = "" if self.forced else r' | /[^\s{](?s:.*)/ | ""'
            lines.append(f"start: call{text}")
            return "\n".join(lines)
        lines.append(f"call: NEWLINE {each} NEWLINE {_text(form.end)}")
        more = f"(NEWLINE {_text(form.begin)} call)*" if several else ""
        if self.forced:
            lines.append(f"start: {_text(form.begin)} call {more}")
        else:
            tag = form.begin
            lines += [
                f"start: TEXT | begun call {more}",
                rf"begun[lazy]: /(?s:.*){tag}/",
                rf"TEXT: /(?s:.*)/ & ~/(?s:.*){tag}(?s:.*)/",
            ]
        return "\n".join(lines)


def _text(text: str) -> str:
    """As the grammar writes it."""
    return json.dumps(text, ensure_ascii=False)


def _quoted(text: str) -> str:
    return f'"{text}"'


class _Function(Fields, extra="ignore"):
    name: str
    parameters: dict[str, Any] = {}
    strict: bool = False


class _Tool(Fields, extra="ignore"):
    type: Literal["function"] = "function"
    function: _Function


class ToolFields(Fields):
    """What a request says of tools."""

    tools: Annotated[list[_Tool], FailFast()] = []
    tool_choice: Any = _AUTO
    parallel_tool_calls: bool = True

    def asked_for(self, body: Mapping[str, Any]) -> Tools:
        """What these fields ask for, of the request ``body``.

        Raises:
          Refused: a choice of a tool that is not there, or none where there are no tools.
        """
        given = tuple(body.get("tools") or ())  # as they came, to the template
        functions = tuple(
            Function(f.name, f.parameters or _NO_ARGUMENTS, f.strict, f"tools[{i}].function")
            for i, f in enumerate(tool.function for tool in self.tools)
        )
        several, choice = self.parallel_tool_calls, self.tool_choice
        match choice:
            case "none":
                return Tools((), (), choice, several)
            case "auto" | "required":
                if choice == _REQUIRED and not functions:
                    said = "tool_choice: required, and there are no tools"
                    raise Refused(said, param="tool_choice")
                return Tools(given, functions, choice, several)
            case {"type": "function", "function": {"name": str(name)}}:
                chosen = tuple(function for function in functions if function.name == name)[:1]
                if not chosen:
                    raise wrong("tool_choice", choice, "the name of one of the tools")
                return Tools(given, chosen, "function", False)
        wanted = '"auto", "none", "required", or {"type": "function", "function": {"name": ...}}'
        raise wrong("tool_choice", choice, wanted)
