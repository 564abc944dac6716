"""Constrained (guided, grammar) decoding: token bitmasks by llguidance's matchers, on the host.

A token is allowed if the response's bytes and its own are a prefix of some text that matches, in
whatever tokens the tokenizer would spell that text. So the model's distribution is sampled at each
position, over the allowed tokens. Bytes are compared: several tokens may make up a character.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hjax.data.token_bytes import TokenBytes
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.rollout.constraint import Constraint
from hjax.rollout.sampling_params import SamplingParams

# Prefix of the finish reason of a response that does not match and that no token may continue.
FAILED = "constraint: "
# Allow all tokens that fit the grammar, not only the tokenizer's own spelling.
_ALL_TOKENS = '%llguidance {"no_forcing": true}\n'
# Whitespace in JSON. If any amount were allowed, models with nothing to say would draw it for ever.
JSON_WHITESPACE = {"x-guidance": {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}}


def bitmask_words(vocab: int) -> int:
    """uint32 words of a bitmask with a bit for each token."""
    return -(-vocab // 32)


class ConstraintCompiler:
    """Compiles constraints to matchers for a model's vocabulary; callable from any thread.

    Args:
      tokenizer: of the model; None: constraints are refused.
      vocab: vocabulary size.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab: int):
        self._tokenizer, self._vocab = tokenizer, vocab
        self._bytes: TokenBytes | None = None
        self._tokens: Any = None  # llguidance's tokenizer, made on first use
        self._lock = threading.Lock()

    def matcher(
        self, constraint: Constraint, options: SamplingParams, prompt: Sequence[int]
    ) -> ConstraintMatcher:
        """The matcher of a response. Compiling takes a moment (1 to 30 ms on GPT-2's vocabulary)
        and releases the interpreter's lock.

        Args:
          constraint: what the response must match.
          options: sampling options; tokens that they forbid are not allowed.
          prompt: token ids before the response, which decide whether its first space is text.

        Raises:
          ConfigError: a constraint that llguidance refuses or nothing matches, no tokenizer, one
            whose tokens' bytes are unknown, no llguidance; forced tokens that do not match.
        """
        if self._tokenizer is None:
            raise ConfigError(
                "a constraint is about text, and this model has no tokenizer; leave it out"
            )
        with self._lock:
            self._prepare(self._tokenizer)
        assert self._bytes is not None
        drops_space = self._bytes.drops_space and not self._tokenizer.decode(prompt)
        return ConstraintMatcher(self._grammar(constraint, drops_space), self._vocab, options)

    def _prepare(self, tokenizer: Tokenizer) -> None:
        if self._tokens is not None:
            return
        try:
            import llguidance
        except ModuleNotFoundError:
            raise ConfigError(
                "llguidance is not installed, which constraints need; the extra `constraints` has "
                "it: pip install 'hjax[constraints]'"
            ) from None
        self._bytes = tokenizer.token_bytes()
        table = self._bytes.tokens[: self._vocab]
        self._spaces = _bits([i for i, own in enumerate(table) if own[:1] == b" "], self._vocab)
        vocabulary: Any = _Vocabulary(self._bytes.tokens, self._vocab)
        self._tokens = llguidance.LLTokenizer(vocabulary)

    def _grammar(self, constraint: Constraint, drops_space: bool) -> Any:
        """Compiled for each response anew: a matcher's work counts towards its limits, so responses
        that shared a grammar would not end alike."""
        if constraint.grammar is None:
            return self._compile(constraint, _source(constraint, drops_space))
        made = self._compile(constraint, _wrap_lark(constraint.grammar, "start: @value"))
        if not drops_space:
            return made
        # The text lacks the response's first space. Where the text may begin with one, another
        # comes before it.
        optional = "" if (_mask(made, self._vocab) & self._spaces).any() else "?"
        return self._compile(
            constraint, _wrap_lark(constraint.grammar, f'start: " "{optional} @value')
        )

    def _compile(self, constraint: Constraint, source: str) -> Any:
        import llguidance

        limits = llguidance.LLParserLimits(verbose_errors=False)
        made = llguidance.LLMatcher(self._tokens, source, log_level=0, limits=limits)
        if made.is_error():
            raise ConfigError(f"{_name(constraint)}: {_reason(made.get_error())}")
        return made


class ConstraintMatcher:
    """Tracks which tokens may come next in one response. Made by ``ConstraintCompiler``.

    Attributes:
      bitmask: uint32 [bitmask_words(vocab)], bit i % 32 of word i // 32 for token i: whether
        it may come next.
      forced: of each token so far, whether no other might have come.
    """

    def __init__(self, grammar: Any, vocab: int, options: SamplingParams):
        self._grammar, self._vocab = grammar, vocab
        self._there = _bits(slice(vocab), vocab)
        self._stops = _bits(list(options.stop), vocab)
        self._banned = _bits(list(options.banned), vocab)
        self._stop, self._min_tokens = frozenset(options.stop), options.min_tokens
        self._position = 0
        self.forced: list[bool] = []
        self.bitmask = self._next_bitmask()
        self._check(options.forced)

    def _check(self, forced: Sequence[int]) -> None:
        if not self.bitmask.any():
            raise ConfigError(
                "constraint: no token may begin a response: nothing matches, or its first tokens "
                "are not in the vocabulary or forbidden by bad, logit_bias or min_tokens"
            )
        tried = self._grammar.deep_copy()
        for at, token in enumerate(forced):
            if not (tried.is_accepting() if token in self._stop else tried.consume_token(token)):
                raise ConfigError(
                    f"forced token {token} at position {at}: the constraint does not allow it there"
                )

    def advance(self, tokens: Sequence[int], finish: str = "") -> str:
        """Advance by tokens that were drawn.

        Args:
          tokens: in order.
          finish: ``stop`` if the last is a stop token, ``length`` if no more may be drawn, or "".

        Returns:
          The finish reason: ``stop`` if the text matches and no token may follow, ``constraint:``
            and the reason if it does not match and no token may follow, else ``finish``.
        """
        self._position += len(tokens)
        alone = int(np.bitwise_count(self.bitmask).sum()) == 1
        self.forced += [alone] * len(tokens)  # the engine draws one between two bitmasks
        if finish == "stop":
            return finish
        for token in tokens:
            self._grammar.consume_token(token)
        self.bitmask = self._next_bitmask()
        if self._grammar.is_accepting() and (
            self._grammar.is_stopped() if finish else not self.bitmask.any()
        ):
            return "stop"
        if not finish and not self.bitmask.any():
            return FAILED + self._why()
        return finish

    def _next_bitmask(self) -> np.ndarray:
        bitmask = _mask(self._grammar, self._vocab) & self._there & ~self._stops
        if self._grammar.is_accepting() and self._position >= self._min_tokens:
            bitmask |= self._stops
        return bitmask & ~self._banned

    def _why(self) -> str:
        error = self._grammar.get_error()
        if not error or error.startswith("NoExtension"):
            return "no token that may be drawn goes on to a text that matches"
        return f"it grew beyond what a matcher holds ({_first_line(error)})"


class _Vocabulary:
    """A vocabulary as llguidance reads it; its tokens are UTF-8 only."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = None  # llguidance adds one
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[bytes], vocab: int):
        missing = max(vocab - len(tokens), 0)
        # llguidance marks special tokens by a first byte of 0xFF, which no text has.
        self.tokens = [b"" if each[:1] == b"\xff" else each for each in tokens[:vocab]]
        self.tokens += [b""] * missing

    def __call__(self, text: str) -> list[int]:
        return []  # used only by grammars that force a spelling; these do not


def _source(constraint: Constraint, drops_space: bool) -> str:
    """The grammar as llguidance reads it.

    With ``drops_space`` the response's bytes may begin with a space that its text does not have.
    """
    import llguidance

    if constraint.regex is not None:
        pattern = llguidance.regex_to_lark(constraint.regex, "")
        body = f"start: TEXT\nTEXT: /{pattern}/\n"
        if drops_space:
            body = f"start: TEXT\nTEXT: / / OWN | OWN & /([^ ](?s:.)*)?/\nOWN: /{pattern}/\n"
        return json.dumps({"grammars": [{"lark_grammar": _ALL_TOKENS + body}]})
    schema = json.loads(constraint.json_schema or "") | JSON_WHITESPACE
    body = 'start: " "? @value' if drops_space else "start: @value"
    grammars = [{"lark_grammar": _ALL_TOKENS + body}, {"name": "value", "json_schema": schema}]
    return json.dumps({"grammars": grammars})


def _wrap_lark(grammar: str, body: str) -> str:
    """The source of ``body`` around a Lark grammar, which it refers to as ``@value``."""
    grammars = [{"lark_grammar": _ALL_TOKENS + body}]
    grammars += [{"name": "value", "lark_grammar": f"{grammar}\n{_ALL_TOKENS}"}]
    return json.dumps({"grammars": grammars})


def _mask(grammar: Any, vocab: int) -> np.ndarray:
    """uint32 [bitmask_words(vocab)], the tokens that may come next; further bits are undefined."""
    # llguidance counts one more token, the end.
    found = np.zeros(bitmask_words(vocab + 1), np.uint32)
    grammar.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
    return found[: bitmask_words(vocab)]


def _name(constraint: Constraint) -> str:
    kinds = (field.name for field in dataclasses.fields(constraint))
    kind, text = next((k, x) for k in kinds if (x := getattr(constraint, k)) is not None)
    text = " ".join(text[:100].split())
    return f"{kind}={text if len(text) <= 60 else text[:57] + '...'}"


def _reason(error: str) -> str:
    """The cause in a message of llguidance's, without the pattern and line that it quotes."""
    if error.startswith("panic: missing special token"):
        return "a special token has no text; leave it out"
    own = re.search(r"^error: (.*)$", error, re.MULTILINE)
    if own:
        return own[1]
    # Drop the place in the grammar, and an option that hjax does not expose.
    return re.sub(r"^.*\(in regex\): |; .* in regex /.*$|\. Enable '.*$", "", _first_line(error))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _bits(tokens: list[int] | slice, vocab: int) -> np.ndarray:
    table = np.zeros(bitmask_words(vocab) * 32, np.uint8)
    table[tokens] = 1
    return np.packbits(table, bitorder="little").view("<u4").astype(np.uint32)
