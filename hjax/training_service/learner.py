"""``hjax.Learner``: a model that is trained and sampled by calls, gradients apart from steps."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hjax.errors import ConfigError, RunError
from hjax.files import StrPath
from hjax.models.lora import ALL, Lora, targets_of
from hjax.models.parameters import Params
from hjax.training_service.adamw import AdamParams, AdamState, step_scalars
from hjax.training_service.datum import Datum, batches_of, check_datum
from hjax.training_service.saved_state import read_about, read_saved, saved_lora, write_saved
from hjax.training_service.shared_base import ModelPrograms, SharedBase
from hjax.training_service.snapshot_sampler import (
    SampledWeights,
    SampleRequest,
    SampleResult,
    prompt_log_probs,
)
from hjax.training_service.token_losses import find_loss


@dataclasses.dataclass(frozen=True)
class LossOutput:
    """What a forward pass gives.

    Attributes:
      loss: the sum over all tokens of all data.
      logprobs: of each datum's targets, float32 in their shape, [N] or [N, K]; natural logs, at
        temperature 1.
    """

    loss: float
    logprobs: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A model's trained parameters at a moment, to sample from. It is a reference, not a copy:
    training makes new arrays.

    Attributes:
      programs: of the model.
      learned: the parameters.
      label: of whoever keeps it.
    """

    programs: ModelPrograms
    learned: Params
    label: Any = None

    @property
    def weights(self) -> SampledWeights:
        """As the sampler takes it."""
        return self.programs.sampled(self.learned)

    def sample(self, request: SampleRequest) -> SampleResult:
        """Responses to one prompt; waits for them.

        Raises:
          ConfigError: a request that can never be answered.
          RunError: sampling failed.
        """
        [result] = self.sample_many([request])
        return result

    def sample_many(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """``sample`` of several requests, which run side by side."""
        found: list[SampleResult | Exception | None] = [None] * len(requests)
        done = threading.Semaphore(0)
        submitted = 0

        def keep(index: int, result: SampleResult | Exception) -> None:
            found[index] = result
            done.release()

        try:
            for index, request in enumerate(requests):
                on_done = functools.partial(keep, index)
                self.programs.sampler().submit(self.weights, request, on_done)
                submitted += 1
        finally:
            for _ in range(submitted):
                done.acquire()
        for result in found:
            if isinstance(result, Exception):
                raise result
        return [result for result in found if isinstance(result, SampleResult)]

    def compute_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """The log-prob of each token given those before it, natural logs; NaN for the first."""
        prompt = tuple(tokens)
        result = self.sample(SampleRequest(prompt, max_tokens=0, prompt_logprobs=True))
        assert result.prompt is not None
        return prompt_log_probs(prompt, result.prompt)


class Learner:
    """A model trained by calls: gradients add up until a step takes them.

    It has adapters of its own over a base that others may share, or with ``lora_rank=0`` parameters
    of its own. Only one thread at a time may call it.

      >>> learner = Learner("runs/model", lora_rank=8)           # doctest: +SKIP
      >>> data = [Datum([3, 5, 8], {"target_tokens": [5, 8, 2]})]
      >>> learner.forward_backward(data, "cross_entropy").loss   # doctest: +SKIP
      >>> learner.optim_step(learning_rate=1e-4)                 # doctest: +SKIP

    Args:
      model: a Hugging Face directory or name, an hjax workdir, or a ``SharedBase``.
      lora_rank: of the adapters; 0: all parameters are trained.
      lora_alpha: adapters are scaled by ``lora_alpha / lora_rank``.
      lora_targets: matrices with adapters, as of the config key ``actor.lora.targets``.
      seed: of the adapters' first values.
      **options: of ``SharedBase``, with a path alone.

    Raises:
      ConfigError: as of ``SharedBase``; adapters that the model cannot have.

    Attributes:
      base: the model that it shares.
      learned: its trained parameters, a nested dict of float32 arrays.
      step: steps taken.
    """

    def __init__(
        self,
        model: StrPath | SharedBase,
        lora_rank: int = 32,
        *,
        lora_alpha: float = 32.0,
        lora_targets: Sequence[str] = (ALL,),
        seed: int = 0,
        **options: Any,
    ):
        if isinstance(model, SharedBase):
            if options:
                raise ConfigError(f"{', '.join(options)}: the base has them; give it a path")
            self.base = model
        else:
            self.base = SharedBase(model, **options)
        lora = None
        if lora_rank:
            targets = targets_of(tuple(lora_targets), bool(self.base.config.experts))
            lora = Lora(lora_rank, lora_alpha, targets)
        self._programs = self.base.programs(lora)
        self.learned = self.base.initial(lora, seed)
        zeros = self._programs.zeros
        self._optimizer, self._sums = AdamState(zeros(), zeros()), zeros()
        self.step = 0
        self._lost = ""

    @property
    def lora(self) -> Lora | None:
        """Settings of its adapters; None: all parameters are trained."""
        return self._programs.network.config.lora

    @property
    def gradients(self) -> Params:
        """The sums that the next step takes, a nested dict like ``learned``; the next call of
        ``forward_backward`` or ``optim_step`` deletes these arrays."""
        return self._sums

    def forward_backward(
        self, data: Sequence[Datum], loss: str, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        """Add the gradients of a loss to those that wait for the next step.

        Args:
          data: at least one; all are checked before anything is computed.
          loss: ``cross_entropy``, ``importance_sampling``, ``ppo``, ``cispo``, ``dro`` or ``gspo``,
            see ``hjax.training_service.token_losses``.
          config: settings of the loss.

        Raises:
          ConfigError: an unknown loss or setting, or data that do not fit it; nothing was added.
          RunError: gradients were lost in an earlier call.
        """
        return self._run(data, loss, config, backward=True)

    def forward(
        self, data: Sequence[Datum], loss: str, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        """The loss and log-probs of data, without gradients; arguments as of
        ``forward_backward``. Inputs that the loss does not read are ignored."""
        return self._run(data, loss, config, backward=False)

    def optim_step(self, **settings: float) -> dict[str, float]:
        """Take a step of AdamW on the sum of the gradients, which is 0 afterwards.

        Args:
          **settings: of ``AdamParams``. Other values compile nothing.

        Returns:
          ``grad_norm`` before clipping, ``learning_rate`` and ``skipped``: 1 if a gradient was not
          finite, so that parameters and moments stay as they were.

        Raises:
          ConfigError: a value out of its range.
          RunError: gradients were lost in an earlier call.
        """
        self._check_whole()
        unknown = set(settings) - {field.name for field in dataclasses.fields(AdamParams)}
        if unknown:
            raise ConfigError(f"optim_step has no setting {sorted(unknown)[0]!r}")
        params = AdamParams(**settings)
        scalars = step_scalars(params, self.step + 1)
        with self._losing_on_error("a step"):
            self.learned, self._optimizer, self._sums, found = self._programs.step(
                self.learned, self._optimizer, self._sums, scalars
            )
            norm, finite = float(found["grad_norm"]), bool(found["finite"])
        self.step += finite
        return {
            "grad_norm": norm,
            "learning_rate": params.learning_rate,
            "skipped": float(not finite),
        }

    def snapshot(self) -> Snapshot:
        """The parameters as they are now, to sample from."""
        return Snapshot(self._programs, self.learned)

    def sample(self, prompt: Sequence[int], **options: Any) -> SampleResult:
        """Responses to a prompt by the parameters as they are now; waits for them.

        Args:
          prompt: token ids.
          **options: the other fields of ``SampleRequest``.

        Raises:
          ConfigError: a request that can never be answered.
          RunError: sampling failed.
        """
        return self.snapshot().sample(SampleRequest(tuple(prompt), **options))

    def save(
        self, folder: StrPath, *, optimizer: bool = True, about: Mapping[str, Any] | None = None
    ) -> None:
        """Save parameters and moments; gradients that wait for a step are not saved.

        Args:
          folder: is replaced. With adapters it is a PEFT directory too.
          optimizer: False: parameters alone.
          about: JSON values to keep beside them.

        Raises:
          RunError: it cannot be written, or the state was lost in an earlier call.
        """
        self._check_whole()
        moments = self._optimizer if optimizer else None
        described = {**(about or {}), "step": self.step}
        network, base = self._programs.network, self.base.path
        write_saved(
            Path(folder), network, self.learned, optimizer=moments, about=described, base=base
        )

    def load(self, folder: StrPath, *, optimizer: bool = True) -> None:
        """Continue from a saved state of the same adapters; gradients are 0 afterwards.

        Args:
          folder: of ``save``.
          optimizer: False: with new moments, as before the first step.

        Raises:
          ConfigError: no such state, one of other adapters, or a damaged one; nothing changed.
        """
        folder = Path(folder)
        programs = self._programs
        learned, moments = read_saved(folder, programs.network, programs.abstract, optimizer)
        zeros = programs.zeros
        self.learned, self._sums = learned, zeros()
        self.step = read_about(folder)["step"] if moments is not None else 0
        self._optimizer = moments or AdamState(zeros(), zeros())
        self._lost = ""

    @classmethod
    def from_saved(cls, base: SharedBase, folder: StrPath, *, optimizer: bool = True) -> Learner:
        """A learner with the adapters and the state in a folder; arguments as of ``load``."""
        lora = saved_lora(read_about(Path(folder)))
        if lora is None:
            learner = cls(base, 0)
        else:
            learner = cls(base, lora.rank, lora_alpha=lora.alpha, lora_targets=lora.targets)
        learner.load(folder, optimizer=optimizer)
        return learner

    def _run(
        self,
        data: Sequence[Datum],
        loss: str,
        config: Mapping[str, float] | None,
        backward: bool,
    ) -> LossOutput:
        self._check_whole()
        found, sizes = find_loss(loss), self.base.config
        settings = found.settings(config)
        if not data:
            raise ConfigError("data is empty; give at least one datum")
        longest = sizes.max_length
        checked = [
            check_datum(
                datum, f"datum {i}", found,
                vocab=sizes.vocab_size, longest=longest, unread=not backward,
            )
            for i, datum in enumerate(data)
        ]  # fmt: skip
        parts = []
        with self._losing_on_error("a backward pass", backward):
            tokens, shards = self.base.micro_batch_tokens, self.base.layout.shard_count("batch")
            for batch in batches_of(checked, tokens, longest, shards):
                sums = self._sums if backward else None
                total, logprobs, sums = self._programs.run(
                    loss, self.learned, sums, batch.arrays, settings
                )
                if sums is not None:
                    self._sums = sums
                parts.append((batch, total, logprobs))
            rows: list[Any] = [None] * len(checked)
            for batch, _, logprobs in parts:
                array = np.asarray(logprobs)
                for row, index in enumerate(batch.rows):
                    shape = checked[index].inputs["target_tokens"].shape
                    whole = array[row]
                    rows[index] = whole[tuple(slice(n) for n in shape)]
            return LossOutput(sum(float(total) for _, total, _ in parts), rows)

    def _check_whole(self) -> None:
        if self._lost:
            raise RunError(f"{self._lost}; load a saved state")

    def _losing_on_error(self, what: str, donates: bool = True) -> _LosingOnError:
        return _LosingOnError(self, what, donates)


class _LosingOnError:
    """Marks a learner's gradients as lost if a program that donates them fails."""

    def __init__(self, learner: Learner, what: str, donates: bool):
        self._learner, self._what, self._donates = learner, what, donates

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._donates:
            said = " ".join(str(error).split())[:200]
            self._learner._lost = f"its gradients were lost when {self._what} failed: {said}"
