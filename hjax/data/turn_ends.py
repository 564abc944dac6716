"""Where a chat template ends the assistant's turn, found by rendering a scripted conversation."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hjax.errors import DataError

# The assistant's text of the scripted conversation; no template writes it by itself.
_ANSWER = "The answer is 86420."
_CALL = {"name": "find", "arguments": {"of": _ANSWER}}
_TOOL = {
    "name": "find",
    "description": "Finds.",
    "parameters": {"type": "object", "properties": {"of": {"type": "string"}}},
}


class TurnEnds(NamedTuple):
    """What a chat template writes after the assistant's text.

    Attributes:
      tokens: texts of the tokens that end a turn, that of a plain answer first; empty if there are
        none.
      tail: everything that follows the text of the conversation's last turn, such as
        ``<end_of_turn>`` and a newline.
      added: finds the tokenizer's added tokens in a text.
    """

    tokens: tuple[str, ...] = ()
    tail: str = ""
    added: re.Pattern[str] = re.compile(r"(?!)")

    def cut(self, text: str) -> tuple[str, bool]:
        """A rendered turn without what follows its end, and whether it ends in a token."""
        places = [text.rfind(token) + len(token) for token in self.tokens if token in text]
        if places and not self.added.sub("", text[max(places) :]).strip():
            return text[: max(places)], True
        bare = text.rstrip()
        if any(found.end() == len(bare) for found in self.added.finditer(bare)):
            return bare, True  # such as a call of a tool, which ends in a token of its own
        kept = len(self.tail) - len(self.tail.rstrip()) if text.endswith(self.tail) else 0
        return text[: len(text) - kept], False


def find_turn_ends(chat: Callable[..., str], added_tokens: Sequence[str]) -> TurnEnds:
    """The ends of the assistant's turns; none where the template refuses the conversation.

    Args:
      chat: ``Tokenizer.chat``.
      added_tokens: texts that are one token each wherever they stand.
    """
    longest_first = sorted((t for t in added_tokens if t.strip()), key=len, reverse=True)
    added = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    question = {"role": "user", "content": "A question."}
    answer = {"role": "assistant", "content": _ANSWER}
    last = _after_answer(chat, [question, answer])
    if not last:
        return TurnEnds(added=added)
    # Followed by another turn: tells the end of the turn from that of the text.
    middle = _after_answer(chat, [question, answer, question])
    ends = added.findall(os.path.commonprefix([last, middle]))[-1:] or added.findall(last)[:1]
    function = {"id": "call00000", "type": "function", "function": _CALL}
    call = {"role": "assistant", "content": "", "tool_calls": [function]}
    after_call = _after_answer(
        chat, [question, call], tools=[{"type": "function", "function": _TOOL}]
    ).rstrip()
    closing = [found[0] for found in added.finditer(after_call) if found.end() == len(after_call)]
    if not any(end in after_call for end in ends):
        ends += closing
    return TurnEnds(tuple(ends), last, added)


def _after_answer(chat: Callable[..., str], messages: list[dict[str, Any]], **values: Any) -> str:
    """The rendered text after the last answer; empty if the template refuses the messages."""
    try:
        text = chat(messages, add_generation_prompt=False, **values)
    except DataError:
        return ""
    return text.rpartition(_ANSWER)[2] if _ANSWER in text else ""
