"""A tokenizer of the library `tokenizers`, whose file is untrusted, run within limits.

The parts of its file that are harmless by inspection run in this process. The others, and texts so
long that they may exceed a limit all the same, go to an isolated process.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hjax.data.limited_process import CHARACTERS, ComputationFailed, LimitedProcess
from hjax.data.tokenizer_inspection import proven_costs
from hjax.errors import DataError

if TYPE_CHECKING:
    import tokenizers

T = TypeVar("T")

# Most tokens of one text, and the growth up to which a text's length does not matter: NFC and names
# for bytes are 15.
TOKENS, MOST_GROWTH = 4 * 2**20, 16
# Without threads of its own, which would need address space, and backtraces.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"
}  # fmt: skip


class TokenizerBackend:
    """A tokenizer of the library, and the parts of its file that must run in isolation.

    Args:
      library: the tokenizer, without those parts; tokens may be added to it until the first text.
      costs: of each part of the file, see ``proven_costs``.
      isolated_parts: by name, the JSON of the parts that ``library`` lacks.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        costs: Mapping[str, int | None],
        isolated_parts: Mapping[str, Any] = {},
    ):
        self.library = library
        self._costs = dict(costs)
        self._isolated_parts = dict(isolated_parts)

    @classmethod
    def from_library(cls, library: tokenizers.Tokenizer) -> TokenizerBackend:
        """Of a tokenizer that was made in this process, not read from a tokenizer.json."""
        library.no_padding()
        library.no_truncation()
        return cls(library, proven_costs(json.loads(library.to_str())))

    @classmethod
    def from_json(cls, text: str, content: Mapping[str, Any]) -> TokenizerBackend:
        """Of a tokenizer.json.

        Args:
          text: of the file.
          content: the same, parsed; no key may come twice.

        Raises:
          DataError: the library cannot read it. The message has no subject.
        """
        import tokenizers

        costs = proven_costs(content)
        unproven = [name for name, cost in costs.items() if cost is None]
        parts = {name: content.get(name) for name in unproven if name != "model"}
        if unproven:  # what loads there within the limits loads here too
            _start_process(text).ask(b"{}")
            text = json.dumps({**content, **dict.fromkeys(parts)})
        try:
            library = without_panics(tokenizers.Tokenizer.from_str, text)
        except DataError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise DataError(" ".join(str(error).split())) from None
        # The file's padding and truncation settings would silently change what `encode` returns.
        library.no_padding()
        library.no_truncation()
        return cls(library, costs, parts)

    def to_json(self) -> str:
        """The tokenizer.json."""
        if not self._isolated_parts:
            return self.library.to_str(pretty=True)
        content = json.loads(self.library.to_str()) | self._isolated_parts
        return json.dumps(content, indent=2, ensure_ascii=False)

    @property
    def decoder(self) -> dict[str, Any] | None:
        """The JSON of the decoder; DataError if it may write much more than the tokens."""
        if (self._costs["decoder"] or MOST_GROWTH + 1) > MOST_GROWTH:
            raise DataError("its decoder is not known to be harmless; constraints need one that is")
        decoder = self.library.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    @property
    def decodes_here(self) -> bool:
        """Whether responses are decoded in this process, in a moment."""
        return self._most_tokens > 0

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without those that the post-processor adds.

        Raises:
          ComputationFailed: a limit was exceeded, or the library crashed.
          Exception: the library cannot encode the text.
        """
        if len(text) > self._most_characters:
            return self._process.ask(json.dumps({"encode": text}).encode())
        return without_panics(_encode, self.library, text)

    def decode(self, tokens: Sequence[int], skip_special: bool) -> str:
        """Text of token ids; raises as ``encode`` does."""
        if len(tokens) > self._most_tokens:
            request = {"decode": tokens, "skip_special": skip_special}
            return self._process.ask(json.dumps(request).encode())
        return without_panics(self.library.decode, tokens, skip_special)

    def added_prefix(self) -> list[int]:
        """Ids that the post-processor puts before a text (BOS); what it appends is ignored."""
        if not self._most_characters:
            return self._process.ask(b'{"prefix": true}')
        return without_panics(_added_prefix, self.library)

    @functools.cached_property
    def _most_characters(self) -> int:
        """Length of the texts that are encoded in this process: any where they grow little."""
        parts = ("normalizer", "pre_tokenizer", "post_processor", "model")
        cost = math.prod(self._costs[name] or CHARACTERS + 1 for name in parts)
        return sys.maxsize if cost <= MOST_GROWTH else CHARACTERS // cost

    @functools.cached_property
    def _most_tokens(self) -> int:
        """Number of tokens that are decoded in this process."""
        longest = max(map(len, self.library.get_vocab(with_added_tokens=True)), default=0)
        cost = self._costs["decoder"]
        return 0 if cost is None else CHARACTERS // (cost * max(longest + 1, 1))

    @functools.cached_property
    def _process(self) -> LimitedProcess:
        return _start_process(self.to_json())

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_process"}


def _start_process(text: str) -> LimitedProcess:
    entry = "hjax.data.tokenizer_backend:make_tokenizer"
    return LimitedProcess(entry, text.encode(), _ENVIRONMENT)


def make_tokenizer(text: bytes) -> Callable[[bytes], Any]:
    """Return the isolated process's function of a request in JSON, for a tokenizer.json."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where a panic prints
    import tokenizers

    library = tokenizers.Tokenizer.from_str(text.decode())
    library.no_padding()
    library.no_truncation()

    def compute(request: bytes) -> Any:
        given = json.loads(request)
        if "encode" in given:
            return _encode_limited(library, given["encode"])
        if "decode" in given:
            text = library.decode(given["decode"], skip_special_tokens=given["skip_special"])
            return _limited(text, CHARACTERS, "characters of text")
        return _added_prefix(library) if "prefix" in given else None

    return compute


def _encode_limited(library: tokenizers.Tokenizer, text: str) -> list[int]:
    if library.normalizer is not None:
        normalized = library.normalizer.normalize_str(text)
        _limited(normalized, CHARACTERS, "characters of normalized text")
    ids = _encode(library, _limited(text, CHARACTERS, "characters"))
    return _limited(ids, TOKENS, "tokens")


def _limited(value: Any, most: int, what: str) -> Any:
    if len(value) > most:
        raise MemoryError(f"{len(value)} {what}, at most {most}")
    return value


def _encode(library: tokenizers.Tokenizer, text: str) -> list[int]:
    # `encode` holds the GIL, and keeps offsets that nobody asks for: a sixth of its time.
    [found] = library.encode_batch_fast([text], add_special_tokens=False)
    return found.ids


def _added_prefix(library: tokenizers.Tokenizer) -> list[int]:
    # By id: the library gives them in another order each time.
    vocabulary = library.get_vocab(with_added_tokens=False)
    added = library.get_added_tokens_decoder().keys()
    for probe in ("a", *sorted(vocabulary, key=vocabulary.__getitem__)):
        try:
            plain = library.encode(probe, add_special_tokens=False).ids
        except Exception:  # the probe is outside the alphabet
            continue
        if plain and added.isdisjoint(plain):  # BOS itself says nothing of what is prepended
            full = library.encode(probe, add_special_tokens=True).ids
            starts = range(len(full) - len(plain) + 1)
            return full[: next(i for i in starts if full[i : i + len(plain)] == plain)]
    return []


def without_panics(compute: Callable[..., T], *arguments: Any) -> T:
    """The result; a panic of the library, which is no ``Exception``, becomes ComputationFailed."""
    try:
        return compute(*arguments)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ComputationFailed(f"crashes ({' '.join(str(error).split())[:500]})") from None
