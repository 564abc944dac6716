"""How an agent's calls become rows: each rule's worked example, and any tree of calls."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from serving_double import END, byte_tokenizer

from hjax.agents.agent_requests import any_client, drawn_by_the_run
from hjax.agents.call_tree import AGENT, AUXILIARY, DISCARDED, CallTree
from hjax.data.chat_messages import read_messages
from hjax.data.conversation import Conversation
from hjax.environments.episode import DrawnTurn, Episode, EpisodeLimits
from hjax.environments.episode_batch import episode_batch
from hjax.environments.episode_text import ObservationEncoder

EOS = 257
LIMITS = EpisodeLimits(turns=64, turn_tokens=0, prompt_tokens=4096, response_tokens=4096)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def encoder():
    return ObservationEncoder(byte_tokenizer(), chat=True)


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text} | more


def calling(arguments, name="add", call="c1"):
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"id": call, "type": "function", "function": function}]}


def result(text, call="c1"):
    return {"role": "tool", "tool_call_id": call, "content": text}


def ids(text, end=True):
    return [*text.encode(), *([EOS] if end else [])]


def ask(tree, messages, drawn, told=None, tools=None, ended=True):
    """A call with these messages, whose answer is ``drawn`` and told as ``told``; the call."""
    place = tree.place(Conversation(read_messages(messages, request=True), tools))
    tokens = ids(drawn, ended) if isinstance(drawn, str) else drawn
    logprobs = [-1.0 / next(NUMBERS) for _ in tokens]
    turn = DrawnTurn(tokens, {"logprobs": logprobs, "policy_logprobs": logprobs}, ended)
    [told] = read_messages([told or answer(drawn)], request=True)
    return tree.add(place, turn, told)


def rows_of(tree, trained=None):
    return tree.rows(trained or [label == AGENT for label in tree.labels()])


def marked(row):
    """A row's ids after its prompt, with whether the policy drew them."""
    found = [(token, False) for token in row.context]
    for turn in row.turns:
        found += [(token, True) for token in turn.tokens]
        found += [(token, False) for token in turn.observation]
    return found


def test_r2_a_call_goes_on_by_stored_ids(encoder):
    tree = CallTree(encoder, LIMITS)
    first = ask(tree, [user("a")], [7, 8, EOS], answer("\x07\x08"))
    second = ask(tree, [user("a"), answer("\x07\x08"), user("b")], "S2")
    between = list(b"\n") + encoder.tokenizer.encode(
        f"<|im_start|>user\nb{END}\n<|im_start|>assistant\n", add_special=False
    )
    assert second.place.parent == 0
    assert list(second.place.prompt) == [*first.place.prompt, 7, 8, EOS, *between]
    [row] = rows_of(tree)
    drawn = [(7, True), (8, True), (EOS, True)]
    assert marked(row) == [*drawn, *((i, False) for i in between), *((i, True) for i in ids("S2"))]


def test_r2_the_end_that_was_not_drawn_is_inserted_and_not_learned(encoder):
    tree = CallTree(encoder, LIMITS)
    ask(tree, [user("a")], [7, 8], answer("\x07\x08"), ended=False)
    ask(tree, [user("a"), answer("\x07\x08"), user("b")], "S2")
    [row] = rows_of(tree)
    assert marked(row)[:3] == [(7, True), (8, True), (EOS, False)]


@pytest.mark.parametrize(
    ("echo", "known"),
    [
        (answer(None, **calling('{"a":3}', call="other")), True),  # blanks, ids, a null content
        (answer("hm", **calling('{"a": 3}')), True),
        (answer("hm", **calling('{"a": 4}')), False),
        (answer("hm", **calling('{"a": 3}', name="sub")), False),
        (answer("<think>\nwell\n</think>\n\nhm", **calling('{"a": 3}')), True),
        (answer("<think>else</think>hm", **calling('{"a": 3}')), False),
        (answer("h m", **calling('{"a": 3}')), False),
    ],
)
def test_r3_an_echo_is_known_by_its_normal_form(encoder, echo, known):
    tree = CallTree(encoder, LIMITS)
    content = echo["content"] and "<think>well</think>hm"
    told = answer(content or "", **calling('{"a": 3}'))
    ask(tree, [user("a")], "drawn", told, [TOOL])
    call = echo["tool_calls"][0]["id"]
    second = ask(tree, [user("a"), echo, result("7", call)], "S2", tools=[TOOL])
    assert second.place.parent == (0 if known else None)


def test_r3_other_tools_and_results_of_another_call_are_another_conversation(encoder):
    tree = CallTree(encoder, LIMITS)
    calls = {"tool_calls": calling("{}")["tool_calls"] + calling("{}", call="c2")["tool_calls"]}
    ask(tree, [user("a")], "drawn", answer("", **calls), [TOOL])
    echoed = [user("a"), answer("", **calls), result("1"), result("2", "c2")]
    ask(tree, echoed, "S2", tools=[TOOL])
    other = dict(TOOL, function={"name": "sub", "parameters": {}})
    assert ask(tree, [*echoed, answer("S2"), user("b")], "S3", tools=[TOOL]).place.parent == 1
    assert ask(tree, [*echoed, answer("S2"), user("b")], "S3", tools=[other]).place.parent is None
    swapped = [user("a"), answer("", **calls), result("1", "c2"), result("2"), answer("S2")]
    assert ask(tree, [*swapped, user("b")], "S4", tools=[TOOL]).place.parent == 0


def test_r3_the_newest_of_equal_calls_is_gone_on_from(encoder):
    tree = CallTree(encoder, LIMITS)
    ask(tree, [user("a")], "same")
    ask(tree, [user("a")], "same")
    assert ask(tree, [user("a"), answer("same"), user("b")], "x").place.parent == 1


def rewritten(tree):
    """Three calls of a client that rewrites every answer."""
    ask(tree, [user("a")], "S1")
    ask(tree, [user("a"), answer("S1, said"), user("b")], "S2")
    ask(tree, [user("a"), answer("S1, said"), user("b"), answer("S2, said"), user("c")], "S3")
    return rows_of(tree)


def test_r4_rewritten_echoes_are_roots_and_all_that_was_drawn_is_learned(encoder):
    rows = rewritten(CallTree(encoder, LIMITS))
    assert [[turn.text for turn in row.turns] for row in rows] == [["S1"], ["S2"], ["S3"]]
    assert all(not row.context and len(row.turns) == 1 for row in rows)
    [row] = rewritten(CallTree(encoder, LIMITS, echo="trust"))
    assert [turn.text for turn in row.turns] == ["S1", "S2", "S3"]
    assert "said" not in encoder.tokenizer.decode(row.response)


def test_r4_a_prompt_that_begins_with_the_tokens_is_linked_by_them(encoder):
    """The answer stands in what the client sends as one text: another message, the same ids."""
    tree = CallTree(encoder, LIMITS)
    ask(tree, [user("a")], "S1")
    whole = f"a{END}\n<|im_start|>assistant\nS1{END}\n<|im_start|>user\nb"
    second = ask(tree, [user(whole)], "S2")
    assert second.place.parent == 0
    assert len(rows_of(tree)) == 1


def test_r5_branches_share_what_is_before_them_and_learn_it_once(encoder):
    tree = CallTree(encoder, LIMITS)
    ask(tree, [user("p")], "n")
    head = [user("p"), answer("n")]
    a = ask(tree, [*head, user("do a")], "a")
    b = ask(tree, [*head, user("do b")], "b")
    one, two = rows_of(tree)
    assert [turn.text for turn in one.turns] == ["n", "a"] and not one.context
    assert [turn.text for turn in two.turns] == ["b"]
    assert [*two.prompt, *two.context] == list(b.place.prompt)
    assert two.prompt == one.prompt and a.place.parent == b.place.parent == 0


def test_r5_best_of_two_then_growth_from_the_older(encoder):
    tree = CallTree(encoder, LIMITS)
    ask(tree, [user("p")], "x")
    ask(tree, [user("p")], "z")
    ask(tree, [user("p"), answer("x"), user("more")], "y")
    rows = tree.rows([True] * 3)
    assert [[turn.text for turn in row.turns] for row in rows] == [["x", "y"], ["z"]]
    assert tree.labels() == [AGENT, DISCARDED, AGENT]


def test_r6_dropped_answers_and_calls_without_tools_are_not_learned(encoder):
    tree = CallTree(encoder, LIMITS)
    told = answer("", **calling("{}"))
    ask(tree, [user("t")], "call", told, [TOOL])
    history = [user("t"), told, result("1")]
    ask(tree, history, "text only", tools=[TOOL])
    ask(tree, [*history, user("call a tool")], "again", told, [TOOL])
    ask(tree, [user("a title, please")], "Title")
    assert tree.labels() == [AGENT, DISCARDED, AGENT, AUXILIARY]
    [row] = rows_of(tree)
    assert [turn.text for turn in row.turns] == ["call", "again"]
    assert sum(drawn for _, drawn in marked(row)) == len(ids("call")) + len(ids("again"))


def test_r6_where_no_call_has_tools_all_are_the_agents(encoder):
    tree = CallTree(encoder, LIMITS)
    shown = [user("e"), answer("never drawn"), user("q")]
    ask(tree, shown, "S1")
    ask(tree, [user("title")], "S2")
    assert tree.labels() == [AGENT, AGENT]
    assert sum(drawn for row in rows_of(tree) for _, drawn in marked(row)) == 6


def test_r7_the_runs_sampling_wins():
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    body = {
        "model": "gpt", "messages": [user("a")], "temperature": 0.2, "top_p": 0.9, "seed": 3,
        "tools": tools, "tool_choice": "required", "response_format": {"type": "json_object"},
        "max_tokens": 64000, "stop": ["x"], "n": 2, "stream_options": {"include_usage": True},
    }  # fmt: skip
    used, asked = drawn_by_the_run(any_client(body))
    assert used == {
        "messages": [user("a")], "max_tokens": 64000, "stop": ["x"], "n": 2,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }  # fmt: skip
    assert asked == {
        "temperature": 0.2, "top_p": 0.9, "seed": 3, "tool_choice": "required", "strict": True,
        "response_format": {"type": "json_object"},
    }  # fmt: skip


def test_r7_constrained_keeps_the_form_that_is_asked_for():
    body = {
        "messages": [user("a")], "temperature": 0.2, "tool_choice": "required", "strict": True,
        "response_format": {"type": "json_object"}, "guided_regex": "a*",
        "parallel_tool_calls": False,
    }  # fmt: skip
    used, asked = drawn_by_the_run(body, constrained=True)
    assert asked == {"temperature": 0.2}
    assert used == {name: value for name, value in body.items() if name != "temperature"}


def test_r7_tokens_without_a_choice_are_not_learned_and_rewards_stand_before_them(encoder):
    """Two turns of which the first's second token and all of the second's had no choice."""
    tree = CallTree(encoder, LIMITS)
    first = ask(tree, [user("a")], [65, 66, EOS], answer("AB"))
    second = ask(tree, [user("a"), answer("AB"), user("b")], [67, EOS], answer("C"))
    for call, forced in ((first, [False, True, False]), (second, [True, True])):
        drawn = dataclasses.replace(call.drawn, forced=forced)
        tree.calls[call.number] = dataclasses.replace(call, drawn=drawn)
    episode = Episode(0, 0, {}, 0, rows=rows_of(tree), stop_reason="done")
    episode.turns[-1].reward = 0.3
    batch = episode_batch([episode], 64, 64)
    assert batch["turn"][0, :3].tolist() == [0, -1, 0]
    assert batch["response_mask"][0].nonzero()[0].tolist() == [0, 2]
    rewards = batch["token_rewards"][0]
    assert rewards[2] == np.float32(0.3) and rewards.sum() == np.float32(0.3)


def test_r8_an_episode_of_three_rows_is_one_sample(encoder):
    """Rewards 1, 1, 0, 0 with rows 3, 1, 1, 1: over episodes the mean is .5, over rows .67."""
    from hjax.algorithms.advantages import group_advantages
    from hjax.batches import sample_rows

    episodes = []
    for number, reward in enumerate((1.0, 1.0, 0.0, 0.0)):
        tree = CallTree(encoder, LIMITS)
        episode = Episode(number, 0, {}, 0, stop_reason="done")
        episode.rows = rewritten(tree) if not number else []
        if number:
            ask(tree, [user("a")], "S")
            episode.rows = rows_of(tree)
        episode.turns[-1].reward = reward
        episodes.append(episode)
    batch = episode_batch(episodes, 128, 64)
    first = sample_rows(batch)
    assert batch["episode"].tolist() == [0, 0, 0, 1, 2, 3, -1, -1] and first.tolist() == [
        0,
        3,
        4,
        5,
    ]
    returns = [episodes[i].total_reward for i in batch["episode"][first]]
    assert sum(returns) / 4 == 0.5
    assert group_advantages(returns, 4, normalise="none").tolist() == [0.5, 0.5, -0.5, -0.5]


def test_r14_another_system_prompt_is_a_root_of_the_same_episode(encoder):
    tree = CallTree(encoder, LIMITS)
    one, two = ({"role": "system", "content": text} for text in ("be", "now be"))
    ask(tree, [one, user("a")], "S1", tools=[TOOL])
    second = ask(tree, [two, user("a"), answer("S1"), user("b")], "S2", tools=[TOOL])
    assert second.place.parent is None and tree.labels() == [AGENT, AGENT]
    assert len(rows_of(tree)) == 2


def test_r14_a_template_history_is_rendered_anew_at_a_users_message(encoder):
    """Ids that spell a text otherwise than the tokenizer does stay where nothing is rendered."""
    odd = [*"é".encode(), EOS]
    for history, parent in (("sampled", 0), ("template", None)):
        tree = CallTree(encoder, LIMITS, history=history)
        ask(tree, [user("a")], [65, *odd], answer("Aé, cleaned"))
        second = ask(tree, [user("a"), answer("Aé, cleaned"), user("b")], "S2")
        assert second.place.parent == parent
        tree = CallTree(encoder, LIMITS, history=history)
        told = answer("", **calling("{}"))
        ask(tree, [user("a")], "x", told, [TOOL])
        assert ask(tree, [user("a"), told, result("1")], "y", tools=[TOOL]).place.parent == 0


def test_a_prompt_that_is_longer_than_a_rows_prompt_goes_on_as_context(encoder):
    limits = EpisodeLimits(turns=9, turn_tokens=0, prompt_tokens=16, response_tokens=200)
    tree = CallTree(encoder, limits)
    first = ask(tree, [user("a" * 30)], "S1")
    assert tree.room(first.place) == 216 and tree.most_tokens == 216
    episode = Episode(0, 0, {}, 0, rows=rows_of(tree), stop_reason="done")
    batch = episode_batch([episode], 16, 64)
    size = len(first.place.prompt) - 16
    assert batch["response_lengths"].tolist() == [size + 3]
    assert batch["response_mask"][0].nonzero()[0].tolist() == [size, size + 1, size + 2]


@pytest.mark.parametrize("seed", range(12))
def test_any_tree_of_calls_learns_each_drawn_token_once(encoder, seed):
    """Branches, samples sent twice, rewritten echoes, compaction and results in tools: in the batch
    each drawn token has mask 1 in exactly one row, with its log-prob, after the prompt it had."""
    chance = random.Random(seed)
    tree = CallTree(encoder, LIMITS)
    histories: list[list] = [[user("root")]]
    for number in range(chance.randint(1, 14)):
        messages = list(chance.choice(histories))
        if chance.random() < 0.15:
            messages = [user(f"a summary {number}")]
        drawn = [chance.randrange(97, 123) for _ in range(chance.randint(1, 5))]
        ended = chance.random() < 0.7
        text = bytes(drawn).decode()
        tools = [TOOL] if chance.random() < 0.5 else None
        told = answer(text, **calling('{"x": 1}')) if tools else answer(text)
        ask(tree, messages, drawn + [EOS] * ended, told, tools, ended)
        echo = told if chance.random() < 0.7 else answer(text + "!")
        new = result(str(number)) if "tool_calls" in echo else user(str(number))
        histories.append([*messages, echo, new])
    episode = Episode(5, 0, {}, 0, rows=tree.rows([True] * len(tree.calls)), stop_reason="done")
    batch = episode_batch([episode], 512, 1024)
    seen = []
    for row in range(len(batch["episode"])):
        prompt = batch["prompts"][row][batch["prompt_mask"][row]].tolist()
        places = batch["response_mask"][row].nonzero()[0]
        whole = prompt + batch["responses"][row].tolist()
        for at in places.tolist():
            logprob = float(batch["logprobs"][row, at])
            seen.append((tuple(whole[: len(prompt) + at]), whole[len(prompt) + at], logprob))
    expected = [
        ((*call.place.prompt, *call.drawn.tokens[:i]), token, call.drawn.logprobs["logprobs"][i])
        for call in tree.calls
        for i, token in enumerate(call.drawn.tokens)
    ]
    assert sorted(s[:2] for s in seen) == sorted(e[:2] for e in expected)
    told = {(head, token, round(logprob, 6)) for head, token, logprob in seen}
    assert told == {(head, token, round(logprob, 6)) for head, token, logprob in expected}
