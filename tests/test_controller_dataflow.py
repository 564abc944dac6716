"""The controller knows no tokens: a dataflow of two small MLPs, each on its own four devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hjax
from hjax.controller import ResourcePool, Timeline, WorkerGroup, join
from hjax.sharding.layout import make_layouts


class MLP(hjax.workers.Worker):
    """x -> tanh(x @ w) @ v, with one gradient step towards given targets."""

    def __init__(self, context: hjax.workers.WorkerContext, width: int):
        super().__init__(context)
        rng = np.random.default_rng(context.seed)
        whole = self.layouts.train.replicated
        self.weights = jax.device_put(
            [rng.normal(size=(3, width)), rng.normal(size=(width, 3))], whole
        )
        self.program = jax.jit(mlp)
        self.gradient = jax.jit(jax.grad(lambda w, x, y: jnp.mean((mlp(w, x) - y) ** 2)))

    @hjax.protocol("3D_PROTO", phase="generate")
    def apply(self, batch):
        self.seen = batch["x"].sharding
        return {"x": self.program(self.weights, batch["x"])}

    @hjax.protocol("3D_PROTO", phase="update")
    def learn(self, batch):
        gradient = self.gradient(self.weights, batch["x"], batch["y"])
        self.weights = jax.tree.map(lambda w, g: w - 0.1 * g, self.weights, gradient)
        return {"norm": jnp.sqrt(sum(jnp.sum(g**2) for g in gradient))}


def mlp(weights, x):
    w, v = weights
    return jnp.tanh(x @ w) @ v


@pytest.fixture
def two_pools():
    timeline = Timeline()
    devices = jax.devices()
    pools = [
        ResourcePool("left", devices[:4], timeline),
        ResourcePool("right", devices[4:], timeline),
    ]
    groups = [
        WorkerGroup(
            pool,
            MLP,
            hjax.workers.WorkerContext(
                role, layouts=make_layouts(pool.devices, {"data": -1}), seed=seed
            ),
            width=8,
            role=role,
        )
        for seed, (role, pool) in enumerate(zip(("encoder", "decoder"), pools, strict=True))
    ]
    yield groups, timeline
    for pool in pools:
        pool.close()


def test_a_dataflow_of_two_mlps_on_two_pools(two_pools):
    (encoder, decoder), timeline = two_pools
    x = np.random.default_rng(7).normal(size=(8, 3)).astype(np.float32)

    hidden = encoder.apply({"x": x})  # a future, handed on without waiting
    out = join(decoder.apply(hidden))["x"]

    reference = x
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        w, v = rng.normal(size=(3, 8)), rng.normal(size=(8, 3))
        reference = np.tanh(reference @ w) @ v
    np.testing.assert_allclose(out, reference, rtol=1e-4, atol=1e-5)
    assert isinstance(out, np.ndarray)

    # Every array was split over the receiver's own devices, the second batch moved across.
    assert encoder.worker.seen.device_set == set(jax.devices()[:4])
    assert decoder.worker.seen.device_set == set(jax.devices()[4:])
    assert decoder.worker.seen.spec == jax.sharding.PartitionSpec("data")


def test_updates_follow_in_call_order(two_pools):
    (encoder, _), timeline = two_pools
    rng = np.random.default_rng(7)
    batch = {"x": rng.normal(size=(8, 3)), "y": np.zeros((8, 3))}
    norms = [encoder.learn(batch) for _ in range(20)]
    norms = [float(join(norm)["norm"]) for norm in norms]
    assert norms[-1] < norms[0]  # later calls saw the weights of the earlier ones
    spans = [s for s in timeline.spans() if s.method == "learn"]
    assert len(spans) == 20
    assert all(a.end <= b.start for a, b in zip(spans, spans[1:]))
