"""One response as it is drawn: its tokens become text, until a stop string or a token ends it."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from hjax.data.response_text import ResponseText
from hjax.rollout.prompt_log_probs import PromptLogProbs, Top
from hjax.rollout.requests import ResponseChunk
from hjax.rollout.stop_strings import StopStrings
from hjax.serving.request_errors import RequestRefused
from hjax.serving.request_models import ParsedRequest
from hjax.serving.served_model import ServedModel
from hjax.serving.tool_calls import CallPart

# How a piece's finish begins where the engine gave up, or this response alone cannot go on.
FAILED, UNMET = "error: ", "constraint: "


@dataclasses.dataclass(frozen=True)
class DrawnToken:
    """A token of a response.

    Attributes:
      id: of the vocabulary.
      logprob: natural log, of the distribution sampled; of a prompt's token the model's own, and
        None of its first.
      text: the token's own; U+FFFD where its bytes are no whole character.
      offset: characters of the response's text before it.
      top: of the most probable tokens of its place texts and log-probs, falling.
    """

    id: int
    logprob: float | None
    text: str
    offset: int
    top: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Delta:
    """What is new of a response, or all of it.

    Attributes:
      text: that may be shown.
      drawn: tokens, if the request asks for them.
      finish: "" while it goes on, else "stop", "length" or "tool_calls".
      calls: what is new of calls of tools.
      prompt: the prompt's tokens, if the request asks for them.
    """

    text: str = ""
    drawn: tuple[DrawnToken, ...] = ()
    finish: str = ""
    calls: tuple[CallPart, ...] = ()
    prompt: tuple[DrawnToken, ...] = ()

    @classmethod
    def joined(cls, deltas: Sequence[Self]) -> Self:
        """One of several of the same response."""
        return cls(
            "".join(each.text for each in deltas),
            tuple(drawn for each in deltas for drawn in each.drawn),
            deltas[-1].finish if deltas else "",
            CallPart.joined([part for each in deltas for part in each.calls]),
            tuple(token for each in deltas for token in each.prompt),
        )


class Choice:
    """A response while it is drawn.

    Args:
      asked: the request.
      index: of the response.
      served: the model.

    Attributes:
      finish: as of ``Delta``.
      count: tokens so far, that which ended it included.
    """

    def __init__(self, asked: ParsedRequest, index: int, served: ServedModel):
        prompt = asked.prompt_of(index)
        tokenizer = served.tokenizer
        self.finish = ""
        self.count = 0
        self._tokenizer = tokenizer
        self._wants_tokens = asked.logprobs is not None or asked.token_ids
        self._prompt = prompt.tokens if asked.scored else None
        self._text = ResponseText(tokenizer, prompt.tokens) if tokenizer is not None else None
        self._stops = StopStrings(asked.stop)
        self._calls = None if asked.calls is None else asked.calls.reader()
        self._finish = "" if asked.calls is None else asked.calls.finish
        self._called = False
        self._ends = frozenset(asked.options.stop)
        self._min_tokens = asked.options.min_tokens
        self._before: Sequence[int] = prompt.tokens[-1:]
        self._top = asked.logprobs or 0
        self._echo = ""
        if asked.echo and tokenizer is not None:
            text = prompt.text
            self._echo = tokenizer.decode(prompt.tokens) if text is None else text
        self._length = len(self._echo)

    def begin(self) -> Delta:
        """What is there before any token: the prompt that is echoed, if it is not scored first."""
        return Delta("" if self._prompt is not None else self._echo)

    def take(self, piece: ResponseChunk) -> Delta:
        """What a piece adds; nothing once the response has ended.

        Raises:
          RequestRefused: the engine gave up, or nothing may follow though a constraint is not met.
        """
        if self.finish:
            return Delta()
        if self._prompt is not None and piece.prompt is not None:
            begun = Delta(self._echo, prompt=self._scored(self._prompt, piece.prompt))
            self._prompt = None
            rest = self.take(dataclasses.replace(piece, prompt=None))
            return Delta.joined([begun, rest])
        text, drawn = "", []
        tops = piece.top or ((),) * len(piece.tokens)
        for token, logprob, top in zip(piece.tokens, piece.logprobs, tops, strict=True):
            self.count += 1
            if self._wants_tokens:
                drawn.append(self._told(token, logprob, self._before, self._length, top))
                self._before = (token,)
            if token not in self._ends and self._text is not None:
                text += self._shown(self._text.feed(token))
            if self._stops.found is not None:
                return self._ended(text, drawn, "stop")
        if not piece.finish:
            text, calls = self._parted(text)
            return Delta(text, tuple(drawn), calls=calls)
        if piece.finish not in ("stop", "length"):
            raise _failure(piece.finish)
        if self._text is not None:
            text += self._shown(self._text.close())
        finish = "stop" if self._stops.found is not None else piece.finish
        return self._ended(text + self._stops.close(), drawn, finish)

    def _shown(self, text: str) -> str:
        """Of new text what cannot be the beginning of a stop string."""
        self._length += len(text)
        # Before min_tokens nothing ends a response.
        return self._stops.feed(text) if self.count > self._min_tokens else text

    def _parted(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """What is no call, and what is new of calls."""
        if self._calls is None:
            return text, ()
        text, calls = self._calls.feed(text)
        self._called |= bool(calls)
        return text, calls

    def _ended(self, text: str, drawn: list[DrawnToken], finish: str) -> Delta:
        text, calls = self._parted(text)
        if self._calls is not None:
            rest, last = self._calls.close()
            text, calls = text + rest, (*calls, *last)
        called = self._called or bool(calls)
        # A call that was cut is no whole one.
        whole = called and self._calls is not None and self._calls.whole and finish == "stop"
        self.finish = self._finish if whole else finish
        return Delta(text, tuple(drawn), self.finish, calls)

    def _scored(self, prompt: Sequence[int], scores: PromptLogProbs) -> tuple[DrawnToken, ...]:
        """The prompt's tokens."""
        text = None if self._tokenizer is None else ResponseText(self._tokenizer, ())
        told, length = [], 0
        scored = zip((None, *scores.logprobs), ((), *scores.top), strict=True)
        for at, (token, (logprob, top)) in enumerate(zip(prompt, scored, strict=True)):
            before = prompt[max(at - 1, 0) : at]
            told.append(self._told(token, logprob, before, length, top[: self._top]))
            length += 0 if text is None else len(text.feed(token))
        return tuple(told)

    def _told(
        self, token: int, logprob: float | None, before: Sequence[int], offset: int, top: Top
    ) -> DrawnToken:
        """A token with its text, and those of the most probable ones."""
        # The token's own log-prob as it is told, which another program may have rounded otherwise.
        most = [(self._own_text(t, before), logprob if t == token else x) for t, x in top]
        if token not in (t for t, _ in top):
            most.append((self._own_text(token, before), logprob))
        told = tuple((text, x) for text, x in most if x is not None) if self._top else ()
        return DrawnToken(token, logprob, self._own_text(token, before), offset, told)

    def _own_text(self, token: int, before: Sequence[int]) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        text = self._tokenizer.decode_response(before, [token])
        return text or self._tokenizer.decode([token], skip_special=False)


def _failure(finish: str) -> RequestRefused:
    if finish == "cancelled":
        return RequestRefused("the server is being stopped", 503, retry_after=10)
    if finish.startswith(UNMET):
        return RequestRefused(f"a response cannot go on: {finish.removeprefix(UNMET)}", 400)
    return RequestRefused(f"the engine failed: {finish.removeprefix(FAILED)}", 500)
