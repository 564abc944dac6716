"""The text of a response as its tokens come, in whole characters."""

from collections.abc import Sequence

from hjax.data.tokenizer import Tokenizer

# Tokens of the prompt that are decoded along, so that a first word keeps its space.
CONTEXT = 32
# Tokens that may wait for the rest of a character: one has at most 4 bytes, so that the first of
# more than these are no beginning of any.
WAITING, UNFINISHED = 16, 3
_BROKEN = "\ufffd"


class ResponseText:
    """Text that tokens add to a prompt, token by token.

    What is given out, joined, is ``Tokenizer.decode_response`` of all tokens, as long as they are
    whole characters. Bytes that belong to no character come out as U+FFFD, late.

    Args:
      tokenizer: of the model.
      prompt: token ids before the response.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._before = list(prompt[-CONTEXT:])
        self._waiting: list[int] = []

    def feed(self, token: int) -> str:
        """The text that is certain now that ``token`` has come, mostly the token's."""
        self._waiting.append(token)
        text = self._text(self._waiting)
        if text and not text.endswith(_BROKEN):
            return self._give(len(self._waiting), text)
        if len(self._waiting) <= WAITING:
            return ""
        settled = len(self._waiting) - UNFINISHED
        return self._give(settled, self._text(self._waiting[:settled]))

    def close(self) -> str:
        """What is left when no more tokens come."""
        return self._give(len(self._waiting), self._text(self._waiting))

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode_response(self._before, tokens)

    def _give(self, count: int, text: str) -> str:
        # Tokens without text (special ones) are no context for what follows.
        if text:
            self._before = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return text
