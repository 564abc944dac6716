"""Base class of algorithms: roles, config keys, mini-batches and state for checkpoints.

An algorithm is a dataflow. A step is ``collect`` (rollout) and then ``learn`` (scoring and
updates), which call worker groups. Each call returns a future at once; ``join`` waits for the
values that the controller computes with. An algorithm names no device, mesh or sharding.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import overlong_penalty
from hjax.algorithms.difficulty import make_difficulty_filter
from hjax.algorithms.episode_rows import ROW_LENGTHS, EpisodeRows, episode_minibatches
from hjax.algorithms.kl import make_entropy_controller, make_kl_controller
from hjax.algorithms.prediction_calibration import Predictions
from hjax.algorithms.prompt_choice import PromptChoice, choice_metrics
from hjax.batches import response_lengths
from hjax.controller import Future, join
from hjax.controller.messages import MiniBatch
from hjax.errors import ConfigError, RunError

Batch = dict[str, Any]


class AbsentRole:
    """Null object in place of a role that the config does not need: every call returns {}.

    Args:
      role: its name.
      methods: the remote methods of its worker class.
    """

    def __init__(self, role: str, methods: Collection[str]):
        self._role, self._methods = role, frozenset(methods)

    def __getattr__(self, name: str) -> Callable[..., Batch]:
        if name.startswith("_"):  # copy and pickle look these up before __init__ has run
            raise AttributeError(name)
        if name not in self._methods:
            raise AttributeError(
                f"{self._role} has no method {name!r} bound to a protocol; "
                f"it has {', '.join(sorted(self._methods)) or 'none'}"
            )
        return lambda *args, **kwargs: {}


class Algorithm(PromptChoice):
    """Base of every algorithm.

    Subclass it (or one of its subclasses) and override ``collect``, ``learn`` or
    ``compute_advantages``. Each role in ``roles`` is an attribute that holds its worker group.

    Args:
      config: the section ``algorithm`` of the run's config.
      groups: worker group by role; an ``AbsentRole`` for a role that the config does not need.
      seed: the run's seed.
      samples: responses per prompt.
      demonstrations: returns the next training batch of the dataset: demonstrations, or with the
        source "pairs" chosen and rejected responses in alternating rows, or with "verdicts"
        responses with their labels as ``positive``. None where the dataset has none.
      max_response_length: maximum length of a response, in tokens.
      more_prompts: returns further prompts for this step, given how many sequences the step has
        drawn so far; None where prompts are drawn ahead of the step.
      environment: plays an episode for each sample of a batch of prompts, see ``answer``; None: a
        sample is one response.
      tokenizer: of the actor; None: there is none.
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
        environment: Any = None,
        tokenizer: Any = None,
    ):
        self.config = config
        self.seed = seed
        self.samples = samples
        self.demonstrations = demonstrations
        self.max_response_length = max_response_length
        self.more_prompts = more_prompts
        self.environment = environment
        self.tokenizer = tokenizer
        if config.get("pretraining_coef") and demonstrations is None:
            raise ConfigError(
                "algorithm.pretraining_coef needs demonstrations; this data has none: set it to 0"
            )
        if self.needed_data and demonstrations is None:
            hint = f": {self.data_hint}" if self.data_hint else ""
            raise ConfigError(
                f"{type(self).__name__} needs {self.needed_data}; this data has none{hint}"
            )
        self.check_samples(config, samples)
        self.step_number = 0
        for role in self.all_roles():
            if role not in groups:
                raise ConfigError(f"{type(self).__name__} needs a worker group for the role {role}")
            setattr(self, role, groups[role])
        self.kl = make_kl_controller(config)
        self.entropy = make_entropy_controller(config)
        self.difficulty = make_difficulty_filter(config)
        # (role, metrics) of this step's updates, see `log`; the trainer reads it.
        self.logged: list[tuple[str, Future | Mapping[str, Any]]] = []

    # Declared for type checkers; each is a worker group.
    actor: Any
    critic: Any
    reference: Any
    reward: Any
    cost: Any
    cost_critic: Any
    target: Any
    buffer: Any

    def step(self, prompts: Batch) -> Batch:
        """One step of the dataflow on a batch of prompts; returns the batch it trained on.

        A class may override it instead of ``collect`` and ``learn``. Its steps are then run
        synchronously, because the trainer cannot tell which part could run asynchronously.
        """
        return self.learn(self.collect(prompts))

    def answer(self, prompts: Batch, greedy: bool = False, samples: int | None = None) -> Any:
        """Answer prompts: what training and evaluation both call.

        With an environment the actor plays an episode for each sample, and the batch has the
        episodes' rows (docs/agents.md); this waits for them. Else it generates a response to each.

        Args:
          prompts: a batch of prompts.
          greedy: one answer per prompt, of the most likely tokens.
          samples: answers per prompt, if not the configured number (``eval.samples``).

        Returns:
          the future of a batch, or the batch.
        """
        options: dict[str, Any] = {"greedy": True} if greedy else {}
        if samples is not None:
            options["samples"] = samples
        if self.environment is not None:
            return self.environment.play(self.actor, prompts, **options)
        return self.actor.generate_sequences(prompts, **options)

    def collect(self, prompts: Batch) -> Any:
        """Rollout: answer prompts; the part of a step that may run asynchronously.

        An algorithm that does not generate takes the next demonstrations and ignores the prompts.
        Without ``sequences`` the prompts are ``{"step": number}``, and so is what this returns.

        It only makes calls and waits for none. With asynchronous rollout
        (``rollout.max_staleness``) it runs in another thread than ``learn``, so it must not change
        anything that ``learn`` reads.

        Returns:
          the input of ``learn``: the future of a batch, or a tuple or dict of futures.
        """
        if self.generates:
            return self.answer(prompts)
        if not self.sequences:
            return prompts
        assert self.demonstrations is not None
        return self.demonstrations()

    def learn(self, batch: Any) -> Batch:
        """Score the batch from ``collect`` and update; returns the batch it trained on."""
        raise NotImplementedError(f"{type(self).__name__} must define learn")

    def compute_advantages(self, batch: Batch) -> Batch:
        """Add to the batch (numpy arrays on the controller) the entries that the updates read."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_advantages")

    def with_advantages(self, batch: Batch) -> Batch:
        """``compute_advantages``, of batches whose episodes have several rows too."""
        episodes = EpisodeRows.of(batch)
        if episodes is None:
            return self.compute_advantages(batch)
        for key, instead in (("ratio", "token"), ("correction", "truncated")):
            if str(self.config.get(key, "")).startswith("sequence"):
                raise RunError(
                    f"algorithm.{key}={self.config[key]} is of whole responses, and the "
                    "environment's fresh observations cut episodes into several rows; use "
                    f"{key}={instead}"
                )
        joined = episodes.join(batch)
        return episodes.split(self.compute_advantages(joined), joined, batch)

    def predictions(self, batch: Batch) -> Predictions:
        """Predictions on held-out examples with known outcomes, for the evaluation.

        Args:
          batch: examples, as ``demonstrations`` returns them.

        Returns:
          by metric prefix (logits, outcomes), both float [examples, ...]; an outcome is 1 yes,
          0 no, NaN unknown. {} where the algorithm predicts nothing.
        """
        return {}

    def evaluate(self, held_out: Any) -> dict[str, float]:
        """Further metrics of an evaluation, by name; they stand under ``eval/``.

        With ``sequences`` they stand beside rewards and accuracy of greedy answers. Nothing may be
        changed here that training reads.

        Args:
          held_out: the run's held-out dataset; None where it has none.
        """
        return {}

    def pretraining_batch(self) -> Batch | None:
        """The next demonstrations for PPO-ptx, or None where ``pretraining_coef`` is 0."""
        if not self.config.get("pretraining_coef"):
            return None
        assert self.demonstrations is not None
        coefficient = np.asarray(self.config.pretraining_coef, np.float32)
        return self.demonstrations() | {"coefficient": coefficient}

    def finish(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Called with a step's metrics at its end; returns further metrics.

        Updates an adaptive entropy coefficient from the entropy that the actor's updates measured.
        """
        if self.entropy is None:
            return {}
        used = self.entropy.coef
        self.entropy.update(metrics.get("actor/entropy", float("nan")))
        return {"entropy/coefficient": used}

    def update_kl_coef(self, batch: Batch, old: Any) -> Batch:
        """Update the adaptive KL coefficient from the KL measured on this batch.

        Args:
          batch: with ``response_mask``, and with ``ref_kl`` or ``ref_logprobs`` where there is a
            reference.
          old: float [rows, length], log-probs of the policy that sampled the batch.

        Returns:
          entries for the batch: ``ref_kl`` where there is a reference (see ``reference_kl``);
          ``kl_coef``, a float32 scalar, where an adaptive KL is in the loss, with its value from
          before this update (the next step uses the new one, as with the KL in the reward);
          ``entropy_coef`` where the entropy bonus is adaptive.
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
        """Rewards for the advantages: scaled, clipped, minus the penalty for overlong responses.

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
            # Of an episode of several rows the longest: each may be as long as a response.
            rows = batch.get(ROW_LENGTHS)
            lengths: Any = response_lengths(batch) if rows is None else rows.max(axis=1)
            penalty = overlong_penalty(lengths, limit, config.overlong_buffer * limit)
            scores = scores + np.float32(config.overlong_penalty) * np.asarray(penalty)
        return scores

    def token_scores(self, batch: Batch) -> np.ndarray | None:
        """Scaled per-token (dense) rewards, float32 [rows, length]; None: the batch has none."""
        if "token_rewards" not in batch:
            return None
        return np.asarray(batch["token_rewards"], np.float32) * np.float32(self.config.reward_scale)

    def rows_in_loss(self, batch: Batch, scores: np.ndarray) -> np.ndarray:
        """Row mask of the losses, bool [rows]: scored, and with ``mask_truncated`` not cut off."""
        rows = ~np.isnan(scores)
        if self.config.mask_truncated:
            rows &= ~np.asarray(batch["truncated"], bool)
        return rows

    def proximal(self, batch: Any) -> Any:
        """Recompute the old (proximal) log-probs for importance-sampling ``correction``.

        Args:
          batch: from ``collect``, or its future.

        Returns:
          the future of ``old_logprobs`` float32 [rows, length], computed by the actor; {} without
          a correction, when the sampler's are used.
        """
        if self.config.get("correction", "none") == "none":
            return {}
        return self.actor.compute_log_prob(batch)

    def minibatches(self, batch: Any) -> Iterator[Any]:
        """Mini-batches of whole groups of samples, reshuffled in every epoch.

        Scalar arrays apply to all rows and are in every mini-batch; other arrays that are not per
        row are in none, as updates split all that they get by rows.

        Args:
          batch: from ``compute_advantages``; or the future of a batch that a worker group holds
            (from its ``apply``). Such a batch stays on the group's devices, and the mini-batches
            are futures too.

        Yields:
          mappings of arrays. Where there are several, each role receives the entries that it reads
          once and slices the rows on its devices.
        """
        if isinstance(batch, Future):
            group = getattr(self, batch.label.split(".")[0])
            for chosen in self._minibatch_rows(int(group.apply(row_count, batch).result())):
                yield batch if chosen is None else group.apply(take_rows, batch, chosen)
            return
        arrays = {k: v for k, v in join(batch).items() if isinstance(v, np.ndarray)}
        rows = row_count(arrays)
        arrays = {k: v for k, v in arrays.items() if not v.ndim or len(v) == rows}
        held: dict[Any, Any] = {}
        if EpisodeRows.of(arrays) is None:
            parts = list(self._minibatch_rows(rows))
        else:
            parts = list(self._episode_minibatch_rows(arrays))
        for part in parts:
            yield arrays if len(parts) == 1 else MiniBatch(arrays, part, held)

    def _minibatch_rows(self, rows: int) -> Iterator[np.ndarray | None]:
        """Row numbers of each mini-batch; None: all rows in their order."""
        size = self.config.get("minibatch", 0) or rows
        samples = max(self.samples if rows % self.samples == 0 else 1, self.unit)
        for epoch in range(self.config.get("epochs", 1)):
            if size >= rows:
                yield None
                continue
            rng = np.random.default_rng([self.seed, self.step_number, epoch])
            yield from rng.permutation(np.arange(rows).reshape(-1, samples)).reshape(-1, size)

    def _episode_minibatch_rows(self, batch: Batch) -> Iterator[np.ndarray]:
        """Row numbers of each mini-batch of episodes that have several rows."""
        groups, episodes = np.asarray(batch["group"]), np.asarray(batch["episode"])
        names = len(set(groups[episodes >= 0].tolist()))
        count = max((self.config.get("minibatch", 0) or names * self.samples) // self.samples, 1)
        for epoch in range(self.config.get("epochs", 1)):
            rng = np.random.default_rng([self.seed, self.step_number, epoch])
            order = rng.permutation(names) if count < names else np.arange(names)
            yield from episode_minibatches(groups, episodes, order, count)

    def log(self, metrics: Future | Mapping[str, Any], role: str = "") -> None:
        """Keep an update's metrics for this step's row; does not wait for a future."""
        if isinstance(metrics, Future):
            role = role or metrics.label.split(".")[0]
        self.logged.append((role, metrics))

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """Metrics that this algorithm adds to the step's row, computed from its batch.

        Metrics common to all algorithms (rewards, KL, lengths) are added elsewhere. By default what
        ``choose`` has said in numbers.
        """
        return choice_metrics(batch)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as plain JSON; the workers save their arrays themselves."""
        entropy = {} if self.entropy is None else {"entropy": self.entropy.state()}
        chosen = {} if self.difficulty is None else {"difficulty": self.difficulty.state()}
        return {"kl": self.kl.state(), **entropy, **chosen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        self.kl.restore(state["kl"])
        if self.entropy is not None:
            self.entropy.restore(state["entropy"])
        if self.difficulty is not None:
            self.difficulty.restore(state["difficulty"])


def row_count(batch: Mapping[str, Any]) -> int:
    """Number of rows of a batch of arrays."""
    if "response_mask" in batch:
        return batch["response_mask"].shape[0]
    rows = next((np.shape(x)[0] for x in batch.values() if np.ndim(x)), None)
    if rows is None:
        raise RunError(
            f"minibatches: no array with rows among {', '.join(batch) or 'no entries'}; give "
            "arrays with a row per example"
        )
    return rows


def take_rows(batch: Mapping[str, Any], chosen: Any) -> Batch:
    """Select rows of a batch of arrays by number; what is not per row is kept."""
    rows = row_count(batch)
    return {key: x[chosen] if x.ndim and len(x) == rows else x for key, x in batch.items()}


def old_logprobs(batch: Batch) -> Any:
    """Old log-probs, the denominator of the ratio: tempered, not truncated by top-k or top-p.

    The actor's, recomputed before the first update (``proximal``), where the batch has them; else
    the sampler's.
    """
    return batch.get("old_logprobs", batch.get("policy_logprobs", batch["logprobs"]))


def reference_kl(batch: Batch, old: Any = None) -> np.ndarray | None:
    """Per-token KL to the reference (k1), in nats; the batch's ``ref_kl`` if it is there already.

    Args:
      batch: with ``response_mask``, and ``ref_logprobs`` where there is a reference.
      old: float [rows, length], log-probs of the sampling policy; None: those of the batch.

    Returns:
      float32 [rows, length], 0 off the responses; None without a reference.
    """
    if "ref_kl" in batch or "ref_logprobs" not in batch:
        return batch.get("ref_kl")
    difference = np.asarray(old_logprobs(batch) if old is None else old) - batch["ref_logprobs"]
    return np.where(batch["response_mask"], difference, np.float32(0))
