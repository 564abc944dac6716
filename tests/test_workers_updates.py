"""What an update hands back lies where it was taken from, on every platform: by compiling it.

As a program, `python test_workers_updates.py TOPOLOGY` compiles for devices that are not there, in
a process of its own, since compilers read their settings when they are loaded.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

LAYOUTS = {
    "fsdp and tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "stages": {"pipe": 2, "fsdp": 2, "tensor": 2},
}


def update_on(devices, train):
    """A critic's update compiled for eight devices: which kernels it runs, what moved."""
    import jax
    import jax.numpy as jnp

    from hjax.algorithms.losses import ValueLoss
    from hjax.models.compute import Compute
    from hjax.models.model_config import ModelConfig
    from hjax.sharding.layout import make_layouts
    from hjax.workers import Critic, OptimizerConfig, WorkerContext

    context = WorkerContext(
        role="critic",
        layouts=make_layouts(devices, train),
        model=ModelConfig(64, 256, 256, 2, 2, 2, 128, 32),
        compute=Compute(jnp.float32),
        max_response_length=8,
        loss=ValueLoss(),
        optimizer=OptimizerConfig(1e-3, weight_decay=0.1),
    )
    worker = Critic(context)
    (update,) = [p for p in worker.programs(16, 8) if p.name == "update"]
    compiled = update.trace().lower().compile()
    (params, _, state, _), _ = compiled.input_shardings
    new_params, new_state, metrics = compiled.output_shardings
    shapes = worker.network.shapes, worker.abstract_state()["optimizer"]

    def same(shape, before, after):
        return before.is_equivalent_to(after, len(shape.shape))

    kept = jax.tree.map(same, shapes, (params, state), (new_params, new_state))
    split = jax.tree.map(lambda s: not s.is_fully_replicated, (params, state))
    return {
        "kernels": worker.compute.kernel_set,
        "moved": [
            jax.tree_util.keystr(path) for path, same in jax.tree.leaves_with_path(kept) if not same
        ],
        "split": sum(jax.tree.leaves(split)),
        "metrics whole": all(s.is_fully_replicated for s in jax.tree.leaves(metrics)),
    }


def check(found, kernels):
    # Split are the parameters and both moments of the embedding and seven arrays of layers, at
    # least their matrices: 3 x 6.
    assert found.pop("split") >= 18
    assert found == {"kernels": kernels, "moved": [], "metrics whole": True}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.extended
def test_an_update_leaves_everything_where_it_was(layout):
    import jax

    check(update_on(jax.devices(), LAYOUTS[layout]), "cpu")


@pytest.mark.parametrize(
    "topology, compiler",
    [
        # A TPU's compiler never moved anything; a GPU's did.
        pytest.param("v5e:2x4", "libtpu", marks=pytest.mark.slow),
        pytest.param("h100:1x8", "jax_plugins.xla_cuda13", marks=pytest.mark.slow),
    ],
)
def test_an_update_leaves_everything_where_it_was_on_accelerators(topology, compiler):
    package = compiler.partition(".")[0]
    if not importlib.util.find_spec(package) or not importlib.util.find_spec(compiler):
        pytest.skip(f"{compiler}, the compiler of {topology}, is not installed")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(__file__)), topology],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == LAYOUTS.keys()
    for layout in LAYOUTS:
        check(found[layout], "backward")


def main(topology):
    from hjax.dryrun.topologies import find_topology, prepare_environment

    prepare_environment()
    import jax

    jax.config.update("jax_optimization_level", "O0")  # where outputs stand is decided before
    devices = find_topology(topology).devices
    print(json.dumps({name: update_on(devices, train) for name, train in LAYOUTS.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
