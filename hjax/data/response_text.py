"""Incremental detokenization: the text of a response as its tokens arrive, in whole characters."""

from collections.abc import Sequence

from hjax.data.tokenizer import Tokenizer

# Prompt tokens that are decoded along, so that the first word keeps its space.
CONTEXT_TOKENS = 32
# Most tokens that are held back for an incomplete character. A character has at most 4 bytes, so
# all but the last 3 tokens of a longer buffer are invalid UTF-8 and are released.
MAX_HELD_TOKENS, INCOMPLETE_TOKENS = 16, 3
_BROKEN = "\ufffd"


class ResponseText:
    """Decodes a response as its tokens come (streaming detokenizer).

    The returned pieces, joined, equal ``Tokenizer.decode_response`` of all tokens if these form
    whole characters. Invalid bytes are returned as U+FFFD, after a delay.

    Args:
      tokenizer: of the model.
      prompt: token ids before the response.
      skip_special: whether special tokens are left out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._context = list(prompt[-CONTEXT_TOKENS:])
        self._held: list[int] = []

    def feed(self, *tokens: int) -> str:
        """Add tokens; returns the text that is now final, usually theirs."""
        self._held += tokens
        text = self._text(self._held)
        if text and not text.endswith(_BROKEN):
            return self._release(len(self._held), text)
        if len(self._held) <= MAX_HELD_TOKENS:
            return ""
        settled = len(self._held) - INCOMPLETE_TOKENS
        return self._release(settled, self._text(self._held[:settled]))

    def close(self) -> str:
        """The remaining text, after the last token."""
        return self._release(len(self._held), self._text(self._held))

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode_response(self._context, tokens, self._skip_special)

    def _release(self, count: int, text: str) -> str:
        # Tokens without text (special ones) are no context for what follows.
        if text:
            self._context = self._held[:count]
        self._held = self._held[count:]
        return text
