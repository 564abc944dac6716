"""Response models: OpenAI's JSON of completions and chat completions, whole and in chunks."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from hjax.data.tool_call_forms import CallPart
from hjax.serving.detokenizer import Delta, DrawnToken
from hjax.serving.request_models import ParsedRequest

_BROKEN = "\ufffd"


class ResponseForm:
    """The JSON answers to one request, in a format of OpenAI's.

    Args:
      model: the name under which it is served.
      parsed: the request.
    """

    kind, chunk_kind, prefix = "", "", ""
    opens = False  # whether a stream begins with an empty chunk

    def __init__(self, model: str, parsed: ParsedRequest):
        self.parsed = parsed
        self._model = model
        self._id = f"{self.prefix}-{secrets.token_hex(16)}"
        self._created = int(time.time())

    def whole(self, deltas: Sequence[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        """The complete answer, of all of each response."""
        choices = [
            {"index": index}
            | self._content(delta)
            | self._rest(index, delta)
            | self._ids(index, delta, True)
            for index, delta in enumerate(deltas)
        ]
        return self._head(self.kind) | {"choices": choices, "usage": usage} | self._prompt_ids()

    def chunk(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        """A chunk with what is new of a response."""
        choice = (
            {"index": index}
            | self._new(delta, first)
            | self._rest(index, delta)
            | self._ids(index, delta, first)
        )
        ids = self._prompt_ids() if first else {}
        return self._head(self.chunk_kind) | {"choices": [choice]} | self._no_usage() | ids

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream with usage."""
        return self._head(self.chunk_kind) | {"choices": [], "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _no_usage(self) -> dict[str, Any]:
        return {"usage": None} if self.parsed.include_usage else {}

    def _rest(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if self.parsed.logprobs is not None:
            logprobs = self._logprobs((*delta.prompt, *delta.drawn))
        return {"logprobs": logprobs, "finish_reason": delta.finish or None}

    def _ids(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        """Token ids, under vLLM's names."""
        if not self.parsed.token_ids:
            return {}
        ids = {"token_ids": [drawn.id for drawn in delta.drawn]}
        if first:
            ids["prompt_token_ids"] = list(self.parsed.prompt_of(index).tokens)
        return ids

    def _prompt_ids(self) -> dict[str, Any]:
        """The only prompt's token ids, beside the choices."""
        return {}

    def _content(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _new(self, delta: Delta, first: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, drawn: Sequence[DrawnToken]) -> dict[str, Any]:
        raise NotImplementedError


class CompletionForm(ResponseForm):
    """/v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _content(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text}

    def _new(self, delta: Delta, first: bool) -> dict[str, Any]:
        return self._content(delta)

    def _logprobs(self, drawn: Sequence[DrawnToken]) -> dict[str, Any]:
        return {
            "tokens": [each.text for each in drawn],
            "token_logprobs": [each.logprob for each in drawn],
            "top_logprobs": [_by_text(each) for each in drawn] if self.parsed.logprobs else None,
            "text_offset": [each.offset for each in drawn],
        }


class ChatForm(ResponseForm):
    """/v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    opens = True

    def _prompt_ids(self) -> dict[str, Any]:
        ids = list(self.parsed.prompts[0].tokens)
        return {"prompt_token_ids": ids} if self.parsed.token_ids else {}

    def _content(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.calls:
            message["content"] = delta.text or None
            message["tool_calls"] = [self._call(part) for part in delta.calls]
        return {"message": message}

    def _new(self, delta: Delta, first: bool) -> dict[str, Any]:
        new: dict[str, Any] = {"role": "assistant"} if first else {}
        if delta.text or first:
            new["content"] = delta.text
        if delta.calls:
            new["tool_calls"] = [{"index": part.index} | self._call(part) for part in delta.calls]
        return {"delta": new}

    def _call(self, part: CallPart) -> dict[str, Any]:
        """A tool call, or what is new of one that has begun."""
        if not part.id:
            return {"function": {"arguments": part.arguments}}
        function = {"name": part.name, "arguments": part.arguments}
        return {"id": part.id, "type": "function", "function": function}

    def _logprobs(self, drawn: Sequence[DrawnToken]) -> dict[str, Any]:
        content = [
            _token(each.text, each.logprob)
            | {"top_logprobs": [_token(*most) for most in each.top[: self.parsed.logprobs]]}
            for each in drawn
        ]
        return {"content": content, "refusal": None}


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    # The bytes of a partial character are not known here.
    known = None if _BROKEN in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": known}


def _by_text(drawn: DrawnToken) -> dict[str, float] | None:
    """Log-probs of the top tokens and the drawn one; of several with one text the likeliest."""
    if drawn.logprob is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in sorted(drawn.top, key=lambda most: -most[1]):
        found.setdefault(text, logprob)
    return found
