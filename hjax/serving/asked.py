"""What a request asks for: the fields of OpenAI's two forms, read and checked."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Mapping
from typing import Any

from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError
from hjax.rollout.matching import Matcher
from hjax.rollout.options import MOST_TOP, OPTIONS, Sampling
from hjax.rollout.requests import Request
from hjax.serving.fields import Fields
from hjax.serving.formats import Format, read_format, read_structured
from hjax.serving.limits import Limits
from hjax.serving.messages import read_messages
from hjax.serving.refusal import Refused
from hjax.serving.served import Served
from hjax.serving.tool_calls import Calls
from hjax.serving.tool_choice import read_tools

SEEDS = 2**32
_LARGEST = 2**31 - 1
# OpenAI's, where /v1/completions is not told how many.
MAX_TOKENS = 16
# Of /v1/completions' log-probs, as OpenAI's.
MOST_TOP_COMPLETIONS = 5
# Characters of a text that are read first, for each token that there is room for.
BEGINNING = 16
# These say who asks or how it is billed: they do not change the answer.
_REMARKS = (
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)


@dataclasses.dataclass(frozen=True)
class Prompt:
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
class Asked:
    """A request for responses.

    Attributes:
      prompts: at least one.
      n: responses to each.
      options: how tokens are drawn; the model's own ends are among the stop tokens.
      seed: every draw follows from it and the response's number.
      stop: strings before which a response ends.
      stream: whether it is answered while it is drawn.
      include_usage: at the stream's end.
      logprobs: how many of each place's most probable tokens are told beside the one drawn; None:
        no log-probs.
      echo: the prompt's text first.
      token_ids: of prompts and responses, beside the text.
      calls: of tools that are looked for in the answer; None: none.
      format: what each response's text must be; None: anything.
      matchers: of each response, made of its format; none without.
    """

    prompts: tuple[Prompt, ...]
    n: int
    options: Sampling
    seed: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: int | None
    echo: bool
    token_ids: bool
    calls: Calls | None
    format: Format | None
    matchers: tuple[Matcher | None, ...] = ()

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a response."""
        return self.prompts[index // self.n]

    @property
    def scored(self) -> bool:
        """Whether the prompt is told with its log-probs."""
        return self.echo and self.logprobs is not None

    def requests(self) -> list[Request]:
        """One for each response, in their order."""
        constraint = None if self.format is None else self.format.constraint
        return [
            Request(
                self.prompt_of(index).tokens,
                self.prompt_of(index).max_tokens,
                self.options,
                self.seed,
                index,
                constraint,
                self.scored or not self.prompt_of(index).max_tokens,
            )
            for index in range(len(self.prompts) * self.n)
        ]


def read_completion(body: Mapping[str, Any], served: Served, limits: Limits) -> Asked:
    """What the body of a /v1/completions request asks for.

    Raises:
      Refused: a field that is wrong, or not supported.
    """
    fields = Fields(body)
    common = _common(fields, served, limits)
    echo = fields.flag("echo")
    max_tokens = fields.take("max_tokens", MAX_TOKENS)
    if type(max_tokens) is not int or not (0 if echo else 1) <= max_tokens <= _LARGEST:
        raise fields.wrong("max_tokens", max_tokens, "a whole number, 1 or more; 0 with echo")
    prompts = _prompts(fields, served, max_tokens)
    logprobs = fields.whole("logprobs", 0, MOST_TOP_COMPLETIONS)
    best_of = fields.take("best_of", common["n"])
    if best_of != common["n"]:
        raise fields.wrong("best_of", best_of, "not supported here; leave it out, or n")
    fields.only("suffix", "")
    form = {"logprobs": logprobs, "echo": echo}
    return _asked(fields, common, served, limits, prompts, **form)


def read_chat(body: Mapping[str, Any], served: Served, limits: Limits) -> Asked:
    """What the body of a /v1/chat/completions request asks for.

    Raises:
      Refused: a field that is wrong, or not supported; a model without chat template.
    """
    fields = Fields(body)
    common = _common(fields, served, limits)
    most = fields.whole("max_completion_tokens", 1, _LARGEST)
    older = fields.whole("max_tokens", 1, _LARGEST, most)
    if most is not None and older != most:
        raise Refused(
            f"max_tokens={older} and max_completion_tokens={most}: give one of them",
            param="max_tokens",
        )
    wanted, logprobs = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MOST_TOP)
    if logprobs is not None and not wanted:
        raise Refused("top_logprobs: only with logprobs=true", param="top_logprobs")
    logprobs = logprobs or 0 if wanted else None
    tools = read_tools(fields)
    common["format"] = _one_format(read_format(fields), common["format"])
    if common["format"] is not None and tools.functions:
        raise Refused(
            'tools with a format of the answer: no call would match it; tool_choice "none", or '
            "leave one of them out",
            param="tools",
        )
    fields.only("modalities", ["text"])
    fields.only("store", False)
    text, tokens = _render(fields, served, list(tools.given))
    calls = tools.calls(served.call_form, served.name)
    if calls is not None and calls.held:
        common["format"] = tools.format(calls.form)
    prompts = (_prompt(served, tokens, older, text),)
    return _asked(fields, common, served, limits, prompts, logprobs=logprobs, calls=calls)


def _asked(
    fields: Fields,
    common: dict[str, Any],
    served: Served,
    limits: Limits,
    prompts: tuple[Prompt, ...],
    **form: Any,
) -> Asked:
    fields.end()
    if len(prompts) * common["n"] > limits.choices:
        raise Refused(
            f"{len(prompts)} prompts with n={common['n']}: at most {limits.choices} responses",
            param="n",
        )
    given: dict[str, Any] = {"prompts": prompts, "echo": False, "calls": None} | common | form
    given["options"] = dataclasses.replace(common["options"], top=form["logprobs"] or 0)
    asked = Asked(**given)
    if asked.format is None:
        return asked
    return dataclasses.replace(asked, matchers=_matchers(asked, asked.format, served))


def _matchers(asked: Asked, format: Format, served: Served) -> tuple[Matcher | None, ...]:
    """Made here, where nobody waits for this thread."""
    requests = asked.requests()
    try:
        return tuple(map(served.service.prepare, requests))
    except ConfigError as error:
        for name, part in format.parts:
            _check_part(name, dataclasses.replace(requests[0], constraint=part), served)
        raise Refused(f"{format.field}: {error}", param=format.field) from None


def _check_part(name: str, request: Request, served: Served) -> None:
    """Of several constraints that were made into one say which does not do."""
    try:
        served.service.prepare(request)
    except ConfigError as error:
        raise Refused(f"{name}: {error}", param=name) from None


def _one_format(format: Format | None, structured: Format | None) -> Format | None:
    if format is not None and structured is not None:
        raise Refused(
            "response_format and structured_outputs: give one of them", param="response_format"
        )
    return format or structured


def _common(fields: Fields, served: Served, limits: Limits) -> dict[str, Any]:
    """What both forms have."""
    served.check_name(fields.text("model"))
    for name in _REMARKS:
        fields.take(name)
    stream = fields.flag("stream")
    stream_options = Fields(fields.object("stream_options"), "stream_options")
    include_usage = stream_options.flag("include_usage")
    stream_options.flag("include_obfuscation")  # padding against eavesdroppers; there is none
    stream_options.end()
    if include_usage and not stream:
        raise Refused("stream_options: only with stream=true", param="stream_options")
    seed = fields.whole("seed", 0, SEEDS - 1)
    return {
        "n": fields.whole("n", 1, limits.choices, 1),
        "options": _options(fields, served),
        "seed": secrets.randbelow(SEEDS) if seed is None else seed,
        "stop": _stop(fields, served, limits),
        "stream": stream,
        "include_usage": include_usage,
        "token_ids": fields.flag("return_token_ids"),
        "format": read_structured(fields),
    }


def _options(fields: Fields, served: Served) -> Sampling:
    given = {
        name: value
        for name in OPTIONS
        if name != "logit_bias" and (value := fields.take(name)) is not None
    }
    if given.get("top_k") == -1:  # vLLM's word for all
        given["top_k"] = 0
    stop = fields.list("stop_token_ids")
    served.check_ids("stop_token_ids", stop)
    bias: dict[int, float] = {}
    for key, value in fields.object("logit_bias").items():
        token = int(key) if re.fullmatch(r"[0-9]{1,10}", key) else -1
        if token not in range(served.vocab_size):
            raise fields.wrong("logit_bias", key, f"a token id, 0 to {served.vocab_size - 1}")
        bias[token] = value
    try:
        return Sampling(**given, logit_bias=bias, stop=tuple({*served.eos_ids, *stop}))
    except ConfigError as error:
        raise Refused.of(error) from None


def _stop(fields: Fields, served: Served, limits: Limits) -> tuple[str, ...]:
    given = fields.take("stop", [])
    strings = [given] if isinstance(given, str) else given
    text = isinstance(strings, list) and all(isinstance(each, str) and each for each in strings)
    if not text or len(strings) > limits.stops:
        raise fields.wrong("stop", given, f"a string, or up to {limits.stops}, none empty")
    if strings:
        served.text_tokenizer("stop")
    return tuple(strings)


def _prompts(fields: Fields, served: Served, max_tokens: int) -> tuple[Prompt, ...]:
    given = fields.take("prompt")
    each = given if isinstance(given, list) else [given]
    if each and all(type(token) is int for token in each):
        each = [each]
    texts = all(isinstance(prompt, str) for prompt in each)
    if not each or not (texts or all(isinstance(prompt, list) for prompt in each)):
        raise fields.wrong(
            "prompt", given, "a string, strings, token ids, or lists of token ids; none empty"
        )
    if not texts:
        for ids in each:
            served.check_ids("prompt", ids)
        return tuple(_prompt(served, ids, max_tokens) for ids in each)
    tokenizer = served.text_tokenizer("prompt")
    try:
        for text in each:
            _check_length(served, tokenizer, text, "prompt")
        return tuple(_prompt(served, tokenizer.encode(text), max_tokens, text) for text in each)
    except DataError as error:
        raise Refused(f"prompt: {error}", param="prompt") from None


def _render(fields: Fields, served: Served, tools: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """The chat's text by the template, and its tokens."""
    tokenizer = served.text_tokenizer("messages")
    if not tokenizer.chat_template:
        raise Refused(
            f"messages: {served.name} has no chat template; ask /v1/completions", param="messages"
        )
    messages = read_messages(fields.list("messages"))
    variables = fields.object("chat_template_kwargs")
    taken = {"messages", "tools", "add_generation_prompt", "self"} & variables.keys()
    if taken:
        raise fields.wrong("chat_template_kwargs", variables, f"without {', '.join(sorted(taken))}")
    if tools and not re.search(r"\btools\b", tokenizer.chat_template):
        raise Refused(
            f"tools: the chat template of {served.name} has no place for them", param="tools"
        )
    try:
        text = tokenizer.chat(messages, True, **variables, tools=tools or None)
        _check_length(served, tokenizer, text, "messages")
        return text, tokenizer.encode(text, add_special=False)
    except (ValueError, ArithmeticError) as error:  # DataError, or what a template's filters raise
        raise Refused(f"messages: {error}", param="messages") from None


def _check_length(served: Served, tokenizer: Tokenizer, text: str, field: str) -> None:
    """Refused if a text's beginning has far more tokens than fit: all of some MB would take long,
    and a hundred times its bytes."""
    room = served.service.max_tokens
    beginning = text[: BEGINNING * room]
    if len(beginning) < len(text) and len(tokenizer.encode(beginning)) > 2 * room:
        raise Refused(
            f"{field}: more than {2 * room} tokens, and this server has room for {room}",
            param=field,
            code="context_length_exceeded",
        )


def _prompt(
    served: Served, tokens: list[int], max_tokens: int | None, text: str | None = None
) -> Prompt:
    if not tokens:
        raise Refused("prompt is empty, and the model has no token to begin with", param="prompt")
    room = served.service.max_tokens - len(tokens)
    wanted = 1 if max_tokens is None else max_tokens
    if room < wanted:
        raise Refused(
            f"a prompt of {len(tokens)} tokens and max_tokens={wanted} exceed the "
            f"{served.service.max_tokens} that this server has room for",
            param="max_tokens" if room > 0 else "prompt",
            code="context_length_exceeded",
        )
    return Prompt(tuple(tokens), room if max_tokens is None else max_tokens, text)
