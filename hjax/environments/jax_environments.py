"""Environments as pure JAX functions, so that a whole rollout of many is one compiled program.

Constants and equations of motion are those of Gymnasium's CartPole-v1 and Pendulum-v1.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

State = Any  # a tree of arrays


class EnvironmentStep(NamedTuple):
    """What one step of one environment gives.

    Attributes:
      state: after it.
      reward: float scalar.
      terminated: bool scalar: the episode ended, and nothing more was to be had.
      truncated: bool scalar: a time limit cut the episode.
    """

    state: State
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array


class JaxEnvironment:
    """One environment; a worker runs many of them side by side with ``jax.vmap``.

    Attributes:
      observation_shape: of an observation, float32.
      actions: number of actions, numbered from 0; 0: actions are float32 vectors.
      action_size: entries of such a vector.
    """

    observation_shape: tuple[int, ...] = ()
    actions: int = 0
    action_size: int = 0

    def reset(self, key: jax.Array) -> State:
        """The state in which an episode begins."""
        raise NotImplementedError(f"{type(self).__name__} must define reset(key)")

    def observe(self, state: State) -> jax.Array:
        """What the policy sees of a state."""
        raise NotImplementedError(f"{type(self).__name__} must define observe(state)")

    def step(self, state: State, action: jax.Array) -> EnvironmentStep:
        """Take an action."""
        raise NotImplementedError(f"{type(self).__name__} must define step(state, action)")


@dataclasses.dataclass(frozen=True)
class CartPole(JaxEnvironment):
    """A pole on a cart, pushed left (0) or right (1); each step that it stands is worth 1.

    Barto, Sutton and Anderson 1983. An episode ends where the cart is 2.4 from the middle or the
    pole leans by 12 degrees, and is cut after ``limit`` steps.
    """

    limit: int = 500
    observation_shape = (4,)
    actions = 2

    def reset(self, key: jax.Array) -> State:
        """Position, velocity, angle and angular velocity, each uniform in +-0.05."""
        motion = jax.random.uniform(key, (4,), jnp.float32, -0.05, 0.05)
        return {"motion": motion, "time": jnp.int32(0)}

    def observe(self, state: State) -> jax.Array:
        """float32 [4]: position, velocity, angle (radians), angular velocity."""
        return state["motion"]

    def step(self, state: State, action: jax.Array) -> EnvironmentStep:
        """Euler's method, 0.02 s."""
        gravity, mass, pole_mass, half, force, seconds = 9.8, 1.1, 0.1, 0.5, 10.0, 0.02
        x, speed, angle, turning = state["motion"]
        push = jnp.where(action == 1, force, -force)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        part = (push + pole_mass * half * turning**2 * sin) / mass
        turn = (gravity * sin - cos * part) / (half * (4 / 3 - pole_mass * cos**2 / mass))
        pull = part - pole_mass * half * turn * cos / mass
        motion = jnp.stack(
            [
                x + seconds * speed,
                speed + seconds * pull,
                angle + seconds * turning,
                turning + seconds * turn,
            ]
        )
        time = state["time"] + 1
        fell = (jnp.abs(motion[0]) > 2.4) | (jnp.abs(motion[2]) > 12 * jnp.pi / 180)
        late = ~fell & (time >= self.limit)
        return EnvironmentStep({"motion": motion, "time": time}, jnp.float32(1), fell, late)


@dataclasses.dataclass(frozen=True)
class Pendulum(JaxEnvironment):
    """A pendulum to be swung up and held by a torque; the reward is minus a cost.

    An episode is cut after ``limit`` steps. The action is a torque in units of 2, cut to +-1.
    """

    limit: int = 200
    observation_shape = (3,)
    action_size = 1

    def reset(self, key: jax.Array) -> State:
        """Angle uniform in +-pi, angular velocity in +-1."""
        drawn = jax.random.uniform(key, (2,), jnp.float32, -1.0, 1.0)
        return {"motion": drawn * jnp.array([jnp.pi, 1.0], jnp.float32), "time": jnp.int32(0)}

    def observe(self, state: State) -> jax.Array:
        """float32 [3]: cosine and sine of the angle, angular velocity."""
        angle, turning = state["motion"]
        return jnp.stack([jnp.cos(angle), jnp.sin(angle), turning])

    def step(self, state: State, action: jax.Array) -> EnvironmentStep:
        """Euler's method, 0.05 s."""
        gravity, seconds = 10.0, 0.05
        angle, turning = state["motion"]
        torque = 2 * jnp.clip(action[0], -1, 1)
        from_top = (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
        cost = from_top**2 + 0.1 * turning**2 + 0.001 * torque**2
        turning = turning + (1.5 * gravity * jnp.sin(angle) + 3 * torque) * seconds
        turning = jnp.clip(turning, -8, 8)
        motion = jnp.stack([angle + turning * seconds, turning])
        time = state["time"] + 1
        late = time >= self.limit
        return EnvironmentStep({"motion": motion, "time": time}, -cost, jnp.bool_(False), late)


# By name, as configs name them.
JAX_ENVIRONMENTS: dict[str, type[JaxEnvironment]] = {"cartpole": CartPole, "pendulum": Pendulum}
