"""Games of TextArena, with a module of this test's own in the package's place."""

import enum
import random
import sys
import types

import numpy as np
import pytest

from hjax.environments.episode_server import load_environment
from hjax.errors import ConfigError, DataError

Kind = enum.Enum("Kind", ["PROMPT", "PLAYER_ACTION", "GAME_MESSAGE"])


class Wrapper:
    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)


class History(Wrapper):
    def get_observation(self):
        raise AssertionError("it repeats what was seen before")


class Brackets(Wrapper):
    def step(self, action):
        return self.env.step(f"[{action.strip('[]')}]")


class State:
    """Of the package's states what the adapter reads."""

    def __init__(self, players):
        self.current_player_id, self.error_count = 0, 0
        self.role_mapping = {-1: "GAME"} | {i: f"Player {i}" for i in range(players)}
        self.game_info = {i: {"invalid_move": False} for i in range(players)}
        self.observations = {i: [(-1, "Guess 0 to 9.", Kind.PROMPT)] for i in range(players)}

    def tell(self, text, sender=-1, kind=Kind.GAME_MESSAGE):
        for seen in self.observations.values():
            seen.append((sender, text, kind))


class SinglePlayerState(State):
    pass


class Game:
    """Guess a number that is drawn anew after each guess; with two players in turns. The second
    invalid action in a row loses."""

    def __init__(self, largest=9, players=1):
        self.largest, self.players = largest, players

    def reset(self, num_players, seed):
        if num_players != self.players:
            raise AssertionError(f"{self.players} players, received {num_players}")
        random.seed(seed)
        np.random.seed(seed)
        self.state = (SinglePlayerState if self.players == 1 else State)(num_players)
        self.rewards = None

    def get_observation(self):
        player = self.state.current_player_id
        seen, self.state.observations[player] = self.state.observations[player], []
        return player, seen

    def step(self, action):
        state, player = self.state, self.state.current_player_id
        state.tell(action, player, Kind.PLAYER_ACTION)
        drawn = random.randint(0, self.largest) + 10 * int(np.random.randint(10))
        guess = int(action.strip("[]")) if action.strip("[]").isdigit() else None
        if guess is None:
            state.error_count += 1
            if state.error_count == 1:
                state.tell("A number, please.")
                return False, {}
            return self.end(player, -1.0, "not a number", invalid_move=True)
        state.error_count = 0
        if guess == 99:
            return self.end(player, 0.75, "ninety-nine")
        state.tell(f"It was {drawn}.")
        state.current_player_id = (player + 1) % self.players
        return False, {}

    def end(self, player, reward, reason, **about):
        self.rewards = {i: reward if i == player else -reward for i in range(self.players)}
        for info in self.state.game_info.values():
            info["reason"] = reason
        self.state.game_info[player].update(about)
        return True, {}

    def close(self):
        return self.rewards, self.state.game_info


@pytest.fixture(autouse=True)
def package(monkeypatch):
    made = types.ModuleType("textarena")
    made.Wrapper, made.SinglePlayerState, made.ObservationType = Wrapper, SinglePlayerState, Kind
    known = {"Guess-v0": 1, "Duel-v0": 2}
    made.make = lambda name, **more: Brackets(History(Game(players=known[name], **more)))
    registry = types.ModuleType("textarena.envs.registration")
    registry.ENV_REGISTRY = known
    parts = {"textarena": made, "textarena.envs": types.ModuleType("textarena.envs")}
    for name, module in (parts | {"textarena.envs.registration": registry}).items():
        monkeypatch.setitem(sys.modules, name, module)


def begun(name="textarena:Guess-v0", row=None, seed=5):
    environment = load_environment(name)()
    return environment, environment.reset({"prompt": "", **(row or {})}, seed).text


def drawn(seed, count, largest=9):
    """What the game draws of its seed, computed apart from it."""
    first, second = random.Random(seed), np.random.RandomState(seed)
    return [first.randint(0, largest) + 10 * int(second.randint(10)) for _ in range(count)]


def test_an_observation_is_what_is_new_without_the_players_own_words():
    environment, first = begun(row={"prompt": "Play well."})
    assert first == "Play well.\nGuess 0 to 9."
    steps = [environment.step(action) for action in ("3", "[4]", "99")]
    texts = [f"It was {number}." for number in drawn(5, 2)] + ["ninety-nine"]
    assert [step.observation.text for step in steps] == texts
    assert [(s.reward, s.done, s.valid) for s in steps] == [
        (0.0, False, True), (0.0, False, True), (0.75, True, True),
    ]  # fmt: skip


def test_refused_actions():
    environment, _ = begun()
    steps = [environment.step(action) for action in ("x", "1", "x", "x")]
    assert [(s.reward, s.done, s.valid) for s in steps] == [
        (0.0, False, False), (0.0, False, True), (0.0, False, False), (-1.0, True, False),
    ]  # fmt: skip
    assert [steps[0].observation.text, steps[3].observation.text] == [
        "A number, please.", "not a number",
    ]  # fmt: skip


def test_games_of_one_process_have_chances_of_their_own():
    before = random.getstate(), np.random.get_state()[1].tolist()
    games = [begun(seed=seed)[0] for seed in (1, 2)]
    shown = [[], []]
    for _ in range(4):
        for seen, game in zip(shown, games):
            seen.append(game.step("0").observation.text)
    assert shown == [[f"It was {n}." for n in drawn(seed, 4)] for seed in (1, 2)]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_the_rows_seed_and_settings():
    environment, _ = begun(row={"seed": 8, "settings": {"largest": 3}})
    assert environment.step("0").observation.text == f"It was {drawn(8, 1, largest=3)[0]}."
    with pytest.raises(DataError, match="^settings is 'largest=3'; it must be arguments by name"):
        begun(row={"settings": "largest=3"})


def test_games_that_cannot_be_played(monkeypatch):
    with pytest.raises(ConfigError, match="='textarena:Gues-v0': did you mean Guess-v0.* no such"):
        load_environment("textarena:Gues-v0")
    says = r"with 1 player\(s\): AssertionError: 2 players, received 1; .*players and opponent"
    with pytest.raises(ConfigError, match=says):
        load_environment("textarena:Duel-v0")
    monkeypatch.setitem(sys.modules, "textarena.envs.registration", None)
    with pytest.raises(ConfigError, match="it needs textarena, .*: pip install textarena"):
        load_environment("textarena:Guess-v0")


DUEL = """
from hjax.environments.textarena_adapter import TextArenaEnvironment

class Duel(TextArenaEnvironment):
    target, players, seat = "Duel-v0", 2, {seat}

    def opponent(self, player, seen):
        assert player == 1 - self.seat
        return "99" if "[Player {seat}] [7]" in seen else "1"
"""


@pytest.mark.parametrize("seat, last", [(0, "7"), (1, "7"), (1, "99")])
def test_a_scripted_opponent(tmp_path, seat, last):
    (tmp_path / "duel.py").write_text(DUEL.format(seat=seat))
    environment, first = begun(f"{tmp_path}/duel.py:Duel")
    numbers = [f"It was {n}." for n in drawn(5, 3)]
    opening = ["[Player 0] [1]", numbers[0]] if seat == 1 else []
    assert first.split("\n") == ["Guess 0 to 9.", *opening]
    seen = environment.step("3").observation.text.split("\n")
    assert seen == [numbers[seat], f"[Player {1 - seat}] [1]", numbers[seat + 1]]
    step = environment.step(last)
    assert (step.reward, step.done, step.valid) == (0.75 if last == "99" else -0.75, True, True)
