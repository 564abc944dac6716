"""The calls of an agent's session as a tree, and the rows that they make.

A call goes on from another if its messages are that one's, its answer and more. Then its prompt is
what that one had and drew, and the ids that the template writes for what is new: nothing that the
policy drew is encoded again. Any other call is rendered whole, and begins a tree of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.agents.message_keys import MessageKeys
from hjax.data.conversation import Conversation
from hjax.environments.episode import DrawnTurn, EpisodeLimits, EpisodeRow, Turn
from hjax.environments.episode_pool import EpisodeAnswer
from hjax.environments.episode_text import ObservationEncoder
from hjax.errors import DataError, truncate

# What a call is: the agent's own; one whose answer the agent dropped, or a sample that it did not
# go on with; one without tools in a session whose others have tools (a title, a summary).
AGENT, DISCARDED, AUXILIARY = LABELS = ("agent", "discarded", "auxiliary")
# Characters of a text that is only looked at.
_SHOWN = 4000
HISTORIES, ECHOES = ("sampled", "template"), ("exact", "trust")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a call stands in the tree.

    Attributes:
      chat: its messages and tools.
      keys: of the chat.
      prompt: its ids.
      parent: number of the call that it goes on from; None: of none.
      root: number of the first call of its tree; None: it is the first.
      head: ids of that one's prompt that stand in a row's prompt.
    """

    chat: Conversation
    keys: MessageKeys
    prompt: tuple[int, ...]
    parent: int | None
    root: int | None
    head: int


@dataclasses.dataclass(frozen=True)
class AgentCall:
    """A call that was answered.

    Attributes:
      number: in the session, from 0.
      place: where it stands.
      drawn: ids that the policy drew, and their log-probs.
      answer: the message that the agent got.
      keys: of the chat with the answer.
      text: of the ids drawn.
      asked: what the request asked of sampling, and did not get.
    """

    number: int
    place: Placement
    drawn: DrawnTurn
    answer: Mapping[str, Any]
    keys: MessageKeys
    text: str
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and what was drawn."""
        return (*self.place.prompt, *self.drawn.tokens)


class CallTree:
    """The calls of one session.

    Args:
      encoder: of chats, for the policy's tokenizer.
      limits: of a row's tokens.
      history: ``sampled``: a call goes on from what was drawn; ``template``: where a user's message
        follows, the chat template writes all of it anew, as a served model sees it.
      echo: ``exact``: an echoed answer must be the answer; ``trust``: its place alone decides.

    Attributes:
      calls: those that were answered, in order.
    """

    def __init__(
        self,
        encoder: ObservationEncoder,
        limits: EpisodeLimits,
        *,
        history: str = "sampled",
        echo: str = "exact",
    ):
        self.calls: list[AgentCall] = []
        self._encoder, self._limits = encoder, limits
        self._rendered_anew, self._trust = history == "template", echo == "trust"

    @property
    def most_tokens(self) -> int:
        """Of any call's prompt and answer."""
        most = self._limits.prompt_tokens + self._limits.response_tokens
        return min(most, self._limits.row_tokens or most)

    def place(self, chat: Conversation) -> Placement:
        """Where a call with these messages stands.

        Raises:
          DataError: the chat template refuses them.
        """
        keys = MessageKeys(chat, self._trust)
        for call in self._candidates(keys):
            if (prompt := self._continued(call, chat)) is not None:
                return self._below(call, chat, keys, prompt)
        prompt = tuple(self._encoder.begin(chat))
        linked = [each for each in self.calls if _begins(each.ids, prompt)]
        if linked:
            return self._below(max(linked, key=lambda each: len(each.ids)), chat, keys, prompt)
        head = min(len(prompt), self._limits.prompt_tokens)
        return Placement(chat, keys, prompt, None, None, head)

    def room(self, place: Placement) -> int:
        """Most tokens of the call's prompt and answer."""
        room = place.head + self._limits.response_tokens
        return min(room, self._limits.row_tokens or room)

    def add(
        self,
        place: Placement,
        drawn: DrawnTurn,
        answer: Mapping[str, Any],
        asked: Mapping[str, Any] | None = None,
    ) -> AgentCall:
        """Record a call that was answered.

        Args:
          answer: the message that the agent got, as templates take messages.
          asked: what it asked of sampling, and did not get.
        """
        whole = dataclasses.replace(place.chat, messages=[*place.chat.messages, dict(answer)])
        text = self._encoder.tokenizer.decode_response(place.prompt, drawn.tokens)
        keys = MessageKeys(whole, self._trust)
        call = AgentCall(len(self.calls), place, drawn, answer, keys, text, dict(asked or {}))
        self.calls.append(call)
        return call

    def labels(self) -> list[str]:
        """What each call is, of LABELS."""
        parents = {call.place.parent for call in self.calls}
        some_have_tools = any(call.place.chat.tools for call in self.calls)
        found = []
        for call in self.calls:
            if call.number not in parents and self._was_passed_over(call, parents):
                found.append(DISCARDED)
            elif some_have_tools and not call.place.chat.tools:
                found.append(AUXILIARY)
            else:
                found.append(AGENT)
        return found

    def rows(self, trained: Sequence[bool]) -> list[EpisodeRow]:
        """The rows of the calls that are learned from. Each of these calls is a turn of one row; a
        branch's row has the calls before it as context.

        Args:
          trained: whether each call is.
        """
        rows: list[EpisodeRow] = []
        for call, number in zip(self.calls, self.row_numbers(trained), strict=True):
            if number is None:
                continue
            place = call.place
            if number == len(rows):
                ids, head = list(place.prompt), place.head
                text = self._encoder.tokenizer.decode(ids, skip_special=False)
                row = EpisodeRow(ids[:head], text, context=ids[head:])
                rows.append(row)
            else:
                row = rows[number]
                assert place.parent is not None
                before = self.calls[place.parent]
                row.turns[-1].observation = list(place.prompt[len(before.ids) :])
                row.turns[-1].observed = _new_text(before, call)
            drawn = call.drawn
            row.turns.append(Turn(drawn.tokens, drawn.logprobs, call.text, forced=drawn.forced))
        return rows

    def row_numbers(self, trained: Sequence[bool]) -> list[int | None]:
        """Of each call the number of the row that it is a turn of; None: it is not learned from."""
        found: list[int | None] = []
        tails: dict[int | None, int] = {}  # rows, by the call that is their last
        count = 0
        for call in self.calls:
            if not trained[call.number]:
                found.append(None)
                continue
            row = tails.pop(call.place.parent, count)
            count += row == count
            tails[call.number] = row
            found.append(row)
        return found

    def call_records(self, trained: Sequence[bool]) -> list[dict[str, Any]]:
        """The calls as JSON values, to be looked at: ``number``, ``parent``, ``label``, ``row``
        (None: not learned from), ``said`` (role and text of the messages that are new), ``answer``,
        ``tokens`` and ``forced`` of it. Long texts are cut."""
        found = []
        told = zip(self.calls, self.labels(), self.row_numbers(trained), strict=True)
        for call, label, row in told:
            place, messages = call.place, call.place.chat.messages
            if place.parent is not None:
                messages = messages[len(self.calls[place.parent].place.chat.messages) + 1 :]
            said = [[each["role"], truncate(each["content"], _SHOWN)] for each in messages]
            found.append(
                {
                    "number": call.number,
                    "parent": place.parent,
                    "label": label,
                    "row": row,
                    "said": said,
                    "answer": truncate(call.text, _SHOWN),
                    "tokens": len(call.drawn.tokens),
                    "forced": sum(call.drawn.forced),
                }
            )
        return found

    def _candidates(self, keys: MessageKeys) -> list[AgentCall]:
        """The calls that a chat may go on from, longest first, the newest of equals."""
        found = [
            call
            for call in self.calls
            if len(call.keys.thoughts) < len(keys.thoughts) and call.keys.begins(keys)
        ]
        return sorted(found, key=lambda call: (-len(call.keys.thoughts), -call.number))

    def _continued(self, call: AgentCall, chat: Conversation) -> tuple[int, ...] | None:
        """The prompt of a chat that goes on from a call; None: its template cannot continue it."""
        new = chat.messages[len(call.place.chat.messages) + 1 :]
        if new[0]["role"] == "assistant":
            return None
        if self._rendered_anew and any(message["role"] == "user" for message in new):
            return None
        calls = call.answer.get("tool_calls", ())
        readable = calls and all(isinstance(c["function"]["arguments"], dict) for c in calls)
        following = EpisodeAnswer(messages=[dict(call.answer), *new] if readable else new)
        try:
            drawn, ended = call.drawn.tokens, call.drawn.ended
            bridge = self._encoder.continuation(
                call.place.chat, drawn, ended, following, rewritten=True
            )
        except DataError:
            return None
        return (*call.ids, *bridge)

    def _below(
        self, parent: AgentCall, chat: Conversation, keys: MessageKeys, prompt: tuple[int, ...]
    ) -> Placement:
        root = parent.number if parent.place.root is None else parent.place.root
        return Placement(chat, keys, prompt, parent.number, root, parent.place.head)

    def _was_passed_over(self, call: AgentCall, parents: set[int | None]) -> bool:
        """Whether the agent went on from another answer to the same prompt, or with these messages
        and without this answer."""
        size = len(call.place.chat.messages)
        for other in self.calls:
            if other is call:
                continue
            if other.number in parents and other.place.prompt == call.place.prompt:
                return True
            messages = other.place.chat.messages
            longer = other.number > call.number and len(messages) > size
            if longer and messages[size]["role"] != "assistant":
                if call.place.keys.begins(other.place.keys):
                    return True
        return False


def _begins(ids: tuple[int, ...], prompt: tuple[int, ...]) -> bool:
    """Whether a prompt begins with these ids, and goes on."""
    size = len(ids)
    return size < len(prompt) and prompt[size - 1] == ids[-1] and prompt[:size] == ids


def _new_text(before: AgentCall, call: AgentCall) -> str:
    """The text of the messages between two calls."""
    new = call.place.chat.messages[len(before.place.chat.messages) + 1 :]
    return "\n".join(message["content"] for message in new)
