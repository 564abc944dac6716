"""A network that plays JAX environments inside its own compiled programs."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hjax.environments.jax_environments import JAX_ENVIRONMENTS, JaxEnvironment
from hjax.errors import ConfigError
from hjax.sharding.global_arrays import place
from hjax.sharding.protocols import control, protocol
from hjax.user_code import load_subclass
from hjax.workers.network import NetworkWorker
from hjax.workers.parameter_worker import abstract
from hjax.workers.worker import WorkerContext


class PlayingWorker(NetworkWorker):
    """A network whose ``act`` plays environments that are pure JAX functions.

    ``algorithm.environment`` names the environment and ``algorithm.environments`` how many are
    played side by side, split over the data-parallel parts. Their states go on from call to call
    and stand in the checkpoint. A role that is never asked to ``play`` (a target network) keeps
    them as they began.
    """

    def __init__(self, context: WorkerContext):
        own = context.options.algorithm
        self.environment = find_environment(own.environment)
        self.count = int(own.environments)
        super().__init__(context)
        parts = self.layouts.train.shard_count("batch")
        if self.count % parts:
            raise ConfigError(
                f"config.algorithm.environments={self.count} do not divide over {parts} "
                f"data-parallel parts of the {self.role}; use a multiple of {parts}"
            )
        self.played: dict[str, Any] = {}

    @control
    def initialize(self) -> None:
        """Draw the parameters, and begin the environments."""
        super().initialize()
        self._begin()

    @control
    def take_weights(self, params: Any, manifest: Any = None) -> None:
        """Copy another worker's parameters, and begin the environments."""
        super().take_weights(params, manifest)
        self._begin()

    def _begin(self) -> None:
        shardings = jax.tree.map(lambda x: x.sharding, self._abstract_played())
        self.played = jax.jit(self._fresh, out_shardings=shardings)()

    def _fresh(self) -> dict[str, Any]:
        keys = self.noise(jnp.uint32(2**32 - 1), 0, self.count)
        zeros = jnp.zeros(self.count, jnp.float32)
        return {"state": jax.vmap(self.environment.reset)(keys), "return": zeros}

    def _abstract_played(self) -> dict[str, Any]:
        shapes = jax.eval_shape(self._fresh)
        split = self.layouts.train.sharding("batch")
        made: dict[str, Any] = abstract(shapes, jax.tree.map(lambda _: split, shapes))
        return made

    @protocol("3D_PROTO", phase="generate")
    def play(self, number: int, steps: int, **options: Any) -> dict[str, jax.Array]:
        """Go on playing every environment; one that ends begins anew.

        Args:
          number: of the call, such as the step's: equal numbers draw equal noise.
          steps: of each environment.
          options: float scalars that ``act`` takes by name, such as an ``epsilon``.

        Returns:
          arrays [environments, steps, ...]: ``observations``, ``actions``, ``logprobs`` (where the
          class defines ``log_prob``), ``next_observations`` (before a new episode begins),
          ``rewards``, ``terminated``, ``truncated``, and ``returns``, float: the sum of an
          episode's rewards where it ended, NaN elsewhere.
        """
        whole = self.layouts.train.replicated
        turn = place(jnp.asarray(number, jnp.uint32), whole)
        floats = {key: place(jnp.asarray(x, jnp.float32), whole) for key, x in options.items()}
        program = self.compiled("unroll", steps=steps)
        self.played, made = program(self.params, self.played, turn, floats)
        return made  # type: ignore[no-any-return]

    def unroll(
        self, model: Any, played: Any, number: jax.Array, options: Mapping[str, Any], steps: int
    ) -> tuple[Any, dict[str, jax.Array]]:
        """``play`` as a pure function of the environments' states; inside jit."""
        constrain = self.layouts.train.constrain
        rows = self.noise(number, 0, self.count)
        knows = type(self).log_prob is not NetworkWorker.log_prob
        game = self.environment

        def turn(played: Any, time: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            def one(state: Any, total: jax.Array, row: jax.Array) -> Any:
                key = jax.random.fold_in(row, time)
                observation = game.observe(state)
                action = self.act(model, observation, key, **options)
                after = game.step(state, action)
                done, total = after.terminated | after.truncated, total + after.reward
                fresh = game.reset(jax.random.fold_in(key, 1))
                seen = {
                    "observations": observation,
                    "actions": action,
                    "next_observations": game.observe(after.state),
                    "rewards": after.reward,
                    "terminated": after.terminated,
                    "truncated": after.truncated,
                    "returns": jnp.where(done, total, jnp.nan),
                }
                if knows:
                    seen["logprobs"] = self.log_prob(model, observation, action)
                state = jax.tree.map(lambda a, b: jnp.where(done, a, b), fresh, after.state)
                return {"state": state, "return": jnp.where(done, 0.0, total)}, seen

            made = jax.vmap(one)(played["state"], played["return"], rows)
            return jax.tree.map(lambda x: constrain(x, "batch"), made)  # type: ignore[no-any-return]

        played, seen = jax.lax.scan(turn, played, jnp.arange(steps))
        return played, {key: constrain(x.swapaxes(0, 1), "batch") for key, x in seen.items()}

    @protocol("3D_PROTO", phase="")
    def evaluate_episodes(self, steps: int, **options: Any) -> dict[str, jax.Array]:
        """Play an episode in each environment by ``act_greedily``, of at most ``steps`` steps,
        leaving those of training as they are; returns ``returns`` float [environments]."""
        whole = self.layouts.train.replicated
        number = place(jnp.asarray(2**32 - 2, jnp.uint32), whole)
        returns: jax.Array = self.compiled("greedy_episodes", steps=steps)(self.params, number)
        return {"returns": returns}

    def act_greedily(self, model: Any, observation: jax.Array) -> jax.Array:
        """The action of an evaluation for one observation."""
        raise NotImplementedError(f"{type(self).__name__} must define act_greedily")

    def greedy_episodes(self, model: Any, number: jax.Array, steps: int) -> jax.Array:
        """Returns of episodes by ``act_greedily``, float [environments]; inside jit."""
        game = self.environment

        def one(key: jax.Array) -> jax.Array:
            def turn(carry: Any, _: Any) -> tuple[Any, None]:
                state, total, live = carry
                after = game.step(state, self.act_greedily(model, game.observe(state)))
                total = total + jnp.where(live, after.reward, 0.0)
                return (after.state, total, live & ~(after.terminated | after.truncated)), None

            start = game.reset(key), jnp.float32(0), jnp.bool_(True)
            return jax.lax.scan(turn, start, None, steps)[0][1]  # type: ignore[no-any-return]

        return jax.vmap(one)(self.noise(number, 0, self.count))

    def state(self) -> dict[str, Any]:
        """That of the network, and the environments' states."""
        return super().state() | {"environments": self.played}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``checkpointed`` state."""
        super().restore(state)
        self.played = state["environments"]

    def abstract_state(self) -> dict[str, Any]:
        """Shapes and shardings of ``state()``."""
        return super().abstract_state() | {"environments": self._abstract_played()}


def find_environment(name: str) -> JaxEnvironment:
    """The environment that a config names: a shipped one, or ``path.py:Class``.

    Raises:
      ConfigError: there is none.
    """
    return load_subclass(
        name, "config.algorithm.environment", base=JaxEnvironment, shipped=JAX_ENVIRONMENTS
    )()
