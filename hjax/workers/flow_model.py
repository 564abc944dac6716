"""Flow models as workers: trained by flow matching, sampled with and without noise."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.environments.flow_problems import FlowProblem, find_problem
from hjax.models.flow_steps import FlowStep, flow_steps, sigma_grid
from hjax.sharding.global_arrays import place
from hjax.sharding.protocols import protocol
from hjax.workers.micro_batching import Batch
from hjax.workers.mlp import apply_mlp, create_mlp, mlp_axes
from hjax.workers.network import NetworkWorker
from hjax.workers.worker import WorkerContext


class FlowModel(NetworkWorker):
    """A network that turns noise into samples; a subclass defines ``init`` and ``velocity``.

    ``algorithm.problem`` says what samples are and how many conditions there are,
    ``algorithm.noise`` is that of stochastic steps.
    """

    problem: FlowProblem

    def __init__(self, context: WorkerContext):
        self.problem = find_problem(context.options.algorithm.problem)
        super().__init__(context)

    def velocity(
        self, model: Any, x: jax.Array, sigma: jax.Array, conditions: jax.Array
    ) -> jax.Array:
        """E[noise - sample | x] at noise levels.

        Args:
          model: with parameters.
          x: float32 [rows, *sample shape].
          sigma: float32 [rows].
          conditions: int32 [rows].
        """
        raise NotImplementedError(f"{type(self).__name__} must define velocity")

    def loss(self, model: Any, batch: Batch, keys: jax.Array) -> Any:
        """The algorithm's loss; without one flow matching, the mean squared error of the velocity
        at a noise level uniform in (0, 1]."""
        if self.algorithm_loss is not None:
            return super().loss(model, batch, keys)
        x = batch["samples"]

        def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            level, noise = jax.random.split(key)
            return 1 - jax.random.uniform(level), jax.random.normal(noise, x.shape[1:])

        sigma, noise = jax.vmap(draw)(keys)
        wide = sigma.reshape(-1, *(1,) * (x.ndim - 1))
        found = self.velocity(model, (1 - wide) * x + wide * noise, sigma, batch["conditions"])
        return jnp.mean(((found - (noise - x)) ** 2).reshape(len(x), -1), axis=1)

    @protocol("3D_PROTO", phase="generate")
    def sample_paths(
        self, conditions: Any, number: int, steps: int, noise: float, start: Any = None,
        first: int = 0,
    ) -> dict[str, jax.Array]:  # fmt: skip
        """Sample, step by step.

        Args:
          conditions: int32 [rows].
          number: of the call: equal numbers draw equal noise.
          steps: of the whole grid from 1 to 0.
          noise: of stochastic steps; 0: deterministic ones (an ODE).
          start: float32 [rows, ...] at the level of step ``first``; None: noise.
          first: steps that are left out.

        Returns:
          ``samples`` [rows, ...]; with noise also ``latents`` [rows, steps - first + 1, ...] and
          ``logprobs`` float32 [rows, steps - first].
        """
        turn = place(jnp.asarray(number, jnp.uint32), self.layouts.train.replicated)
        program = self.compiled("unroll_path", steps=steps, noise=float(noise), first=first)
        return program(self.params, conditions, turn, start)  # type: ignore[no-any-return]

    def unroll_path(
        self, model: Any, conditions: jax.Array, number: jax.Array, start: Any, *, steps: int,
        noise: float, first: int,
    ) -> dict[str, jax.Array]:  # fmt: skip
        """``sample_paths`` as a pure function; inside jit."""
        rows, constrain = conditions.shape[0], self.layouts.train.constrain
        keys = self.noise(number, 0, rows)
        if start is None:
            start = jax.vmap(lambda key: jax.random.normal(key, self.problem.shape))(keys)
        grid = jax.tree.map(lambda x: x[first:], flow_steps(sigma_grid(steps), noise))

        def advance(x: jax.Array, each: tuple[FlowStep, jax.Array]) -> Any:
            step, time = each
            sigma = jnp.broadcast_to(step.sigma, (rows,))
            mean = step.mean(x, self.velocity(model, x, sigma, conditions))
            if not noise:
                return constrain(mean, "batch"), None

            def draw(key: jax.Array) -> jax.Array:
                return jax.random.normal(jax.random.fold_in(key, time + 1), x.shape[1:])

            after = mean + step.spread * jax.vmap(draw)(keys)
            return constrain(after, "batch"), (after, step.log_density(after, mean))

        last, seen = jax.lax.scan(advance, start, (grid, jnp.arange(first, steps)))
        if not noise:
            return {"samples": last}
        latents = jnp.concatenate([start[None], seen[0]]).swapaxes(0, 1)
        return {"samples": last, "latents": latents, "logprobs": seen[1].swapaxes(0, 1)}

    def step_means(
        self, model: Any, latents: jax.Array, conditions: jax.Array, steps: int, noise: float
    ) -> tuple[jax.Array, FlowStep]:
        """Where the first steps lead on average, from each latent but the last.

        Args:
          model: with parameters.
          latents: [rows, taken + 1, ...] of the first ``taken`` steps.
          conditions: int32 [rows].
          steps, noise: of the whole grid.

        Returns:
          means [rows * taken, ...], row by row, and the steps' numbers, to broadcast with them.
        """
        rows, taken = latents.shape[0], latents.shape[1] - 1
        grid = jax.tree.map(lambda x: x[:taken], flow_steps(sigma_grid(steps), noise))
        before = latents[:, :-1].reshape(rows * taken, *latents.shape[2:])
        wide = (-1, *(1,) * (latents.ndim - 2))
        step = FlowStep(*(jnp.tile(x, rows).reshape(wide) for x in grid))
        conditions = jnp.repeat(conditions, taken)
        return step.mean(
            before, self.velocity(model, before, step.sigma.reshape(-1), conditions)
        ), step

    def path_means(
        self, model: Any, latents: jax.Array, conditions: jax.Array, *, steps: int, noise: float
    ) -> jax.Array:
        """``step_means`` alone, [rows, taken, ...]."""
        means, _ = self.step_means(model, latents, conditions, steps, noise)
        return means.reshape(latents.shape[0], -1, *latents.shape[2:])

    def path_logprobs(
        self, model: Any, latents: jax.Array, conditions: jax.Array, *, steps: int, noise: float
    ) -> jax.Array:
        """Log-density of each step of a path, float32 [rows, taken]."""
        means, step = self.step_means(model, latents, conditions, steps, noise)
        after = latents[:, 1:].reshape(means.shape)
        return step.log_density(after, means).reshape(latents.shape[0], -1)

    @protocol("3D_PROTO")
    def score_paths(
        self, name: str, batch: Mapping[str, Any], steps: int, noise: float
    ) -> jax.Array:
        """``path_means`` or ``path_logprobs`` of a batch's ``latents`` and ``conditions``."""
        program = self.compiled(name, steps=steps, noise=float(noise))
        return program(self.params, batch["latents"], batch["conditions"])  # type: ignore[no-any-return]


class MLPFlow(FlowModel):
    """A perceptron of sample, noise level and condition."""

    def init(self, key: jax.Array) -> Any:
        """Weights."""
        own, size = self.context.options.algorithm, int(np.prod(self.problem.shape))
        inputs = size + 8 + self.problem.conditions
        return {"mlp": create_mlp(key, [inputs, *[own.hidden_size] * own.hidden_layers, size])}

    def axes(self) -> Any:
        """Hidden layers are split."""
        return {"mlp": mlp_axes(self.context.options.algorithm.hidden_layers + 1)}

    def velocity(
        self, model: Any, x: jax.Array, sigma: jax.Array, conditions: jax.Array
    ) -> jax.Array:
        """See ``FlowModel``."""
        waves = sigma[:, None] * jnp.pi * 2.0 ** jnp.arange(4)
        known = jax.nn.one_hot(conditions, self.problem.conditions)
        flat = x.reshape(len(x), -1)
        inputs = jnp.concatenate([flat, jnp.sin(waves), jnp.cos(waves), known], axis=1)
        return apply_mlp(model["mlp"], inputs, jax.nn.silu).reshape(x.shape)
