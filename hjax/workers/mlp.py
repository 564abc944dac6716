"""Multilayer perceptrons as workers: a policy, a value function, and a Q function."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.workers.network import NetworkWorker
from hjax.workers.player import PlayingWorker, find_environment
from hjax.workers.worker import WorkerContext


def create_mlp(key: jax.Array, sizes: Sequence[int], last_scale: float = 1.0) -> dict[str, Any]:
    """Weights of a perceptron, orthogonal with gain sqrt(2), the last with ``last_scale``.

    Args:
      key: PRNG key.
      sizes: of inputs, hidden layers and outputs.
      last_scale: gain of the last layer.

    Returns:
      by layer (``0``, ``1``, ...) ``kernel`` float32 [inputs, outputs] and ``bias`` [outputs], 0.
    """
    layers = {}
    for number, (inputs, outputs) in enumerate(zip(sizes[:-1], sizes[1:])):
        gain = last_scale if number == len(sizes) - 2 else np.sqrt(2)
        draw = jax.nn.initializers.orthogonal(gain)
        kernel = draw(jax.random.fold_in(key, number), (inputs, outputs), jnp.float32)
        layers[str(number)] = {"kernel": kernel, "bias": jnp.zeros(outputs, jnp.float32)}
    return layers


def apply_mlp(layers: dict[str, Any], x: jax.Array, activation: Any = jnp.tanh) -> jax.Array:
    """The outputs [..., outputs] of a perceptron for inputs [..., inputs]."""
    for number in range(len(layers)):
        layer = layers[str(number)]
        x = x @ layer["kernel"] + layer["bias"]
        x = activation(x) if number < len(layers) - 1 else x
    return x


def mlp_axes(layers: int) -> dict[str, Any]:
    """Logical axes of a perceptron's weights: hidden layers are split in turn, as a transformer's
    MLP is."""
    names = [("embed", "mlp"), ("mlp", "embed")]
    axes = {}
    for number in range(layers):
        first, second = names[number % 2]
        if number == 0:
            first = ""
        if number == layers - 1:
            second = ""
        axes[str(number)] = {"kernel": (first or None, second or None), "bias": (second or None,)}
    return axes


class MLPPolicy(PlayingWorker):
    """A perceptron that chooses actions: a softmax over numbered ones, or a normal distribution
    with a learned standard deviation around vectors."""

    def _hidden(self) -> list[int]:
        own = self.context.options.algorithm
        return [own.hidden_size] * own.hidden_layers

    def init(self, key: jax.Array) -> Any:
        """Weights, and for vectors ``log_std`` [entries], 0."""
        game = self.environment
        sizes = [*game.observation_shape, *self._hidden(), game.actions or game.action_size]
        params: dict[str, Any] = {"mlp": create_mlp(key, sizes, last_scale=0.01)}
        return params if game.actions else params | {"log_std": jnp.zeros(game.action_size)}

    def axes(self) -> Any:
        """Hidden layers are split."""
        return {"mlp": mlp_axes(len(self._hidden()) + 1)}

    def act(self, model: Any, observation: jax.Array, key: jax.Array) -> jax.Array:
        """Draw an action."""
        outputs = apply_mlp(model["mlp"], observation)
        if self.environment.actions:
            return jax.random.categorical(key, outputs)
        return outputs + jnp.exp(model["log_std"]) * jax.random.normal(key, outputs.shape)

    def act_greedily(self, model: Any, observation: jax.Array) -> jax.Array:
        """The most likely action."""
        outputs = apply_mlp(model["mlp"], observation)
        return jnp.argmax(outputs) if self.environment.actions else outputs

    def log_prob(self, model: Any, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Log-probability, or log-density, of an action; with row axes too."""
        outputs = apply_mlp(model["mlp"], observation)
        if self.environment.actions:
            every = jax.nn.log_softmax(outputs)
            return jnp.take_along_axis(every, action[..., None], axis=-1)[..., 0]
        return jnp.sum(jax.scipy.stats.norm.logpdf(action, outputs, jnp.exp(model["log_std"])), -1)

    def entropy(self, model: Any, observation: jax.Array) -> jax.Array:
        """Entropy of the policy in nats; with row axes too."""
        if self.environment.actions:
            every = jax.nn.log_softmax(apply_mlp(model["mlp"], observation))
            return -jnp.sum(jnp.exp(every) * every, axis=-1)
        each = model["log_std"] + 0.5 * np.log(2 * np.pi * np.e)
        rows = observation.ndim - len(self.environment.observation_shape)
        return jnp.broadcast_to(jnp.sum(each), observation.shape[:rows])


class MLPValue(NetworkWorker):
    """A perceptron that predicts the return of a state."""

    def __init__(self, context: WorkerContext):
        self.environment = find_environment(context.options.algorithm.environment)
        super().__init__(context)

    def init(self, key: jax.Array) -> Any:
        """Weights."""
        own = self.context.options.algorithm
        sizes = [*self.environment.observation_shape, *[own.hidden_size] * own.hidden_layers, 1]
        return {"mlp": create_mlp(key, sizes)}

    def axes(self) -> Any:
        """Hidden layers are split."""
        return {"mlp": mlp_axes(self.context.options.algorithm.hidden_layers + 1)}

    def value(self, model: Any, observations: jax.Array) -> jax.Array:
        """Predicted returns, float [...] for observations [..., size]."""
        return apply_mlp(model["mlp"], observations)[..., 0]


class MLPQFunction(PlayingWorker):
    """A perceptron that predicts the return of each action."""

    def init(self, key: jax.Array) -> Any:
        """Weights."""
        own, game = self.context.options.algorithm, self.environment
        hidden = [own.hidden_size] * own.hidden_layers
        return {"mlp": create_mlp(key, [*game.observation_shape, *hidden, game.actions])}

    def axes(self) -> Any:
        """Hidden layers are split."""
        return {"mlp": mlp_axes(self.context.options.algorithm.hidden_layers + 1)}

    def action_values(self, model: Any, observations: jax.Array) -> jax.Array:
        """Predicted returns [..., actions]."""
        return apply_mlp(model["mlp"], observations, jax.nn.relu)

    def act(
        self, model: Any, observation: jax.Array, key: jax.Array, epsilon: Any = 0.0
    ) -> jax.Array:
        """The best action, or with probability ``epsilon`` any."""
        chance, choice = jax.random.split(key)
        best = self.act_greedily(model, observation)
        any_action = jax.random.randint(choice, (), 0, self.environment.actions)
        return jnp.where(jax.random.uniform(chance) < epsilon, any_action, best)

    def act_greedily(self, model: Any, observation: jax.Array) -> jax.Array:
        """The best action."""
        return jnp.argmax(self.action_values(model, observation))
