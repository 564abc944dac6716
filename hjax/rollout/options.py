"""What one request may ask of how its tokens are drawn, checked where it comes in."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.errors import ConfigError
from hjax.rollout.sampling import Sampling

# Of OpenAI's API; its -100 bans a token.
BIASES, LARGEST_BIAS, LARGEST_PENALTY = 300, 100.0, 2.0
# Of each place the most probable tokens that are told at most; OpenAI's.
MOST_TOP = 20
_INT32 = 2**31 - 1
# Of what logits are multiplied or divided by: float32 then keeps them finite.
_SMALLEST, _LARGEST = 1e-5, 1e5


@dataclasses.dataclass(frozen=True)
class Options:
    """How the tokens of one request are drawn.

    Attributes:
      temperature, top_k, top_p: as of ``Sampling``.
      min_p: leave out tokens less likely than this share of the likeliest one's probability
        (Nguyen et al., arXiv 2407.01082); 0 keeps all.
      repetition_penalty: logits of tokens that the prompt or the response has are divided by it if
        positive, else multiplied (Keskar et al., arXiv 1909.05858); 1 changes nothing.
      presence_penalty: taken from the logits of tokens that the response has.
      frequency_penalty: taken from a token's logit for each time that the response has it.
      logit_bias: added to the logits, by token id; -100 bans.
      bad: ids of tokens that are never drawn.
      stop: ids of tokens that end the response (and are part of it).
      min_tokens: position in the response before which no stop token is drawn.
      forced: ids of the response's first tokens, in order; drawing begins after them.
      top: of each place so many of the most probable tokens are told with their log-probs. That
        changes nothing that is drawn.

    Raises:
      ConfigError: a value out of its range, named; forced tokens that other options forbid.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    bad: Sequence[int] = ()
    stop: Sequence[int] = ()
    min_tokens: int = 0
    forced: Sequence[int] = ()
    top: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            _check_number(name, getattr(self, name))
        for name in ("top_k", "min_tokens", "top"):
            _check_whole(name, getattr(self, name))
        if self.top > MOST_TOP:
            raise ConfigError(f"top={self.top}: at most {MOST_TOP}")
        Sampling(self.temperature, self.top_k, self.top_p)
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p}: 0 (all tokens) to 1 (only the likeliest)")
        if self.temperature and not _SMALLEST <= self.temperature <= _LARGEST:
            raise ConfigError(
                f"temperature={self.temperature}: 0 (greedy), or {_SMALLEST:g} to {_LARGEST:g}"
            )
        if not _SMALLEST <= self.repetition_penalty <= _LARGEST:
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty}: {_SMALLEST:g} to {_LARGEST:g}, "
                "1 for none"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            _check_within(name, getattr(self, name), LARGEST_PENALTY)
        if len(self.logit_bias) > BIASES:
            raise ConfigError(f"logit_bias of {len(self.logit_bias)} tokens: at most {BIASES}")
        for token, bias in self.logit_bias.items():
            _check_whole("logit_bias token", token)
            _check_within(f"logit_bias of token {token}", bias, LARGEST_BIAS)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for name in ("bad", "stop", "forced"):
            for token in getattr(self, name):
                _check_whole(f"{name} token", token)
            object.__setattr__(self, name, tuple(getattr(self, name)))
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

    @property
    def banned(self) -> frozenset[int]:
        """The tokens that are never drawn."""
        biased = (token for token, bias in self.logit_bias.items() if bias <= -LARGEST_BIAS)
        return frozenset(self.bad).union(biased)

    @property
    def penalised(self) -> bool:
        """Whether a penalty needs to know the tokens so far: ``Counts``."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name}={value!r}: a number")


def _check_within(name: str, value: Any, limit: float) -> None:
    _check_number(name, value)
    if not -limit <= value <= limit:
        raise ConfigError(f"{name}={value}: {-limit:g} to {limit:g}")


def _check_whole(name: str, value: Any) -> None:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value > _INT32 or (value < 0 and name != "top_k"):  # Sampling names top_k's
        raise ConfigError(f"{name}={value!r}: a whole number, 0 to {_INT32}")
