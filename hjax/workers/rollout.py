"""The rollout worker: generation on devices of its own, with weights that the actor publishes."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hjax.errors import ConfigError, RunError
from hjax.models.parameters import Params
from hjax.sharding.global_arrays import to_numpy
from hjax.sharding.layout import RoleLayouts
from hjax.sharding.parameter_manifest import check_manifest, manifest_of
from hjax.sharding.protocols import control, protocol
from hjax.workers.generating_worker import (
    PENDING_REWARDS,
    PROMPT_KEYS,
    GeneratingWorker,
    once_per_prompt,
)
from hjax.workers.worker import WorkerContext


class Rollout(GeneratingWorker):
    """Generates with one version of the weights and can hold the next version beside it.

    The weight sync (actor to rollout) has two phases: ``receive_weights`` brings a version here,
    ``commit`` switches generation to it. Both are messages of the pool, so no generation sees half
    an update. Version numbers rise. A checkpoint holds none of this: the actor publishes again.
    """

    def __init__(self, context: WorkerContext):
        if context.layouts is None:
            raise ConfigError(f"{context.role}: a model needs devices and shapes")
        generate = context.layouts.generate
        super().__init__(dataclasses.replace(context, layouts=RoleLayouts(generate, generate)))
        # It keeps, and is sent, the weights in generation's dtypes.
        self.network = self.network.with_shapes(self.network.compute_shapes(context.compute.dtype))
        self._clear()

    def _clear(self) -> None:
        self.params: Params = {}
        self.version: int | None = None
        self._received: tuple[int, Params] | None = None
        self._seconds = 0.0

    @control
    def initialize(self) -> None:
        """Nothing to load: the actor publishes the weights."""
        self._clear()

    @control
    def load_state(self, folder: str) -> None:
        """Clear the weights: a checkpoint has none of them, and the actor publishes again."""
        self._clear()

    def state(self) -> dict[str, Any]:
        """Empty: the weights are the actor's."""
        return {}

    @control
    def receive_weights(self, params: Params, version: int) -> int:
        """Receive a version of the weights beside the one in use (weight sync); returns its number.

        Args:
          params: from ``Actor.publish``.
          version: larger than that of the weights here.

        Raises:
          RunError: other names, shapes or dtypes than generation reads, or an old version.
        """
        check_manifest(manifest_of(params, version), self.network.shapes, newer_than=self.version)
        start = time.perf_counter()
        self._received = version, jax.block_until_ready(self._reshard(params))
        self._seconds += time.perf_counter() - start
        return version

    @control
    def commit(self, version: int) -> int:
        """Switch generation to a received version; the previous weights are freed.

        Raises:
          RunError: it was not received.
        """
        if self._received is None or self._received[0] != version:
            received = "none" if self._received is None else f"version {self._received[0]}"
            raise RunError(f"{self.role}: version {version} was not received ({received} was)")
        params, self._received = self._received[1], None
        self.params = {}  # freed before the new ones are split by layer
        self.params = self.generator.decoding_params(params)
        self.version = version
        return version

    @protocol("3D_ALL_MICRO_DP", phase="generate", reads=PROMPT_KEYS)
    def generate_sequences(
        self,
        prompts: Mapping[str, Any],
        greedy: bool = False,
        samples: int | None = None,
        version: int | None = None,
        tokens: int = 0,
    ) -> dict[str, Any]:
        """Generate responses, see ``GeneratingWorker``.

        Args:
          prompts, greedy, samples: as there.
          version: of the weights that must generate.
          tokens: after which to pause, for ``continue_sequences``; 0: run to the end.

        Returns:
          the batch, with ``versions`` int32 [rows, length]: of the weights that drew each token, 0
          on padding. If paused it is the argument of ``continue_sequences``, no batch to train on.
        """
        self.check_version(version)
        rollout = self.generate_tokens(prompts, greedy, samples, tokens or None)
        rollout["versions"] = self._versions(rollout["response_mask"])
        if not tokens:
            return self.with_text(rollout)
        numbers = {name: prompts.get(name, 0) for name in ("step", "first")}
        return rollout | numbers | {"samples": samples}

    @protocol("3D_ALL_MICRO_DP", phase="generate")
    def continue_sequences(
        self,
        partial: Mapping[str, Any],
        start: int,
        tokens: int,
        last: bool,
        version: int | None = None,
    ) -> dict[str, Any]:
        """Continue a paused batch with the current weights (partial rollout).

        Args:
          partial: from ``generate_sequences`` or this method; rows that have ended are kept.
          start: tokens after which it was paused.
          tokens: after which to pause again.
          last: whether this is the last part; the result is then a complete batch.
          version: of the weights that must generate.
        """
        self.check_version(version)
        context, rollout = self.context, dict(partial)
        step, first, samples = (rollout.pop(name) for name in ("step", "first", "samples"))
        rows = rollout["responses"].shape[0]
        if to_numpy(rollout["truncated"]).any():
            drawn = {key: x for key, x in rollout.items() if isinstance(x, jax.Array)}
            before = drawn.pop("versions")
            config = self.generation_config(samples=samples, end=None if last else start + tokens)
            asked = once_per_prompt(rollout, config.samples)
            pending = {role: list(said) for role, said in rollout.get(PENDING_REWARDS, {}).items()}
            with self.generation_weights() as params:
                drawn = self.generator.resume(
                    params,
                    drawn,
                    self.sequence_numbers(rows, first),
                    dataclasses.replace(config, extra_samples=0),
                    seed=context.seed,
                    step=step,
                    start=start,
                    on_prompt_done=self.reward_callback(asked, pending),
                )
            new = drawn["response_mask"] & ~rollout["response_mask"]
            rollout |= drawn | {"versions": jnp.where(new, self._versions(new), before)}
            rollout |= {PENDING_REWARDS: pending} if pending else {}
        if last:
            return self.with_text(self.cut_at_stop_strings(rollout))
        return rollout | {"step": step, "first": first, "samples": samples}

    def _versions(self, mask: jax.Array) -> jax.Array:
        return jnp.where(mask, jnp.int32(self.version), 0)

    def check_version(self, version: int | None) -> None:
        """Raise RunError unless there are weights, of this version (None: any)."""
        if self.version is None or version not in (None, self.version):
            raise RunError(
                f"{self.role}: version {version} of the weights must generate, but "
                f"{'none' if self.version is None else self.version} is loaded"
            )

    @control
    def take_seconds(self) -> dict[str, float]:
        """Seconds spent receiving weights since the last time this was called."""
        taken, self._seconds = self._seconds, 0.0
        return {"transition": taken}
