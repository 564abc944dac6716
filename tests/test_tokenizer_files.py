"""Directories of tokenizers, read as transformers' AutoTokenizer reads them, or refused by name."""

import base64
import json
import pickle
import subprocess
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError
from hjax.run.inputs import load_tokenizer

TEXTS = [
    "the cat sat.", " two  spaces ", "Hello, world! It 's n't .", "ünï 漢字 🙂\n\tend",
    "<|user|>hi<|end|><|tool|>{}<pad>", "<|end|> after", "a<extra>b", "",
]  # fmt: skip
CORPUS = ["the cat sat on the mat, and the dog saw it.", "Hello, world! It's here; isn't it?"] * 5
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the cat"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
NAMED = [
    {"name": "default", "template": "{{ bos_token }}D{{ messages[0].content }}{{ eos_token }}"},
    {"name": "tool_use", "template": "T{{ tools | length }}{{ messages[1].content }}"},
]
SPACED = {"content": "<|tool|>", "lstrip": True, "rstrip": True, "special": False}


def flagged(text, **flags):
    """An added token as tokenizer_config.json holds it."""
    fields = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {"content": text, **fields, "special": True, **flags}


def byte_level(size=290):
    """A byte-level BPE like GPT-2's, trained on a few sentences."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>"], initial_alphabet=sorted(alphabet),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def words(kind):
    """WordPiece or Unigram, whose decoded text `clean_up_tokenization_spaces` changes."""
    backend = tokenizers.Tokenizer(kind(unk_token="[U]") if kind is models.WordPiece else kind())
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer if kind is models.WordPiece else trainers.UnigramTrainer
    more = {"unk_token": "[U]"} if kind is models.Unigram else {}
    backend.train_from_iterator(
        CORPUS, trainer(vocab_size=90, special_tokens=["[U]"], show_progress=False, **more)
    )
    return backend


def metaspace():
    """A BPE like Llama 2's: a space becomes ▁, unknown characters become bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁theca,."]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, "▁t", "th", "the", "▁the"])}
    merges = [("▁t", "he"), ("t", "h"), ("th", "e"), ("▁", "the")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges[1:], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def write(folder, backend, **files):
    """A directory of a tokenizer: `config` is tokenizer_config.json, others by their stem."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for stem, content in files.items():
        name = "tokenizer_config" if stem == "config" else stem
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


FAST, GPT2 = {"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": "GPT2Tokenizer"}
BOS = {"bos_token": "<s>", "unk_token": "<s>"}
ADDED = {"<|user|>": 290, "<|end|>": 291, "<|tool|>": 292}
CASES = {
    "end in added_tokens_decoder": dict(
        config=FAST | {"eos_token": "<|end|>", "added_tokens_decoder": {
            "291": flagged("<|end|>"), "290": flagged("<|user|>", special=False)}}),
    "flags of added_tokens_decoder": dict(
        config=FAST | {"eos_token": "<|end|>", "pad_token": "<|tool|>", "added_tokens_decoder": {
            "0": flagged("<s>", lstrip=True), "290": flagged("<|tool|>", **SPACED),
            "291": flagged("<|end|>", rstrip=True)}}),
    "added_tokens.json": dict(
        config=FAST | {"eos_token": "<|end|>", "additional_special_tokens": ["<|user|>"]},
        added_tokens=ADDED),
    "special_tokens_map.json": dict(
        config=FAST | {"eos_token": "<s>"},
        special_tokens_map={"eos_token": flagged("<|end|>", lstrip=True), "pad_token": "<pad>",
                            "additional_special_tokens": ["<|user|>", "<|tool|>"]}),
    "map beside added_tokens_decoder": dict(
        config=FAST | {"eos_token": "<s>", "added_tokens_decoder": {"290": flagged("<|end|>")}},
        special_tokens_map={"eos_token": "<|end|>", "pad_token": "<pad>"}, added_tokens=ADDED),
    "extra_special_tokens": dict(
        config=FAST | BOS | {"extra_special_tokens": ["<|user|>", "<|end|>"], "eos_token": "<s>",
                             "additional_special_tokens": ["<|tool|>"]}),
    "named extra tokens": dict(
        config=FAST | {"extra_special_tokens": {"image_token": "<extra>"}, "eos_token": "<|end|>",
                       "user_token": "<|user|>",
                       "chat_template": "{{ image_token }}{{ user_token }}"}),
    "objects with a type": dict(
        config=FAST | {"eos_token": flagged("<|end|>", normalized=True, __type="AddedToken")}),
    "named templates": dict(config=FAST | BOS | {"eos_token": "<|end|>", "chat_template": NAMED}),
    "BOS said but not in the json": dict(config=FAST | BOS | {"add_bos_token": True}),
    "BOS in the json but denied": dict(
        config=FAST | BOS | {"add_bos_token": False}, begins=True),
    "EOS said": dict(config=FAST | BOS | {"eos_token": "<s>", "add_eos_token": True}),
    "space before, GPT-2": dict(config=GPT2 | BOS | {"eos_token": "<s>", "add_prefix_space": True}),
    "space before, generic class": dict(config=FAST | BOS | {"add_prefix_space": True}),
    "no space before, Llama": dict(
        backend=metaspace, config={"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False,
                                   "legacy": False}),
    "space before, Llama": dict(
        backend=metaspace, config={"tokenizer_class": "LlamaTokenizerFast", "legacy": False,
                                   "add_prefix_space": True}),
    "spaces cleaned, WordPiece": dict(
        backend=lambda: words(models.WordPiece),
        config=FAST | {"clean_up_tokenization_spaces": True, "unk_token": "[U]"}),
    "spaces cleaned, Unigram": dict(
        backend=lambda: words(models.Unigram),
        config=FAST | {"clean_up_tokenization_spaces": True, "eos_token": "<|end|>"}),
    "spaces of a BPE": dict(config=FAST | BOS | {"clean_up_tokenization_spaces": True}),
    "spaces of a BPE all the same": dict(
        config=FAST | BOS | {
            "clean_up_tokenization_spaces": True,
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}),
}  # fmt: skip


@pytest.fixture(params=CASES)
def directory(request, tmp_path):
    case = dict(CASES[request.param])
    backend, begins = case.pop("backend", byte_level)(), case.pop("begins", False)
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return write(tmp_path / "tokenizer", backend, **case)


def assert_same(ours, theirs):
    """Ids, decoded text, special tokens and rendered chats are those of transformers."""
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, add_special=False) == ids, text
        assert ours.encode(text) == theirs(text).input_ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (
        theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id
    )  # fmt: skip
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    for tools in (None, [], TOOLS) if theirs.chat_template else ():
        assert ours.chat(CHAT, False, tools=tools) == theirs.apply_chat_template(
            CHAT, tools=tools, tokenize=False
        )


def test_directories_are_read_as_transformers_reads_them(directory, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours, theirs = Tokenizer.load(directory), transformers.AutoTokenizer.from_pretrained(directory)
    assert_same(ours, theirs)
    assert_same(pickle.loads(pickle.dumps(ours)), theirs)
    ours.save(tmp_path / "saved")
    assert_same(
        Tokenizer.load(tmp_path / "saved"),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "saved"),
    )


def test_a_template_for_tools_alone(tmp_path):
    """As transformers has it: without a default one, a chat without tools is refused."""
    folder = write(tmp_path, byte_level(), config={"chat_template": NAMED[1:]})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.chat(CHAT, tools=TOOLS) == "T1the cat"
    with pytest.raises(DataError, match="has no chat template named default, only tool_use"):
        tokenizer.chat(CHAT)


def test_a_config_that_names_no_special_token_leaves_the_usual_ones(tmp_path):
    """GPT-2's own tokenizer_config.json has a length alone."""
    backend = byte_level()
    backend.add_special_tokens(["<|endoftext|>"])
    tokenizer = Tokenizer.load(write(tmp_path, backend, config={"model_max_length": 1024}))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 290)


@pytest.mark.parametrize("file, content, line", [
    ("tokenizer_config", {"added_tokens_decoder": {"292": flagged("<a>")}},
     r"added token '<a>' has id 292, and the next free id of its tokenizer.json is 290"),
    ("added_tokens", {"<a>": 289}, "added token '<a>' has id 289, and the next free id"),
    ("added_tokens", {"<a>": "290"}, "added_tokens.json: the file is {'<a>': '290'}"),
    ("tokenizer_config", {"added_tokens_decoder": {"x": flagged("<a>")}}, "tokens with their ids"),
    ("tokenizer_config", {"added_tokens_decoder": ["<a>"]}, "tokens with their ids"),
    ("tokenizer_config", {"added_tokens_decoder": {"290": {"content": 5}}}, "tokens with their id"),
    ("tokenizer_config", {"additional_special_tokens": "<a>"}, "special_tokens is '<a>'; a list"),
    ("tokenizer_config", {"additional_special_tokens": [5]}, "an added token is 5; text, or an"),
])  # fmt: skip
def test_added_tokens_that_do_not_fit(file, content, line, tmp_path):
    write(tmp_path, byte_level(), **{file: content})
    with pytest.raises(DataError, match=line) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_special_tokens_of_the_map_may_be_objects(tmp_path):
    """Files written before transformers 4.34 hold them; 5.24 itself ends in a TypeError."""
    tokenizer = Tokenizer.load(write(
        tmp_path, byte_level(), special_tokens_map={"additional_special_tokens": [flagged("<a>")]}
    ))  # fmt: skip
    assert tokenizer.encode("<a>") == [290] and tokenizer.decode([290]) == ""


def test_a_special_token_beyond_the_embedding_is_refused_where_a_text_has_it(tmp_path):
    """Gemma 3's image token has the id 262144, and the text model 262144 rows."""
    config = FAST | BOS | {"eos_token": "<s>", "image_token": "<image>"}
    tokenizer = Tokenizer.load(write(tmp_path, byte_level(), config=config))
    tokenizer.check_fits(290, "model")
    assert tokenizer.encode("the cat") == Tokenizer.load(tmp_path).encode("the cat")
    with pytest.raises(DataError, match="'an <image>' has the token '<image>', id 290, and the mo"):
        tokenizer.encode("an <image>")
    with pytest.raises(ConfigError, match="model: its tokenizer has ids up to 290, its embedding"):
        tokenizer.check_fits(289, "model")
    ends = write(tmp_path, byte_level(), config=FAST | {"eos_token": "<|end|>"})
    with pytest.raises(ConfigError, match="its tokenizer has ids up to 290, its embedding 290"):
        Tokenizer.load(ends).check_fits(290, "model")


def sentencepiece_model(folder, kind):
    spm = pytest.importorskip("sentencepiece")
    folder.mkdir(exist_ok=True)
    with (folder / "tokenizer.model").open("wb") as file:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=file, model_type=kind, vocab_size=300,
            byte_fallback=True, minloglevel=2, user_defined_symbols=["<|user|>"],
            hard_vocab_limit=False,
        )  # fmt: skip
    return spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_directories_are_converted(kind, tmp_path):
    """Held against transformers, and the ids against SentencePiece itself."""
    transformers = pytest.importorskip("transformers")
    model = sentencepiece_model(tmp_path / "given", kind)
    (tmp_path / "given/tokenizer_config.json").write_text(json.dumps(FAST))
    ours = load_tokenizer(tmp_path / "given")
    assert_same(ours, transformers.AutoTokenizer.from_pretrained(tmp_path / "given"))
    for text in ("the cat sat.", "ünï 漢字 🙂"):
        assert ours.encode(text, add_special=False) == model.encode(text)
        assert ours.decode(model.encode(text)) == text
    assert (ours.bos_id, ours.eos_id) == (model.bos_id(), model.eos_id())
    ours.save(tmp_path / "saved")
    assert_same(
        Tokenizer.load(tmp_path / "saved"),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "saved"),
    )


def tiktoken_ranks():
    """Ranks of a vocabulary: the 256 bytes, and a few merges."""
    merges = [b"th", b"the", b" t", b" the", b"ca", b"cat", b" cat"]
    return {token: i for i, token in enumerate([*(bytes([i]) for i in range(256)), *merges])}


def write_tiktoken(folder, name="tokenizer.model", **config):
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(t).decode()} {i}\n" for t, i in tiktoken_ranks().items()]
    (folder / name).write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(FAST | config))
    return folder


def test_tiktoken_directories_are_converted(tmp_path):
    """Held against transformers, and the ids against tiktoken itself."""
    transformers, tiktoken = pytest.importorskip("transformers"), pytest.importorskip("tiktoken")
    added = {"263": flagged("<|begin|>"), "264": flagged("<|end|>")}
    folder = write_tiktoken(
        tmp_path / "given", added_tokens_decoder=added, bos_token="<|begin|>", eos_token="<|end|>"
    )
    ours = Tokenizer.load(folder)
    assert_same(ours, transformers.AutoTokenizer.from_pretrained(folder))
    pattern = transformers.convert_slow_tokenizer.TikTokenConverter(str(folder)).pattern
    theirs = tiktoken.Encoding(
        "small", pat_str=pattern, mergeable_ranks=tiktoken_ranks(), special_tokens={"<|end|>": 264}
    )
    text = "the cat, ünï 漢字 the<|end|>"
    assert ours.encode(text, add_special=False) == theirs.encode(text, allowed_special="all")


def test_a_vocabulary_with_merges_is_converted(tmp_path):
    transformers = pytest.importorskip("transformers")
    byte_level().model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(GPT2 | BOS | {"eos_token": "<s>"}))
    assert not (tmp_path / "tokenizer.json").exists()
    assert_same(Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path))


@pytest.mark.parametrize("name, content, line", [
    ("tokenizer.model", b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02",
     "SentencePiece model without a tokenizer.json; converting it needs .*sentencepiece"),
    ("tokenizer.model", b"IQ== 0\nIg== 1\n", "tiktoken vocabulary without a tokenizer.json"),
    ("qwen.tiktoken", b"IQ== 0\nIg== 1\n", r"qwen.tiktoken: tiktoken vocabulary without"),
    ("tekken.json", b"{}", "Mistral's tekken vocabulary without a tokenizer.json"),
])  # fmt: skip
def test_without_the_libraries_the_kind_is_named(name, content, line, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    (tmp_path / name).write_bytes(content)
    for load in (Tokenizer.load, load_tokenizer):
        with pytest.raises(DataError, match=line) as caught:
            load(tmp_path)
        assert "pip install 'hjax[tokenizers]'" in str(caught.value)


def test_what_transformers_cannot_convert_is_named(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "vocab.json").write_text("[")
    with pytest.raises(DataError, match="vocab.json: transformers cannot convert this") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_tokenizer_json_is_loaded_without_transformers(tmp_path):
    folder = write(tmp_path, byte_level(), **CASES["end in added_tokens_decoder"])
    program = (
        "import sys; from hjax.data.tokenizer import Tokenizer; "
        f"assert Tokenizer.load({str(folder)!r}).eos_id == 291; "
        "print(sorted({'transformers', 'sentencepiece', 'tiktoken'} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.strip() == "[]", said.stderr
