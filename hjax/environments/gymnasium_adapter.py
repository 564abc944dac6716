"""Environments of gymnasium whose actions and observations are discrete or text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hjax.data.tasks.package_task import import_package
from hjax.environments.environment import Environment, Observation, Step
from hjax.errors import ConfigError, DataError, one_line, short_repr

_NUMBERS = re.compile(r"-?[0-9]{1,18}( -?[0-9]{1,18})*")


class GymnasiumEnvironment(Environment):
    """Plays an environment of gymnasium.

    The row's columns are ``gymnasium``, its id; ``settings``, arguments of `gymnasium.make`; and,
    where a row has them, ``seed``, from which its initial state follows (else from the episode's
    seed), and ``actions``, names of a discrete space's actions in their order.

    | space | as text |
    |---|---|
    | Discrete | a number, or the action's name |
    | MultiDiscrete, MultiBinary | numbers with blanks between |
    | Text | as it is |
    | Tuple, Dict (observations) | their parts with blanks between |

    Observations that are not text end with `;`. An action that is none of the space's is not passed
    on: it is not valid, and `!` and the last observation follow. Rewards are the environment's; it
    ends the episode, also by its limit of steps. Alphabet: the digits, ``-!;`` and the blank, and
    the characters of names and texts. Anchor: the observation.
    """

    _made: tuple[str, str] = ("", "")

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        name, settings = task.get("gymnasium"), task.get("settings") or {}
        if not isinstance(name, str) or not isinstance(settings, Mapping):
            raise DataError(
                f"gymnasium is {short_repr(name)} and settings {short_repr(settings)}; they must "
                "be the id of an environment and arguments by name"
            )
        made = name, json.dumps(dict(settings), sort_keys=True, default=repr)
        if made != self._made:
            self.close()
            self.game, self._made = make_game(name, settings), made
        self.names = [str(action) for action in task.get("actions") or ()]
        space = self.game.action_space
        count = int(space.n) if _kind(space) == "Discrete" else 0
        if self.names and not len(set(self.names)) == len(self.names) == count:
            raise DataError(
                f"{name} has {count} numbered actions, and the names are {', '.join(self.names)}; "
                "give each action a name of its own, or none"
            )
        row_seed = task.get("seed")
        seen, _ = self.game.reset(seed=int(seed if row_seed is None else row_seed))
        if row_seed is not None:  # the same initial state, and the episode's own chance after it
            self.game.unwrapped.np_random = np.random.default_rng([int(row_seed), int(seed)])
        return self._observe(seen)

    def step(self, action: str) -> Step:
        chosen = self._action(action)
        if chosen is None:
            return Step(Observation("!" + self._seen.text, anchor=self._seen.anchor), valid=False)
        seen, reward, terminated, truncated, _ = self.game.step(chosen)
        return Step(self._observe(seen), reward=reward, done=bool(terminated or truncated))

    def close(self) -> None:
        if self._made[0]:
            self.game.close()
            self._made = ("", "")

    @property
    def alphabet(self) -> str:
        """Characters of actions and observations."""
        spaces = (self.game.action_space, self.game.observation_space)
        found = set("0123456789 -!;").union(*self.names, *map(_characters, spaces))
        return "".join(sorted(found))

    @property
    def turn_length(self) -> int:
        """Characters of the longest action, plus one for EOS."""
        longest = _length(self.game.action_space)
        return 1 + (max(map(len, self.names)) if self.names else longest)

    @property
    def observation_length(self) -> int:
        """Characters of the longest observation, with `!` and `;`."""
        return 2 + _length(self.game.observation_space)

    def random_action(self, rng: np.random.Generator) -> str:
        """An action of the space, drawn at random."""
        space = self.game.action_space
        if _kind(space) == "Discrete":
            number = int(rng.integers(space.n))
            return self.names[number] if self.names else str(int(space.start) + number)
        space.seed(int(rng.integers(2**31)))
        return space_text(space, space.sample())

    def _observe(self, seen: Any) -> Observation:
        space = self.game.observation_space
        text = space_text(space, seen)
        ended = text if _kind(space) == "Text" else f"{text};"
        self._seen = Observation(ended, anchor=text)
        return self._seen

    def _action(self, action: str) -> Any:
        """The space's action; None if the text is none."""
        space = self.game.action_space
        if _kind(space) == "Text":
            return action if space.contains(action) else None
        action = action.strip()
        if self.names:
            known = action in self.names
            return space.start + self.names.index(action) if known else None
        if not _NUMBERS.fullmatch(action):
            return None
        numbers = [int(number) for number in action.split(" ")]
        if _kind(space) == "Discrete":
            return numbers[0] if len(numbers) == 1 and space.contains(numbers[0]) else None
        if len(numbers) != int(np.prod(space.shape)):
            return None
        chosen = np.array(numbers).reshape(space.shape)
        fits = np.array_equal(chosen.astype(space.dtype), chosen)
        chosen = chosen.astype(space.dtype)
        return chosen if fits and space.contains(chosen) else None


def make_game(name: str, settings: Mapping[str, Any]) -> Any:
    """An environment of gymnasium whose spaces text can express.

    Raises:
      ConfigError: gymnasium is not installed, has no such environment, cannot make it, or a space
        is continuous.
    """
    gymnasium = import_package("gymnasium", "gymnasium", f"gymnasium:{name}")
    try:
        game = gymnasium.make(name, disable_env_checker=True, **settings)
    except Exception as error:  # also what a registered class raises
        said = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"gymnasium:{name} cannot be made: {said}") from error
    for what, allowed in (("action", _ACTIONS), ("observation", _OBSERVATIONS)):
        _check_space(getattr(game, f"{what}_space"), allowed, f"gymnasium:{name}: {what}s")
    return game


_ACTIONS = ("Discrete", "MultiDiscrete", "MultiBinary", "Text")
_OBSERVATIONS = (*_ACTIONS, "Tuple", "Dict")


def _kind(space: Any) -> str:
    return type(space).__name__


def _check_space(space: Any, allowed: Sequence[str], what: str) -> None:
    if _kind(space) not in allowed:
        raise ConfigError(
            f"{what} are {short_repr(space, 80)}, and only {', '.join(allowed)} can be text; write "
            "a hjax.Environment that rounds or describes them (environment.function)"
        )
    for part in _parts(space):
        _check_space(part, allowed, what)


def _parts(space: Any) -> list[Any]:
    """The spaces that a Tuple or Dict is made of."""
    if _kind(space) == "Tuple":
        return list(space.spaces)
    return list(space.spaces.values()) if _kind(space) == "Dict" else []


def space_text(space: Any, value: Any) -> str:
    """A space's value as text."""
    kind = _kind(space)
    if kind == "Text":
        return str(value)
    if kind == "Discrete":
        return str(int(value))
    if kind in ("Tuple", "Dict"):
        values = [value[key] for key in space.spaces] if kind == "Dict" else value
        return " ".join(space_text(part, one) for part, one in zip(_parts(space), values))
    return " ".join(str(int(number)) for number in np.asarray(value).reshape(-1))


def _characters(space: Any) -> set[str]:
    own = set(space.character_set) if _kind(space) == "Text" else set()
    return own.union(*map(_characters, _parts(space)))


def _length(space: Any) -> int:
    """Characters of a space's longest value."""
    kind = _kind(space)
    if kind == "Text":
        return int(space.max_length)
    if kind in ("Tuple", "Dict"):
        lengths = [_length(part) for part in _parts(space)]
        return sum(lengths) + max(len(lengths) - 1, 0)
    if kind == "MultiBinary":
        return 2 * int(np.prod(space.shape)) - 1
    first = np.asarray(space.start).reshape(-1)
    last = first + np.asarray(space.nvec if kind == "MultiDiscrete" else space.n).reshape(-1) - 1
    longest = [max(len(str(int(a))), len(str(int(b)))) for a, b in zip(first, last)]
    return sum(longest) + len(longest) - 1
