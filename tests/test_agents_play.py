"""Agents in processes of their own: rewards, faults and deadlines of sessions."""

import functools
import pathlib

import numpy as np
import pytest
from serving_double import byte_tokenizer

from hjax.agents.agent_process import load_agent
from hjax.agents.agent_runner import AgentRunner
from hjax.agents.agent_settings import AgentSettings, RecordSettings
from hjax.environments.episode import DrawnTurn, Episode, EpisodeLimits
from hjax.environments.episode_text import ObservationEncoder
from hjax.errors import ConfigError

FILE = pathlib.Path(__file__).parent / "agents_at_fault.py"
LIMITS = EpisodeLimits(turns=8, turn_tokens=0, prompt_tokens=128, response_tokens=512)


def drawn(rounds, requests):
    rounds.append(sorted(request.episode for request in requests))
    logs = {name: [-1.0] * 3 for name in ("logprobs", "policy_logprobs")}
    return [DrawnTurn([*b"ok", 257], logs, True) for _ in requests]


def play(prompts, record=None, as_ready=False, **settings):
    """The episodes of these prompts, or rows, and which were drawn together."""
    encoder = ObservationEncoder(byte_tokenizer(), chat=True)
    settings = AgentSettings(**{"function": f"{FILE}:agent", "seconds": 20.0, **settings})
    runner = AgentRunner(settings, record or RecordSettings(), encoder, LIMITS)
    rounds = []
    try:
        tasks = [each if isinstance(each, dict) else {"prompt": each} for each in prompts]
        episodes = [Episode(i, 0, {"answer": 7} | task, i) for i, task in enumerate(tasks)]
        player = runner.player(functools.partial(drawn, rounds), as_ready=as_ready)
        player.play(episodes)
    finally:
        runner.close()
    return episodes, rounds


def test_sessions_end_with_their_rewards_and_faults_are_not_scored():
    """R9: None is not 0, and neither is an agent that could not be run."""
    episodes, rounds = play(["fine", "raises", "none", "silent", "words", "exits"])
    assert [each.stop_reason for each in episodes] == [
        "done", "exception", "unscored", "exception", "exception", "exception"
    ]  # fmt: skip
    assert episodes[0].total_reward == 2.0
    assert all(np.isnan(each.total_reward) for each in episodes[1:])
    for episode, said in zip(
        episodes[1:], ["ValueError: a fault", "unscored", "no call", "'good'", "SystemExit: 3"],
        strict=True,
    ):  # fmt: skip
        assert said in episode.fault
    assert rounds == [[0, 1, 2], [4, 5]]  # by cohorts, whenever they asked


@pytest.mark.parametrize("as_ready", [False, True])
def test_a_limit_of_calls_ends_a_session_that_goes_on(as_ready):
    [episode], rounds = play(["floods"], as_ready=as_ready)
    assert episode.stop_reason == "max_turns" and len(episode.turns) == 8
    assert episode.turns[-1].metrics["calls"] == 8 and episode.total_reward == 2.0


def test_a_late_session_ends_alone_or_is_given_its_reward():
    episodes, _ = play(["late", "fine"], seconds=2.0)
    assert [each.stop_reason for each in episodes] == ["timeout", "done"]
    [episode], _ = play(["late"], RecordSettings(timeout_reward=-1.0), seconds=2.0)
    assert episode.stop_reason == "done" and episode.total_reward == -1.0 and episode.rows


@pytest.mark.parametrize(("what", "reason"), [("blocks", "timeout"), ("dies", "killed")])
def test_a_process_that_blocks_or_dies_is_replaced(what, reason, monkeypatch):
    monkeypatch.setattr("hjax.agents.agent_pool._LATE_SECONDS", 0.5)
    record = RecordSettings(concurrent=1)
    # A machine that is busy takes seconds to start the process, which count.
    episodes, _ = play([what, "fine"], record, seconds=3.0 if what == "blocks" else 60.0)
    assert [each.stop_reason for each in episodes] == [reason, "done"]
    assert episodes[1].total_reward == 3.0


@pytest.mark.parametrize("name", ["plain", "two", "missing"])
def test_what_is_no_agent_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"agent.function=.*{name}"):
        load_agent(f"{FILE}:{name}")


def test_calls_that_are_learned_from_are_chosen_by_a_function(tmp_path):
    (tmp_path / "choice.py").write_text("def few(call):\n    return call['number'] < 2\n")
    record = RecordSettings(train_call=f"{tmp_path}/choice.py:few")
    [episode], _ = play(["floods"], record)
    assert len(episode.turns) == 2 and episode.turns[-1].metrics["calls"] == 8


def test_calls_do_not_wait_for_a_session_that_asks_nothing(caplog):
    record = RecordSettings(wait_seconds=0.5)
    episodes, rounds = play(["sleeps", "fine", "fine", "fine"], record)
    assert [each.stop_reason for each in episodes] == ["done"] * 4
    assert rounds[0] == [1] and [0] in rounds
    assert "drawn without them" in caplog.text
