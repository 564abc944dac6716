"""Text of a response token by token: `decode_response` of the whole is the truth."""

import json
import random

import pytest
import tokenizers
from serving_double import byte_tokenizer
from tokenizers import decoders, models

from hjax.data.response_text import WAITING, ResponseText
from hjax.data.tokenizer import Tokenizer
from hjax.serving.tool_calls import CallReader, ToolCall, read_calls, writes_calls

TEXT = "Zwölf Boxkämpfer, 😀😀 日本語 e\u0301 \u200d🏳️\u200d🌈  two  spaces\n\ttab Ωmega."


def fallback_tokenizer() -> Tokenizer:
    """As Llama 2's: words that begin with ▁, the first one's space left out, bytes for the rest."""
    words = ["▁", "▁two", "▁spaces", "two", "e", "T", "s", "."]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend, {}, name="fallback")


def fed(tokenizer, prompt, tokens):
    """The pieces that come of each token, and of the end."""
    text = ResponseText(tokenizer, prompt)
    return [*map(text.feed, tokens), text.close()]


@pytest.mark.parametrize("cut", [0, 1, 7, 25])
def test_bytes_become_text_when_their_character_is_whole(cut):
    tokens = list(TEXT.encode())
    pieces = fed(byte_tokenizer(), [65], tokens)
    assert "".join(pieces) == TEXT
    assert all(piece in TEXT and "\ufffd" not in piece for piece in pieces)
    # As early as can be: after each byte all characters that are whole are there.
    for count in range(len(tokens)):
        whole = bytes(tokens[:count]).decode(errors="ignore")
        assert "".join(pieces[:count]) == whole


def test_a_first_word_keeps_its_space_and_bytes_fall_back():
    tokenizer = fallback_tokenizer()
    two, spaces = 257, 258
    tokens = [two, 256, spaces, *"😀日".encode(), spaces, *"é".encode(), two]
    said = " two  spaces😀日 spacesé two"
    assert tokenizer.decode_response([259], tokens) == said
    assert "".join(fed(tokenizer, [259], tokens)) == said
    assert fed(tokenizer, [259], [two])[0] == " two"


def test_special_tokens_say_nothing_and_cost_nothing():
    pieces = fed(byte_tokenizer(), [65], [*b"a", *[256] * (3 * WAITING), *"é".encode(), 257])
    assert "".join(pieces) == "aé"


def test_bytes_of_no_character_come_out_late_and_bounded():
    text = ResponseText(byte_tokenizer(), [65])
    pieces = [text.feed(0xFF) for _ in range(100)]
    assert not any(pieces[:WAITING]) and sum(map(len, pieces)) >= 100 - WAITING
    assert "".join(pieces) + text.close() == "\ufffd" * 100
    assert "".join(fed(byte_tokenizer(), [65], [0xFF, *b"ok", 0xC3])) == "\ufffdok\ufffd"


def test_a_prompt_that_ends_inside_a_character():
    first, second = "é".encode()
    tokenizer = byte_tokenizer()
    tokens = [second, *b"ok"]
    assert "".join(fed(tokenizer, [65, first], tokens)) == tokenizer.decode_response(
        [65, first], tokens
    )


@pytest.mark.parametrize(
    "name", ["tokenizers/gpt2", "tokenizers/minimind", "weights/stories260K-hf"]
)
def test_real_tokenizers(name, test_data):
    tokenizer = Tokenizer.load(test_data / name)
    source = random.Random(name)
    whole = tokenizer.encode(TEXT + (test_data / "text" / "tinyshakespeare.txt").read_text()[:2000])
    compared = 0
    for at in [source.randrange(1, len(whole) - 1) for _ in range(20)]:
        prompt, tokens = whole[:at], whole[at : at + 200]
        if "\ufffd" not in tokenizer.decode(tokens) + tokenizer.decode(
            prompt
        ):  # cut in a character
            said = tokenizer.decode_response(prompt, tokens)
            assert "".join(fed(tokenizer, prompt, tokens)) == said
            compared += 1
    assert compared > 10


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</x>"}}\n</tool_call>'


@pytest.mark.parametrize(
    "text, names",
    [
        (CALL, ["add"]),
        (f"{CALL}\n{CALL}\n", ["add", "add"]),
        ('<tool_call>{"name": "now"}</tool_call>', ["now"]),
        (CALL + " and more", []),
        (CALL.replace("</tool_call>", ""), []),
        (CALL.replace('"name"', '"nome"'), []),
        (CALL.replace("{", "[", 1), []),
        ("<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": "f", "arguments": "text"}</tool_call>', []),
        ("", []),
    ],
)
def test_calls_are_read_only_where_all_is_calls(text, names):
    assert [call.name for call in read_calls(text)] == names


def test_arguments_are_json_text():
    [call] = read_calls(CALL)
    assert json.loads(call.arguments) == {"a": 1, "b": "</x>"}
    assert isinstance(call, ToolCall) and call.id.startswith("call_")


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    "said, text, calls",
    [
        ("Let me <b>see</b>.\n" + CALL, "Let me <b>see</b>.\n", 1),
        ("No <tool_ call", "No <tool_ call", 0),
        ("Broken <tool_call>{</tool_call> off", "Broken <tool_call>{</tool_call> off", 0),
        ("ends <tool_c", "ends <tool_c", 0),
    ],
)
def test_text_is_parted_from_calls_however_it_comes(said, text, calls, size):
    reader = CallReader()
    shown = "".join(reader.feed(said[i : i + size]) for i in range(0, len(said), size))
    rest, found = reader.close()
    assert (shown + rest, len(found)) == (text, calls)


def test_templates_of_real_models(test_data):
    found = {
        file.stem: writes_calls(file.read_text())
        for file in (test_data / "chat_templates").glob("*.jinja")
    }
    assert found == {
        "qwen2_5": True, "qwen3": True, "llama3_1": False, "llama3_2": False, "gemma3": False
    }  # fmt: skip
