"""Updates of published shapes, compiled for devices that are not there."""

import functools
import json
import os
import subprocess
import sys

import pytest

from hjax.dryrun.updating import Case, table

# Heavy in attention and in the head's table, light to compile.
PROGRAM = """
import sys
from hjax.dryrun.topologies import prepare_environment
prepare_environment()
import json, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_compilation_cache", False)
from hjax.dryrun.updating import Case, updating
from hjax.models.config import ModelConfig
model = ModelConfig(4096, 512, 1024, 2, 4, 2, 128, 8192)
train = {"data": 1, "fsdp": -1}
case = Case(model, "v5e:2x2", train, int(sys.argv[1]), rows=4, samples=1)
print(json.dumps({k: v for k, v in updating(case).items() if k != "model"}))
"""


@functools.cache
def record(tokens):
    pytest.importorskip("libtpu")
    command = [sys.executable, "-c", PROGRAM, str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_grows_as_the_length_not_as_its_square():
    assert record(8192)["peak_bytes"] <= 4.5 * record(2048)["peak_bytes"]


@pytest.mark.timeout(900)
def test_an_update_receives_what_fsdp_must_and_multiplies_little_twice():
    found = record(2048)
    assert 0.95 <= found["received_bytes"] / found["minimum_received_bytes"] <= 1.4
    assert 1.0 <= found["flops_over_minimum"] <= 1.4  # blocks that are seen in part; remat
    assert found["seconds"] >= found["minimum_seconds"] > 0


def test_a_table_has_a_row_for_each_also_for_those_refused():
    case = {"model": "small", "train": {"fsdp": 4}, "topology": "v5e:2x2", "tokens": 2048}
    both = {**case, "micro_batch": 0, "before": 2.0}
    counted = dict.fromkeys(
        ("seconds", "minimum_seconds", "mfu", "flops_over_minimum", "received_bytes",
         "minimum_received_bytes", "waited_share", "waited_seconds", "peak_bytes"), 1.0,
    )  # fmt: skip
    lines = table([{**both, **counted}, {**both, "refused_bytes": 2**34}]).splitlines()
    assert len(lines) == 4 and "refused: 16.0 GiB" in lines[-1]
    assert len({line.count("|") for line in lines}) == 1
    assert Case("qwen2.5-1.5b", "v5e:2x4", {}, 1024).prompt == 256
