"""Networks and algorithms of a user's own, as files of a user's have them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import hjax


class Line(hjax.workers.NetworkWorker):
    """x @ w + b, its squared error, and a loss that is infinite where the batch says so."""

    def init(self, key):
        return {"w": jax.random.normal(key, (4, 2)), "b": jnp.zeros(2)}

    def axes(self):
        return {"w": ("embed", None)}

    def loss(self, model, batch, keys):
        errors = jnp.sum((self.predict(model, batch["x"]) - batch["y"]) ** 2, axis=1)
        return errors + batch.get("poison", 0.0), {"size": jnp.abs(batch["y"]).sum(axis=1)}

    def predict(self, model, x):
        return x @ model["w"] + model["b"]


class Module(hjax.workers.NetworkWorker):
    """Two layers of flax.nnx in a list."""

    def init(self, key):
        rngs = nnx.Rngs(params=key)
        layers = [nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)]
        return nnx.Sequential(*layers)

    def loss(self, model, batch, keys):
        return jnp.sum((model(batch["x"]) - batch["y"]) ** 2, axis=1)


class Noisy(Line):
    """Its loss draws noise."""

    def loss(self, model, batch, keys):
        return jax.vmap(jax.random.normal)(keys) * self.predict(model, batch["x"])[:, 0]


class Coin(hjax.workers.NetworkWorker):
    """A policy of two actions that sees one number."""

    def init(self, key):
        return {"w": jnp.zeros(2)}

    def act(self, model, observation, key):
        return jax.random.categorical(key, model["w"] * observation[0])

    def log_prob(self, model, observation, action):
        return jax.nn.log_softmax(model["w"] * observation[0])[action]

    def loss(self, model, batch, keys):
        each = jax.vmap(lambda x, a: self.log_prob(model, x, a))
        return -batch["gains"] * each(batch["observations"], batch["actions"])


def data(seed, number, rows=16):
    rng = np.random.default_rng([seed, number])
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": np.stack([x[:, 0] - 1, x[:, 1:].sum(axis=1)], axis=1).astype(np.float32)}


class Fit(hjax.algorithms.Algorithm):
    """Least squares by a network that is called neither actor nor critic."""

    sequences = False
    workers = {
        "policy": hjax.Role(Line, section="actor", trained=True),
        "copy": hjax.Role(Line, starts_from="policy"),
    }

    def learn(self, start):
        batch = data(self.seed, start["step"])
        self.log(self.policy.update(batch))
        return batch

    def evaluate(self, held_out):
        before, now = (
            g.run("predict", np.ones((8, 4), np.float32)) for g in (self.copy, self.policy)
        )
        moved = hjax.controller.join(before=before, now=now)
        return {"moved": float(np.abs(moved["now"] - moved["before"]).mean())}


class FitModule(Fit):
    """The same with a module, whose class alone is given for a standing role."""

    workers = {"actor": Module}

    def learn(self, start):
        batch = data(self.seed, start["step"])
        self.log(self.actor.update(batch))
        return batch

    def evaluate(self, held_out):
        return {}


class Duel(hjax.algorithms.Algorithm):
    """Self-play: two actors, one wants equal actions and the other wants different ones."""

    sequences = False
    workers = {
        "left": hjax.Role(Coin, section="actor", trained=True),
        "right": hjax.Role(Coin, section="critic", trained=True),
    }

    def learn(self, start):
        seen = {"observations": np.ones((64, 1), np.float32), "step": start["step"]}
        plays = [self.left.generate_actions(seen), self.right.generate_actions(seen)]
        left, right = (hjax.controller.join(play) for play in plays)
        gains = np.where(left["actions"] == right["actions"], 1.0, -1.0).astype(np.float32)
        self.log(self.left.update(seen | left | {"gains": gains}))
        self.log(self.right.update(seen | right | {"gains": -gains}))
        return {"rewards": gains, "left": left["actions"], "right": right["actions"]}


class NoActor(hjax.algorithms.Algorithm):
    """Prompts without an actor: refused."""

    roles = ()
    workers = {"policy": hjax.Role(Line, section="actor", trained=True)}

    @classmethod
    def losses(cls, config, max_response_length):
        return {}
