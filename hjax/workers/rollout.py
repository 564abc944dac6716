"""The rollout: generation on devices of its own, with weights that the actor publishes."""

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
from hjax.sharding.parameter_manifest import check, manifest_of
from hjax.sharding.protocols import control, protocol
from hjax.workers.generating_worker import (
    JUDGED,
    PROMPT_KEYS,
    GeneratingWorker,
    once_per_prompt,
)
from hjax.workers.worker import WorkerContext


class Rollout(GeneratingWorker):
    """Generates with the weights of one version, and takes those of the next beside them.

    A version is published in two phases: ``take`` brings it here, ``commit`` makes it the one that
    generates. Both are messages of the pool, so that no generation sees half of it. Versions are
    numbers that rise; nothing here is in a checkpoint, for the actor publishes anew.
    """

    def __init__(self, context: WorkerContext):
        if context.layouts is None:
            raise ConfigError(f"{context.role}: a model needs devices and shapes")
        generate = context.layouts.generate
        super().__init__(dataclasses.replace(context, layouts=RoleLayouts(generate, generate)))
        dtypes = self.network.compute_dtypes(context.compute.dtype)
        shapes = jax.tree.map(
            lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype), self.network.shapes, dtypes
        )
        # What it keeps, and what it is to be sent, is what generation reads.
        self.network = self.network.with_shapes(shapes)
        self._forget()

    def _forget(self) -> None:
        self.params: Params = {}
        self.version: int | None = None
        self._taken: tuple[int, Params] | None = None
        self._seconds = 0.0

    @control
    def initialize(self) -> None:
        """Nothing to read: the weights are published."""
        self._forget()

    @control
    def load_state(self, folder: str) -> None:
        """A checkpoint has nothing of it: what was published is forgotten, it will be anew."""
        self._forget()

    def state(self) -> dict[str, Any]:
        """Nothing that decides a step: its weights are the actor's."""
        return {}

    @control
    def take(self, params: Params, version: int) -> int:
        """Take a version of the weights beside the one that generates; returns its number.

        Args:
          params: of ``Actor.publish``.
          version: larger than that of the weights here.

        Raises:
          RunError: other names, shapes or dtypes than generation reads, or an old version.
        """
        check(manifest_of(params, version), self.network.shapes, after=self.version)
        start = time.perf_counter()
        self._taken = version, jax.block_until_ready(self._brought(params))
        self._seconds += time.perf_counter() - start
        return version

    @control
    def commit(self, version: int) -> int:
        """Generate with a version from now on; the weights before it are freed.

        Raises:
          RunError: it has not been taken.
        """
        if self._taken is None or self._taken[0] != version:
            taken = "none" if self._taken is None else f"version {self._taken[0]}"
            raise RunError(f"{self.role}: version {version} was not taken ({taken} was)")
        params, self._taken = self._taken[1], None
        self.params = {}  # freed before others are cut by layer
        self.params = self.generator.as_read(params)
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
        """Answer prompts, see ``GeneratingWorker``.

        Args:
          prompts, greedy, samples: as there.
          version: that of the weights that are to generate.
          tokens: after which to leave off, for ``continue_sequences``; 0: to the end.

        Returns:
          the batch, with ``versions`` int32 [rows, length]: of the weights that drew each token,
          0 on padding. Left off, it is that method's argument and no batch to learn from.
        """
        self._expect(version)
        rollout = self.answer(prompts, greedy, samples, tokens or None)
        rollout["versions"] = self._versions(rollout["response_mask"])
        if not tokens:
            return self.with_text(rollout)
        numbers = {name: prompts.get(name, 0) for name in ("step", "first")}
        return rollout | numbers | {"samples": samples}

    @protocol("3D_ALL_MICRO_DP", phase="generate")
    def continue_sequences(
        self,
        begun: Mapping[str, Any],
        start: int,
        tokens: int,
        last: bool,
        version: int | None = None,
    ) -> dict[str, Any]:
        """Go on with a batch that was left off, with the weights as they are now.

        Args:
          begun: from ``generate_sequences`` or this method; rows that have ended stay.
          start: tokens after which it was left off.
          tokens: after which to leave off again.
          last: whether this is the last part: what comes back is a batch as any other.
          version: that of the weights that are to generate.
        """
        self._expect(version)
        context, rollout = self.context, dict(begun)
        step, first, samples = (rollout.pop(name) for name in ("step", "first", "samples"))
        rows = rollout["responses"].shape[0]
        if to_numpy(rollout["truncated"]).any():
            drawn = {key: x for key, x in rollout.items() if isinstance(x, jax.Array)}
            before = drawn.pop("versions")
            config = self.generation_config(samples=samples, end=None if last else start + tokens)
            asked = once_per_prompt(rollout, config.samples)
            judged = {role: list(said) for role, said in rollout.get(JUDGED, {}).items()}
            with self.gathered() as params:
                drawn = self.generator.resume(
                    params,
                    drawn,
                    self.sequence(rows, first),
                    dataclasses.replace(config, surplus=0),
                    seed=context.seed,
                    step=step,
                    start=start,
                    on_ended=self.judging(asked, judged),
                )
            new = drawn["response_mask"] & ~rollout["response_mask"]
            versions = jnp.where(new, self._versions(new), before)
            rollout |= drawn | {"versions": versions} | ({JUDGED: judged} if judged else {})
        if last:
            return self.with_text(self.ended(rollout))
        return rollout | {"step": step, "first": first, "samples": samples}

    def _versions(self, mask: jax.Array) -> jax.Array:
        return jnp.where(mask, jnp.int32(self.version), 0)

    def _expect(self, version: int | None) -> None:
        if self.version is None or version not in (None, self.version):
            raise RunError(
                f"{self.role}: version {version} of the weights is to generate, "
                f"{'none' if self.version is None else self.version} is here"
            )

    @control
    def take_seconds(self) -> dict[str, float]:
        """Seconds in which weights were taken since last asked."""
        taken, self._seconds = self._seconds, 0.0
        return {"transition": taken}
