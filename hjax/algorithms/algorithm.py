"""What every algorithm shares: its roles by name, its keys, mini-batches and resumable state.

An algorithm is a dataflow: a step is ``collect`` and then ``learn``, which call worker groups; each
call returns a future at once, and ``join`` waits for what the controller's own numerics need. It
names no device, mesh or sharding.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import overlong_penalty
from hjax.algorithms.kl import AdaptiveEntropy, AdaptiveKL, FixedKL
from hjax.algorithms.prediction_calibration import Predictions
from hjax.algorithms.spec import AlgorithmSpec
from hjax.controller import Future, join
from hjax.controller.messages import MiniBatch
from hjax.errors import ConfigError

Batch = dict[str, Any]


class AbsentRole:
    """Stands for a role that this configuration does not need: its calls give nothing.

    Args:
      role: its name.
      methods: what its worker class could be called with.
    """

    def __init__(self, role: str, methods: Collection[str]):
        self._role, self._methods = role, frozenset(methods)

    def __getattr__(self, name: str) -> Callable[..., Batch]:
        if name.startswith("_"):  # asked for by copy and pickle, before there are any methods
            raise AttributeError(name)
        if name not in self._methods:
            raise AttributeError(
                f"{self._role} has no method {name!r} bound to a protocol; "
                f"it has {', '.join(sorted(self._methods)) or 'none'}"
            )
        return lambda *args, **kwargs: {}


class Algorithm(AlgorithmSpec):
    """Base of every algorithm.

    Subclass it (or one of its subclasses) and override ``collect``, ``learn`` or
    ``compute_advantages``; the worker groups of ``roles`` are attributes of their names.

    Args:
      config: the section ``algorithm`` of the run's config.
      groups: worker group by role; an ``AbsentRole`` for a role that the config does not need.
      seed: of the run.
      samples: responses per prompt.
      demonstrations: returns the next batch of demonstrations (with the source "pairs" of chosen
        and rejected responses, rows in turn; with "verdicts" of responses and what they are, as
        ``positive``), or None where there are none.
      max_response_length: tokens that a response may have.
      more_prompts: returns further prompts of this step, given how many sequences were drawn for
        it before; None where the step's prompts are drawn ahead of it.
    """

    def __init__(
        self,
        config: ConfigDict,
        groups: Mapping[str, Any],
        seed: int = 0,
        samples: int = 1,
        demonstrations: Callable[[], Batch] | None = None,
        max_response_length: int = 0,
        more_prompts: Callable[[int], Batch] | None = None,
    ):
        self.config = config
        self.seed = seed
        self.samples = samples
        self.demonstrations = demonstrations
        self.max_response_length = max_response_length
        self.more_prompts = more_prompts
        if config.get("pretraining_coef") and demonstrations is None:
            raise ConfigError(
                "algorithm.pretraining_coef needs demonstrations; this data has none: set it to 0"
            )
        if self.needed_data and demonstrations is None:
            hint = f": {self.data_hint}" if self.data_hint else ""
            raise ConfigError(
                f"{type(self).__name__} needs {self.needed_data}; this data has none{hint}"
            )
        self.step_number = 0
        for role in self.all_roles():
            if role not in groups:
                raise ConfigError(f"{type(self).__name__} was given no worker group of {role}")
            setattr(self, role, groups[role])
        self.kl = self.make_kl_controller()
        self.entropy = self.make_entropy_controller()
        # What `log` kept of this step, role and metrics: whoever runs the steps reads it.
        self.logged: list[tuple[str, Future | Mapping[str, Any]]] = []

    # Declared for type checkers; each is a worker group.
    actor: Any
    critic: Any
    reference: Any
    reward: Any
    cost: Any
    cost_critic: Any

    def step(self, prompts: Batch) -> Batch:
        """One step of the dataflow on a batch of prompts; returns the batch it trained on.

        A class may override it instead of the two that it is made of; it is then run one step
        after another, for nobody could tell what of it may run ahead.
        """
        return self.learn(self.collect(prompts))

    def collect(self, prompts: Batch) -> Any:
        """Answer prompts: the part of a step that may run ahead of learning.

        Where nothing is generated it takes the next demonstrations, and the prompts are not used.

        It only makes calls, and waits for none. Where it does run ahead (``rollout.max_staleness``)
        it is called from another thread than ``learn``: it changes nothing that ``learn`` reads.

        Returns:
          what ``learn`` takes: the future of a batch, or a tuple or dict of such.
        """
        if self.generates:
            return self.actor.generate_sequences(prompts)
        assert self.demonstrations is not None
        return self.demonstrations()

    def learn(self, batch: Any) -> Batch:
        """Score what ``collect`` gave and learn from it; returns the batch it trained on."""
        raise NotImplementedError(f"{type(self).__name__} must define learn")

    def compute_advantages(self, batch: Batch) -> Batch:
        """The batch (numpy arrays on the controller) with what the updates need added."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_advantages")

    def predictions(self, batch: Batch) -> Predictions:
        """What the models say of held-out examples, whose outcomes are known.

        Args:
          batch: of examples, as ``demonstrations`` returns them.

        Returns:
          by the start of its metrics' names logits and outcomes (1 yes, 0 no, NaN not known),
          float [examples, ...]; {} where nothing is predicted.
        """
        return {}

    def pretraining_batch(self) -> Batch | None:
        """The next demonstrations, or None without a loss on them (``pretraining_coef``)."""
        if not self.config.get("pretraining_coef"):
            return None
        assert self.demonstrations is not None
        coefficient = np.asarray(self.config.pretraining_coef, np.float32)
        return self.demonstrations() | {"coefficient": coefficient}

    def make_kl_controller(self) -> FixedKL:
        """The coefficient of the KL, in the reward or in the loss; adaptive with a target."""
        config = self.config
        if not config.get("kl_target"):
            return FixedKL(config.get("kl_coef", 0.0))
        return AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)

    def make_entropy_controller(self) -> AdaptiveEntropy | None:
        """What moves the coefficient of the entropy bonus; None: it is fixed."""
        config = self.config
        if not config.get("entropy_target"):
            return None
        return AdaptiveEntropy(
            config.entropy_coef, config.entropy_target, config.entropy_step, config.entropy_max
        )

    def finish(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take note of a step's metrics once it is over; returns more of them.

        An adaptive coefficient of the entropy follows what the actor's updates measured.
        """
        if self.entropy is None:
            return {}
        used = self.entropy.coef
        self.entropy.update(metrics.get("actor/entropy", float("nan")))
        return {"entropy/coefficient": used}

    def follow_kl(self, batch: Batch, old: Any) -> Batch:
        """Let an adaptive coefficient follow the KL measured on this batch.

        Args:
          batch: with ``response_mask``, and where there is a reference with ``ref_kl`` or
            ``ref_logprobs``.
          old: float [rows, length], log-probs of the policy that drew the batch.

        Returns:
          with a reference ``ref_kl``, see ``reference_kl``; what an adaptive KL in the loss reads:
          ``kl_coef``, a float32 scalar, as it was before it moved (the next step's updates take
          the new one, as the reward's KL does); and what an adaptive entropy bonus reads,
          ``entropy_coef``. Else {}.
        """
        config = self.config
        adaptive_loss = config.get("kl_target") and config.get("kl_in") == "loss"
        entries = {"kl_coef": np.asarray(self.kl.coef, np.float32)} if adaptive_loss else {}
        if self.entropy is not None:
            entries["entropy_coef"] = np.asarray(self.entropy.coef, np.float32)
        kl = reference_kl(batch, old)
        if kl is not None:
            mask = np.asarray(batch["response_mask"], bool)
            self.kl.update(float(kl[mask].mean()), mask.shape[0])
            entries["ref_kl"] = kl
        return entries

    def scores(self, batch: Batch) -> np.ndarray:
        """Rewards as advantages take them: scaled, clipped, less what long responses lose.

        Args:
          batch: with ``rewards`` and ``response_mask``.

        Returns:
          float32 [rows], NaN where unscored.
        """
        config = self.config
        scores = np.asarray(batch["rewards"], np.float32) * np.float32(config.reward_scale)
        if config.reward_clip:
            scores = np.clip(scores, -config.reward_clip, config.reward_clip)
        if config.overlong_buffer:
            limit = self.max_response_length
            lengths = np.asarray(batch["response_mask"], bool).sum(axis=1)
            penalty = overlong_penalty(lengths, limit, config.overlong_buffer * limit)
            scores = scores + np.float32(config.overlong_penalty) * np.asarray(penalty)
        return scores

    def token_scores(self, batch: Batch) -> np.ndarray | None:
        """Rewards by token, scaled: float32 [rows, length]; None: the batch has none."""
        if "token_rewards" not in batch:
            return None
        return np.asarray(batch["token_rewards"], np.float32) * np.float32(self.config.reward_scale)

    def counted(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Rows that the losses read, bool [rows]: scored, and with ``mask_truncated`` whole."""
        rows = ~np.isnan(scores)
        if self.config.mask_truncated:
            rows &= ~np.asarray(batch["truncated"], bool)
        return rows

    def proximal(self, batch: Any) -> Any:
        """The actor's own log-probs of a batch, where a ``correction`` compares them.

        Args:
          batch: that ``collect`` gave, or its future.

        Returns:
          the future of ``old_logprobs`` float32 [rows, length]; {} without a correction: then the
          sampler's log-probs stand for them.
        """
        if self.config.get("correction", "none") == "none":
            return {}
        return self.actor.compute_log_prob(batch)

    def minibatches(self, batch: Any) -> Iterator[Any]:
        """Mini-batches of whole groups of samples, drawn anew in every epoch.

        A scalar array holds for all rows and stands in each.

        Args:
          batch: as ``compute_advantages`` gives it; or a future of arrays that a group holds, such
            as its ``apply`` gives: then it stays there, and so do the mini-batches, futures too.

        Yields:
          mappings of arrays; of several each role is sent what it reads of the batch once, and
          cuts the rows out on its devices.
        """
        if isinstance(batch, Future):
            group = getattr(self, batch.label.split(".")[0])
            rows = int(group.apply(rows_of, batch).result())
            for chosen in self._chosen(rows):
                yield batch if chosen is None else group.apply(take_rows, batch, chosen)
            return
        arrays = {k: v for k, v in join(batch).items() if isinstance(v, np.ndarray)}
        held: dict[Any, Any] = {}
        parts = list(self._chosen(rows_of(arrays)))
        for part in parts:
            yield arrays if len(parts) == 1 else MiniBatch(arrays, part, held)

    def _chosen(self, rows: int) -> Iterator[np.ndarray | None]:
        """Row numbers of each mini-batch; None: all, as they stand."""
        size = self.config.get("minibatch", 0) or rows
        samples = max(self.samples if rows % self.samples == 0 else 1, self.unit)
        for epoch in range(self.config.get("epochs", 1)):
            if size >= rows:
                yield None
                continue
            rng = np.random.default_rng([self.seed, self.step_number, epoch])
            order = rng.permutation(np.arange(rows).reshape(-1, samples))
            yield from order.reshape(-1, size)

    def log(self, metrics: Future | Mapping[str, Any], role: str = "") -> None:
        """Keep an update's metrics for this step's row; does not wait for a future."""
        if isinstance(metrics, Future):
            role = role or metrics.label.split(".")[0]
        self.logged.append((role, metrics))

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """Metrics of the algorithm's own for the step's row, read off its batch.

        Those of every algorithm (rewards, KL, lengths) stand in the row already.
        """
        return {}

    def state(self) -> dict[str, Any]:
        """What decides the next step beside the workers' arrays, as plain JSON."""
        entropy = {} if self.entropy is None else {"entropy": self.entropy.state()}
        return {"kl": self.kl.state(), **entropy}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        self.kl.restore(state["kl"])
        if self.entropy is not None:
            self.entropy.restore(state["entropy"])


def rows_of(batch: Mapping[str, Any]) -> int:
    """Rows of a batch of arrays."""
    return batch["response_mask"].shape[0]


def take_rows(batch: Mapping[str, Any], chosen: Any) -> Batch:
    """Rows of a batch of arrays, by their numbers; scalars hold for all."""
    return {key: x[chosen] if x.ndim else x for key, x in batch.items()}


def old_logprobs(batch: Batch) -> Any:
    """The log-probs that ratios are taken against: tempered, not truncated by top-k or top-p.

    The actor's own as learning starts, where the batch has them (``proximal``), else the sampler's.
    """
    return batch.get("old_logprobs", batch.get("policy_logprobs", batch["logprobs"]))


def reference_kl(batch: Batch, old: Any = None) -> np.ndarray | None:
    """KL to the reference by token (k1), in nats; the batch's own ``ref_kl`` where it has that.

    Args:
      batch: with ``response_mask``, and ``ref_logprobs`` where there is a reference.
      old: float [rows, length], log-probs of the policy that drew the batch; None: the batch's.

    Returns:
      float32 [rows, length], 0 off the responses; None without a reference.
    """
    if "ref_kl" in batch or "ref_logprobs" not in batch:
        return batch.get("ref_kl")
    difference = np.asarray(old_logprobs(batch) if old is None else old) - batch["ref_logprobs"]
    return np.where(batch["response_mask"], difference, np.float32(0))
