"""Data of one's own: columns, long prompts, chats, several files, shares of sources."""

import json

import jinja2
import numpy as np
import pytest

from hjax.data.dataset import Dataset
from hjax.data.invalid_rows import InvalidRows
from hjax.data.mixing import MixedSampler, Mixing
from hjax.data.read_options import ReadOptions, parse_source_weights
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError
from hjax.run.inputs import load_inputs, make_prompt_sampler
from hjax.settings.config_checks import check_config
from hjax.settings.config_loading import load_config

LETTERS = Tokenizer.characters("abcdefghijklmnopqrstuvwxyz:>/ ")
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}/{% endfor %}{{ tone }}>"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def questions(tmp_path):
    return write(
        tmp_path / "questions.jsonl",
        [{"question": "ab", "prompt": "not this", "solution": "x"}, {"question": "abcdef"}],
    )


def data(**changes):
    return check_config({"data": changes}).data


def test_columns_are_renamed_and_what_they_replace_gives_way(questions):
    reading = ReadOptions.from_config(data(columns="question = prompt, solution=answer"))
    dataset = Dataset.from_file(questions, LETTERS, options=reading)
    assert dataset.prompt_text == ["ab", "abcdef"]
    assert dataset.columns == {"prompt": ["ab", "abcdef"], "answer": ["x", None]}


@pytest.mark.parametrize(
    ("overlong", "prompts", "said"),
    [
        ("filter", ["ab"], "1 × prompt above rollout.max_prompt_length ("),
        ("truncate_left", ["ab", "cdef"], "and lost their beginning"),
    ],
)
def test_long_prompts(questions, overlong, prompts, said):
    reading = ReadOptions({"question": "prompt"}, overlong)
    told, invalid = [], InvalidRows()
    dataset = Dataset.from_file(
        questions, LETTERS, 4, options=reading, notify=told.append, invalid=invalid
    )
    assert dataset.prompt_text == prompts and said in (told or [str(invalid)])[0]
    assert [len(tokens) for tokens in dataset.prompt_tokens] == [3, 4][: len(prompts)]
    if overlong == "filter":
        with pytest.raises(DataError, match="every row is left out: 2 × prompt above"):
            Dataset.from_file(questions, LETTERS, 1, options=reading)


def test_texts_become_chats_with_the_templates_variables(tmp_path):
    path = write(
        tmp_path / "chats.jsonl",
        [{"prompt": "ab"}, {"prompt": [{"role": "user", "content": "cd"}]}],
    )
    reading = ReadOptions.from_config(
        data(chat=True, system="be kind", template_arguments='{"tone": "calm"}')
    )
    LETTERS.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    found = Dataset.from_file(path, Tokenizer.load(tmp_path), options=reading).prompt_text
    render = jinja2.Template(TEMPLATE).render
    user = {"role": "user", "content": "ab"}
    system = {"role": "system", "content": "be kind"}
    assert found == [
        render(messages=[system, user], tone="calm"),
        render(messages=[system, {"role": "user", "content": "cd"}], tone="calm"),
    ]


def test_several_files_a_pattern_and_a_folder(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    one = write(folder / "b.jsonl", [{"prompt": "b"}])
    (folder / "a.txt").write_text("a\n")
    (folder / "readme.md").write_text("no data")
    other = write(tmp_path / "c.jsonl", [{"prompt": "c", "answer": "z"}])
    for path, texts in [
        (f"{one}, {other}", ["b", "c"]),
        (str(tmp_path / "**" / "*.jsonl"), ["b"]),
        (str(folder), ["a", "b"]),
        (folder, ["a", "b"]),
    ]:
        assert Dataset.from_file(path, LETTERS).prompt_text == texts
    assert Dataset.from_file(f"{one},{other}", LETTERS).columns["answer"] == [None, "z"]
    (tmp_path / "none").mkdir()
    for path, says in [(tmp_path / "none", "the folder has no"), ("n?ne*", "no file matches")]:
        with pytest.raises(DataError, match=says):
            Dataset.from_file(str(path), LETTERS)


def test_sources_have_their_shares_and_go_on_after_a_resume():
    sources = ["a"] * 3 + ["b"] * 50 + ["c"] * 20
    mixing = Mixing(sources, {"a": 2, "b": 1, "c": 1}, "data.weights")
    make = lambda: MixedSampler(mixing, 7, seed=3)  # noqa: E731
    sampler, steps = make(), []
    for number in range(40):
        if number == 17:
            state = sampler.state()
        steps.append(sampler.next())
    drawn = np.concatenate(steps)
    for n in range(1, len(drawn) + 1):
        had = [np.sum([sources[i] == name for i in drawn[:n]]) for name in "abc"]
        assert np.all(np.abs(np.array(had) - n * np.array([0.5, 0.25, 0.25])) <= 1)
    of_a = [i for i in drawn if i < 3]
    epochs = [tuple(of_a[i : i + 3]) for i in range(0, len(of_a), 3)]
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs if len(epoch) == 3)
    assert len(set(epochs)) > 3  # shuffled anew
    other = make()
    other.restore(json.loads(json.dumps(state)))
    assert np.array_equal(np.concatenate([other.next() for _ in range(23)]), drawn[17 * 7 :])
    with pytest.raises(DataError, match="other sources or another seed"):
        MixedSampler(mixing, 7, seed=4).restore(state)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"columns": "question"}, "'question' is not of the form name=…: question=prompt"),
        ({"columns": "a=b,c=b"}, "two columns get the same name"),
        ({"columns": "text=prompt"}, "from a column 'text', which no row has; the first one has"),
        ({"weights": "a=0"}, "the weight of a is '0'; it must be a number above 0"),
        ({"weights": "a=1"}, "no weight for data_source 'b'"),
        ({"weights": "a=1,b=1,c=1"}, "no row has data_source 'c'; there are a, b"),
        ({"system": "be kind"}, "config.data.chat=True makes chats of texts"),
        ({"template_arguments": "[1]"}, "it must be a JSON object"),
        ({"overlong": "filter"}, "needs config.rollout.max_prompt_length above 0"),
        ({"overlong": "cut"}, "must be one of error, filter, truncate_left"),
        ({"path": ""}, "there is no data: set config.data.path=FILE"),
    ],
)
def test_refused_in_one_line(tmp_path, changes, says):
    rows = [{"prompt": "a", "data_source": "a"}, {"prompt": "b", "data_source": "b"}]
    path = write(tmp_path / "rows.jsonl", rows * 4)
    LETTERS.save(tmp_path)
    with pytest.raises(ConfigError) as caught:
        changes = {"path": path} | changes
        config = load_config("base.py", {"data": changes, "tokenizer.path": str(tmp_path)})
        config = check_config(config)
        make_prompt_sampler(config, load_inputs(config))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_data_set_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    rows = datasets.Dataset.from_dict({"question": ["a", "b"], "answer": [{"n": 1}, {"n": 2}]})
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=rows).save_to_disk(str(tmp_path / "dict"))
    for name in ("saved", "dict"):
        found = Dataset.from_file(str(tmp_path / name), LETTERS)
        assert found.prompt_text == ["a", "b"] and found.columns["answer"] == [{"n": 1}, {"n": 2}]


def test_a_data_sets_name_without_the_library_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        Dataset.from_file("openai/gsm8k/main:train", LETTERS)


def test_weights_are_read():
    assert parse_source_weights("gsm8k=2, math = 0.5") == {"gsm8k": 2.0, "math": 0.5}
