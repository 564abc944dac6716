"""Environments: their interface, processes, observations as token ids, and played episodes."""

import json
import math
import os
import pathlib
import pickle
import signal
import time

import numpy as np
import pytest
from serving_double import byte_tokenizer

import hjax
from hjax.data.dataset import Dataset
from hjax.data.read_options import ReadOptions
from hjax.data.tokenizer import Tokenizer
from hjax.environments import anchor_digest, episode_pool
from hjax.environments.episode import (
    DrawnTurn,
    Episode,
    EpisodeLimits,
    EpisodePlayer,
    episode_seed,
)
from hjax.environments.episode_pool import EpisodePool
from hjax.environments.episode_text import ObservationEncoder
from hjax.errors import ConfigError, DataError, RunError
from hjax.run.episode_evaluation import question_episodes
from hjax.run.episode_rollout import EpisodeRollout, log_first_faults, player_of

ENVIRONMENTS = '''
import os, sys, time
import hjax

class Counter(hjax.Environment):
    """Counts its turns; what a turn says decides what happens."""
    def reset(self, task, seed):
        self.count = 0
        return hjax.Observation(f"{task['prompt']}{seed}", anchor={"count": 0})

    def step(self, action):
        self.count += 1
        if action == "hang": time.sleep(60)
        if action == "late": time.sleep(1.5)
        if action == "leave": os._exit(3)
        if action == "garble":
            for number in range(3, 512):
                try: os.write(number, b"\\xff" * 99)
                except OSError: pass
        if action == "raise": raise ValueError("of the environment")
        if action == "exit": sys.exit(1)
        if action == "number": return 3
        if action == "text": return hjax.Step("seen")
        if action == "infinite": return hjax.Step(hjax.Observation("x"), reward=float("inf"))
        if action == "great": return hjax.Step(hjax.Observation("x"), reward=-1e38)
        if action == "rich": return hjax.Step(hjax.Observation("x"), reward=6e5)
        if action == "long": return hjax.Step(hjax.Observation("x" * (1 << 21)))
        if action == "memory": bytearray(1 << 34)
        if action == "fork" and os.fork() == 0: time.sleep(60)
        if action == "print": print("garbage"); os.write(1, b"\\xff\\n")
        seen = hjax.Observation(f"{self.count}{action}", anchor={"count": self.count}, stop=";")
        done, fresh = action == "end", action == "new"
        return hjax.Step(seen, reward=self.count / 4, done=done, fresh=fresh,
                         valid=action != "no", metrics={"pushes": 2})

    def close(self):
        time.sleep(float(os.environ.get("HJAX_TEST_CLOSES", 0)))
        if os.environ.get("HJAX_TEST_CLOSED"): open(os.environ["HJAX_TEST_CLOSED"], "a").write("c")

class Clock(Counter):
    """Does not follow from its seed and actions."""
    def reset(self, task, seed):
        self.count = 0
        return hjax.Observation(str(time.time_ns()))

class Leaving(Counter):
    def close(self):
        raise ValueError("at the end")

class Slow(Counter):
    def step(self, action):
        time.sleep(0.05 * (self.count % 3))
        return super().step(action)

def function(task, seed): pass

class Half:
    def reset(self, task, seed): pass
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ENVIRONMENTS)
    return path


@pytest.fixture
def pool(file):
    with EpisodePool(f"{file}:Counter", step_seconds=1.0, memory_bytes=1 << 32) as made:
        yield made


# The interface


def test_anchors_are_equal_by_value():
    first = {"b": [1.0, None, {"x": "é", "a": True}], "a": 2}
    same = {"a": np.int64(2), "b": (1, None, {"a": True, "x": "é"})}
    assert anchor_digest(first) == anchor_digest(same)
    others = [{"a": 2}, {"a": "2"}, [["a", 2]], {"a": [2]}, {"a": 2.5}, {1: 2}, {"1": 2}, 1, "1"]
    others += [True, [], {}, None, [1, 2], [2, 1], [[1], 2], float(2**60), 2**60 + 1]
    digests = [anchor_digest(x) for x in others]
    assert len(set(digests)) == len(digests)
    assert anchor_digest(np.arange(6).reshape(2, 3)) == anchor_digest([[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("make, says", [
    (lambda: hjax.Observation(3), "Observation.text is 3; it must be a string"),
    (lambda: hjax.Observation("a", anchor={1}), "holds {1} (set); it must be made of strings"),
    (lambda: hjax.Observation("a", anchor=[math.nan]), "Observation.anchor holds nan (float)"),
    (lambda: hjax.Observation("a", stop=["", "b"]), "strings that are not empty"),
    (lambda: hjax.Step("a"), "Step.observation is 'a'; it must be a hjax.Observation"),
    (lambda: hjax.Step(hjax.Observation("a"), reward="1"), "Step.reward is '1'"),
    (lambda: hjax.Step(hjax.Observation("a"), reward=None), "must be a finite number"),
    (lambda: hjax.Step(hjax.Observation("a"), reward=10**400), "must be a finite number"),
    (lambda: hjax.Step(hjax.Observation("a"), reward=-1e38), "is -1e+38; it must be from -1e+06 "),
    (lambda: hjax.Step(hjax.Observation("a"), reward=1e6 + 1), "to 1e+06: scale the rewards"),
    (lambda: hjax.Step(hjax.Observation("a"), done=1), "Step.done is 1; it must be True or False"),
    (lambda: hjax.Step(hjax.Observation("a"), metrics={"x": "y"}), "Step.metrics['x'] is 'y'"),
])  # fmt: skip
def test_what_an_environment_may_not_say(make, says):
    with pytest.raises(DataError) as caught:
        make()
    assert says in str(caught.value)


# Processes


def answer(future):
    return future.result(timeout=120)


FAULTS = {
    "hang": ("timeout", "longer than 1 s"), "late": ("timeout", "longer than 1 s"),
    "leave": ("killed", "exit status 3"), "garble": ("killed", "answered out of turn"),
    "exit": ("exception", "SystemExit"),
    "raise": ("exception", "ValueError: of the environment"),
    "number": ("exception", "step returned 3; it must be a hjax.Step"),
    "text": ("exception", "Step.observation is 'seen'"),
    "infinite": ("exception", "Step.reward is inf"),
    "great": ("exception", "Step.reward is -1e+38"),
    "long": ("exception", "an observation of 2097152 characters"),
    "memory": ("exception", "MemoryError"),
}  # fmt: skip


def test_a_fault_ends_its_episode_and_no_other(pool):
    assert answer(pool.reset(7, {"prompt": "a"}, 5)).observation == "a5"
    counted = 0
    for number, (action, (fault, says)) in enumerate(FAULTS.items(), start=10):
        answer(pool.reset(number, {"prompt": "b"}, number))
        answer(pool.step(number, "x"))
        found = answer(pool.step(number, action))
        assert (found.fault, says in found.text) == (fault, True), found
        # It has ended; the others go on, though their process was lost.
        assert answer(pool.step(number, "x")).fault == fault
        counted += 1
        other = answer(pool.step(7, "on"))
        assert (other.observation, other.reward, other.fault) == (f"{counted}on", counted / 4, "")
        pool.end(number)


def test_answers_are_the_environments(pool):
    first = answer(pool.reset(0, {"prompt": "a"}, 5))
    assert first.anchor == anchor_digest({"count": 0}) and first.stop == ()
    found = answer(pool.step(0, "no"))
    assert (found.observation, found.reward, found.done, found.valid) == ("1no", 0.25, False, False)
    assert found.stop == (";",) and found.metrics == {"pushes": 2}
    assert answer(pool.step(0, "é\n\0")).observation == "2é\n\0"
    assert answer(pool.step(0, "print")).fault == ""
    assert answer(pool.step(0, "fork")).observation == "4fork"
    assert answer(pool.step(0, "end")).done and answer(pool.step(0, "new")).fresh
    with pytest.raises(ConfigError, match="episode 0 is open already"):
        pool.reset(0, {}, 1)
    with pytest.raises(ConfigError, match="episode 3 is not open"):
        pool.step(3, "x")


def test_what_cannot_be_played_again_is_lost(file):
    with EpisodePool(f"{file}:Clock", step_seconds=1.0) as pool:
        answer(pool.reset(0, {"prompt": ""}, 0)), answer(pool.reset(1, {"prompt": ""}, 0))
        assert answer(pool.step(0, "leave")).fault == "killed"
        found = answer(pool.step(1, "x"))
        assert found.fault == "killed" and "it gave something else" in found.text


@pytest.mark.parametrize("victim", ["supervisor", "environment"])
def test_a_process_killed_from_outside_loses_nobody(file, victim):
    with EpisodePool(f"{file}:Counter") as pool, EpisodePool(f"{file}:Counter") as whole:
        for number in range(2):
            for each in (pool, whole):
                answer(each.reset(number, {"prompt": "p"}, 3))
        for turn, number in enumerate([0, 1, 0, 1, 1]):
            (pid,) = pool.pids()
            if victim == "environment":
                listed = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                pid = int(listed[0])
            os.kill(pid, signal.SIGKILL)
            found, expected = (answer(x.step(number, f"a{turn}")) for x in (pool, whole))
            assert not found.fault and found.observation == expected.observation
            assert found.reward == expected.reward


def test_environments_are_closed_and_processes_end(file, tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    monkeypatch.setenv("HJAX_TEST_CLOSED", str(closed))
    with EpisodePool(f"{file}:Counter", processes=2) as pool:
        for number in range(3):
            answer(pool.reset(number, {"prompt": ""}, 0))
        pids = pool.pids()
        for number in (0, 2, 2, 5):  # what is not open is nothing to close
            pool.end(number)
        answer(pool.step(1, "x"))
        deadline = time.monotonic() + 60
        while not closed.exists() or closed.read_text() != "cc":
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert len(pids) == 2 and not any(pathlib.Path(f"/proc/{pid}/cmdline").exists() and
        b"hjax" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)  # fmt: skip


@pytest.mark.parametrize("seconds, closed", [("0.1", "ccc"), ("60", "")])
def test_the_end_of_a_pool_waits_for_episodes_to_close_but_not_for_long(
    seconds, closed, file, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("HJAX_TEST_CLOSED", str(tmp_path / "closed"))
    monkeypatch.setenv("HJAX_TEST_CLOSES", seconds)
    monkeypatch.setattr(episode_pool, "CLOSING_SECONDS", 60.0 if closed else 0.3)
    with EpisodePool(f"{file}:Counter", step_seconds=100.0) as pool:
        for number in range(3):
            answer(pool.reset(number, {"prompt": ""}, 0))
        for number in range(3):
            pool.end(number)
        start = time.monotonic()
    assert time.monotonic() - start < 50
    found = tmp_path / "closed"
    assert (found.read_text() if found.exists() else "") == closed and not caplog.records


def test_a_pool_ends_without_waiting_for_a_call_that_hangs(file):
    with EpisodePool(f"{file}:Counter", processes=2, step_seconds=100.0) as pool:
        for number in range(2):
            answer(pool.reset(number, {"prompt": ""}, 0))
        late = [pool.step(number, "hang") for number in range(2)]
        while not all(each.running() for each in late):
            time.sleep(0.01)
        pids, start = pool.pids(), time.monotonic()
    assert time.monotonic() - start < 50
    assert [answer(each).fault for each in late] == ["killed"] * 2
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_fault_of_close_is_told_once(file, caplog):
    with EpisodePool(f"{file}:Leaving") as pool:
        for number in range(3):
            answer(pool.reset(number, {"prompt": ""}, 0))
            pool.end(number)
        assert answer(pool.reset(3, {"prompt": "a"}, 5)).observation == "a5"
    [line] = [record.getMessage() for record in caplog.records]
    assert "close failed (exception)" in line and "ValueError: at the end" in line


@pytest.mark.parametrize("name, says", [
    ("function", "it is no class; subclass hjax.Environment"),
    ("Half", "it has no step, close; subclass hjax.Environment"),
    ("Conter", "did you mean Counter?"),
])  # fmt: skip
def test_what_is_no_environment(name, says, file):
    with pytest.raises(ConfigError, match="environment.function=") as caught:
        EpisodePool(f"{file}:{name}")
    assert says in str(caught.value)


def test_a_class_of_this_process_alone():
    class Mine(hjax.Environment):
        pass

    with pytest.raises(ConfigError, match="Mine cannot be imported by another process; put it"):
        EpisodePool(Mine)
    with pytest.raises(ConfigError, match="processes=0"):
        EpisodePool("hjax.environments.environment:Environment", processes=0)


# Observations as ids

# Templates whose conversations only grow: what follows a turn is what they write themselves.
APPENDING = ("qwen2_5", "qwen3_instruct_2507", "llama3_1", "llama3_2", "gemma3", "phi3", "lfm2",
             "cohere2")  # fmt: skip


@pytest.mark.parametrize("name", APPENDING)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_turn_is_followed_by_what_the_template_writes(name, system, test_data):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (test_data / f"chat_templates/{name}.jinja").read_text()
    encoder = ObservationEncoder(tokenizer, chat=True, system=system)
    before = [{"role": "system", "content": system}] if system else []
    talk = [*before, {"role": "user", "content": "Où?"}]
    seen = encoder.begin("Où?")
    for said, observed in (("Go north", "A wall."), ("Go  é", "42\n7")):
        turn = tokenizer.encode(said, add_special=False)  # cut off before its end
        seen += turn + encoder.continuation("Où?", turn, False, observed)
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": observed}]
        whole = tokenizer.chat(talk, True)
        assert tokenizer.decode(seen, skip_special=False) == whole


def test_an_end_that_was_drawn_is_not_written_twice(test_data):
    tokenizer = Tokenizer.load(test_data / "tokenizers/minimind")
    encoder = ObservationEncoder(tokenizer, chat=True)
    (end,) = tokenizer.encode("<|im_end|>", add_special=False)
    turn = tokenizer.encode("yes", add_special=False)
    cut = encoder.continuation("a", turn, False, "b")
    assert cut[0] == end and encoder.continuation("a", [*turn, end], True, "b") == cut[1:]
    # The token that ends texts is another stop: the one that was drawn stays.
    tokenizer.eos_ids = (*tokenizer.eos_ids, 7)
    assert encoder.continuation("a", [*turn, 7], True, "b") == cut[1:]


def test_without_a_chat_the_observation_follows_as_it_is(test_data):
    tokenizer = Tokenizer.characters("abc=123")
    encoder = ObservationEncoder(tokenizer)
    a, b, one = (tokenizer.encode(x, add_special=False)[0] for x in "ab1")
    assert encoder.begin("a") == tokenizer.encode("a") and len(encoder.begin("a")) == 2  # with BOS
    assert encoder.continuation("a", [one, tokenizer.eos_id], True, "ab") == [a, b]
    assert encoder.continuation("a", [one], True, "ab") == [a, b]  # ended by a stop string
    assert encoder.continuation("a", [one], False, "ab") == [tokenizer.eos_id, a, b]
    # No blank in front, whatever the tokenizer adds to a text.
    stories = Tokenizer.load(test_data / "weights/stories260K-hf")
    ids = ObservationEncoder(stories).continuation("Once", [5], True, "upon a time")
    assert stories.decode_response(stories.encode("Once"), ids) == "upon a time"


@pytest.mark.parametrize("name, system", [("mistral_small", "Be brief."), ("late", "")])
def test_a_template_that_rewrites_is_refused(name, system, test_data):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content if loop.last else '..' }}{% endfor %}"
        if name == "late"
        else "{% set last = messages | length - 1 %}{% for m in messages %}"
        "{% if m.role == 'user' %}"
        "[{% if loop.index0 == last and messages[0].role == 'system' %}{{ messages[0].content }} "
        "{% endif %}{{ m.content }}]{% elif m.role == 'assistant' %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    with pytest.raises(DataError, match="its chat template cannot continue a chat"):
        ObservationEncoder(tokenizer, chat=True, system=system)


# Episodes

LETTERS = Tokenizer.characters("abcdefghijklmnopqrstuvwxyz0123456789;-.")


def ids(text):
    return LETTERS.encode(text, add_special=False)


class Script:
    """A policy that says what stands here, by episode and turn; keeps the requests."""

    def __init__(self, *texts):
        self.texts, self.waves = texts, []

    def __call__(self, requests):
        self.waves.append([request.episode for request in requests])
        self.requests = requests
        return [self.drawn(self.texts[r.episode][r.turn], r) for r in requests]

    @staticmethod
    def drawn(text, request):
        tokens = ids(text.removesuffix("$")) + [LETTERS.eos_id] * text.endswith("$")
        tokens, ended = tokens[: request.max_tokens], text.endswith("$") or text[-1:] == ";"
        logprobs = {"logprobs": [-float(i) for i in range(len(tokens))]}
        return DrawnTurn(tokens, logprobs, ended and len(tokens) >= len(text))


LIMITS = EpisodeLimits(turns=9, turn_tokens=0, prompt_tokens=20, response_tokens=40)


def play(pool, script, limits=LIMITS, **options):
    episodes = [
        Episode(number=i, group=i // 2, task={"prompt": "p"}, seed=i // 2)
        for i in range(len(script.texts))
    ]
    EpisodePlayer(pool, ObservationEncoder(LETTERS), limits, script, **options).play(episodes)
    return episodes


def test_a_played_episode_by_hand(pool):
    (episode,) = play(pool, Script(["go$", "no", "end$"]))
    (row,) = episode.rows
    eos = LETTERS.eos_id
    assert row.prompt == LETTERS.encode("p0") and row.text == "p0"
    go, no, end = row.turns
    assert (go.tokens, go.text, go.observation) == ([*ids("go"), eos], "go", ids("1go"))
    # The second turn was cut off: its end is written for it.
    assert (no.tokens, no.text, no.observation) == (ids("no"), "no", [eos, *ids("2no")])
    assert (end.tokens, end.observation, end.observed) == ([*ids("end"), eos], [], "3end")
    assert row.response == [*ids("go"), eos, *ids("1go"), *ids("no"), eos, *ids("2no"),
                            *ids("end"), eos]  # fmt: skip
    assert [turn.reward for turn in row.turns] == [0.25, 0.5, 0.75] and episode.total_reward == 1.5
    assert [turn.valid for turn in row.turns] == [True, False, True]
    # The state in which each was taken.
    assert [turn.anchor for turn in row.turns] == [anchor_digest({"count": i}) for i in range(3)]
    assert list(go.logprobs["logprobs"]) == [0, -1, -2] and go.metrics == {"pushes": 2}
    assert episode.stop_reason == "done" and not episode.fault


def test_a_fresh_observation_begins_a_row(pool):
    (episode,) = play(pool, Script(["a$", "new$", "b$", "end$"]))
    first, second = episode.rows
    assert first.text == "p0" and second.text == "2new"
    assert second.prompt == LETTERS.encode("2new") and len(first.turns) == len(second.turns) == 2
    assert first.turns[-1].observation == [] and episode.total_reward == 2.5


@pytest.mark.parametrize("empty, turns", [("p0", 0), ("2new", 2)])
def test_a_row_needs_a_prompt(empty, turns, pool, monkeypatch):
    """Which an empty text is not, where the tokenizer has no BOS."""
    begin = ObservationEncoder.begin

    def without_bos(self, first):
        text = first.messages[-1]["content"]
        return [] if text == empty else begin(self, first)

    monkeypatch.setattr(ObservationEncoder, "begin", without_bos)
    bad, good = play(pool, Script(["a$", "new$"], ["b$", "end$"]), cohorts=1)
    if turns:
        assert good.total_reward == 0.75
    assert (bad.stop_reason, len(bad.turns)) == ("exception", turns)
    assert "begins a row has no tokens" in bad.fault and math.isnan(bad.total_reward)


@pytest.mark.parametrize("limits, turns, stop", [
    (dict(turns=2), 2, "max_turns"),
    (dict(turns=3), 3, "done"),
    (dict(response_tokens=8), 1, "context"),  # aaa$ and 1aaa: nothing is left for another
    (dict(response_tokens=9), 2, "context"),  # one token is
    (dict(row_tokens=11), 1, "context"),
    (dict(row_tokens=12), 2, "context"),
])  # fmt: skip
def test_where_episodes_end(limits, turns, stop, pool):
    limits = EpisodeLimits(**{**vars(LIMITS), **limits})
    (episode,) = play(pool, Script(["aaa$", "bb$", "end$"]), limits)
    assert (len(episode.turns), episode.stop_reason) == (turns, stop)
    assert len(episode.rows[0].response) <= limits.response_tokens


def test_a_turn_has_its_own_limit(pool):
    limits = EpisodeLimits(**{**vars(LIMITS), "turn_tokens": 2, "turns": 1})
    (episode,) = play(pool, Script(["abc$"]), limits)
    assert episode.turns[0].text == "ab"
    small = EpisodeLimits(**{**vars(LIMITS), "prompt_tokens": 2})
    with pytest.raises(DataError, match="first observation of an episode has 3 tokens, and 2 are"):
        play(pool, Script(["a$"]), small)


def test_a_fault_leaves_the_others(pool):
    script = Script(["a$", "end$"], ["raise$"], ["b$", "end$"])
    good, bad, other = play(pool, script)
    assert (bad.stop_reason, len(bad.turns)) == ("exception", 1) and math.isnan(bad.total_reward)
    assert "of the environment" in bad.fault
    assert good.total_reward == other.total_reward == 0.75
    assert good.seed == bad.seed == 0 and other.seed == 1 and other.rows[0].text == "p1"
    # Numbers may be used again.
    assert play(pool, script)[0].stop_reason == "done"


def test_rewards_that_are_too_large_together_are_a_fault(pool):
    rich, fair = play(pool, Script(["rich$", "rich$", "end$"], ["rich$", "end$"]))
    assert (rich.stop_reason, len(rich.turns)) == ("exception", 2)
    assert rich.fault.startswith("the sum of the episode's rewards is 1.2e+06; it must be from -1e")
    assert fair.stop_reason == "done" and fair.total_reward == 600_000.5


@pytest.mark.extended
def test_who_draws_together_does_not_depend_on_time(file):
    texts = [["a$"] * i + ["end$"] for i in (0, 3, 1, 2, 4)]
    waves = []
    for name in ("Counter", "Slow"):
        with EpisodePool(f"{file}:{name}", processes=3) as pool:
            script = Script(*texts)
            play(pool, script)
            waves.append(script.waves)
    assert waves[0] == waves[1]
    assert waves[0][:4] == [[0, 1, 2], [3, 4], [1, 2], [3, 4]]
    with EpisodePool(f"{file}:Slow", processes=3) as pool:
        ready = Script(*texts)
        episodes = play(pool, ready, as_ready=True, cohorts=1)
    assert [len(each.turns) for each in episodes] == [1, 4, 2, 3, 5]


def test_the_first_fault_of_each_kind_is_said(caplog):
    trace = "Traceback (most recent call last):\n  ...\nKeyError: 'limit'"
    ends = [("exception", trace), ("done", ""), ("timeout", "step took 2 s"), ("exception", "x")]
    episodes = [
        Episode(number=i, group=i, task={}, seed=0, stop_reason=reason, fault=fault)
        for i, (reason, fault) in enumerate(ends)
    ]
    told = set()
    log_first_faults(episodes[:2], told)
    log_first_faults(episodes, told)
    # Processes of earlier tests' environments may end meanwhile, and say so.
    ours = [record for record in caplog.records if record.name == "hjax.run.episode_rollout"]
    assert [record.getMessage().split(", and")[0] for record in ours] == [
        "the environment failed (episode/stop_exception)",
        "the environment failed (episode/stop_timeout)",
    ]
    caplog.clear()
    log_first_faults(episodes[:1], set(), "agent my.py:solve")
    assert "the agent my.py:solve failed (episode/stop_exception)" in caplog.text
    assert "learned from: KeyError: 'limit'; further" in caplog.text


@pytest.mark.parametrize(
    "keys, who",
    [
        ({"agent.function": "my agent.py:solve"}, "agent my agent.py:solve"),
        ({"agent.command": "codex exec"}, "agent codex exec"),
        ({"environment.function": "shop.py:Shop"}, "environment shop.py:Shop"),
        ({"environment.function": "shop.py:Shop", "environment.tools": "calculator"}, ""),
        ({"data.task": "maze"}, ""),
    ],
)
def test_who_failed_is_named(keys, who):
    config = hjax.get_config("base.py", keys)
    assert " ".join(filter(None, player_of(config))) == who
    rollout = EpisodeRollout.__new__(EpisodeRollout)
    rollout._max_unscored, rollout._who = 0.5, who or "environment"
    faults = ["Traceback\nValueError: no shop", "", "late"]
    episodes = [
        Episode(number=i, group=i, task={}, seed=0, stop_reason="exception", fault=fault)
        for i, fault in enumerate(faults)
    ]
    said = (
        f"the {who or 'environment'} failed in 2 of 3 episodes (exception 2); the share 0.667 is "
        f"above reward.max_unscored=0.5: correct the {(who or 'environment').split()[0]}, or raise "
        "that key. The first failure: ValueError: no shop"
    )
    with pytest.raises(RunError) as caught:
        rollout._check_faults(episodes)
    assert (str(caught.value), caught.value.details) == (said, faults[0])
    rollout._check_faults([episodes[1], episodes[2]])  # half of them: not above


def test_seeds_of_environments():
    made = {episode_seed(0, step, group) for step in range(20) for group in range(20)}
    assert len(made) == 400 and all(0 <= seed < 2**32 for seed in made)
    assert episode_seed(0, 1, 2) != episode_seed(1, 1, 2)


def test_a_chat_is_rendered_once(tmp_path):
    """An environment that says its row's prompt has it in the template once, not twice."""
    tokenizer = Tokenizer.characters("abcU:A;")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ {'user': 'U', 'assistant': 'A'}[m.role] }}:{{ m.content }};"
        "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    rows = [{"prompt": "ab", "limit": 3}, {"question": "ba"}, {"prompt_tokens": [1, 2]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Dataset.from_file(tmp_path / "rows.jsonl", tokenizer, options=ReadOptions(chat=True))
    assert data.prompt_text[0] == "U:ab;A:"
    episodes = question_episodes(data, range(1, 6), samples=2, seed=0)
    said = [episode.task["prompt"] for episode in episodes]
    assert said == ["ab", "ba", "ba", *[tokenizer.decode([1, 2])] * 2]
    assert [episode.group for episode in episodes] == [0, 1, 1, 2, 2]
    assert episodes[0].task["limit"] == 3 and episodes[1].task["limit"] is None
    begun = ObservationEncoder(tokenizer, chat=True).begin(said[0])
    assert tokenizer.decode(begun) == "U:ab;A:"


def test_a_task_of_any_columns_reaches_the_environment(tmp_path):
    path = tmp_path / "columns.py"
    path.write_text(
        "import hjax\nclass C(hjax.Environment):\n"
        "    def reset(self, task, seed):\n"
        "        return hjax.Observation(repr(sorted((k, str(v)) for k, v in task.items())))\n"
        "    def step(self, action): pass\n"
    )
    task = {"b": None, "a": np.arange(2), "prompt": "é", "c": {"x": [b"\0"]}}
    assert pickle.loads(pickle.dumps(task))["prompt"] == "é"
    with EpisodePool(f"{path}:C") as pool:
        seen = answer(pool.reset(0, task, 0)).observation
    assert seen == repr(sorted((k, str(v)) for k, v in task.items()))


CORRIDOR = """
class Corridor:
    def __init__(self, length): self.length = length
    def reset(self, seed): self.at = seed % self.length; return self.at, {}
    def step(self, move):
        self.at += 2 * move - 1
        return self.at, float(self.at == self.length), self.at == self.length, self.at < 0, {}
"""


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The Python files that docs/agents.md shows, and a game that one of them wraps."""
    folder = tmp_path_factory.mktemp("examples")
    page = pathlib.Path(hjax.__file__).parent.parent / "docs" / "agents.md"
    for code in page.read_text().split("```python\n# ")[1:]:
        name, _, rest = code.partition("\n")
        (folder / name).write_text(rest.split("```")[0])
    (folder / "corridor.py").write_text(CORRIDOR)
    return folder


def test_the_wrapped_game_of_the_docs_plays(examples):
    task = {"prompt": "Go right.", "settings": {"length": 4}}
    with EpisodePool(f"{examples}/from_gym.py:FromGym") as pool:
        assert answer(pool.reset(0, task, 6)).observation == "Go right.\n2"
        found = [answer(pool.step(0, said)) for said in ("up", " LEFT", "right", "right", "right")]
    assert [each.observation for each in found] == ["Say one of left, right.", "1", "2", "3", "4"]
    assert [each.valid for each in found] == [False, True, True, True, True]
    assert [each.done for each in found] == [False] * 4 + [True] and found[-1].reward == 1.0


def test_the_tools_of_the_docs_play(examples):
    from hjax.environments.tools import EpisodeTools, load_tools

    price, cart = load_tools(f"{examples}/shop.py:price,Cart")
    assert price.definition["function"]["description"] == "The price of an item."
    item = {"type": "string", "description": "its name, in the singular."}
    assert price.parameters["properties"] == {"item": item}
    tools = EpisodeTools([price, cart], seed=0)
    assert tools.call("price", {"item": "melon"}) == ("3.0", True)
    assert [tools.call("cart", {"item": "pear", "count": n})[0] for n in (2, 1)] == [
        "0.8", "1.2000000000000002",
    ]  # fmt: skip
    assert tools.call("price", {"item": "pears"}) == ("error: KeyError: 'pears'", True)
    tools.close()


def test_the_config_of_the_docs_is_one(examples):
    config = hjax.get_config(str(examples / "guess_config.py"))
    environment, rollout = config.environment, config.rollout
    room = environment.max_turns * environment.turn_tokens
    assert room < rollout.max_response_length and config.algorithm.name == "GRPO"


def test_the_example_of_the_docs_plays(examples):
    path = examples / "guess.py"
    with EpisodePool(f"{path}:Guess") as pool:
        assert answer(pool.reset(0, {"prompt": "Guess.", "limit": 4}, 7)).observation == "Guess."
        assert not answer(pool.step(0, "two")).valid
        found = [answer(pool.step(0, str(number))) for number in range(1, 5)]
    right = [each.reward for each in found].index(1.0)
    said = ["Higher."] * right + ["Yes."] + ["Lower."] * (3 - right)
    assert [each.observation for each in found] == said and found[right].done
