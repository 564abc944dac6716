"""Preference pairs and verdicts in the shapes that are published, down to the tokens learned."""

import json

import pytest

from hjax.data.tokenizer import Tokenizer
from hjax.errors import DataError
from hjax.run.inputs import load_inputs
from hjax.settings.config_checks import check_config

LETTERS = Tokenizer.characters("abcdefghijklmnopqrstuvwxyz0123456789:>/|\n HA")
# A turn is `role:content|` and a newline; the assistant's begins with `assistant:`.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def rendered(*messages):
    """The template by hand, with the assistant's header."""
    return "".join(f"{m['role']}:{m['content']}<eos>\n" for m in messages) + "assistant:"


def load(tmp_path, row, source="pairs", **changes):
    LETTERS.save(tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    keys = {
        "data.path": str(tmp_path / "rows.jsonl"),
        "tokenizer.path": str(tmp_path / "chat"),
        "data.task": "",
        "eval.every": 0,
        "warm_start.steps": 0,
        "rollout.max_response_length": 64,
    }
    return load_inputs(check_config(keys | changes), source)


ASKED = rendered(user("q"))
SECOND = rendered(user("q1"), answer("x"), user("q2"))
SHAPES = {
    # HuggingFaceH4/ultrafeedback_binarized
    "text beside whole chats": (
        {"prompt": "q", "chosen": [user("q"), answer("a")], "rejected": [user("q"), answer("b")]},
        ASKED,
    ),
    "several turns": (
        {
            "prompt": "q1",
            "chosen": [user("q1"), answer("x"), user("q2"), answer("a")],
            "rejected": [user("q1"), answer("x"), user("q2"), answer("b")],
        },
        SECOND,
    ),
    "text that is the last turn asked": (
        {
            "prompt": "q2",
            "chosen": [user("q1"), answer("x"), user("q2"), answer("a")],
            "rejected": [user("q1"), answer("x"), user("q2"), answer("b")],
        },
        SECOND,
    ),
    "whole chats alone": (
        {
            "chosen": [user("q1"), answer("x"), user("q2"), answer("a")],
            "rejected": [user("q1"), answer("x"), user("q2"), answer("b")],
        },
        SECOND,
    ),
    # trl's prompt, chosen and rejected, all as messages
    "messages apart": (
        {"prompt": [user("q")], "chosen": [answer("a")], "rejected": [answer("b")]},
        ASKED,
    ),
    "messages that are repeated": (
        {"prompt": [user("q")], "chosen": [user("q"), answer("a")], "rejected": [answer("b")]},
        ASKED,
    ),
    "messages apart that share more turns": (
        {
            "prompt": [user("q1")],
            "chosen": [answer("x"), user("q2"), answer("a")],
            "rejected": [answer("x"), user("q2"), answer("b")],
        },
        SECOND,
    ),
    "messages and texts": ({"prompt": [user("q")], "chosen": "a", "rejected": "b"}, ASKED),
    "text and messages apart": (
        {"prompt": "q", "chosen": [answer("a")], "rejected": [answer("b")]},
        ASKED,
    ),
    "a system's message in the chats": (
        {
            "prompt": "q",
            "chosen": [{"role": "system", "content": "s"}, user("q"), answer("a")],
            "rejected": [{"role": "system", "content": "s"}, user("q"), answer("b")],
        },
        "system:s<eos>\n" + ASKED,
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_pair_is_asked_and_answered_as_the_template_says(shape, tmp_path):
    row, prompt = SHAPES[shape]
    found = load(tmp_path, row)
    assert found.train.prompt_text == [prompt]
    expected = [LETTERS.encode(text, add_special=False) for text in (prompt, "a<eos>", "b<eos>")]
    assert found.demonstrations == [tuple(expected)]


@pytest.mark.parametrize("prompt", ["q", [user("q")]])
@pytest.mark.parametrize("completion", [[answer("a")], [user("q"), answer("a")], "a"])
def test_a_verdicts_completion_may_be_messages(prompt, completion, tmp_path):
    row = {"prompt": prompt, "completion": completion, "label": False}
    found = load(tmp_path, row, "verdicts")
    chat = not isinstance(prompt, str) or not isinstance(completion, str)
    asked = LETTERS.encode(ASKED, add_special=False) if chat else LETTERS.encode("q")
    assert found.demonstrations == [(asked, LETTERS.encode("a<eos>", add_special=False))]
    assert found.labels == [False]


REFUSED = {
    "parts early": (
        {
            "chosen": [user("q"), answer("a"), user("c"), answer("d")],
            "rejected": [user("q"), answer("b"), user("c"), answer("d")],
        },
        "chosen and rejected part at message 2, and chosen has 2 more after it",
    ),
    "one goes on": (
        {
            "prompt": [user("q")],
            "chosen": [answer("a")],
            "rejected": [answer("b"), user("c"), answer("d")],
        },
        "chosen and rejected part at message 2, and rejected has 2 more after it",
    ),
    "a dialogue that parts early": (
        {
            "chosen": "\n\nHuman: q\n\nAssistant: a\n\nHuman: c\n\nAssistant: d",
            "rejected": "\n\nHuman: q\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
        },
        "chosen and rejected part before the last turn of chosen",
    ),
    "part where asked": (
        {"chosen": [user("q"), answer("a")], "rejected": [user("r"), answer("a")]},
        "there is no prompt, and chosen and rejected share no message",
    ),
    "end where asked": (
        {"prompt": [user("q")], "chosen": [user("q")], "rejected": [user("q"), answer("b")]},
        "chosen has no turn of the assistant's after the 1 messages of the prompt",
    ),
    "another prompt": (
        {"prompt": "z", "chosen": [user("q"), answer("a")], "rejected": [user("q"), answer("b")]},
        "the prompt 'z' is neither the first nor the last message of the user's",
    ),
    "other messages": (
        {
            "prompt": [user("z")],
            "chosen": [user("q"), answer("a")],
            "rejected": [user("q"), answer("b")],
        },
        "chosen begins with .* is neither an answer to the prompt nor begins with its messages",
    ),
    "token ids beside chats": (
        {"prompt_tokens": [3], "chosen": [answer("a")], "rejected": [answer("b")]},
        r"the prompt is \[3\] beside answers as chat messages",
    ),
    "two kinds": (
        {"prompt": "q", "chosen": [answer("a")], "rejected": "b"},
        "chosen and rejected are text and chat messages",
    ),
    "weights": (
        {"prompt": "q", "chosen": [answer("a") | {"weight": 0}], "rejected": [answer("b")]},
        "chosen has weights of messages",
    ),
    "an unknown field": (
        {"prompt": "q", "chosen": [answer("a") | {"mood": 1}], "rejected": [answer("b")]},
        r"chosen\[0\].mood: not supported here",
    ),
    "several turns of one answer": (
        {"prompt": "q", "completion": [answer("a"), user("c"), answer("d")], "label": True},
        "completion has 3 messages after the prompt",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_shape_that_cannot_be_learned_is_refused(case, tmp_path):
    row, message = REFUSED[case]
    source = "verdicts" if "label" in row else "pairs"
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{message}") as caught:
        load(tmp_path, row, source)
    assert "\n" not in str(caught.value)


def merging(tmp_path):
    """A byte-pair tokenizer that merges across words: `ab`, `b ` (with a blank) and `:\\n`."""
    import tokenizers
    from tokenizers import models

    letters = ["a", "b", "c", "d", " ", ":", "\n", "H", "u", "m", "n", "A", "s", "i", "t"]
    tokens = [*letters, "ab", " c", ":\n", "<eos>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [("a", "b"), (" ", "c"), (":", "\n")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.add_special_tokens(["<eos>"])
    (tmp_path / "merging").mkdir()
    backend.save(str(tmp_path / "merging" / "tokenizer.json"))
    (tmp_path / "merging/tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return Tokenizer.load(tmp_path / "merging")


TEXTS = {
    # The blank belongs to the token ` c` of one answer: the prompt ends before it.
    "a word's blank": ("ab c", "ab d", "ab", " c", " d"),
    "agreeing": ("ab a", "ab d", "ab ", "a", "d"),
    # hh-rlhf: the prompt ends behind `Assistant:`, or before the colon that joins a newline.
    "a dialogue": ("\n\nAssistant: a", "\n\nAssistant: b", "\n\nAssistant:", " a", " b"),
    "a merged colon": ("\n\nAssistant:\na", "\n\nAssistant: b", "\n\nAssistant", ":\na", ": b"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_two_texts_are_cut_where_their_tokens_agree(case, tmp_path):
    chosen, rejected, prompt, *answers = TEXTS[case]
    tokenizer = merging(tmp_path)
    keys = {"tokenizer.path": str(tmp_path / "merging")}
    found = load(tmp_path, {"chosen": chosen, "rejected": rejected}, **keys)
    assert found.train.prompt_text == [prompt]
    assert [found.train.columns[side] for side in ("chosen", "rejected")] == [[a] for a in answers]
    [(asked, *learned)] = found.demonstrations
    wholes = [tokenizer.encode(text) + [tokenizer.eos_id] for text in (chosen, rejected)]
    assert [asked + one for one in learned] == wholes


def test_published_files(test_data, tmp_path):
    LETTERS.save(tmp_path / "chat")
    for name, prompt, answers in (
        ("ultrafeedback_binarized", ASKED, ("good", "bad")),
        ("ultrafeedback_multi", SECOND, ("good", "bad")),
    ):
        path = test_data / "field" / f"{name}.jsonl"
        found = load(tmp_path, {}, **{"data.path": str(path)})
        texts = [prompt, *(text + "<eos>" for text in answers)]
        ids = tuple(LETTERS.encode(text, add_special=False) for text in texts)
        assert found.demonstrations == [ids] * 4
    found = load(tmp_path, {}, **{"data.path": str(test_data / "field/pairs_one_equal.jsonl")})
    where = str(test_data / "field/pairs_one_equal.jsonl:4")
    assert found.left_out == {"equal pair": [where]} and len(found.demonstrations) == 3
    assert found.remarks == (f"rows left out: 1 × equal pair ({where})",)


def test_demonstrations_beside_pairs_are_the_conversations(test_data, tmp_path):
    path = test_data / "field" / "ultrafeedback_binarized.jsonl"
    found = load(tmp_path, {}, "demonstrations", **{"data.path": str(path)})
    ids = tuple(LETTERS.encode(text, add_special=False) for text in (ASKED, "good<eos>"))
    assert found.demonstrations == [ids] * 4
    # What learns neither from conversations nor from pairs answers the prompts.
    found = load(tmp_path, {}, "prompts", **{"data.path": str(path)})
    assert len(found.train) == 4 and not found.demonstrations
