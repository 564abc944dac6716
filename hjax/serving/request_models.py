"""Request models: the fields of OpenAI's completion and chat requests, validated with pydantic."""

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, create_model

from hjax.data.chat_messages import MessageError, read_messages, read_template_arguments
from hjax.data.conversation import Conversation
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError
from hjax.rollout.constrained_decoding import ConstraintMatcher
from hjax.rollout.requests import Request
from hjax.rollout.sampling_params import MOST_TOP, OPTIONS, SamplingParams
from hjax.serving.fields import RequestFields, invalid_field, validate_fields
from hjax.serving.limits import ServerLimits
from hjax.serving.neutral_fields import (
    NeutralChatFields,
    NeutralCompletionFields,
    NeutralFields,
    only,
)
from hjax.serving.request_errors import RequestRefused
from hjax.serving.response_format import FormatFields, ResponseFormat, TextFormat
from hjax.serving.served_model import ServedModel
from hjax.serving.tool_calls import AllowedCalls
from hjax.serving.tool_choice import ToolFields

# Seeds of the engine; larger and negative ones of requests are hashed to them.
SEEDS = 2**32
_INT64 = 2**63
_LARGEST = 2**31 - 1
# OpenAI's default of /v1/completions.
MAX_TOKENS = 16
# Most top log-probs of /v1/completions, as OpenAI's.
MOST_TOP_COMPLETIONS = 5
# Characters per available token that are encoded first, to refuse far too long texts early.
CHARACTERS_PER_TOKEN = 16
# Fields that ``SamplingParams`` checks.
_SAMPLING = OPTIONS.keys() - {"logit_bias"}


@dataclasses.dataclass(frozen=True)
class RequestPrompt:
    """A prompt.

    Attributes:
      tokens: ids, at least one.
      max_tokens: of the response.
      text: None if it was given as ids.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    text: str | None = None


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """A parsed request for responses.

    Attributes:
      prompts: at least one.
      n: responses to each.
      options: sampling options; the model's own end tokens are among the stop tokens.
      seed: every draw follows from it and the response's number.
      stop: strings before which a response ends.
      stream: whether the answer is streamed.
      include_usage: whether the stream ends with the usage.
      token_ids: whether token ids of prompts and responses are returned beside the text.
      skip_special: whether special tokens are left out of the text.
      logprobs: number of top tokens per position, beside the one drawn; None: no log-probs.
      echo: whether the prompt's text comes first.
      calls: tool calls that are looked for in the answer; None: none.
      format: that each response's text must have; None: any.
      matchers: of each response, made of its format; none without, or before ``with_matchers``.
    """

    prompts: tuple[RequestPrompt, ...]
    n: int
    options: SamplingParams
    seed: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    token_ids: bool
    skip_special: bool
    logprobs: int | None
    echo: bool = False
    calls: AllowedCalls | None = None
    format: TextFormat | None = None
    matchers: tuple[ConstraintMatcher | None, ...] = ()

    def prompt_of(self, index: int) -> RequestPrompt:
        """The prompt of a response."""
        return self.prompts[index // self.n]

    @property
    def scored(self) -> bool:
        """Whether the prompt's log-probs are reported."""
        return self.echo and self.logprobs is not None

    def requests(self) -> list[Request]:
        """One engine request for each response, in order."""
        constraint = None if self.format is None else self.format.constraint
        prompts = [prompt for prompt in self.prompts for _ in range(self.n)]
        return [
            Request(
                prompt.tokens,
                prompt.max_tokens,
                self.options,
                self.seed,
                index,
                constraint,
                self.scored or not prompt.max_tokens,
            )
            for index, prompt in enumerate(prompts)
        ]


class _StreamOptions(RequestFields):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers; there is none
    continuous_usage_stats: Annotated[Any, only(False)] = False


_OPTIONS: dict[str, Any] = dict.fromkeys(_SAMPLING, (Any, None))
_SamplingFields: Any = create_model("_SamplingFields", __base__=RequestFields, **_OPTIONS)


class _Common(_SamplingFields, NeutralFields, FormatFields):
    """The fields that both requests have."""

    model: str = ""
    n: int = Field(1, ge=1)
    best_of: int | None = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: Any = []
    stop_token_ids: list[Any] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[str, Any] = {}
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    return_token_ids: bool = False


_Form = TypeVar("_Form", bound=_Common)


class _Completion(_Common, NeutralCompletionFields):
    prompt: Any = None
    max_tokens: int = Field(MAX_TOKENS, ge=0, le=_LARGEST)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_COMPLETIONS)
    echo: bool = False


class _Chat(_Common, ToolFields, NeutralChatFields):
    messages: list[Any] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_LARGEST)
    max_tokens: int | None = Field(None, ge=1, le=_LARGEST)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    response_format: ResponseFormat = ResponseFormat()
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )


def parse_completion(
    body: Mapping[str, Any], served: ServedModel, limits: ServerLimits
) -> ParsedRequest:
    """Parse the body of a /v1/completions request.

    Raises:
      RequestRefused: a field that is wrong, or not supported.
    """
    fields = _validated(_Completion, body, served)
    prompts = _prompt_list(fields.prompt)
    _check_responses(len(prompts), fields.n, limits)  # before any of them is encoded
    if not fields.max_tokens and not fields.echo:
        raise invalid_field("max_tokens", 0, "a whole number, 1 or more; 0 with echo")
    return _parsed(
        fields,
        served,
        limits,
        prompts=_prompts(prompts, served, fields.max_tokens),
        logprobs=fields.logprobs,
        echo=fields.echo,
        format=fields.text_format(),
    )


# Token ids of a chat, and how many tokens there is room for with what is drawn after them.
Encoded = tuple[list[int], int]


def parse_chat(
    body: Mapping[str, Any],
    served: ServedModel,
    limits: ServerLimits,
    encode: Callable[[Conversation], Encoded] | None = None,
) -> ParsedRequest:
    """Parse the body of a /v1/chat/completions request.

    Args:
      encode: what makes the prompt of the chat; a larger ``max_tokens`` than it leaves room for is
        then cut down to that. None: the chat template, and the model's positions.

    Raises:
      RequestRefused: a field that is wrong, or not supported; a model without chat template.
    """
    fields = _validated(_Chat, body, served)
    _check_responses(1, fields.n, limits)
    most = fields.max_completion_tokens
    older = most if fields.max_tokens is None else fields.max_tokens
    if most is not None and older != most:
        raise RequestRefused(
            f"max_tokens={older} and max_completion_tokens={most}: give one of them",
            param="max_tokens",
        )
    if fields.top_logprobs and not fields.logprobs:
        raise RequestRefused("top_logprobs: only with logprobs=true", param="top_logprobs")
    tools = fields.requested_tools(body)
    format = fields.text_format(fields.response_format.format())
    chat = _conversation(fields, served, list(tools.given))
    ids, room = _encoded(chat, served) if encode is None else encode(chat)
    if encode is not None and older is not None:
        older = min(older, max(room - len(ids), 1))
    prompt = _prompt(ids, older, room)
    calls = tools.calls(served.call_form, served.name, format)
    if calls is not None:
        format = tools.format(calls.form, format)
    return _parsed(
        fields,
        served,
        limits,
        prompts=(prompt,),
        logprobs=fields.top_logprobs or 0 if fields.logprobs else None,
        calls=calls,
        format=format,
    )


def _validated(kind: type[_Form], body: Mapping[str, Any], served: ServedModel) -> _Form:
    fields = validate_fields(kind, body)
    served.check_name(fields.model)
    if fields.stream_options.include_usage and not fields.stream:
        raise RequestRefused("stream_options: only with stream=true", param="stream_options")
    if fields.best_of not in (None, fields.n):
        raise invalid_field("best_of", fields.best_of, "not supported here; leave it out, or n")
    return fields


def _parsed(
    fields: _Common, served: ServedModel, limits: ServerLimits, **rest: Any
) -> ParsedRequest:
    """The parsed request, with the fields that both have."""
    parsed = ParsedRequest(
        n=fields.n,
        options=_options(fields, served, rest["logprobs"] or 0),
        seed=_seed(fields.seed),
        stop=_stop(fields.stop, served, limits),
        stream=fields.stream,
        include_usage=fields.stream_options.include_usage,
        token_ids=fields.return_token_ids,
        skip_special=fields.skip_special_tokens,
        **rest,
    )
    if parsed.logprobs is not None:
        # Memory for them is taken as they are drawn, some hundred bytes for each.
        tokens = sum(len(each.tokens) * parsed.echo + each.max_tokens for each in parsed.prompts)
        if (count := tokens * parsed.n * (1 + parsed.logprobs)) > limits.log_probs:
            said = f"{count} log-probs: at most {limits.log_probs}; give a smaller max_tokens or n"
            raise RequestRefused(f"logprobs: up to {said}", param="logprobs")
    return parsed


def _check_responses(prompts: int, n: int, limits: ServerLimits) -> None:
    if prompts * n > limits.choices:
        said = f"{prompts} prompts with n={n}: at most {limits.choices} responses"
        raise RequestRefused(said, param="n")


def with_matchers(parsed: ParsedRequest, served: ServedModel) -> ParsedRequest:
    """The request with the matchers of its responses, compiled where nobody waits for this thread.

    Raises:
      RequestRefused: a format that is invalid, or that the sampling options leave nothing of.
    """
    if parsed.format is None:
        return parsed
    try:
        matchers = tuple(map(served.service.prepare, parsed.requests()))
    except ConfigError as error:
        raise RequestRefused.of_field(parsed.format.field, error) from None
    return dataclasses.replace(parsed, matchers=matchers)


def _seed(given: int | None) -> int:
    """The engine's seed: the one given if it is one, else one that follows from it."""
    if given is None:
        return secrets.randbelow(SEEDS)
    if 0 <= given < SEEDS:
        return given
    digest = hashlib.blake2b(given.to_bytes(8, "little", signed=True), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _options(fields: _Common, served: ServedModel, top: int) -> SamplingParams:
    drawing = {name: getattr(fields, name) for name in _SAMPLING}
    given = {name: value for name, value in drawing.items() if value is not None}
    if given.get("top_k") == -1:  # vLLM's value for all tokens
        given["top_k"] = 0
    served.check_ids("stop_token_ids", fields.stop_token_ids)
    ends = () if fields.ignore_eos else served.eos_ids
    bias: dict[int, float] = {}
    for key, value in fields.logit_bias.items():
        token = int(key) if re.fullmatch(r"[0-9]{1,10}", key) else -1
        if token not in range(served.vocab_size):
            raise invalid_field("logit_bias", key, f"a token id, 0 to {served.vocab_size - 1}")
        bias[token] = value
    try:
        stop = tuple({*ends, *fields.stop_token_ids})
        return SamplingParams(**given, logit_bias=bias, stop=stop, top=top)
    except ConfigError as error:
        raise RequestRefused.from_config_error(error) from None


def _stop(given: Any, served: ServedModel, limits: ServerLimits) -> tuple[str, ...]:
    strings = [given] if isinstance(given, str) else given
    text = isinstance(strings, list) and all(isinstance(each, str) and each for each in strings)
    if not text or len(strings) > limits.stops:
        raise invalid_field("stop", given, f"a string, or up to {limits.stops}, none empty")
    if strings:
        served.text_tokenizer("stop")
    return tuple(strings)


def _prompt_list(given: Any) -> list[Any]:
    """The prompts: all strings, or all lists."""
    each = given if isinstance(given, list) else [given]
    if each and all(type(token) is int for token in each):
        each = [each]
    if not each or not any(all(isinstance(x, kind) for x in each) for kind in (str, list)):
        raise invalid_field(
            "prompt", given, "a string, strings, token ids, or lists of token ids; none empty"
        )
    return each


def _prompts(
    each: Sequence[Any], served: ServedModel, max_tokens: int
) -> tuple[RequestPrompt, ...]:
    room = served.service.max_tokens
    if not isinstance(each[0], str):
        found = tuple(_prompt(ids, max_tokens, room) for ids in each)
        for ids in each:
            served.check_ids("prompt", ids)
        return found
    tokenizer = served.text_tokenizer("prompt")
    try:
        for text in each:
            check_length(text, tokenizer, room, "prompt")
        return tuple(_prompt(tokenizer.encode(text), max_tokens, room, text) for text in each)
    except DataError as error:
        raise RequestRefused.of_field("prompt", error) from None


def _conversation(
    fields: _Chat, served: ServedModel, tools: list[dict[str, Any]]
) -> Conversation:
    """The chat, as the template takes it."""
    template = served.text_tokenizer("messages").template_for(tools or None)
    if not template:
        raise RequestRefused(
            f"messages: {served.name} has no chat template; ask /v1/completions", param="messages"
        )
    try:
        messages = read_messages(fields.messages, request=True)
        variables = _effort(fields.reasoning_effort, template, served.name)
        variables |= read_template_arguments(fields.chat_template_kwargs, "chat_template_kwargs")
    except MessageError as error:
        raise RequestRefused(str(error), param=error.field) from None
    if tools and not re.search(r"\btools\b", template):
        raise RequestRefused(
            f"tools: the chat template of {served.name} has no place for them", param="tools"
        )
    return Conversation(messages, tools or None, variables)


def _encoded(chat: Conversation, served: ServedModel) -> Encoded:
    """The chat's tokens by the template."""
    tokenizer, room = served.text_tokenizer("messages"), served.service.max_tokens
    try:
        text = chat.render(tokenizer, add_generation_prompt=True)
        check_length(text, tokenizer, room, "messages")
        return tokenizer.encode(text, add_special=False), room
    except (ValueError, ArithmeticError) as error:  # DataError, or what a template's filters raise
        raise RequestRefused.of_field("messages", error) from None


def _effort(effort: str | None, template: str, name: str) -> dict[str, Any]:
    """Template variables that say how much the model shall reason."""
    if effort is None:
        return {}
    if re.search(r"\breasoning_effort\b", template):
        return {"reasoning_effort": effort}
    if re.search(r"\benable_thinking\b", template):
        return {"enable_thinking": effort != "none"}
    if effort in ("none", "medium"):  # what a model does that is not asked to reason, or by default
        return {}
    said = f"the chat template of {name} has no place for it; leave it out"
    raise invalid_field("reasoning_effort", effort, said)


def check_length(text: str, tokenizer: Tokenizer, room: int, field: str) -> None:
    """Refuse a text whose beginning has far more tokens than fit: encoding several MB takes long,
    and a hundred times their memory.

    Args:
      room: tokens that fit.
      field: that has the text.

    Raises:
      RequestRefused: it is that long.
    """
    beginning = text[: CHARACTERS_PER_TOKEN * room]
    if len(beginning) < len(text) and len(tokenizer.encode(beginning)) > 2 * room:
        raise RequestRefused(
            f"{field}: more than {2 * room} tokens, and this server has room for {room}",
            param=field,
            code="context_length_exceeded",
        )


def _prompt(
    tokens: list[int], max_tokens: int | None, most: int, text: str | None = None
) -> RequestPrompt:
    """A prompt, of which ``most`` is the room together with what is drawn."""
    if not tokens:
        raise RequestRefused(
            "prompt is empty, and the model has no token to begin with", param="prompt"
        )
    room = most - len(tokens)
    wanted = 1 if max_tokens is None else max_tokens
    if room < wanted:
        raise RequestRefused(
            f"a prompt of {len(tokens)} tokens and max_tokens={wanted} exceed the {most} that this "
            "server has room for",
            param="max_tokens" if room > 0 else "prompt",
            code="context_length_exceeded",
        )
    return RequestPrompt(tuple(tokens), room if max_tokens is None else max_tokens, text)
