"""Requests to a service, their handles, and the chunks of a response that it returns."""

import dataclasses
import logging
from collections.abc import Callable

from hjax.errors import RunError
from hjax.rollout.constrained_decoding import ConstraintMatcher
from hjax.rollout.constraint import Constraint
from hjax.rollout.prefix_cache import CachedPrefix
from hjax.rollout.prompt_log_probs import PromptLogProbs, Top
from hjax.rollout.sampling_params import SamplingParams

_LOG = logging.getLogger(__name__)


class QueueFull(RunError):
    """The queue is full: as many requests wait as may."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for one response.

    Attributes:
      prompt: token ids, at least one.
      max_tokens: of the response, at least 1.
      options: sampling options; their stop tokens end the response.
      seed: 0 to 2**32 - 1; with ``step`` and ``choice`` it decides what is drawn.
      choice: which of several responses to one prompt; of a run's step the sequence's number.
      constraint: that the text must match; None: none.
      scored: whether the prompt's own tokens are scored too. Then ``max_tokens`` may be 0.
      step: of a run.
      first_draw: number of the first token's draw; above 0 the response goes on with another of the
        same seed, step and choice.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    options: SamplingParams = SamplingParams()
    seed: int = 0
    choice: int = 0
    constraint: Constraint | None = None
    scored: bool = False
    step: int = 0
    first_draw: int = 0


@dataclasses.dataclass(frozen=True)
class ResponseChunk:
    """What was drawn since the last chunk.

    Attributes:
      tokens: a stop token included.
      logprobs: of the distribution sampled.
      policy_logprobs: of the model's own at the temperature: what training compares with.
      finish: empty while it runs; then ``stop`` (a stop token, or the text matches and no token may
        follow), ``length``, ``cancelled``, ``error: ...``, or ``constraint: ...`` if no token may
        follow though the text does not match.
      top: for each token the most probable ones of its position, of the distribution sampled, as
        many as ``SamplingParams.top`` or as there are.
      prompt: the prompt's scores, in the first chunk, if they were requested.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    policy_logprobs: tuple[float, ...] = ()
    finish: str = ""
    top: tuple[Top, ...] = ()
    prompt: PromptLogProbs | None = None


class RequestHandle:
    """A submitted request: its state in the service, and how its caller cancels it.

    Attributes:
      request: the request.
      cached_tokens: tokens of its prompt that the prefix cache had; None until it is prefilled.
    """

    def __init__(
        self,
        request: Request,
        matcher: ConstraintMatcher | None,
        on_chunk: Callable[[ResponseChunk], None],
    ):
        self.request, self.matcher, self._on_chunk = request, matcher, on_chunk
        self.cancelled = False
        self.tokens: list[int] = []  # of the response
        self.cached_tokens: int | None = None
        self.cached_prefix = CachedPrefix()  # of its prompt, acquired
        self.prefilled_tokens = 0  # of the prompt, in chunks
        self.chunking = False  # whether its prompt is prefilled in chunks before it enters
        self.unchunked = False  # whether its prompt is prefilled whole, however long
        self.part = 0  # data-parallel part that it enters, and whose cache has its prefix
        self.scores: PromptLogProbs | None = None  # of its prompt, until they are delivered

    @property
    def needs_scores(self) -> bool:
        """Whether its prompt must be scored before it enters."""
        return self.request.scored and self.scores is None

    @property
    def cached_sequence(self) -> tuple[int, ...]:
        """What its row has in the KV cache: all tokens but the last one drawn."""
        return (*self.request.prompt, *self.tokens[:-1])

    def cancel(self) -> None:
        """Stop generating; the last chunk says ``cancelled``. Does nothing if it has ended."""
        self.cancelled = True

    def deliver(self, piece: ResponseChunk) -> None:
        """Pass a chunk on. A listener that raises gets no more chunks, and its error is logged."""
        try:
            self._on_chunk(piece)
        except Exception:  # the listener's; other requests go on
            _LOG.exception("a request's listener failed; the request is cancelled")
            self.cancelled = True
            self._on_chunk = lambda piece: None
