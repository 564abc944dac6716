"""Datasets: tasks and files as prompts with columns, their order, and every bad file's message."""

import json

import numpy as np
import pytest

from hjax.data.conversation import Conversation
from hjax.data.dataset import Dataset, PromptSampler, pad_left, pad_right, split_held_out
from hjax.data.tasks import get_task
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError

LETTERS = Tokenizer.characters("abcdefgh")  # a is 3, b 4, ...; BOS 1 in front


def jsonl(tmp_path, *rows):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def with_template(tmp_path):
    LETTERS.save(tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ 'h' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}h{% endif %}"
    )
    return Tokenizer.load(tmp_path / "chat")


def turn(role, content):
    return {"role": role, "content": content}


TALK = [
    turn("system", "a"), turn("user", "b"), turn("assistant", "cd"), turn("user", "e"),
    turn("assistant", "f"), turn("user", "g"),
]  # fmt: skip


def test_of_a_conversation_the_assistants_turns_are_demonstrations(tmp_path):
    path = jsonl(tmp_path, {"messages": TALK, "level": 1}, {"prompt": "ab", "response": "c"})
    dataset = Dataset.from_file(path, with_template(tmp_path))
    assert dataset.prompt_text == ["abh", "abhcdeh", "ab"]
    assert dataset.columns["response"] == ["cd", "f", "c"]
    assert dataset.columns["level"] == [1, 1, None]
    # Beside a prompt they count where demonstrations are learned from, beside a response never.
    path = jsonl(
        tmp_path,
        {"prompt": "ab", "messages": TALK},
        {"prompt": "ab", "response": "c", "messages": TALK},
    )
    for demonstrated, texts in ((False, ["ab", "ab"]), (True, ["abh", "abhcdeh", "ab"])):
        tokenizer = with_template(tmp_path)
        dataset = Dataset.from_file(path, tokenizer, learns_demonstrations=demonstrated)
        assert dataset.prompt_text == texts


def test_the_assistants_tokens_are_learned_and_no_others(tmp_path):
    """Of every turn, by the tokens that a run's demonstrations hold."""
    from hjax.run.inputs import load_inputs
    from hjax.settings.config_checks import check_config

    with_template(tmp_path)
    path = jsonl(tmp_path, {"prompt": "x", "messages": TALK})
    keys = {
        "algorithm.name": "SFT", "data.path": str(path), "data.task": "", "eval.every": 0,
        "tokenizer.path": str(tmp_path / "chat"), "rollout.max_response_length": 4,
        "reward.function": "",
    }  # fmt: skip
    inputs = load_inputs(check_config(keys), "demonstrations")
    [end] = inputs.eos_ids
    ids = {letter: 3 + i for i, letter in enumerate("abcdefgh")}
    assert inputs.demonstrations == [
        ([ids[x] for x in "abh"], [ids["c"], ids["d"], end]),
        ([ids[x] for x in "abhcdeh"], [ids["f"], end]),
    ]


def test_strings_chats_and_ids_side_by_side(tmp_path):
    path = jsonl(
        tmp_path,
        {"prompt": "abc", "level": 1},
        {"prompt": [{"role": "user", "content": "ab"}], "level": 2},
        {"prompt_tokens": [5, 6], "extra": {"x": 1}},
        {"prompt": [7, 8], "level": 4},
    )
    dataset = Dataset.from_file(path, with_template(tmp_path))
    # The chat brings its own special tokens (here none), so no BOS is added.
    assert dataset.prompt_tokens == [[1, 3, 4, 5], [3, 4, 10], [5, 6], [7, 8]]
    assert dataset.prompt_text == ["abc", "abh", "cd", "ef"]
    assert dataset.columns["level"] == [1, 2, None, 4]
    assert dataset.columns["extra"] == [None, None, {"x": 1}, None]
    assert len(dataset) == 4 and dataset.longest_prompt == 4
    chat = Conversation([{"role": "user", "content": "ab"}])
    assert dataset.conversations == [None, chat, None, None]
    assert dataset.select([3, 1]).conversations == [None, chat]


def test_token_ids_need_no_tokenizer(tmp_path):
    path = jsonl(tmp_path, {"prompt_tokens": [5, 6, 7]}, {"prompt_tokens": [0]})
    dataset = Dataset.from_file(path)
    assert dataset.prompt_tokens == [[5, 6, 7], [0]] and dataset.prompt_text is None
    assert dataset.rows([1])["prompt_text"] is None


def test_a_question_is_a_prompt(tmp_path):
    path = jsonl(tmp_path, {"question": "ab", "answer": "c"}, {"question": "ab", "prompt": "cd"})
    dataset = Dataset.from_file(path, LETTERS)
    assert dataset.prompt_text == ["ab", "cd"] and dataset.columns["answer"] == ["c", None]


def test_lines_of_text(tmp_path):
    (tmp_path / "data.txt").write_bytes("\ufeffab\r\n\ncd".encode())
    dataset = Dataset.from_file(tmp_path / "data.txt", LETTERS)
    assert dataset.prompt_text == ["ab", "cd"] and dataset.columns == {"prompt": ["ab", "cd"]}
    (tmp_path / "data.txt").write_bytes("ab\né".encode("latin-1"))
    with pytest.raises(DataError, match="data.txt:2: not UTF-8"):
        Dataset.from_file(tmp_path / "data.txt", LETTERS)


def test_strings_are_worded_and_nothing_else_is(tmp_path):
    path = jsonl(tmp_path, {"prompt": "ab"}, {"prompt": [5, 6]})
    dataset = Dataset.from_file(path, LETTERS, format_prompt=lambda text: text + "c")
    assert dataset.prompt_text == ["abc", "cd"] and dataset.columns["prompt"] == ["ab", [5, 6]]


def test_rows_and_select():
    dataset = Dataset([[1], [2], [3]], ["a", "b", "c"], {"n": [10, 20, 30]})
    assert dataset.rows(np.array([2, 0, 2])) == {
        "prompt_tokens": [[3], [1], [3]], "prompt_text": ["c", "a", "c"],
        "columns": {"n": [30, 10, 30]}, "locations": None,
    }
    assert dataset.select([1]).columns == {"n": [20]}


def test_from_task():
    task = get_task("addition")
    dataset = Dataset.from_task(task, "eval", seed=0, count=10)
    record = task.examples("eval", 0, 10)[3]
    assert dataset.prompt_text[3] == record["prompt"]
    assert dataset.columns["answer"][3] == record["answer"]
    assert dataset.prompt_tokens[3] == task.tokenizer().encode(record["prompt"])


def test_parquet_with_verls_columns(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{
        "data_source": "letters", "prompt": [{"role": "user", "content": "ab"}], "ability": "x",
        "reward_model": {"style": "rule", "ground_truth": "c"}, "extra_info": {"index": 0},
    }]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    dataset = Dataset.from_file(tmp_path / "data.parquet", with_template(tmp_path))
    assert dataset.prompt_text == ["abh"]
    assert {key: values[0] for key, values in dataset.columns.items()} == rows[0]


def test_knights_with_minimind(test_data):
    tokenizer = Tokenizer.load(test_data / "tokenizers/minimind")
    dataset = Dataset.from_file(test_data / "knights/3ppl_test.parquet", tokenizer)
    assert len(dataset) == 100
    assert {"data_source", "reward_model", "extra_info", "prompt"} <= set(dataset.columns)
    assert dataset.columns["reward_model"][0]["ground_truth"]["solution_text_format"]
    assert dataset.prompt_text[0].startswith("<|im_start|>user")
    assert tokenizer.decode(dataset.prompt_tokens[0], skip_special=False) == dataset.prompt_text[0]


@pytest.mark.parametrize("rows, message", [
    (['{"prompt": "a"}', '{"prompt": '], r"data.jsonl:2: not valid JSON"),
    (['{"prompt": "a"}', "", "[1]"], r"data.jsonl:3: a JSON object is needed, found \[1\]"),
    ([{"prompt": "a"}, {"text": "b"}], r":2: there is no prompt; .* has text; .* data.columns"),
    ([{"prompt": None}], r":1: there is no prompt"),
    ([""], r"data.jsonl: the dataset is empty"),
    ([{"prompt": 3}], r":1: the prompt is 3; it must be text, a list of chat"),
    ([{"messages": "hi"}], r":1: messages must be a list of chat messages, each with a role"),
    (
        [{"messages": [{"role": "user", "content": "a"}]}],
        r":1: .* no turn of the assistant's.*data.columns=messages=prompt",
    ),
    ([{"messages": [{"role": "assistant", "content": "a"}]}], r":1: messages begin with the assis"),
    (
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}],
        r":1: messages\[1\].content is missing",
    ),
    ([{"prompt": []}], r":1: the prompt is \[\]; it must be"),
    ([{"prompt_tokens": [3, 11]}], r":1: token id 11 is outside the vocabulary \(ids from 0 to 10"),
    ([{"prompt_tokens": [-1]}], r":1: token id -1 is outside"),
    ([{"prompt": "ab"}, {"prompt": "abcde"}],
     r":2: the prompt has 6 tokens, above rollout.max_prompt_length=4; raise that key"),
    ([{"prompt": "axe"}], r":1: tokenizer characters: the character 'x'"),
    ([{"prompt": [{"role": "user", "content": "a"}]}], r":1: tokenizer .* has no chat template"),
    ([{"prompt": "a", "responses": 1}], r"a column is called 'responses'"),
])
def test_bad_rows_get_one_line(tmp_path, rows, message):
    with pytest.raises(DataError, match=message) as caught:
        Dataset.from_file(jsonl(tmp_path, *rows), LETTERS, max_prompt_length=4)
    assert "\n" not in str(caught.value)


def test_text_without_a_tokenizer(tmp_path):
    with pytest.raises(DataError, match=r":1: the prompt is text, and there is no tokenizer"):
        Dataset.from_file(jsonl(tmp_path, {"prompt": "ab"}))


def test_empty_prompt_without_bos(tmp_path):
    LETTERS.save(tmp_path / "plain")
    file = tmp_path / "plain/tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    with pytest.raises(DataError, match=":1: the prompt is empty"):
        Dataset.from_file(jsonl(tmp_path, {"prompt": ""}), Tokenizer.load(tmp_path / "plain"))


def test_vocabulary_given_without_a_tokenizer(tmp_path):
    path = jsonl(tmp_path, {"prompt_tokens": [3, 500]})
    with pytest.raises(DataError, match="token id 500 is outside the vocabulary"):
        Dataset.from_file(path, vocab_size=500)


def test_missing_strange_and_broken_files(tmp_path):
    with pytest.raises(DataError, match="none.jsonl: there is no such file"):
        Dataset.from_file(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="data.xlsx: its name must end in .jsonl, .json, .csv"):
        Dataset.from_file(tmp_path / "data.xlsx")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="bad.parquet: not a readable parquet file") as caught:
        Dataset.from_file(tmp_path / "bad.parquet")
    assert "\n" not in str(caught.value)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match="latin.jsonl:1: not UTF-8"):
        Dataset.from_file(tmp_path / "latin.jsonl", LETTERS)


def test_held_out_share_is_seeded_and_disjoint():
    dataset = Dataset([[i] for i in range(50)], None, {"n": list(range(50))})
    train, held = split_held_out(dataset, 0.1, seed=0)
    assert (len(train), len(held)) == (45, 5)
    assert sorted(train.columns["n"] + held.columns["n"]) == list(range(50))
    assert split_held_out(dataset, 0.1, seed=0)[1] == held
    assert split_held_out(dataset, 0.1, seed=1)[1] != held
    assert len(split_held_out(dataset, 0.001, seed=0)[1]) == 1
    assert len(split_held_out(dataset, 0.999, seed=0)[0]) == 1


def test_held_out_share_that_cannot_be():
    with pytest.raises(DataError, match="1 prompt cannot be split"):
        split_held_out(Dataset([[1]], None, {}), 0.5, 0)
    with pytest.raises(ConfigError, match="share 1.5"):
        split_held_out(Dataset([[1], [2]], None, {}), 1.5, 0)


def test_sampler_takes_each_prompt_once_per_epoch():
    sampler = PromptSampler(size=10, per_step=4, seed=0)
    taken = np.concatenate([sampler.next() for _ in range(5)])
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
    assert list(taken[:10]) != list(taken[10:])
    assert list(taken) != list(PromptSampler(10, 20, seed=1).next())
    assert list(taken) == list(PromptSampler(10, 20, seed=0).next())  # whatever the step's size


def test_sampler_goes_on_where_it_was():
    first = PromptSampler(7, 3, seed=5)
    for _ in range(4):
        first.next()
    second = PromptSampler(7, 3, seed=5)
    second.restore(json.loads(json.dumps(first.state())))
    for _ in range(5):
        np.testing.assert_array_equal(first.next(), second.next())


def test_sampler_wraps_when_a_step_is_larger_than_the_data():
    assert sorted(PromptSampler(2, 6, seed=0).next()) == [0, 0, 0, 1, 1, 1]


def test_sampler_refuses_another_datasets_state():
    state = PromptSampler(7, 3, seed=5).state()
    with pytest.raises(ConfigError, match="size 7, this run's data size 8"):
        PromptSampler(8, 3, seed=5).restore(state)
    with pytest.raises(ConfigError, match="both must be at least 1"):
        PromptSampler(8, 0, seed=5)


def test_padding():
    tokens, mask = pad_left([[5, 6], [7], []], 3)
    np.testing.assert_array_equal(tokens, [[0, 5, 6], [0, 0, 7], [0, 0, 0]])
    np.testing.assert_array_equal(mask, [[0, 1, 1], [0, 0, 1], [0, 0, 0]])
    assert tokens.dtype == np.int32 and mask.dtype == bool
    tokens, mask = pad_right([[5, 6], [7]], 3, pad=9)
    np.testing.assert_array_equal(tokens, [[5, 6, 9], [7, 9, 9]])
    np.testing.assert_array_equal(mask, [[1, 1, 0], [1, 0, 0]])
    with pytest.raises(DataError, match="row 1 has 2 tokens and does not fit a length of 1"):
        pad_left([[1], [1, 2]], 1)
