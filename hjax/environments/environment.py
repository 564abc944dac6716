"""The interface of environments: what an agent observes, does and is rewarded for.

One object plays one episode. The policy's turn is text; the environment answers with an observation
and a reward until it says that the episode is done.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hjax.data.chat_messages import read_messages, read_tools
from hjax.errors import DataError, short_repr
from hjax.rewards.reward_results import LARGEST_REWARD


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the policy sees next.

    Attributes:
      text: as the policy reads it. With a chat template it is the content of a user's message, else
        it follows the turn as it is.
      anchor: the environment's state without history, counters or hints, for credit among episodes
        that meet in the same state (GiGPO): JSON values, compared by value whatever the order of
        keys; None: no state to compare.
      stop: strings that end the policy's next turn.
      messages: chat messages instead of a user's message: of ``reset`` and of a fresh step the
        conversation that the policy answers, of another step those that follow its turn. If the
        first of these is the assistant's, it is that turn as the environment read it, with its
        ``tool_calls``; the ids that the policy drew stay. Only with a chat template; ``text`` is
        then what people are shown, by default the messages' contents.
      tools: of a conversation, definitions of the functions that the policy may call, for the
        template.
      template_arguments: of a conversation, further variables of the template.
    """

    text: str = ""
    anchor: Any = None
    stop: Sequence[str] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.messages:
            messages = read_messages(list(self.messages), "Observation.messages", request=True)
            object.__setattr__(self, "messages", tuple(messages))
            if not self.text:
                object.__setattr__(self, "text", _shown(messages))
        object.__setattr__(self, "tools", tuple(read_tools(list(self.tools), "Observation.tools")))
        if not isinstance(self.text, str):
            raise DataError(f"Observation.text is {short_repr(self.text, 80)}; it must be a string")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):
            raise DataError(
                f"Observation.stop is {short_repr(self.stop, 80)}; it must be a sequence of "
                "strings that are not empty"
            )
        object.__setattr__(self, "stop", tuple(stop))
        if self.anchor is not None:
            anchor_digest(self.anchor)


@dataclasses.dataclass(frozen=True)
class Step:
    """What an environment answers to a turn.

    Attributes:
      observation: what the policy sees next; of the last step nobody acts on it.
      reward: of this turn, a number from -1e6 to 1e6, which float32 tells apart.
      done: whether the episode has ended.
      valid: whether the action was one that the environment allows (else e.g. an unknown move).
      fresh: whether the observation replaces the history: the next turn sees it alone.
      metrics: numbers by name; a run reports their means over episodes.
    """

    observation: Observation
    reward: float = 0.0
    done: bool = False
    valid: bool = True
    fresh: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.observation, Observation):
            raise DataError(
                f"Step.observation is {short_repr(self.observation, 80)}; it must be a "
                "hjax.Observation"
            )
        object.__setattr__(self, "reward", check_reward("Step.reward", self.reward))
        for name in ("done", "valid", "fresh"):
            value = getattr(self, name)
            if not isinstance(value, bool) and type(value).__name__ != "bool":  # numpy's too
                raise DataError(f"Step.{name} is {short_repr(value, 80)}; it must be True or False")
            object.__setattr__(self, name, bool(value))
        if not isinstance(self.metrics, Mapping):
            raise DataError(
                f"Step.metrics is {short_repr(self.metrics, 80)}; it must be a dict of numbers"
            )
        numbers = {str(k): _finite(f"Step.metrics[{k!r}]", v) for k, v in self.metrics.items()}
        object.__setattr__(self, "metrics", numbers)


class Environment:
    """Base class of environments; one object plays one episode at a time.

    Objects live in processes of their own without JAX. Each call has a deadline
    (``environment.step_seconds``): a late one ends its process and its episode. What is the
    policy's fault (an action that makes no sense, code of its own that loops) is an observation;
    an exception is the environment's fault, and its episode is not learned from.

    An episode must follow from its task, its seed and its actions alone. Then a run that was
    interrupted continues bit for bit.

    Attributes:
      step_seconds: the deadline of a call, where one is played.
    """

    step_seconds: ClassVar[float] = 60.0

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        """Begin an episode.

        Args:
          task: the dataset's row: its columns by name, ``prompt`` among them.
          seed: of the episode's chance; episodes that are compared with each other have the same.

        Returns:
          the first observation, which is the prompt.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reset")

    def step(self, action: str) -> Step:
        """Answer a turn of the policy: its text, without the token that ended it."""
        raise NotImplementedError(f"{type(self).__name__} must define step")

    def close(self) -> None:
        """Give up what the episode holds; called once after each episode."""


def _shown(messages: Sequence[Mapping[str, Any]]) -> str:
    """Contents of messages for people; roles where there are several speakers."""
    others = [each for each in messages if each["role"] != "assistant"]
    if len({each["role"] for each in others}) <= 1:
        return "\n".join(each["content"] for each in others)
    return "\n".join(f"{each['role']}: {each['content']}" for each in others)


def anchor_digest(anchor: Any) -> bytes:
    """16 bytes that are equal for equal anchors: of a dict whatever the order of its keys.

    Raises:
      DataError: a value that is neither a JSON value nor an array of numbers.
    """
    canonical = json.dumps(_canonical(anchor), ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _canonical(value: Any) -> Any:
    """JSON values in which types stay apart and dicts are lists of pairs in order."""
    if isinstance(value, Mapping):
        pairs = [(str(k), type(k).__name__, _canonical(v)) for k, v in value.items()]
        return ["dict", sorted(pairs, key=lambda pair: pair[:2])]
    if isinstance(value, list | tuple):
        return ["list", *map(_canonical, value)]
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # numpy's arrays and numbers
        return _canonical(value.tolist())
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)  # 1.0 and 1 are the same state
    if (
        value is None
        or isinstance(value, str | bool | int)
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return value
    raise DataError(
        f"Observation.anchor holds {short_repr(value, 80)} ({type(value).__name__}); it must be "
        "made of strings, finite numbers, True, False, None, lists and dicts"
    )


def check_reward(name: str, value: Any) -> float:
    """A reward of a turn or an episode.

    Raises:
      DataError: it is no finite number, or float32 cannot tell such rewards apart.
    """
    number = _finite(name, value)
    if abs(number) > LARGEST_REWARD:
        raise DataError(
            f"{name} is {number:g}; it must be from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}: "
            "scale the rewards"
        )
    return number


def _finite(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{name} is {short_repr(value, 80)}; it must be a finite number")
    return number
