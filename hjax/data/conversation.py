"""Chats as prompts, and the turns that answer them as the chat template writes them."""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hjax.data.tokenizer import Tokenizer
from hjax.errors import DataError, short_repr

Messages = list[dict[str, Any]]
# An answer that shares no beginning with real ones.
_OTHER_ANSWER = "\u00b7\u00b7"


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A prompt as a chat.

    Attributes:
      messages: as templates take them: dicts with `role`, `content`, `tool_calls` and so on.
      tools: definitions of the functions that the assistant may call.
      template_arguments: further variables of the chat template.
    """

    messages: Messages
    tools: list[Any] | None = None
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def render(
        self,
        tokenizer: Tokenizer,
        answer: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of the messages and of the messages `answer` after them.

        Raises:
          DataError: no chat template, or it refuses the messages.
        """
        given = {} if self.tools is None else {"tools": self.tools}
        variables = {**self.template_arguments, **given}
        return tokenizer.chat([*self.messages, *answer], add_generation_prompt, **variables)


def encode_example(
    tokenizer: Tokenizer,
    conversation: Conversation | None,
    prompt_tokens: list[int],
    responses: Sequence[str | Messages],
    notify: Callable[[str], None] = lambda remark: None,
    prompt_text: str | None = None,
) -> tuple[list[int], ...]:
    """Token ids of a prompt and of the responses to it.

    After a prompt that is text a response is its text, encoded as the continuation of the prompt
    where no token lies across both, and the tokenizer's EOS. After a chat it is
    what the template's rendering of the whole conversation has after the rendering of the prompt
    with its generation prompt, up to and including the token that ends the turn.

    Some templates write an earlier part differently where an answer follows. If only the generation
    prompt differs (it opens a `<think>` that the answer has not), the prompt ends where both agree.
    If the messages before do, the answer follows the prompt as rollouts see it.

    Args:
      tokenizer: of the model.
      conversation: the prompt as a chat; None for text or token ids.
      prompt_tokens: ids of the prompt as rollouts see it.
      responses: the content of an assistant's turn, or the messages that continue the chat.
      notify: called with a message about a template with such an exception.
      prompt_text: of a prompt that is text.

    Returns:
      the prompt's ids, then those of each response.

    Raises:
      DataError: the template refuses the messages, leaves out part of a response, or hides where
        it begins.
    """
    if conversation is None:
        end, found = response_end(tokenizer, is_chat=False), []
        for text in responses:
            if not isinstance(text, str):
                raise DataError(
                    f"the prompt is no chat, and an answer is {short_repr(text, 80)}; give both as "
                    "chat messages, or both as text (data.chat=True makes chats of prompts)"
                )
            whole = tokenizer.encode((prompt_text or "") + text)
            known = prompt_text is not None and whole[: len(prompt_tokens)] == prompt_tokens
            rest = whole[len(prompt_tokens) :]
            found.append((rest if known else tokenizer.encode(text, add_special=False)) + end)
        return (prompt_tokens, *found)
    turns = _LearnedTurns(tokenizer, conversation, notify)
    answers = [
        [{"role": "assistant", "content": one}] if isinstance(one, str) else one
        for one in responses
    ]
    return turns.encode(prompt_tokens, answers)


def response_end(tokenizer: Tokenizer, is_chat: bool) -> list[int]:
    """The id that ends a response, none where there is none: that of the template's plain turns
    after a chat, else the tokenizer's EOS."""
    ends = tokenizer.turn_ends.tokens if is_chat else ()
    if ends:
        return tokenizer.encode(ends[0], add_special=False)
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


class _LearnedTurns:
    """The responses to one prompt, as parts of the whole conversation's rendering."""

    def __init__(
        self, tokenizer: Tokenizer, conversation: Conversation, notify: Callable[[str], None]
    ):
        self._tokenizer, self._conversation, self._notify = tokenizer, conversation, notify
        self._prompt = conversation.render(tokenizer, add_generation_prompt=True)

    def encode(
        self, prompt_tokens: list[int], answers: Sequence[Messages]
    ) -> tuple[list[int], ...]:
        wholes = [
            self._conversation.render(self._tokenizer, answer, add_generation_prompt=False)
            for answer in answers
        ]
        starts = [self._start(whole) for whole in wholes]
        for answer, whole, (start, _) in zip(answers, wholes, starts, strict=True):
            own = [each for each in answer if each["role"] == "assistant"]
            check_rendered(own, whole[start:], f"tokenizer {self._tokenizer.name}")
        if not all(as_asked for _, as_asked in starts):  # the prompt that all wholes begin with
            shared = min(start for start, as_asked in starts if not as_asked)
            head = self._tokenizer.encode(wholes[0][:shared], add_special=False)
            prompt_tokens = head[-len(prompt_tokens) :]
            starts = [(shared, False)] * len(wholes)
        ids = [
            self._continuation(whole[:start], whole[start:])
            for whole, (start, _) in zip(wholes, starts, strict=True)
        ]
        return (prompt_tokens, *ids)

    def _start(self, whole: str) -> tuple[int, bool]:
        """Where the answer begins in the whole, and whether the prompt before it stays as it is."""
        prompt, name = self._prompt, self._tokenizer.name
        if whole.startswith(prompt):
            return len(prompt), True
        messages = self._conversation.render(self._tokenizer, add_generation_prompt=False)
        messages = os.path.commonprefix([messages, prompt])
        other = self._conversation.render(
            self._tokenizer,
            [{"role": "assistant", "content": _OTHER_ANSWER}],
            add_generation_prompt=False,
        )
        before = os.path.commonprefix([whole, other])
        shared = os.path.commonprefix([before, prompt])
        header = prompt[len(messages) :]
        if shared.startswith(messages):
            shared = self._whole_tokens(whole, shared, len(messages))
            self._notify(
                f"tokenizer {name}: its chat template asks with {header!r}, with which no answer "
                f"in its conversations begins; learned answers follow "
                f"{header[: len(shared) - len(messages)]!r}"
            )
            return len(shared), False
        found = before.rfind(header)
        if found < 0:
            raise DataError(
                f"tokenizer {name}: its chat template writes the prompt differently where an "
                f"answer follows, and answers do not begin with {short_repr(header, 80)}; take a "
                "template whose conversations only grow"
            )
        self._notify(
            f"tokenizer {name}: its chat template writes some prompts differently where an answer "
            "follows; learned answers follow the prompt as rollouts see it"
        )
        return found + len(header), True

    def _whole_tokens(self, whole: str, beginning: str, least: int) -> str:
        """The beginning of the whole, shortened until no token lies across its end."""
        ids = self._tokenizer.encode(whole, add_special=False)
        for length in range(len(beginning), least, -1):
            head = self._tokenizer.encode(whole[:length], add_special=False)
            if ids[: len(head)] == head:
                return whole[:length]
        return whole[:least]

    def _continuation(self, before: str, rest: str) -> list[int]:
        """Token ids of a turn up to its end, as they continue the text before it."""
        tokenizer = self._tokenizer
        rest, ended = tokenizer.turn_ends.cut(rest)
        end = [] if ended else response_end(tokenizer, is_chat=False)
        if not ended:
            self._notify(
                f"tokenizer {tokenizer.name}: its chat template ends an answer with "
                f"{tokenizer.turn_ends.tail!r}, in which is no token of its own; learned answers "
                + ("end in the tokenizer's EOS" if end else "have no end")
            )
        # After a newline: a tokenizer that adds a blank adds it before that.
        for context in (before, "\n"):
            known = tokenizer.encode(context, add_special=False)
            ids = tokenizer.encode(context + rest, add_special=False)
            if ids[: len(known)] == known:
                return ids[len(known) :] + end
        return tokenizer.encode(rest, add_special=False) + end


def check_rendered(messages: Sequence[Mapping[str, Any]], text: str, name: str) -> None:
    """Check that a rendering has every part of some messages; blanks may differ.

    Args:
      messages: as templates take them.
      text: the rendering.
      name: of the template, in errors.

    Raises:
      DataError: it lacks a content, a reasoning, a call or one of its arguments.
    """
    found = "".join(text.split())
    functions = [
        call.get("function", call) for each in messages for call in each.get("tool_calls") or []
    ]
    parts: list[tuple[str, str, int]] = []
    for message in messages:
        content = message.get("content") or ""
        texts = [content] if isinstance(content, str) else _strings(content, ("text",))
        thoughts = (part for text in texts for part in re.split("</?think>", text))
        parts += [("content", part, 1) for part in thoughts]
        parts.append(("reasoning_content", message.get("reasoning_content") or "", 1))
    names = [str(function.get("name")) for function in functions]
    parts += [("tool_calls", called, names.count(called)) for called in names]
    for function in functions:
        parts += [("tool_calls", part, 1) for part in _strings(function.get("arguments"))]
    for field, part, count in parts:
        forms = {part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1]}
        if part and all(found.count("".join(form.split())) < count for form in forms):
            raise DataError(
                f"{name}: its chat template leaves out {short_repr(part.strip(), 80)} of the "
                f"{field} of a learned turn; remove it from the data, or take a template that "
                "writes it"
            )


def _strings(value: Any, fields: Sequence[str] = ()) -> Iterator[str]:
    """The texts in nested objects and lists; `fields`: only those of these names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if not fields or key in fields:
                yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each, fields)
