"""Tokenizers: built-in characters, and Hugging Face files as transformers reads them."""

import itertools
import json
import pickle
import threading
import time

import pytest

from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError


def test_characters_have_the_promised_ids():
    tokenizer = Tokenizer.characters("01+=")
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.vocab_size == 7
    assert tokenizer.encode("1+0=") == [1, 4, 5, 3, 6]
    assert tokenizer.encode("1+0=", add_special=False) == [4, 5, 3, 6]
    assert tokenizer.decode([1, 4, 5, 3, 6, 2, 0]) == "1+0="
    assert tokenizer.decode([1, 4, 2], skip_special=False) == "<bos>1<eos>"


def test_characters_keep_spaces_and_newlines():
    tokenizer = Tokenizer.characters("ab \n")
    assert tokenizer.decode(tokenizer.encode(" a  b\n")) == " a  b\n"


def test_a_long_text_is_encoded_while_other_threads_run():
    tokenizer = Tokenizer.characters("ab ")
    ticks, ended = [], threading.Event()

    def tick():
        while not ended.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    tokens = tokenizer.encode("ab " * 200_000)
    seconds = time.monotonic() - began
    ended.set(), thread.join()
    assert tokens == [1] + [3, 4, 5] * 200_000
    gaps = [after - before for before, after in itertools.pairwise([began, *ticks])]
    assert max(gaps) < seconds / 2, (seconds, len(ticks))


def test_character_outside_the_alphabet_is_named():
    with pytest.raises(DataError, match=r"character 'x' of '1x' is not in its vocabulary of 5"):
        Tokenizer.characters("01").encode("1x")


@pytest.mark.parametrize("alphabet, message", [("", "is empty"), ("aba", "'a' more than once")])
def test_bad_alphabet(alphabet, message):
    with pytest.raises(ConfigError, match=message):
        Tokenizer.characters(alphabet)


def test_saved_characters_load_here_and_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer.characters("abc|")
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.same_vocabulary(tokenizer)
    assert (again.pad_id, again.bos_id, again.eos_id) == (0, 1, 2)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = tokenizer.encode("cab|")
    assert theirs("cab|").input_ids == ids == again.encode("cab|")
    assert theirs.decode(ids, skip_special_tokens=True) == "cab|"
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)


def test_pickled_tokenizer_is_the_same():
    tokenizer = Tokenizer.characters("abc")
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.same_vocabulary(tokenizer) and again.encode("cab") == tokenizer.encode("cab")


def test_same_as_compares_ids():
    assert Tokenizer.characters("ab").same_vocabulary(Tokenizer.characters("ab"))
    assert not Tokenizer.characters("ab").same_vocabulary(Tokenizer.characters("ba"))


def test_end_of_sequence_ids_of_the_neighbouring_files(tmp_path):
    Tokenizer.characters("abc").save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert Tokenizer.load(tmp_path).eos_ids == (2, 5)


@pytest.mark.parametrize("prepare, message", [
    (lambda path: path / "absent", "no such file or directory"),
    (lambda path: path, "holds no tokenizer.json"),
    (lambda path: (path / "tokenizer.json").write_text("{") and path, "not a readable"),
])
def test_no_tokenizer_there(tmp_path, prepare, message):
    with pytest.raises(DataError, match=message):
        Tokenizer.load(prepare(tmp_path))


def test_post_processor_decides_without_a_config(tmp_path):
    # The json's own post-processor puts <bos> in front; an EOS behind would be left out.
    import tokenizers.processors

    Tokenizer.characters("abc").save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.encode("ab") == [1, 3, 4]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 0)


def test_chat_template_from_a_file(tmp_path):
    Tokenizer.characters("abc").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = Tokenizer.load(tmp_path)
    messages = [{"role": "user", "content": "é<"}]
    assert tokenizer.chat(messages) == '<bos>[user]"é<"[assistant]'
    assert tokenizer.chat(messages, add_generation_prompt=False) == '<bos>[user]"é<"'
    tokenizer.save(tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").chat(messages) == tokenizer.chat(messages)


def test_null_is_a_missing_key_in_chats(tmp_path):
    """As transformers has it: of OpenAI's tool calls content is null."""
    Tokenizer.characters("abc").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content if 'content' in m else '-' }}{% endfor %}"
    )
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": None}]
    assert Tokenizer.load(tmp_path).chat(turns) == "1-"
    with pytest.raises(DataError, match="continue_final_message is not supported"):
        Tokenizer.load(tmp_path).chat(turns, continue_final_message=True)


def test_chat_without_a_template():
    with pytest.raises(DataError, match="has no chat template"):
        Tokenizer.characters("ab").chat([{"role": "user", "content": "a"}])


def test_chat_template_that_refuses(tmp_path):
    Tokenizer.characters("abc").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="refuses.*roles must alternate"):
        Tokenizer.load(tmp_path).chat([{"role": "user", "content": "a"}])


def test_chat_template_is_sandboxed(tmp_path):
    Tokenizer.characters("abc").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(DataError, match="unsafe"):
        Tokenizer.load(tmp_path).chat([{"role": "user", "content": "a"}])


def test_stories_tokens_and_text_are_the_golden_ones(test_data):
    folder = test_data / "weights/stories260K-hf"
    golden = json.loads((folder / "goldens.json").read_text())
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode(golden["text"]) == golden["text_ids"]
    assert tokenizer.decode(golden["greedy_from_bos"]) == golden["greedy_text"]
    assert tokenizer.decode_response([1], golden["greedy_from_bos"][1:]) == golden["greedy_text"]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, None)
    assert (tokenizer.vocab_size, tokenizer.name) == (512, "stories260K-hf")


def test_response_keeps_the_space_that_sentencepiece_drops(test_data):
    tokenizer = Tokenizer.load(test_data / "weights/stories260K-hf")
    prompt, whole = tokenizer.encode("Once upon"), tokenizer.encode("Once upon a time")
    response = whole[len(prompt):]
    assert tokenizer.decode(response) == "a time"
    assert tokenizer.decode_response(prompt, response) == " a time"


def test_response_that_completes_a_character_is_decoded_by_itself(test_data):
    tokenizer = Tokenizer.load(test_data / "tokenizers/gpt2")
    ids = tokenizer.encode("é漢")
    assert len(ids) > 2
    tail = tokenizer.decode_response(ids[:-1], ids[-1:])
    assert tail == tokenizer.decode(ids[-1:]) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.decode_response([], ids) == "é漢"


@pytest.mark.parametrize("folder", ["weights/stories260K-hf", "tokenizers/minimind"])
def test_same_ids_and_text_as_transformers(folder, test_data):
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.load(test_data / folder)
    # The file itself: AutoTokenizer's LlamaTokenizer would replace its normalizer.
    config = json.loads((test_data / folder / "tokenizer_config.json").read_text())
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(test_data / folder / "tokenizer.json"),
        bos_token=config["bos_token"], eos_token=config["eos_token"],
    )
    for text in ["Hello, world!", "two  spaces", "Zürich 漢字 🙂\n\tend", "x = 3 * (4 + 5)"]:
        assert ours.encode(text) == theirs(text).input_ids
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_gpt2_without_a_config(test_data):
    tokenizer = Tokenizer.load(test_data / "tokenizers/gpt2" / "tokenizer.json")
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.eos_id == 50256 and tokenizer.vocab_size == 50257


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2?"},
    {"role": "assistant", "content": "Yes, \"it\" is."},
    {"role": "user", "content": "Und in Zürich?"},
]


def test_minimind_chat_equals_transformers(test_data):
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.load(test_data / "tokenizers/minimind")
    theirs = transformers.AutoTokenizer.from_pretrained(test_data / "tokenizers/minimind")
    for generation in (True, False):
        assert ours.chat(CONVERSATION, generation) == theirs.apply_chat_template(
            CONVERSATION, tokenize=False, add_generation_prompt=generation
        )


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "llama3_2", "gemma3"])
def test_real_templates_render_as_transformers_renders_them(name, tmp_path, test_data):
    transformers = pytest.importorskip("transformers")
    template = test_data / "chat_templates" / f"{name}.jinja"
    Tokenizer.characters("abc").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template.read_text())
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a<b": "é"}}}]
    assert ours.chat(CONVERSATION) == theirs.apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=True
    )
    assert ours.chat(CONVERSATION, tools=tools) == theirs.apply_chat_template(
        CONVERSATION, tools=tools, tokenize=False, add_generation_prompt=True
    )


def test_bos_stands_first_whatever_order_the_vocabulary_is_listed_in():
    tokenizers = [Tokenizer.characters("012=") for _ in range(40)]
    assert {tuple(t.encode("1=")) for t in tokenizers} == {(1, 4, 6)}
