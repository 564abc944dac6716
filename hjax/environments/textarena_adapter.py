"""Games of TextArena: one seat is the policy's, the others those of a class of yours."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from hjax.environments.adapted_environment import AdaptedEnvironment, adapter_package
from hjax.environments.environment import Observation, Step
from hjax.errors import ConfigError, DataError, did_you_mean, one_line, short_repr

# What to do with a game of several players.
_SEATS = "for others a class of yours says players and opponent (docs/agents.md)"


class TextArenaEnvironment(AdaptedEnvironment):
    """Plays a game of TextArena, by its id.

    The first observation is the row's ``prompt``, and below it what the game shows its player; an
    observation is what is new since, without the player's own words. The row may have ``settings``,
    arguments of the game, and ``seed``, which stands in for the episode's.

    The reward is the one that the game's ``close`` has for the seat, at the last turn; an episode
    that is stopped before has 0. An action that the game refuses is not valid: the policy reads
    why, and the game ends where it allows no more of them.

    A game of several players needs a subclass in a file of yours, with ``target``, ``players`` and
    ``opponent``.

    Attributes:
      players: of the game; ``seat``: the policy's.
    """

    players: ClassVar[int] = 1
    seat: ClassVar[int] = 0
    _game: Any = None

    @classmethod
    def check_target(cls) -> None:
        registry = adapter_package("textarena.envs.registration", "textarena").ENV_REGISTRY
        if cls.target not in registry:
            raise ConfigError(f"{did_you_mean(cls.target, registry)}TextArena has no such game")
        try:
            cls()._begin({}, 0)
        except Exception as error:  # of the game's own
            said = f"{type(error).__name__}: {one_line(error)}"
            raise ConfigError(
                f"the game cannot begin with {cls.players} player(s): {said}; {_SEATS}"
            ) from error

    def opponent(self, player: int, seen: str) -> str:
        """The action of another player.

        Args:
          player: who is to act.
          seen: what is new for that player.
        """
        raise NotImplementedError(f"{type(self).__name__} must define opponent")

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        settings, row_seed = task.get("settings") or {}, task.get("seed")
        if not isinstance(settings, Mapping):
            raise DataError(f"settings is {short_repr(settings)}; it must be arguments by name")
        self._begin(settings, int(seed if row_seed is None else row_seed))
        self._let_others_act()
        return Observation(self.first_text(task, self._seen()))

    def step(self, action: str) -> Step:
        with self._own_chance():
            done, _ = self._game.step(action)
        about = self._state.game_info.get(self.seat, {})
        errors = getattr(self._state, "error_count", 0)
        valid = not about.get("invalid_move") and not (errors and self._is_next)
        done = bool(done) or self._let_others_act()
        if not done:
            return Step(Observation(self._seen()), valid=valid)
        rewards, info = self._game.close()
        reason = str(info.get(self.seat, {}).get("reason") or "")
        seen = "\n".join(part for part in (self._seen() if self._is_next else "", reason) if part)
        reward = float((rewards or {}).get(self.seat, 0.0))
        return Step(Observation(seen), reward=reward, done=True, valid=valid)

    def _begin(self, settings: Mapping[str, Any], seed: int) -> None:
        import textarena

        self._chance = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        self._game = self._unwrapped = textarena.make(self.target, **settings)
        while isinstance(self._unwrapped, textarena.Wrapper):  # these repeat what was seen before
            self._unwrapped = self._unwrapped.env
        self._own_words = textarena.ObservationType.PLAYER_ACTION
        with self._own_chance():
            self._game.reset(num_players=self.players, seed=seed)
        if self.players == 1 and not isinstance(self._state, textarena.SinglePlayerState):
            raise ConfigError("it is a game of several players")

    @property
    def _state(self) -> Any:
        return self._unwrapped.state

    @property
    def _is_next(self) -> bool:
        return bool(self._state.current_player_id == self.seat)

    def _let_others_act(self) -> bool:
        """Let the other players act until the policy is next; whether the game is over."""
        done = False
        while not done and not self._is_next:
            player = self._state.current_player_id
            action = self.opponent(player, self._seen())
            with self._own_chance():
                done, _ = self._game.step(action)
        return done

    def _seen(self) -> str:
        """What is new for the player who is next."""
        player, messages = self._unwrapped.get_observation()
        names = self._state.role_mapping
        return "\n".join(
            text if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in messages
            if not (sender == player and kind == self._own_words)
        )

    @contextlib.contextmanager
    def _own_chance(self) -> Iterator[None]:
        """Games draw from the generators of the process, which others play in too."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._chance[0])
        np.random.set_state(self._chance[1])
        try:
            yield
        finally:
            self._chance = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])
