"""What the benchmarks of episodes compute: counts of faults, growth, ratios."""

import itertools

import episode_faults
import episodes
import numpy as np
import pytest
from episode_faults import FAULTS, FaultyMaze, Tally, fault_of_seed, fault_turn, growth
from serving_double import byte_tokenizer

TASK = {"maze": "@..\n...\n..G", "prompt": "maze"}
# CRC-32 is 0 of nothing and 0xe8b7be43 of "a": the first is even, the second is not.
ACTING_UP, SOUND = "", "a"


def seed_of(fault):
    return next(seed for seed in itertools.count() if fault_of_seed(seed) == fault)


def test_every_fault_is_drawn_and_a_quarter_of_the_groups_has_one():
    drawn = [fault_of_seed(seed) for seed in range(4000)]
    assert set(drawn) == {None, *FAULTS}
    assert 0.2 < np.mean([fault is not None for fault in drawn]) < 0.3


@pytest.mark.parametrize("fault, raises", [
    ("raise", ValueError), ("sys.exit", SystemExit), ("raise in reset", ValueError),
    ("raise in close", ValueError),
])  # fmt: skip
def test_a_fault_is_committed_where_it_belongs_and_written_down(
    fault, raises, tmp_path, monkeypatch
):
    written = tmp_path / "committed"
    monkeypatch.setenv(episode_faults.COMMITTED, str(written))

    def play(second):
        maze = FaultyMaze()
        maze.reset(TASK, seed_of(fault))
        maze.step(SOUND), maze.step(second), maze.close()

    if "reset" not in fault:
        play(SOUND)  # the other episodes of the group go on
        assert not written.exists()
    with pytest.raises(raises):
        play(ACTING_UP)
    assert written.read_text() == f"{fault}\n"


@pytest.mark.parametrize("fault, answer", [
    ("step returns None", None), ("reset returns text", "a maze"),
])  # fmt: skip
def test_wrong_types_are_answered(fault, answer, tmp_path, monkeypatch):
    monkeypatch.setenv(episode_faults.COMMITTED, str(tmp_path / "committed"))
    maze = FaultyMaze()
    first = maze.reset(TASK, seed_of(fault))
    if "reset" in fault:
        assert first == answer
    else:
        maze.step(SOUND)
        assert maze.step(ACTING_UP) is answer


def test_episodes_are_counted_by_fault_and_by_how_they_ended():
    tally = Tally()
    hang, fork, none = seed_of("hang"), seed_of("fork of a child that stays"), seed_of(None)
    metrics = {"episode/stop_timeout": 0.25, "episode/stop_done": 0.75, "episode/turns": 3.0}
    # The second of the hanging group is sound; the third never had a second turn.
    tally.add([hang, hang, hang, none], [ACTING_UP, SOUND, None, None],
              ["timeout", "done", "done", "done"], metrics)  # fmt: skip
    assert (tally.episodes, tally.wrong) == (4, 0)
    assert tally.metrics == {"timeout": 1, "done": 3}
    assert tally.ended == {"hang": {"timeout": 1}, "": {"done": 3}}
    # A fault that was not counted, one of another name, one of nobody's, and a fork.
    tally.add([hang, hang, none, fork], [ACTING_UP, ACTING_UP, ACTING_UP, ACTING_UP],
              ["done", "killed", "exception", "max_turns"], {})  # fmt: skip
    assert (tally.episodes, tally.wrong) == (8, 3)
    assert tally.ended["fork of a child that stays"] == {"max_turns": 1}


def test_what_the_policy_said_in_the_turn_of_faults():
    turns = np.array([0, 0, -1, 1, 1, 1, -1, 2])
    tokens = np.frombuffer(b"ab.cde.f", np.uint8).astype(np.int32)
    assert fault_turn(turns, tokens, byte_tokenizer()) == "cde"
    assert fault_turn(turns[:3], tokens[:3], byte_tokenizer()) is None


def test_growth_is_from_the_first_third_to_the_last():
    values = {25: 1, 50: 10, 75: 12, 100: 50, 125: 9, 150: 13, 175: 13}
    lines = [{"step": step, "rss": value} for step, value in values.items()]
    assert growth(lines, "rss") == {"least": 9, "most": 50, "grown": 2.0}


def rounds(**seconds):
    tokens = {"episodes": 30, "full_prefill": 30, "single_turn": 60, "single_turn_rows": 120}
    return {
        name: [
            episodes.Figures(
                wall, 2 * wall, tokens=tokens[name], row_tokens=90, environment=4.0, waited=waited
            )
            for wall, waited in zip(walls, (1.0, 2.0, 8.0), strict=True)
        ]
        for name, walls in seconds.items()
    }


def test_ratios_are_of_rounds_that_stood_beside_each_other():
    found = episodes.ratios(
        rounds(
            episodes=[2, 4, 8], full_prefill=[6, 8, 12], single_turn=[2, 2, 2],
            single_turn_rows=[2, 4, 4],
        )
    )  # fmt: skip
    # 3, 2, 1.5; 30 tokens in 2, 4, 8 s beside 60 in 2 s: .5, .25, .125; and of rows 90 in 2, 4,
    # 8 s beside 120 in 2, 4, 4 s: .75, .75, .375.
    expected = {"full_prefill": 2.0, "single_turn": 0.25, "single_turn_rows": 0.75}
    assert found == {
        f"{name}_{kind}": x for name, x in expected.items() for kind in ("wall", "cpu")
    }


def test_environment_time_is_hidden_as_far_as_nobody_waited():
    found = episodes.medians(rounds(episodes=[2, 4, 8])["episodes"])
    assert (found["seconds"], found["tokens_per_second"]) == (4, 7.5)
    assert found["hidden"] == 0.5  # of .75, .5 and 0, as one cannot wait longer than all of it
