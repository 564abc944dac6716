"""Environments of OpenEnv's servers, against a server of this test's own."""

import json

import numpy as np
import pytest

from hjax.environments.episode import Episode, EpisodeLimits, EpisodePlayer
from hjax.environments.episode_pool import EpisodePool
from hjax.environments.episode_server import load_environment
from hjax.environments.episode_text import ObservationEncoder
from hjax.environments.openenv_adapter import ActionSchema, OpenEnvEnvironment
from hjax.errors import ConfigError, DataError, RunError

pytest.importorskip("websockets", reason="the extra environments")

from openenv_double import GUESS, openenv_double  # noqa: E402


@pytest.fixture
def server():
    with openenv_double() as double:
        yield double


def begun(server, row=None, seed=7, seconds=4.0):
    made = type("Here", (OpenEnvEnvironment,), {"target": server.address, "step_seconds": seconds})
    environment = made()
    return environment, environment.reset({"prompt": "Guess.", **(row or {})}, seed)


def test_an_episode(server):
    environment, first = begun(server)
    assert first.text == "Guess.\n0-9"
    steps = [environment.step(turn) for turn in ("3", ' {"n": 9}\n', "seven", "7.0", "7")]
    assert [(s.observation.text, s.reward, s.done, s.valid) for s in steps] == [
        ("higher", 0.0, False, True),  # its reward is null
        ("lower", 0.0, False, True),
        (steps[2].observation.text, 0.0, False, False),
        (steps[2].observation.text, 0.0, False, False),
        ("yes", 1.0, True, True),
    ]
    said = "This is no action. An action is a JSON object with n (integer, required), or the value"
    assert steps[2].observation.text == f"{said} of n alone."
    assert server.actions == [{"n": 3}, {"n": 9}, {"n": 7}]
    environment.close()


def test_an_action_that_the_server_refuses_is_the_policys_fault(server):
    environment, _ = begun(server)
    step = environment.step('{"n": "3"}')
    said = "Invalid message (VALIDATION_ERROR); n: Input should be a valid integer"
    assert not step.valid and step.observation.text == said
    assert environment.step("7").done
    environment.close()


def test_all_columns_but_the_prompt_are_keys_of_the_reset(server):
    row = {"level": np.arange(2), "name": "é", "seed": 4, "empty": None, "map": {"a": [None]}}
    environment, _ = begun(server, row)
    assert server.resets == [{"level": [0, 1], "name": "é", "seed": 4, "map": {"a": [None]}}]
    assert environment.step("4").done
    environment.close()
    begun(server, {"seed": None})[0].close()
    assert server.resets[1] == {"seed": 7}
    with pytest.raises(DataError, match="^image is b'x', and a reset takes JSON values; leave"):
        begun(server, {"image": b"x"})
    with pytest.raises(DataError, match=r"^prompt is \[1\]; .*it must be text"):
        begun(server, {"prompt": [1]})
    environment, first = begun(server, {"prompt": ""})
    assert first.text == "0-9"
    environment.close()


@pytest.mark.parametrize("fault, says", [
    ("vanish", "has left the episode: ConnectionClosed"),
    ("late", "has not answered in 0.9 s"),
    ("text", "has answered something else: '<html>502</html>'"),
    ("binary", "has answered something else"), ("list", "has answered something else"),
    ("no data", "has answered something else"), ("no observation", "has answered something else"),
    ("no done", "Step.done is None"), ("reward", "has answered something else"),
    ("infinite", "has answered something else"), ("state", "has answered something else"),
    ("large", "has left the episode"), ("deep", "has answered something else"),
    ("fails", r"fails at {'n': 1}: division by zero \(EXECUTION_ERROR\)"),
])  # fmt: skip
def test_what_is_the_servers_fault(server, fault, says):
    seconds = 1.0 if fault == "late" else 4.0
    environment, _ = begun(server, {"fault": fault}, seconds=seconds)
    environment.step("1")
    with pytest.raises((RunError, DataError), match=says) as error:
        environment.step("1")
    assert server.address in str(error.value) or fault == "no done"
    environment.close()


def test_resets_that_fail(server):
    with pytest.raises(RunError, match=r"refuses a reset with {.*}: no such level \(EXECUTION"):
        begun(server, {"fault": "reset"})
    with pytest.raises(RunError, match="has ended the episode at its reset"):
        begun(server, {"fault": "over"})


def test_a_server_without_a_free_session(server):
    """One is waited for a little, since a server frees it after its episode has ended."""
    server.sessions = 1
    first, _ = begun(server)
    with pytest.raises(RunError, match="no session free .*larger max_concurrent_envs, or play"):
        begun(server)
    first.close()
    begun(server)[0].close()


def test_a_server_that_is_not_there():
    with openenv_double() as gone:
        pass
    with pytest.raises(RunError, match=rf"{gone.address} has no actions at {gone.address}/schema"):
        begun(gone)


def test_addresses():
    for good in ("http://h:1", "https://h/base/", "ws://1.2.3.4:80", "wss://h"):
        assert load_environment(f"openenv:{good}").target == good
    for bad in ("", "h:1", "//h:1", "ftp://h:1", "http://", "http://h:1?a=b", "http://h:1#a"):
        with pytest.raises(ConfigError, match="^--environment='openenv:.*must be http://HOST:PORT"):
            load_environment(f"openenv:{bad}", "--environment")


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "websockets.sync.client", None)
    with pytest.raises(
        ConfigError, match="needs websockets, which cannot .*pip install websockets"
    ):
        load_environment("openenv:http://h:1")


@pytest.mark.parametrize("types, required, turn, action", [
    ({"code": "string"}, [], ' print("{") ', {"code": ' print("{") '}),
    ({"code": "string"}, ["code"], '{"a": 1}', {"code": '{"a": 1}'}),
    ({"code": "string"}, ["code"], '{"code": "1"}', {"code": "1"}),
    ({"id": "integer", "game": "string"}, ["id"], "4", {"id": 4}),
    ({"id": "integer"}, ["id"], "true", None), ({"id": "integer"}, ["id"], "9" * 5000, None),
    ({"x": "number"}, [], "0.5", {"x": 0.5}), ({"x": "number"}, [], "NaN", None),
    ({"a": "string", "b": "string"}, ["a", "b"], "text", None),
    ({"a": "string", "b": "string"}, ["a", "b"], '{"c": 1}', {"c": 1}),
    ({"at": "array"}, ["at"], "[1]", None), ({"at": ""}, ["at"], "1", None),
    ({}, [], "text", None), ({}, [], "{}", {}), ({}, [], "[" * 100_000, None),
])  # fmt: skip
def test_turns_as_actions(types, required, turn, action):
    assert ActionSchema(types, tuple(required)).read(turn) == action


def test_the_schema_of_a_union_has_no_single_field():
    union = {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    assert ActionSchema.of({"action": union}) == ActionSchema({}, ())
    assert ActionSchema.of({"action": GUESS}) == ActionSchema({"n": "integer"}, ("n",))


def test_an_observation_of_several_fields_is_json():
    shown = OpenEnvEnvironment().observation_text({"board": [0, 1], "legal": ["é"]})
    assert json.loads(shown) == {"board": [0, 1], "legal": ["é"]} and "é" in shown
    assert OpenEnvEnvironment().observation_text({"n": 3}) == '{"n": 3}'


def test_faults_cost_their_episode_only(server):
    """Six episodes in two processes; the late one ends no process, so no other is played again."""
    import serving_double

    from hjax.environments.episode import DrawnTurn

    tokenizer = serving_double.byte_tokenizer()
    faults = ["", "vanish", "late", "text", "fails", ""]
    episodes = [
        Episode(number=i, group=i, task={"prompt": "p", "fault": fault}, seed=3)
        for i, fault in enumerate(faults)
    ]

    def draw(requests):
        return [DrawnTurn(tokenizer.encode(str(r.turn + 1)), {}, True) for r in requests]

    limits = EpisodeLimits(turns=4, turn_tokens=9, prompt_tokens=99, response_tokens=999)
    with EpisodePool(f"openenv:{server.address}", processes=2, step_seconds=2.0) as pool:
        EpisodePlayer(pool, ObservationEncoder(tokenizer), limits, draw).play(episodes)
    assert [each.stop_reason for each in episodes] == ["done", *["exception"] * 4, "done"]
    assert [each.total_reward for each in (episodes[0], episodes[5])] == [1.0, 1.0]
    assert "has not answered in 1.8 s" in episodes[2].fault
    assert len(server.resets) == 6
