"""Sampling parameters: one table of options, for training, ``generate``, commands and servers.

An option is a field of ``SamplingParams`` that has a ``Key``: its default, which changes nothing,
its meaning and its rule. Config keys under ``rollout``, arguments of ``generate``, flags of
commands and fields of requests are made from ``OPTIONS``; docs/sampling.md is its printout. What an
option does to logits is in ``row_sampling.py`` and ``sampling.py``.
"""

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hjax.errors import ConfigError
from hjax.rules import Key, Rule

# Limits of OpenAI's API; its bias of -100 bans a token.
BIASES, LARGEST_BIAS, LARGEST_PENALTY = 300, 100.0, 2.0
# Most top tokens reported per position; OpenAI's.
MOST_TOP = 20
_INT32 = 2**31 - 1
# Range of factors of logits: float32 then keeps them finite.
_SMALLEST, _LARGEST = 1e-5, 1e5
_F = TypeVar("_F", bound=Callable[..., Any])


def read_biases(text: str) -> dict[int, float]:
    """Biases by token id, of text like ``5:-100,7:2.5``.

    Raises:
      ConfigError: something else.
    """
    biases: dict[int, float] = {}
    for part in text.split(",") if text else ():
        token, _, value = part.partition(":")
        try:
            biases[int(token)] = float(value)
        except ValueError:
            raise ConfigError(
                f"logit_bias={text!r}: token ids and biases, as 5:-100,7:2.5"
            ) from None
    return biases


def _biases_hold(text: str) -> bool:
    try:
        return bool(SamplingParams(logit_bias=read_biases(text)))
    except ConfigError:
        return False


def _within(low: float, high: float, more: str = "") -> Rule:
    return Rule(f"{low:g} to {high:g}{more}", lambda x: low <= x <= high)


def _option(default: Any, doc: str, rule: Rule) -> Any:
    return dataclasses.field(default=default, metadata={"key": Key(default, doc, rule)})


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a response are drawn.

    Logits are changed in this order: biases, repetition penalty, frequency and presence penalty,
    bans; then temperature, top-k, top-p, min-p.

    Attributes:
      bad: ids of tokens that are never drawn.
      stop: ids of tokens that end the response (and are part of it).
      forced: ids of the response's first tokens, in order; drawing begins after them.
      top: how many of the most probable tokens of each position are reported with their log-probs;
        that changes nothing that is drawn.

    All others are in ``OPTIONS``.

    Raises:
      ConfigError: a value out of its range, named; forced tokens that other options forbid.
    """

    temperature: float = _option(
        1.0,
        "logits are divided by it; 0 is greedy",
        Rule(
            f"0 (greedy), or {_SMALLEST:g} to {_LARGEST:g}",
            lambda x: x == 0 or _SMALLEST <= x <= _LARGEST,
        ),
    )
    top_k: int = _option(
        0,
        "sample among the k likeliest tokens; 0: all",
        Rule("0 (all tokens) or more", lambda x: 0 <= x <= _INT32),
    )
    top_p: float = _option(
        1.0,
        "sample among the likeliest tokens of this total probability",
        Rule("above 0 and at most 1", lambda x: 0 < x <= 1),
    )
    min_p: float = _option(
        0.0,
        "leave out tokens less likely than this share of the likeliest one's probability (Nguyen "
        "et al., arXiv 2407.01082); 0: none",
        Rule("0 (all tokens) to 1 (only the likeliest)", lambda x: 0 <= x <= 1),
    )
    repetition_penalty: float = _option(
        1.0,
        "logits of tokens that the prompt or the response has are divided by it if positive, else "
        "multiplied (Keskar et al., arXiv 1909.05858); 1: none",
        _within(_SMALLEST, _LARGEST, ", 1 for none"),
    )
    presence_penalty: float = _option(
        0.0,
        "taken from the logits of tokens that the response has",
        _within(-LARGEST_PENALTY, LARGEST_PENALTY),
    )
    frequency_penalty: float = _option(
        0.0,
        "taken from a token's logit for each time that the response has it",
        _within(-LARGEST_PENALTY, LARGEST_PENALTY),
    )
    logit_bias: Mapping[int, float] = dataclasses.field(
        default_factory=dict,
        hash=False,
        metadata={
            "key": Key(
                "",
                "added to the logits, by token id, as 5:-100,7:2.5; -100 bans a token",
                Rule(
                    f"up to {BIASES} token ids with biases of -100 to 100, as 5:-100,7:2.5",
                    _biases_hold,
                ),
            )
        },
    )
    min_tokens: int = _option(
        0,
        "tokens before which nothing ends a response, neither token nor string",
        Rule("0 or more", lambda x: 0 <= x <= _INT32),
    )
    bad: Sequence[int] = ()
    stop: Sequence[int] = ()
    forced: Sequence[int] = ()
    top: int = 0

    def __post_init__(self) -> None:
        for name, key in OPTIONS.items():
            if name != "logit_bias":
                _check(name, getattr(self, name), key)
        if isinstance(self.logit_bias, str):
            object.__setattr__(self, "logit_bias", read_biases(self.logit_bias))
        if len(self.logit_bias) > BIASES:
            raise ConfigError(f"logit_bias of {len(self.logit_bias)} tokens: at most {BIASES}")
        bias = _within(-LARGEST_BIAS, LARGEST_BIAS)
        for token, value in self.logit_bias.items():
            _check_whole("logit_bias token", token)
            _check(f"logit_bias of token {token}", value, Key(0.0, rule=bias))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for name in ("bad", "stop", "forced"):
            for token in getattr(self, name):
                _check_whole(f"{name} token", token)
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_whole("top", self.top)
        if self.top > MOST_TOP:
            raise ConfigError(f"top={self.top}: at most {MOST_TOP}")
        self._check_forced()

    def _check_forced(self) -> None:
        for at, token in enumerate(self.forced):
            if token in self.banned:
                raise ConfigError(f"forced token {token} is banned by bad or logit_bias; drop one")
            if token in self.stop and at < self.min_tokens:
                raise ConfigError(
                    f"forced token {token} at position {at} is a stop token, which "
                    f"min_tokens={self.min_tokens} forbids there; at most {at}, or do not force it"
                )
            if token in self.stop and at + 1 < len(self.forced):
                raise ConfigError(
                    f"forced token {token} is a stop token: what is forced after it is never drawn"
                )

    def check_vocabulary(self, vocab: int) -> None:
        """Refuse what does not fit a model.

        Args:
          vocab: its tokens.

        Raises:
          ConfigError: a token that it does not have, or no token left to draw.
        """
        for name in ("logit_bias", "bad", "stop", "forced"):
            for token in getattr(self, name):
                if token >= vocab:
                    raise ConfigError(f"{name} token {token}: the model's are 0 to {vocab - 1}")
        if len(self.banned.union(self.stop if self.min_tokens else ())) >= vocab:
            raise ConfigError(f"all {vocab} tokens are banned: leave one to draw")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p cut the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def tempered(self) -> bool:
        """Whether the temperature changes the distribution."""
        return not self.greedy and self.temperature != 1

    @property
    def changes_logits(self) -> bool:
        """Whether biases, bans, penalties or forced tokens change what is drawn."""
        held = bool(self.stop) and self.min_tokens > 0
        return bool(self.logit_bias or self.bad or self.forced) or held or self.penalised

    @property
    def banned(self) -> frozenset[int]:
        """The tokens that are never drawn."""
        biased = (token for token, bias in self.logit_bias.items() if bias <= -LARGEST_BIAS)
        return frozenset(self.bad).union(biased)

    @property
    def penalised(self) -> bool:
        """Whether a penalty needs ``TokenCounts``."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)


# By name: default, meaning and rule of each option, biases as text.
OPTIONS: Mapping[str, Key] = {
    field.name: field.metadata["key"]
    for field in dataclasses.fields(SamplingParams)
    if "key" in field.metadata
}


def takes_options(function: _F) -> _F:
    """Decorator: a function with ``**options`` gets the sampling options in its signature."""
    signature = inspect.signature(function)
    *own, rest = signature.parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    named = [
        inspect.Parameter(name, keyword, default=key.default)
        for name, key in OPTIONS.items()
        if name not in signature.parameters
    ]
    signature = signature.replace(parameters=[*own, *named, rest])
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _check(name: str, value: Any, key: Key) -> None:
    if type(key.default) is int:
        _check_whole(name, value)
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name}={value!r}: a number")
    if key.rule is not None and not key.rule.holds(value):
        raise ConfigError(f"{name}={value}: {key.rule.text}")


def _check_whole(name: str, value: Any) -> None:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value > _INT32 or (value < 0 and name != "top_k"):  # its rule says more
        raise ConfigError(f"{name}={value!r}: a whole number, 0 to {_INT32}")
