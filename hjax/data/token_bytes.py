"""Token id to bytes, derived from the decoder in tokenizer.json (constrained decoding needs it).

Text is the concatenation of the tokens' bytes if the decoder treats each token alone. Such decoders
are GPT-2's byte-level one, SentencePiece-like ones (`▁` is a space, `<0x0A>` a byte), and none.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from hjax.errors import DataError

# Last step of a SentencePiece-like decoder: it drops the first space of the text.
_FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_Spell = Callable[[str], bytes]


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """The bytes of every token.

    Attributes:
      tokens: by id; empty for special tokens and unused ids.
      drops_space: whether decoding drops the first space of a text.
    """

    tokens: Sequence[bytes]
    drops_space: bool

    @classmethod
    def from_decoder(
        cls, decoder: Mapping[str, Any] | None, tokens: Mapping[int, str], name: str
    ) -> Self:
        """The bytes of ``tokens``.

        Args:
          decoder: the decoder section of a tokenizer.json.
          tokens: id to spelling, without special tokens.
          name: of the tokenizer, for messages.

        Raises:
          DataError: a decoder whose tokens' bytes depend on their neighbours, or an unknown one.
        """
        steps = _steps(decoder)
        kinds = [step["type"] for step in steps]
        drops_space = steps[-1:] == [_FIRST_SPACE] and "Fuse" in kinds
        rest = steps[:-1] if drops_space else steps
        if kinds == ["ByteLevel"]:
            spell: _Spell = _by_byte_names
        elif rest and all(map(_per_token, rest)):
            spell = _by_steps(rest)
        else:
            said = ", ".join(kinds) or "none"
            raise DataError(
                f"tokenizer {name}: its decoder ({said}) does not say which bytes a token stands "
                "for; byte-level and SentencePiece-like ones do"
            )
        size = max(tokens, default=-1) + 1
        table = [spell(tokens[i]) if i in tokens else b"" for i in range(size)]
        return cls(table, drops_space)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for each in decoder["decoders"] for step in _steps(each)]


def _per_token(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    return step["type"] in ("ByteFallback", "Fuse")


def _by_steps(steps: Sequence[Mapping[str, Any]]) -> _Spell:
    replaced = [
        (step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"
    ]
    falls_back = any(step["type"] == "ByteFallback" for step in steps)

    def spell(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        byte = _BYTE.fullmatch(token) if falls_back else None
        return bytes([int(byte[1], 16)]) if byte else token.encode()

    return spell


def _by_byte_names(token: str) -> bytes:
    """Decode GPT-2's byte-level spelling; a token with other characters (an added one) is text."""
    values = [_BYTES.get(character) for character in token]
    return token.encode() if None in values else bytes(v for v in values if v is not None)


def _byte_names() -> dict[str, int]:
    """GPT-2's character for each byte: printable Latin-1 is itself, the rest starts at U+0100."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_names()
