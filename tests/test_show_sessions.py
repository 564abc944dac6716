"""Sessions of agents as they are looked at: trees in the report, counts in the displays."""

import io
import json

from serving_double import byte_tokenizer
from test_agents_rows import ask

from hjax.agents.agent_player import SessionCounts
from hjax.agents.call_tree import AGENT, CallTree
from hjax.environments.episode import EpisodeLimits
from hjax.environments.episode_text import ObservationEncoder
from hjax.run.throughput import session_times
from hjax.settings.keys import default_config
from hjax.show.live import Display
from hjax.show.report import write_report
from hjax.show.session_tree import session_tree

LIMITS = EpisodeLimits(turns=64, turn_tokens=0, prompt_tokens=512, response_tokens=4096)


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def planned():
    """A session: a plan, two workers that go on from it, a dropped answer, then a summary."""
    tree = CallTree(ObservationEncoder(byte_tokenizer(), chat=True), LIMITS)
    plan = [user("Plan: 17 + 4 * 2?"), answer("first 4 * 2, then add 17")]
    ask(tree, plan[:1], "first 4 * 2, then add 17")
    ask(tree, [*plan, user("Do the product.")], "8")
    ask(tree, [*plan, user("Do the sum.")], "I cannot <b>know</b>")
    ask(tree, [*plan, user("Do the sum."), user("With 8.")], "25")
    ask(tree, [*plan, user("Do the product."), answer("8"), user("Sure?")], "yes, 8")
    ask(tree, [user("Summary: 8 and 25. The answer?")], "25")
    return tree.call_records([label == AGENT for label in tree.labels()])


def test_a_sessions_records_say_what_is_new_and_which_row_learns_from_it():
    records = planned()
    assert [(each["parent"], each["row"], each["label"]) for each in records] == [
        (None, 0, "agent"), (0, 0, "agent"), (0, None, "discarded"), (0, 1, "agent"),
        (1, 0, "agent"), (None, 2, "agent"),
    ]  # fmt: skip
    assert records[4]["said"] == [["user", "Sure?"]] and records[4]["answer"] == "yes, 8"
    assert records[1]["tokens"] == 2  # the character and the end
    json.dumps(records)


def test_chains_go_on_while_there_is_one_child_and_branch_at_several():
    plan, summary = session_tree(planned())
    assert [call["head"] for call in plan["calls"]] == ["call 1 · row 1 · 25 tokens"]
    product, dropped, total = plan["branches"]
    assert [call["answer"] for call in product["calls"]] == ["8", "yes, 8"]
    assert [call["color"] for call in product["calls"]] == [0, 0]
    assert dropped["calls"][0]["head"].startswith("call 3 · after 1 · not learned from · discarded")
    assert dropped["calls"][0]["color"] == -1 and total["calls"][0]["color"] == 1
    assert not summary["branches"] and summary["calls"][0]["color"] == 2


def test_the_report_has_the_tree_and_escapes_what_was_said(tmp_path):
    sample = {
        "step": 1, "index": 0, "kind": "train", "prompt": "Plan", "response": "25", "reward": 1.0,
        "advantage": 0.5, "truncated": False, "stop_reason": "done", "turns": [],
        "calls": planned(),
    }  # fmt: skip
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    page = write_report(tmp_path).read_text()
    assert page.count('<div class="call">') == 6 and page.count('class="text drawn c0"') == 3
    assert '<div class="branches">' in page and "&lt;b&gt;know" in page
    assert "<b>know</b>" not in page.partition('<script type="application/json"')[0]


def test_displays_say_how_far_sessions_are():
    stream = io.StringIO()
    display = Display(default_config(), 3, stream)
    assert display.state.sessions_text() == ""
    display.sessions(SessionCounts(open=12, ended=20, all=32, calls=90, seconds=2.0))
    assert display.state.sessions_text() == "12 sessions open, 20 of 32 ended, 45.0 calls/s"
    display.sessions(SessionCounts(open=0, ended=32, all=32, calls=90, seconds=2.0))
    assert display.state.sessions_text() == ""
    times = {
        "step": 1, "throughput/calls_per_second": 45.0, "time/calls_wait": 1.5, "time/agents": 0.25
    }  # fmt: skip
    display.step(times)
    assert "calls/s" in stream.getvalue() and "0.25 s" in stream.getvalue()


def test_times_of_sessions_are_means_over_episodes_not_rows():
    import numpy as np

    told = {
        "waited": np.array([3.0, 3.0, 1.0], np.float32),
        "seconds": np.array([5.0, 5.0, 1.5], np.float32),
        "calls": np.array([4.0, 4.0, 2.0], np.float32),
    }
    batch = {
        "episode": np.array([0, 0, 1]), "row_mask": np.array([True] * 3), "episode_metrics": told
    }  # fmt: skip
    assert session_times(batch, 2.0) == {
        "throughput/calls_per_second": 3.0, "time/calls_wait": 2.0, "time/agents": 1.25
    }  # fmt: skip
    assert session_times({"episode_metrics": {}}, 2.0) == {}
