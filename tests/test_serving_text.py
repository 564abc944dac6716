"""Text of a response token by token: `decode_response` of the whole is the truth."""

import json
import random

import pytest
import tokenizers
from serving_double import byte_tokenizer
from tokenizers import decoders, models

from hjax.data.response_text import MAX_HELD_TOKENS, ResponseText
from hjax.data.tokenizer import Tokenizer
from hjax.data.tool_call_forms import BARE, IN_TAGS, TAGGED, CallPart, call_form, read_calls
from hjax.serving.tool_calls import AllowedCalls

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


def fed_at_once(tokenizer, prompt, tokens):
    """The text of tokens that come together."""
    text = ResponseText(tokenizer, prompt)
    return text.feed(*tokens) + text.close()


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
    assert "".join(fed(tokenizer, [259], tokens)) == said == fed_at_once(tokenizer, [259], tokens)
    assert fed(tokenizer, [259], [two])[0] == " two"


def test_special_tokens_say_nothing_and_cost_nothing():
    invalid = [256] * (3 * MAX_HELD_TOKENS)
    pieces = fed(byte_tokenizer(), [65], [*b"a", *invalid, *"é".encode(), 257])
    assert "".join(pieces) == "aé"


def test_bytes_of_no_character_come_out_late_and_bounded():
    text = ResponseText(byte_tokenizer(), [65])
    pieces = [text.feed(0xFF) for _ in range(100)]
    assert not any(pieces[:MAX_HELD_TOKENS]) and sum(map(len, pieces)) >= 100 - MAX_HELD_TOKENS
    assert "".join(pieces) + text.close() == "\ufffd" * 100
    assert fed_at_once(byte_tokenizer(), [65], [0xFF] * 100) == "\ufffd" * 100
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
            assert fed_at_once(tokenizer, prompt, tokens) == said
            compared += 1
    assert compared > 10


NAMES = ("add", "now", "f")
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
    assert [call.name for call in read_calls(text, TAGGED, NAMES, {})] == names


@pytest.mark.parametrize(
    "text, names",
    [
        ('{"name": "now", "parameters": {}}', ["now"]),
        ('\n{"name": "add", "parameters": {"a": [1, {}]}} ', ["add"]),
        ('{"name": "other", "parameters": {}}', []),
        ('{"name": "now", "parameters": {}} and more', []),
        ('{"name": "now", "parameters": 1}', []),
        ("{}", []),
    ],
)
def test_bare_calls_are_read_where_they_are_the_answer(text, names):
    assert [call.name for call in read_calls(text, BARE, NAMES, {})] == names


def test_arguments_are_json_text():
    [call] = read_calls(CALL, TAGGED, NAMES, {})
    assert json.loads(call.arguments) == {"a": 1, "b": "</x>"}
    assert call.index == 0 and call.id.startswith("call_")


def read(calls, said, size):
    """Text and calls of an answer that comes in pieces."""
    reader = calls.reader()
    some = [reader.feed(said[i : i + size]) for i in range(0, len(said), size)] + [reader.close()]
    parts = CallPart.merged([part for _, parts in some for part in parts])
    return "".join(text for text, _ in some), parts, reader.whole


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
    shown, found, _ = read(AllowedCalls(TAGGED, NAMES), said, size)
    assert (shown, len(found)) == (text, calls)


ARGUMENTS = ['{"a": "</tool_call> {\\"}", "b": [{}, "\\\\"]}', "{}"]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("form", [TAGGED, BARE], ids=["tagged", "bare"])
@pytest.mark.parametrize("forced", [True, False])
def test_calls_that_are_held_to_a_form_are_told_as_they_come(form, forced, size):
    calls = AllowedCalls(form, NAMES, constrained=True, forced=forced)
    tight, loose = (f'{{"name":{space}"f",{space}"{form.arguments}":{space}' for space in ("", " "))
    each = [tight + ARGUMENTS[0] + "}", loose + ARGUMENTS[1] + "}"]
    if form is TAGGED:
        each = [f"<tool_call>{each[0]}</tool_call>\n<tool_call>\n{each[1]}\n</tool_call>"]
    begun = "So: <b>\n" if form is TAGGED and not forced else ""
    for said in each:
        text, found, whole = read(calls, begun + said, size)
        expected = ARGUMENTS if form is TAGGED else [ARGUMENTS[each.index(said)]]
        assert text == begun and whole
        assert [call.arguments for call in found] == expected
        assert [(call.index, call.name) for call in found] == [*zip(range(2), "ff")][: len(found)]
        # Cut anywhere the arguments are the beginning of what they would be.
        cut = len(begun + said) - 15 if form is TAGGED else len(said) - 2
        _, some, whole = read(calls, (begun + said)[:cut], size)
        assert not whole and expected[-1].startswith(some[-1].arguments)
    text, found, _ = read(calls, "" if forced else "So <tool_ca", size)
    assert not found and text == ("" if forced else "So <tool_ca")


def test_templates_of_real_models(test_data):
    found = {
        file.stem: call_form(file.read_text())
        for file in (test_data / "chat_templates").glob("*.jinja")
    }
    tagged = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_training"]
    known = dict.fromkeys(tagged, TAGGED) | {"llama3_1": BARE, "llama3_2": BARE}
    tags = ["qwen3_5_think", "qwen3_5_think_training", "qwen3_6", "nemotron_3_nano"]
    known |= dict.fromkeys(tags, IN_TAGS)
    # Others ask for calls in forms of their own, or for none.
    assert found == dict.fromkeys(found, None) | {n: f for n, f in known.items() if n in found}
    assert {"qwen2_5", "llama3_1"} <= found.keys()
