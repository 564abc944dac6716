"""Rewards that come with hjax: forms, lengths, similarity, and a judge over HTTP."""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers import save_model
from serving_double import byte_tokenizer

from hjax.errors import ConfigError, DataError
from hjax.rewards.formats import Json, Pattern, Tags
from hjax.rewards.function import RewardFunction, load_function
from hjax.rewards.judge import Judge
from hjax.rewards.lengths import Length
from hjax.rewards.similarity import Similarity


def rewards_of(function, responses, prompts=None, **columns):
    tokens = [list(range(len(response))) for response in responses]
    prompts = prompts or ["p"] * len(responses)
    return RewardFunction(function, 250)(prompts, responses, columns, tokens, tokens)


THOUGHT = "<think>\na < b\n</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        (Tags("think", "answer"), THOUGHT, 1),
        (Tags("think", "answer"), f"  {THOUGHT}\n", 1),
        (Tags("think", "answer"), "Well. " + THOUGHT, 0),
        (Tags("think", "answer"), THOUGHT + THOUGHT, 0),
        (Tags("think", "answer"), "<answer>4</answer><think>a</think>", 0),
        (Tags("think", "answer"), "<think><think>a</think><answer>4</answer>", 0),
        (Tags("think", "answer", begun="<think>\n"), "a</think><answer>4</answer>", 1),
        (Tags("think", "answer", partial=0.4), "<think>a</think>4</answer>", 0.3),
        (Tags("think", "answer", partial=0.4), "</think>a<think>", 0.1),
        (Tags("think", "answer", partial=0.4), "4", 0),
        (Pattern(r".*Answer: -?\d+"), "So\nAnswer: -12\n", 1),
        (Pattern(r".*Answer: -?\d+"), "Answer: twelve", 0),
        (Json("a"), '{"a": 1, "b": [2]}', 1),
        (Json("a"), '```json\n{"a": 1}\n```', 1),
        (Json("a"), '{"b": 1}', 0),
        (Json(), "[1]", 0),
        (Json(), "{" * 100_000, 0),
        (Length(4, 6), "1234", 1),  # a token each
        (Length(4, 6), "1", 0),
        (Length(4, 6), "123", 0.5),
        (Length(4, 6, over=4), "123456789", 0.25),
        (Length(1, 2, unit="words"), "two words", 1),
        (Length(0, 3, over=1, unit="characters"), "word", 0),
    ],
)
def test_forms_and_lengths(function, text, expected):
    assert rewards_of(function, [text]).rewards.tolist() == pytest.approx([expected])


def common(one, other):
    """Length of the longest common subsequence, by its definition."""
    table = np.zeros((len(one) + 1, len(other) + 1), int)
    for i, j in itertools.product(range(len(one)), range(len(other))):
        same = one[i] == other[j]
        table[i + 1, j + 1] = table[i, j] + 1 if same else max(table[i, j + 1], table[i + 1, j])
    return table[-1, -1]


def test_similarity_is_of_the_longest_common_subsequence():
    draw = random.Random(0)
    texts = [" ".join(draw.choices("abcde", k=draw.randint(1, 9))) for _ in range(40)]
    responses, wanted = texts[:20], texts[20:]
    for unit, parts in (("words", str.split), ("characters", list)):
        expected = [
            2 * common(parts(a), parts(b)) / (len(parts(a)) + len(parts(b)))
            for a, b in zip(responses, wanted)
        ]
        found = rewards_of(Similarity(unit), responses, answer=wanted)
        np.testing.assert_allclose(found.rewards, expected, rtol=1e-6)
    # Of several texts the nearest; case and marks are no words; without a text no verdict.
    columns = {"summary": [["x", "The cat, sat."], None, []]}
    found = rewards_of(Similarity(column="summary"), ["the cat sat"] * 3, **columns)
    assert found.rewards[0] == 1 and found.row_outcomes == ("ok", "none", "none")
    with pytest.raises(DataError, match="no column 'answer'; there are question"):
        Similarity()([""], [""], question=[""])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Tags(), "give names of tags"),
        (lambda: Tags("<think>"), "give names of tags"),
        (lambda: Pattern("("), "Pattern"),
        (lambda: Length(3, 2), "low must be 0 to high"),
        (lambda: Length(1, 2, unit="letters"), "must be one of tokens, words, characters"),
        (lambda: Similarity("letters"), "must be one of words, characters"),
        (lambda: Judge("localhost", "m", "{response}"), "must begin with http"),
        (lambda: Judge("http://x", "m", "How good?"), "must have {response} in it"),
        (lambda: Judge("http://x", "m", "{response}", scores=(5, 1)), "below the best"),
        (lambda: Judge("http://x", "m", "{response}", budget=0), "budget=0"),
        (lambda: Judge("http://x", "m", "{response}", pattern="x"), "needs a group"),
        (lambda: Judge("http://x", "m", "{response}", cache=os.devnull + "/x"), "cache="),
    ],
)
def test_wrong_values_are_named(make, says):
    with pytest.raises(ConfigError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["formats.py:think_answer", "formats.py:json_object", "similarity.py:rouge_l"]
)
def test_some_are_there_by_name(name):
    assert rewards_of(load_function(name), [THOUGHT], answer=[THOUGHT]).row_outcomes == ("ok",)


def test_the_example_of_the_page_is_a_function(tmp_path, monkeypatch):
    page = (pathlib.Path(__file__).parent.parent / "docs" / "rewards.md").read_text()
    (example,) = re.findall(r"^```python\n# graded.py\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "graded.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    function = load_function("graded.py:reward")
    RewardFunction(function)  # takes what a run gives it
    judge = load_function("graded.py:judge")
    judge.cache.put(judge.request_key("2+2=", THOUGHT, {"solution": "4"}), "Fine.\nScore: 10")
    result = rewards_of(function, [THOUGHT], ["2+2="], solution=["4"])
    assert {name: list(made) for name, made in result.named.items()} == {"form": [1], "judge": [1]}


class Endpoint:
    """A chat API: answers by what is asked, after the statuses in `first`; counts what comes."""

    def __init__(self):
        self.first, self.seen, self.keys, self.together, self.most = [], [], [], 0, 0

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        assert scope["path"] == "/v1/chat/completions"
        asked = json.loads(body)
        self.seen.append(asked)
        self.keys.append(dict(scope["headers"]).get(b"authorization"))
        self.together += 1
        self.most = max(self.most, self.together)
        await asyncio.sleep(0.01)
        self.together -= 1
        status = self.first.pop(0) if self.first else 200
        question = asked["messages"][-1]["content"]
        text = json.dumps({"choices": [{"message": {"content": f"I say: {question}"}}]})
        if status == "odd":
            status, text = 200, "<html>"
        headers = [(b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text.encode()})


@pytest.fixture
def endpoint():
    import uvicorn

    app = Endpoint()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()  # a request that comes before the server runs waits
        config = uvicorn.Config(app, lifespan="off", log_level="error", http="h11")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        app.url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        yield app
        server.should_exit = True
        thread.join(10)


def judge_of(endpoint, question="{response}", **options):
    quick = {"first_wait_seconds": 0.01, "timeout_seconds": 5}
    return Judge(endpoint.url, "judge", question, **quick | options)


def test_a_judge_reads_the_last_score(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    judge = judge_of(endpoint, "{prompt} ({level}): {response}", system="Be fair.", at_once=2)
    texts = [
        "Score: 10",
        "Score: 3 no, **Score:** 5.5",
        "score 0",
        "Score: 99",
        "none",
        "Score: 10",
    ]
    result = rewards_of(judge, texts, level=["easy"] * 6)
    expected = [1, 0.5, 0, 1, np.nan, 1]
    np.testing.assert_allclose(result.rewards, expected)
    assert result.row_outcomes == ("ok",) * 4 + ("none", "ok")
    # The same question is asked once, and what is sent is what was asked for.
    assert len(endpoint.seen) == judge.cache.calls == 5 and endpoint.most <= 2
    assert endpoint.seen[0]["messages"][0] == {"role": "system", "content": "Be fair."}
    assert endpoint.seen[0]["messages"][1]["content"].startswith("p (easy): ")
    assert (endpoint.seen[0]["model"], endpoint.seen[0]["temperature"]) == ("judge", 0)
    assert set(endpoint.keys) == {b"Bearer sesame"}


def test_answers_are_kept_and_requests_counted_in_a_file(endpoint, tmp_path):
    path = tmp_path / "kept" / "judge.sqlite"
    texts = ["Score: 1", "Score: 10"]
    assert rewards_of(judge_of(endpoint, cache=path), texts).rewards.tolist() == [0, 1]
    again = judge_of(endpoint, cache=path, budget=3)
    assert rewards_of(again, texts).rewards.tolist() == [0, 1] and len(endpoint.seen) == 2
    # Another question is another request; the third one is one too many.
    result = rewards_of(again, [*texts, "Score: 4", "Score: 7"])
    assert result.row_outcomes == ("exception",) * 4
    assert "has been asked 3 times, its budget" in result.first_traceback
    assert len(endpoint.seen) == 3
    more = judge_of(endpoint, cache=path, budget=9)
    assert rewards_of(more, ["Score: 4", "Score: 7"]).row_outcomes == ("ok", "ok")
    assert len(endpoint.seen) == more.cache.calls == 4


def test_a_busy_endpoint_is_asked_again_and_a_broken_one_named(endpoint):
    endpoint.first = [429, 500, 503]
    judge = judge_of(endpoint, at_once=1)
    assert rewards_of(judge, ["Score: 10"]).rewards.tolist() == [1] and judge.cache.calls == 4
    # One that keeps failing leaves its response unscored, and nothing of it is kept.
    endpoint.first = [500] * 3
    judge = judge_of(endpoint, at_once=1, retries=2)
    assert rewards_of(judge, ["Score: 1", "Score: 10"]).row_outcomes == ("none", "ok")
    assert rewards_of(judge, ["Score: 1"]).row_outcomes == ("ok",)
    for status, says in [(401, "with status 401"), ("odd", "no chat completions: <html>")]:
        endpoint.first = [status]
        result = rewards_of(judge_of(endpoint), ["Score: 1"])
        assert result.row_outcomes == ("exception",) and says in result.first_traceback
    endpoint.first = [500] * 9
    result = rewards_of(judge_of(endpoint, retries=1), ["Score: 1"])
    assert "gave no answer: 2 tries, the last: status 500" in result.first_traceback
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint.url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        result = rewards_of(judge_of(endpoint, retries=1), ["Score: 1"])
    assert "gave no answer: 2 tries, the last: ConnectError" in result.first_traceback
    result = rewards_of(judge_of(endpoint, "{answer} {response}"), ["Score: 1"])
    assert "asks for 'answer'; there are prompt, response" in result.first_traceback


@pytest.mark.slow
def test_a_model_that_hjax_serves_is_a_judge(tmp_path):
    """Random weights, held to the form of a verdict: the path is what is tested."""
    path = tmp_path / "model"
    save_model(path, tokenizer=byte_tokenizer(), vocab_size=260, max_length=128)
    command = [sys.executable, "-m", "hjax.launch.serve", f"--model={path}", "--protocol=openai"]
    process = subprocess.Popen([*command, "--port=0"], stdout=subprocess.PIPE, text=True)
    with contextlib.closing(process.stdout):
        try:
            url = process.stdout.readline().rstrip("\n").rpartition(" on ")[2]
            form = {"structured_outputs": {"regex": "Score: [1-9]"}, "max_tokens": 16}
            # The first requests wait for their programs.
            asked = {"options": form, "timeout_seconds": 200, "retries": 0}
            judge = Judge(f"{url}/v1", str(path), "Rate {response}", cache=tmp_path / "c", **asked)
            texts = ["a", "b", "c", "a"]
            result = rewards_of(judge, texts)
            assert result.row_outcomes == ("ok",) * 4, result.first_traceback
            assert set(np.round(result.rewards * 9 + 1, 4)) <= set(range(1, 10))
            assert judge.cache.calls == 3
            again = Judge(f"{url}/v1", str(path), "Rate {response}", **asked)
            np.testing.assert_array_equal(rewards_of(again, texts).rewards, result.rewards)
        finally:
            process.terminate()
            process.wait(30)
