"""Observations as token ids: what a row has before and between the policy's turns.

Ids that the policy drew are never decoded and encoded again. An observation's ids follow them: the
end of the turn where the policy has not drawn it, what the chat template writes between two turns,
the observation, and the header of the next turn.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from hjax.data.conversation import response_end
from hjax.data.tokenizer import Tokenizer
from hjax.errors import DataError, short_repr

Messages = list[dict[str, Any]]
# Stands for a turn of the policy where a template renders what follows it.
_TURN = "\u00b7turn\u00b7"


class ObservationEncoder:
    """Encodes observations for one tokenizer.

    Args:
      tokenizer: of the model that plays.
      chat: whether observations are user messages of a chat, by the tokenizer's template; else they
        are text as it is.
      system: system message of the chat; empty: none.
      variables: further variables of the chat template.

    Raises:
      DataError: a chat, and the template cannot continue one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: bool = False,
        system: str = "",
        variables: dict[str, Any] | None = None,
    ):
        self.tokenizer, self.chat = tokenizer, chat
        self._system, self._variables = system, variables or {}
        self._end = response_end(tokenizer, is_chat=chat)
        if chat:
            self._between("1", "2")

    def begin(self, text: str) -> list[int]:
        """Token ids of a first observation: the prompt of a row."""
        if not self.chat:
            return self.tokenizer.encode(text)
        rendered = self.tokenizer.chat(self._first(text), True, **self._variables)
        return self.tokenizer.encode(rendered, add_special=False)

    def continuation(self, first: str, drawn: Sequence[int], ended: bool, text: str) -> list[int]:
        """Token ids that follow a turn of the policy.

        Args:
          first: text of the row's first observation.
          drawn: ids of the turn.
          ended: whether the turn has ended: by a token, or without chat by a stop string.
          text: of the observation.
        """
        has_end = bool(drawn) and drawn[-1] in self.tokenizer.eos_ids
        if not self.chat:
            return ([] if ended or has_end else self._end) + self._after_a_turn(text)
        ids = self._after_a_turn(self._between(first, text))
        if self._end and ids[: len(self._end)] == self._end and has_end:
            return ids[len(self._end) :]
        return ids

    def _first(self, text: str) -> Messages:
        before = [{"role": "system", "content": self._system}] if self._system else []
        return [*before, {"role": "user", "content": text}]

    def _between(self, first: str, text: str) -> str:
        """What the template writes from the end of a turn to the header of the next.

        Raises:
          DataError: it writes earlier messages differently where others follow, or loses them.
        """
        messages, tokenizer = self._first(first), self.tokenizer
        turn, answer = {"role": "assistant", "content": _TURN}, {"role": "user", "content": text}
        alone = [tokenizer.chat(messages, asks, **self._variables) for asks in (False, True)]
        before = os.path.commonprefix(alone)
        whole = tokenizer.chat([*messages, turn, answer], True, **self._variables)
        head, found, rest = whole.partition(_TURN)
        if not head.startswith(before) or not found or _TURN in rest or text.strip() not in rest:
            raise DataError(
                f"tokenizer {tokenizer.name}: its chat template cannot continue a chat after "
                f"{short_repr(before, 80)}: it writes {short_repr(whole, 160)}; take a template "
                "that only appends (of Mistral's, one whose system message stays first), leave the "
                "system message out, or set data.chat=False"
            )
        return rest

    def _after_a_turn(self, text: str) -> list[int]:
        """Token ids of a text as what follows another: no BOS, and no blank in front."""
        alone = self.tokenizer.encode(text, add_special=False)
        with contextlib.suppress(DataError):  # a newline may be outside a small vocabulary
            known = self.tokenizer.encode("\n", add_special=False)
            ids = self.tokenizer.encode("\n" + text, add_special=False)
            return ids[len(known) :] if ids[: len(known)] == known else alone
        return alone
