"""Detokenizer: a response's tokens become text as they are drawn, up to a stop string."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from hjax.data.response_text import ResponseText
from hjax.data.tool_call_forms import CallPart
from hjax.rollout.prompt_log_probs import PromptLogProbs, Top
from hjax.rollout.requests import ResponseChunk
from hjax.rollout.stop_strings import StopStrings
from hjax.serving.request_errors import RequestRefused
from hjax.serving.request_models import ParsedRequest
from hjax.serving.served_model import ServedModel

# Prefixes of a chunk's finish: the engine failed, or this response alone cannot continue.
ENGINE_FAILED, CONSTRAINT_UNMET = "error: ", "constraint: "


@dataclasses.dataclass(frozen=True)
class DrawnToken:
    """A token of a response.

    Attributes:
      id: of the vocabulary.
      logprob: natural log, of the distribution sampled; of a prompt's token the model's own, and
        None of its first.
      text: the token's own; U+FFFD if its bytes are no whole character.
      offset: characters of the response's text before it.
      top: texts and log-probs of the most probable tokens of its position, descending.
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
      finish: "" while it runs, else "stop", "length" or "tool_calls".
      calls: what is new of tool calls.
      prompt: the prompt's tokens, if the request asks for them.
    """

    text: str = ""
    drawn: tuple[DrawnToken, ...] = ()
    finish: str = ""
    calls: tuple[CallPart, ...] = ()
    prompt: tuple[DrawnToken, ...] = ()

    @classmethod
    def merged(cls, deltas: Sequence[Self]) -> Self:
        """Several deltas of one response, merged."""
        return cls(
            "".join(each.text for each in deltas),
            tuple(drawn for each in deltas for drawn in each.drawn),
            deltas[-1].finish if deltas else "",
            CallPart.merged([part for each in deltas for part in each.calls]),
            tuple(token for each in deltas for token in each.prompt),
        )


class Choice:
    """One response while it is drawn.

    Args:
      parsed: the request.
      index: of the response.
      served: the model.

    Attributes:
      finish: as in ``Delta``.
      count: tokens so far, the one that ended it included.
    """

    def __init__(self, parsed: ParsedRequest, index: int, served: ServedModel):
        prompt = parsed.prompt_of(index)
        tokenizer = served.tokenizer
        self.finish = ""
        self.count = 0
        self._tokenizer = tokenizer
        self._wants_tokens = parsed.logprobs is not None or parsed.token_ids
        self._prompt = prompt.tokens if parsed.scored else None
        self._skip_special = parsed.skip_special
        self._text = self._response_text(prompt.tokens)
        self._stops = StopStrings(parsed.stop)
        self._decodes_at_once = not (self._wants_tokens or parsed.stop)
        self._calls = None if parsed.calls is None else parsed.calls.reader()
        self._finish = "" if parsed.calls is None else parsed.calls.finish
        self._called = False
        self._ends = frozenset(parsed.options.stop)
        self._min_tokens = parsed.options.min_tokens
        self._before: Sequence[int] = prompt.tokens[-1:]
        self._top = parsed.logprobs or 0
        self._echoed = prompt if parsed.echo else None
        self._echo = ""
        self._length = 0

    def begin(self) -> Delta:
        """What precedes any token: the echoed prompt, unless it is scored first."""
        if self._echoed is not None and self._tokenizer is not None:
            text = self._echoed.text
            if text is None:
                text = self._tokenizer.decode(self._echoed.tokens, self._skip_special)
            self._echo, self._length = text, len(text)
        return Delta("" if self._prompt is not None else self._echo)

    def add(self, piece: ResponseChunk) -> Delta:
        """What a chunk adds; nothing once the response has ended.

        Raises:
          RequestRefused: the engine failed, or no token may follow though a constraint is not met.
        """
        if self.finish:
            return Delta()
        if self._prompt is not None and piece.prompt is not None:
            begun = Delta(self._echo, prompt=self._prompt_tokens(self._prompt, piece.prompt))
            self._prompt = None
            rest = self.add(dataclasses.replace(piece, prompt=None))
            return Delta.merged([begun, rest])
        text, drawn = self._add_tokens(piece)
        if self._stops.found is not None:
            return self._finish_delta(text, drawn, "stop")
        if not piece.finish:
            text, calls = self._split_calls(text)
            return Delta(text, tuple(drawn), calls=calls)
        if piece.finish not in ("stop", "length"):
            raise _failure(piece.finish)
        if self._text is not None:
            text += self._unstopped(self._text.close())
        finish = "stop" if self._stops.found is not None else piece.finish
        return self._finish_delta(text + self._stops.close(), drawn, finish)

    def _add_tokens(self, piece: ResponseChunk) -> tuple[str, list[DrawnToken]]:
        """The text of a chunk's tokens up to a stop string, and these tokens if they are wanted."""
        if self._decodes_at_once and piece.finish and not self.count:  # a whole response
            self.count = len(piece.tokens)
            shown = [token for token in piece.tokens if token not in self._ends]
            return "" if self._text is None else self._unstopped(self._text.feed(*shown)), []
        text, drawn = "", list[DrawnToken]()
        tops = piece.top or ((),) * len(piece.tokens)
        for token, logprob, top in zip(piece.tokens, piece.logprobs, tops, strict=True):
            self.count += 1
            if self._wants_tokens:
                drawn.append(self._drawn_token(token, logprob, self._before, self._length, top))
                self._before = (token,)
            if token not in self._ends and self._text is not None:
                text += self._unstopped(self._text.feed(token))
            if self._stops.found is not None:
                break
        return text, drawn

    def _unstopped(self, text: str) -> str:
        """The part of new text that cannot be the beginning of a stop string."""
        self._length += len(text)
        # Before min_tokens nothing ends a response.
        return self._stops.feed(text) if self.count > self._min_tokens else text

    def _split_calls(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """New text outside of tool calls, and what is new of calls."""
        if self._calls is None:
            return text, ()
        text, calls = self._calls.feed(text)
        self._called |= bool(calls)
        return text, calls

    def _finish_delta(self, text: str, drawn: list[DrawnToken], finish: str) -> Delta:
        text, calls = self._split_calls(text)
        if self._calls is not None:
            rest, last = self._calls.close()
            text, calls = text + rest, (*calls, *last)
        called = self._called or bool(calls)
        # A call that was cut off is not complete.
        whole = called and self._calls is not None and self._calls.whole and finish == "stop"
        self.finish = self._finish if whole else finish
        return Delta(text, tuple(drawn), self.finish, calls)

    def _prompt_tokens(
        self, prompt: Sequence[int], scores: PromptLogProbs
    ) -> tuple[DrawnToken, ...]:
        """The prompt's tokens, with their log-probs."""
        text = self._response_text(())
        told, length = [], 0
        scored = zip((None, *scores.logprobs), ((), *scores.top), strict=True)
        for at, (token, (logprob, top)) in enumerate(zip(prompt, scored, strict=True)):
            before = prompt[max(at - 1, 0) : at]
            told.append(self._drawn_token(token, logprob, before, length, top[: self._top]))
            length += 0 if text is None else len(text.feed(token))
        return tuple(told)

    def _response_text(self, prompt: Sequence[int]) -> ResponseText | None:
        """The text after a prompt; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return ResponseText(self._tokenizer, prompt, self._skip_special)

    def _drawn_token(
        self, token: int, logprob: float | None, before: Sequence[int], offset: int, top: Top
    ) -> DrawnToken:
        """A token with its text, and the texts of the top tokens."""
        # The token's own log-prob as reported: another program may have rounded it otherwise.
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
    if finish.startswith(CONSTRAINT_UNMET):
        return RequestRefused(
            f"a response cannot go on: {finish.removeprefix(CONSTRAINT_UNMET)}", 400
        )
    return RequestRefused(f"the engine failed: {finish.removeprefix(ENGINE_FAILED)}", 500)
