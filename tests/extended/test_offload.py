"""Offload: idle state waits in pinned host memory, and nothing that is computed changes."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import computed, tiny_config, trainer_of

from hjax.dryrun.description import describe
from hjax.errors import ConfigError
from hjax.models import parameter_counts
from hjax.run.trainer import Trainer
from hjax.sharding.layout import make_layouts
from hjax.sharding.offload import to_device, to_host

ALL = {"actor.offload": "all", "critic.offload": "all", "reference.offload": "all"}


def test_there_and_back_keeps_values_and_shards_and_frees_what_was_left():
    sharding = make_layouts(jax.devices(), {"fsdp": 8}).train.sharding("embed")
    values = np.arange(32.0).reshape(16, 2)
    there = {"x": jax.device_put(values, sharding), "count": jnp.int32(3)}
    waiting = to_host(there)
    assert there["x"].is_deleted()
    assert waiting["x"].sharding.memory_kind == "pinned_host"
    back = to_device(waiting)
    assert waiting["x"].is_deleted()
    assert back["x"].sharding.is_equivalent_to(sharding, 2)
    assert back["x"].sharding.memory_kind == "device"
    np.testing.assert_array_equal(back["x"], values)
    assert int(back["count"]) == 3


def device_bytes():
    """Bytes of all live arrays on the first device, by memory kind."""
    gc.collect()  # runs of other tests
    found = {"device": 0, "pinned_host": 0}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device == jax.devices()[0]:
                found[array.sharding.memory_kind] += shard.data.nbytes
    return found


def run(changes):
    """Rows of two steps, and bytes on a device as generation starts in the second."""
    with trainer_of("PPO", changes) as trainer:
        rows, seen = [trainer.step()], {}
        actor = trainer.roles.groups["actor"].worker
        generate = actor.generator.generate

        def watched(*args, **options):
            seen.update(device_bytes())
            return generate(*args, **options)

        actor.generator.generate = watched
        rows.append(trainer.step())
        return rows, seen, parameter_counts.parameter_count(trainer.roles.models["actor"])


@pytest.fixture(scope="module")
def plain():
    return run({})


@pytest.mark.parametrize("name", ["all", "optimizer"])
def test_metrics_are_bit_equal_and_the_bytes_are_gone_from_the_device(name, plain):
    changes = ALL if name == "all" else {"actor.offload": "optimizer", "critic.offload": name}
    rows, during, parameters = run(changes)
    expected, before, _ = plain
    assert [computed(row) for row in rows] == [computed(row) for row in expected]
    # float32: two moments each, and with all the parameters of critic and reference; a critic has
    # a head of 32 weights and a bias on top.
    copies = 6 if name == "all" else 4
    moved = 4 * (copies * parameters + (3 if name == "all" else 2) * 33)
    counts = 2 * 2 * 4  # each optimizer's step count, twice
    assert before["device"] - during["device"] == pytest.approx(moved, abs=2 * counts)
    assert during["pinned_host"] == pytest.approx(moved, abs=2 * counts)
    assert rows[-1]["memory/offloaded_bytes"] == pytest.approx(moved, abs=2 * counts)
    assert "memory/offloaded_bytes" not in expected[-1]


def test_the_dry_run_says_what_it_saves():
    # A pool of 4 kB models: the reference is idle in the largest program, an update.
    with trainer_of("PPO", {"reference.offload": "all"}) as trainer:
        told = describe(trainer)
        size = 4 * parameter_counts.parameter_count(trainer.roles.models["reference"])
    assert told["offload"]["saved_bytes"] == size
    assert told["offload"]["peak_without_bytes"] - told["offload"]["peak_bytes"] == size
    [generate] = [row for row in told["memory"] if row["program"] == "generate"]
    assert generate["offloaded_bytes"] == {"reference params": size}


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="reference.offload='optimizer': must be one of none, a"):
        Trainer(tiny_config("PPO", {"reference.offload": "optimizer"}))
