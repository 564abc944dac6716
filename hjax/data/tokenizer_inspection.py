"""Which parts of a tokenizer.json are harmless: their cost is proven by inspection of the JSON.

A file is untrusted. Its normalizer and decoder can make text of any size from a short one, its
regular expressions may backtrack for ever. A part is harmless if all of its steps are of a kind
whose cost is known, and its regular expressions are published ones or simple.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

# Most characters that a harmless step adds to a character, or by which it replaces one. Unicode's
# forms: 18 of U+FDFA by NFKC, 4 by NFD, 3 by NFC.
_NORMALIZERS = {
    "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "StripAccents": 1, "Strip": 1,
    "Nmt": 1, "BertNormalizer": 12, "ByteLevel": 4,
}  # fmt: skip
# A character has up to four bytes, and each piece of a text gets a space in front.
_PRE_TOKENIZERS = {
    "ByteLevel": 5, "Metaspace": 2, "Whitespace": 1, "WhitespaceSplit": 1, "BertPreTokenizer": 1,
    "Punctuation": 1, "Digits": 1, "UnicodeScripts": 1, "CharDelimiterSplit": 1,
}  # fmt: skip
_DECODERS = {
    "ByteLevel": 1, "ByteFallback": 1, "Fuse": 1, "Metaspace": 1, "WordPiece": 2, "BPEDecoder": 2
}  # fmt: skip

# Steps of a sequence, pieces and tokens that a post-processor adds, what a Strip takes away.
_MOST_STEPS = 16
# Characters of a simple regular expression or a replaced string, of a token, of all added tokens.
_PATTERN, _TOKEN, _ADDED_TOKENS = 64, 1024, 2**20
_WORD = 1000  # characters of the longest word that WordPiece splits, in quadratic time

_CONTRACTIONS, _SPACES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS, _UPPER, _LOWER = (
    r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
)  # fmt: skip
_KIMI = [each.replace("]", r"&&[^\p{Han}]]") for each in (_UPPER, _LOWER)]
# Published regular expressions that need linear time: what one branch rescans, another takes.
_PUBLISHED = {
    # GPT-2
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Llama 3 and GLM 4; Qwen 2 and 3; MiniCPM 5
    *(
        rf"{_CONTRACTIONS}|{_LETTERS}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
        for digits in (r"\p{N}{1,3}", r"\p{N}", r"\p{N}+")
    ),
    # Qwen 3.5
    rf"{_CONTRACTIONS}|{_LETTERS}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    + _SPACES,
    # cl100k as tiktoken has it; LLaDA
    *(
        rf"'(?i:[sdmt]|ll|ve|re)|{_LETTERS}+\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|"
        r"\s*[\r\n]|\s+(?!\S)|\s+"
        for digits in (r"\p{N}{1,3}", r"\p{N}")
    ),
    # o200k, gpt-oss and Llama 4; Mistral's tekken; Kimi K2
    *(
        start + rf"{_LETTERS}{upper}*{lower}+{end}|{_LETTERS}{upper}+{lower}*{end}|"
        rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+{after}*|{_SPACES}"
        for start, upper, lower, end, digits, after in (
            ("", _UPPER, _LOWER, f"{_CONTRACTIONS}?", r"\p{N}{1,3}", r"[\r\n/]"),
            ("", _UPPER, _LOWER, "", r"\p{N}", r"[\r\n/]"),
            (r"[\p{Han}]+|", *_KIMI, f"{_CONTRACTIONS}?", r"\p{N}{1,3}", r"[\r\n]"),
        )
    ),
    # DeepSeek V3
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    # BLOOM
    " ?[^(\\s|[.,!?…。，、।۔،])]+",
}
# Published ones that need quadratic time: Command R7B, DeepSeek Coder V2, SentencePiece's spaces.
_QUADRATIC = {r"\d{1,3}(?=(?:\d{3})*\b)", r"\s+$", r"\A +| +\z"}
# Their cost, as if they multiplied a text: it keeps texts to 16 thousand characters.
_QUADRATIC_COST = 1024
# A simple one: branches of characters and classes of which the first may be optional, and the last
# repeated. Where a branch fails it has read no more than its own length.
_ATOM = r"(?:\\[pP]\{\^?\w+\}|\\[sSdDwWrntAz]|\\[^\w\s]|\[(?:\\.|[^\[\]\\])+\]|[^\\\[\](){}|*+?^$])"
_BRANCH = rf"(?:{_ATOM}\?)?{_ATOM}*(?:{_ATOM}(?:[*+?]|\{{\d(?:,\d?)?\}}))?"
_SIMPLE = re.compile(rf"{_BRANCH}(?:\|{_BRANCH})*", re.DOTALL)


def proven_costs(content: Mapping[str, Any]) -> dict[str, int | None]:
    """By part of a tokenizer.json, the cost of running it in characters per character of a text;
    None where it is not proven.

    Args:
      content: of the file.
    """
    sections = {
        "normalizer": ("normalizers", _normalizer),
        "pre_tokenizer": ("pretokenizers", _pre_tokenizer),
        "post_processor": ("processors", _post_processor),
        "decoder": ("decoders", _decoder),
    }
    costs = {
        name: _proven(functools.partial(_product, steps_key=key, cost=cost), content.get(name))
        for name, (key, cost) in sections.items()
    }
    return costs | {"model": _proven(_model, content)}


def _proven(cost: Callable[[Any], int | None], part: Any) -> int | None:
    try:
        return cost(part)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        return None  # it has another form than the library writes


def _product(part: Any, steps_key: str, cost: Callable[[Any], int | None]) -> int | None:
    if part is None:
        return 1
    steps = part[steps_key] if part["type"] == "Sequence" else [part]
    costs = [cost(step) for step in steps[: _MOST_STEPS + 1]]
    known = [each for each in costs if each is not None]
    return math.prod(known) if len(known) == len(steps) <= _MOST_STEPS else None


def _normalizer(step: Any) -> int | None:
    if step["type"] == "Prepend":
        return 1 + len(step["prepend"])
    return _replacement(step) if step["type"] == "Replace" else _NORMALIZERS.get(step["type"])


def _pre_tokenizer(step: Any) -> int | None:
    if step["type"] == "Split":
        return _search(step["pattern"])
    return _PRE_TOKENIZERS.get(step["type"])


def _decoder(step: Any) -> int | None:
    if step["type"] == "Strip":
        return 1 if max(step["start"], step["stop"]) <= _MOST_STEPS else None
    return _replacement(step) if step["type"] == "Replace" else _DECODERS.get(step["type"])


def _replacement(step: Any) -> int | None:
    pattern, written = step["pattern"], len(step["content"])
    cost = _search(pattern)
    if cost is None:
        return None
    # A regular expression may match between characters too.
    return cost * (max(1, -(-written // len(pattern["String"]))) if "String" in pattern
                   else 1 + written)  # fmt: skip


def _search(pattern: Any) -> int | None:
    """Cost of finding a pattern."""
    [(kind, text)] = pattern.items()
    if kind == "String":
        return 1 if 0 < len(text) <= _PATTERN else None
    text = text.replace("\r", r"\r").replace("\n", r"\n")
    if text in _QUADRATIC:
        return _QUADRATIC_COST
    simple = 0 < len(text) <= _PATTERN and _SIMPLE.fullmatch(text) is not None
    return 1 if simple or text in _PUBLISHED else None


def _post_processor(step: Any) -> int | None:
    if step["type"] in ("ByteLevel", "BertProcessing", "RobertaProcessing"):
        return 1
    pieces = step["single"]
    sequences = [piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece]
    added = sum(len(token["ids"]) for token in step["special_tokens"].values())
    plain = step["type"] == "TemplateProcessing" and sequences == ["A"]
    return 1 if plain and len(pieces) <= _MOST_STEPS and added <= _MOST_STEPS else None


def _model(content: Any) -> int | None:
    model, added = content["model"], content.get("added_tokens") or []
    vocabulary, word_piece = model["vocab"], model.get("type") == "WordPiece"
    tokens = vocabulary if isinstance(vocabulary, dict) else [token for token, _ in vocabulary]
    spelled = [token["content"] for token in added]
    affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    plain = (
        all(len(affix or "") <= (8 if word_piece else 0) for affix in affixes)
        and model.get("max_input_chars_per_word", 0) <= _WORD
        and max(map(len, [*tokens, *spelled]), default=0) <= _TOKEN
        and sum(map(len, spelled)) <= _ADDED_TOKENS
    )
    return 1 if plain else None
