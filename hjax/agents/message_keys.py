"""By what a call is recognised as going on from another: the normal form of its messages.

Clients echo an answer with other blanks in the arguments of its calls, without the ids of its calls
or without its thoughts. The ids that the policy drew are known anyway: a message is a key, never
the source of tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hjax.data.conversation import Conversation

# Thoughts at the beginning of a content; templates may have opened them in the prompt.
_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>(.*)", re.DOTALL)


class MessageKeys:
    """The keys of a conversation.

    Args:
      chat: the conversation.
      trust: whether an answer is known by its place, whatever the echo says.

    Attributes:
      digests: of the tools and variables with the first 0, 1, ... messages.
      thoughts: of each message; empty: none, or left out.
    """

    def __init__(self, chat: Conversation, trust: bool = False):
        variables = {**chat.template_arguments, "tools": chat.tools or []}
        self.digests = [_digest(b"", variables)]
        self.thoughts: list[str] = []
        for form, thought in _forms(chat.messages):
            known = ("assistant",) if trust and form[0] == "assistant" else form
            self.digests.append(_digest(self.digests[-1], known))
            self.thoughts.append("" if trust else thought)

    def begins(self, other: MessageKeys) -> bool:
        """Whether the other conversation begins with this one: the same messages, and the same
        thoughts where both have them."""
        size = len(self.thoughts)
        if size > len(other.thoughts) or self.digests[-1] != other.digests[size]:
            return False
        pairs = zip(self.thoughts, other.thoughts[:size], strict=True)
        return all(not one or not echoed or one == echoed for one, echoed in pairs)


def _forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """The normal form of each message, as ``read_messages`` returns it, and its thoughts."""
    asked: list[str] = []  # ids of the last answer's calls
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "assistant":
            thought = str(message.get("reasoning_content") or "")
            if not thought and (found := _THOUGHT.fullmatch(text)):
                thought, text = found.groups()
            calls = message.get("tool_calls", ())
            asked = [str(call.get("id", "")) for call in calls]
            called = tuple((c["function"]["name"], c["function"]["arguments"]) for c in calls)
            yield (role, text.strip(), called), thought.strip()
        elif role == "tool":
            name = message.get("tool_call_id")
            yield (role, asked.index(name) if name in asked else -1, text), ""
        else:
            yield (role, text), ""


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(before + text.encode(errors="surrogatepass"), digest_size=16).digest()
