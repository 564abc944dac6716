"""What is asked of a service, and what it tells: requests, their tickets, pieces of answers."""

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
    """As many requests wait as may."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked.

    Attributes:
      prompt: token ids, at least one.
      max_tokens: of the response, at least 1.
      options: how they are drawn; with its stop tokens a response ends.
      seed: 0 to 2**32 - 1; with ``choice`` it decides what is drawn.
      choice: which of several answers to one prompt.
      constraint: that its text must match; None: none.
      scored: whether the prompt's own tokens are scored too. Then ``max_tokens`` may be 0.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    options: SamplingParams = SamplingParams()
    seed: int = 0
    choice: int = 0
    constraint: Constraint | None = None
    scored: bool = False


@dataclasses.dataclass(frozen=True)
class ResponseChunk:
    """What was drawn since the last piece.

    Attributes:
      tokens: a stop token included.
      logprobs: of the distribution sampled.
      policy_logprobs: of the model's own at the temperature: what training compares with.
      finish: empty while it goes on; then ``stop`` (a stop token came, or the text matches and
        nothing may follow), ``length``, ``cancelled``, ``error: ...``, or ``constraint: ...`` where
        nothing may follow though the text does not match.
      top: for each token the most probable ones of its place, of the distribution sampled, as many
        as ``SamplingParams.top`` or as there are.
      prompt: the prompt's scores, in the first piece, if they were asked for.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    policy_logprobs: tuple[float, ...] = ()
    finish: str = ""
    top: tuple[Top, ...] = ()
    prompt: PromptLogProbs | None = None


class RequestHandle:
    """A request on its way.

    Attributes:
      request: what is asked.
      cached: tokens of its prompt that others had left known; None until it is read.
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
        self.cached_prefix = CachedPrefix()  # what is known of its prompt, held
        self.prefilled_tokens = 0  # tokens of it that were read in chunks
        self.chunking = False  # whether it is read in chunks, before it enters
        self.unchunked = False  # whether it is read in one piece, however long
        self.scores: PromptLogProbs | None = None  # of its prompt, until they are told

    @property
    def needs_scores(self) -> bool:
        """Whether its prompt is to be scored before it enters."""
        return self.request.scored and self.scores is None

    def cancel(self) -> None:
        """Draw no more; the last piece says ``cancelled``. Nothing happens if it has ended."""
        self.cancelled = True

    def deliver(self, piece: ResponseChunk) -> None:
        """Hand a piece on; a listener that fails is none any more, and its error is logged."""
        try:
            self._on_chunk(piece)
        except Exception:  # of whoever asked: the others' answers go on
            _LOG.exception("a request's listener failed; the request is cancelled")
            self.cancelled = True
            self._on_chunk = lambda piece: None
