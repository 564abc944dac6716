"""Updates of published shapes, compiled for devices that are not there."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import pytest
from updating import FAMILIES, Case, family_table, table

from hjax.models import families
from hjax.models.presets import preset
from hjax.models.remat import POLICIES

# Heavy in attention and in the head's table, light to compile.
PROGRAM = """
import sys
from hjax.dryrun.topologies import prepare_environment
prepare_environment()
import json, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_compilation_cache", False)
from updating import Case, updating
from hjax.models.model_config import ModelConfig
model = ModelConfig(4096, 512, 1024, 2, 4, 2, 128, 8192)
train = {"data": 1, "fsdp": -1}
case = Case(model, "v5e:2x2", train, int(sys.argv[1]), rows=4, samples=1)
print(json.dumps({k: v for k, v in updating(case).items() if k != "model"}))
"""


PUBLISHED = """
import sys
from hjax.dryrun.topologies import prepare_environment
prepare_environment()
import json, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_compilation_cache", False)
from updating import Case, updating
print(json.dumps(updating(Case(**json.loads(sys.argv[1])))))
"""

# Wide enough that there is something to do while weights travel, light to compile.
TRAVELLING = """
import sys
from hjax.dryrun.topologies import prepare_environment
prepare_environment()
import json, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_compilation_cache", False)
from updating import Case, updating
from hjax.models.model_config import ModelConfig
model = ModelConfig(4096, 2048, 8192, 2, 16, 8, 128, 8192)
topology, train = json.loads(sys.argv[1])
case = Case(model, topology, train, 2048, rows=16)
print(json.dumps({k: v for k, v in updating(case).items() if k != "model"}))
"""


@functools.cache
def record(tokens):
    pytest.importorskip("libtpu")
    return run(PROGRAM, tokens)


def run(program, argument):
    command = [sys.executable, "-c", program, json.dumps(argument)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_grows_as_the_length_not_as_its_square():
    assert record(8192)["peak_bytes"] <= 4.5 * record(2048)["peak_bytes"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_update_receives_what_fsdp_must_and_multiplies_little_twice():
    found = record(2048)
    assert 0.95 <= found["received_bytes"] / found["minimum_received_bytes"] <= 1.4
    assert 1.0 <= found["flops_over_minimum"] <= 1.4  # blocks that are seen in part; remat
    assert found["seconds"] >= found["minimum_seconds"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tensor_parallelism_waits_for_little_where_weights_travel():
    pytest.importorskip("libtpu")
    found = run(TRAVELLING, ("v5e:2x2", {"data": 1, "tensor": 4}))
    # 1.92, 53 % and 2.23 when this was written. Beside only two layers the table and the head make
    # half of what is received; activations that are summed would be waited for, all of them.
    assert 0.95 <= found["received_bytes"] / found["minimum_received_bytes"] <= 2.0
    assert found["waited_share"] <= 0.6
    assert found["seconds"] <= 2.4 * found["minimum_seconds"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sparse_cores_leave_little_to_wait_for():
    pytest.importorskip("libtpu")
    train = {"data": 1, "fsdp": 4}
    with_them, without = (run(TRAVELLING, (kind, train)) for kind in ("v5p:2x2x1", "v5e:2x2"))
    # .02 and .32 when this was written.
    assert with_them["waited_share"] <= 0.5 * without["waited_share"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "tokens, micro_batch, rows, remat",
    [*((2048, 32, 64, remat) for remat in POLICIES), (512, 0, 128, "none"), (512, 0, 128, "full")],
)
def test_an_updates_memory_is_near_its_estimate(tokens, micro_batch, rows, remat):
    pytest.importorskip("jax_cuda13_plugin")
    train = {"data": 1, "fsdp": -1}
    # Sequences of 512 have their scores in memory.
    case = Case("qwen2.5-1.5b", "h100:1x8", train, tokens, micro_batch, remat, rows)
    found = run(PUBLISHED, dataclasses.asdict(case))
    # 0.98 to 1.01, and 1.11 of short ones of which nothing is kept, when this was written.
    assert 0.95 <= found["estimated_bytes"] / found["peak_bytes"] <= 1.12


@pytest.mark.slow
def test_an_updates_output_takes_its_arguments_place():
    assert record(2048)["output_bytes"] < 2**16  # metrics


def test_a_table_has_a_row_for_each_also_for_those_refused():
    case = dict(model="small", train={"fsdp": 4}, topology="v5e:2x2", tokens=2048)
    both = {**case, "micro_batch": 0, "before": 2.0, "remat": "full", "rows": 8, "scores": False}
    both["attention"] = "auto"
    counted = dict.fromkeys(
        ("seconds", "minimum_seconds", "mfu", "flops_over_minimum", "received_bytes",
         "minimum_received_bytes", "waited_share", "waited_seconds", "peak_bytes",
         "temporary_bytes", "estimated_bytes"), 1.0,
    ) | {"output_bytes": 512}  # fmt: skip
    long = {**both, **counted, "tokens": 8192, "temporary_bytes": 3.5}
    refused = {**both, "refused_bytes": 2**34}
    lines, said = table([{**both, **counted}, refused, long]).split("\n\n")
    lines = lines.splitlines()
    assert len(lines) == 5 and "refused: 16.0 GiB" in lines[3] and "remat full" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
    assert "8k tokens a row over those of 2k" in said and "3.50." in said and "0.5 KiB" in said
    assert Case("qwen2.5-1.5b", "v5e:2x4", {}, 1024).prompt == 256


def test_each_family_has_an_update_beside_its_least():
    found = dict(seconds=3.0, minimum_seconds=2.0, flops_over_minimum=1.25, memory_seconds=0.25,
                 waited_seconds=0.5, peak_bytes=2**30)  # fmt: skip
    lines = family_table([{**dataclasses.asdict(case), **found} for case in FAMILIES]).splitlines()
    assert len(lines) == 2 + len(FAMILIES)
    assert lines[2] == (
        "| llama-3-8b, 64 × 2k, v5p:2x2x2, fsdp 2 × tensor 4, remat products | 3.00 s | 2.00 s "
        "| 1.50 | 1.25 | 0.25 s | 0.50 s | 1.0 GiB |"
    )
    assert "qwen2.5-1.5b, 64 × 8k, v5e:2x4, fsdp, micro_batch 32" in lines[3]
    refused = family_table([{**dataclasses.asdict(FAMILIES[0]), "refused_bytes": 2**34}])
    assert "remat products | refused: 16.0 GiB |" in refused
    assert len({line.count("|") for line in refused.splitlines()}) == 1
    assert {preset(str(case.model)).family for case in FAMILIES} == families.FAMILIES.keys()
