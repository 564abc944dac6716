"""Updates of published shapes, compiled for devices that are not there."""

import json
import os
import subprocess
import sys

import pytest

from hjax.dryrun.updating import Case, table

# Heavy in attention and in the head's table, light to compile.
PROGRAM = """
from hjax.dryrun.topologies import prepare_environment
prepare_environment()
import dataclasses, json, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_compilation_cache", False)
from hjax.dryrun.updating import Case, updating
from hjax.models.config import ModelConfig
model = ModelConfig(16384, 512, 1024, 2, 4, 2, 128, 8192)
for tokens in (2048, 8192):
    case = Case(model, "v5e:2x2", {"data": 1, "fsdp": -1}, tokens, micro_batch=4, rows=8, samples=1)
    print(json.dumps({k: v for k, v in updating(case).items() if k != "model"}))
"""


@pytest.fixture(scope="module")
def records():
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_memory_grows_as_the_length_not_as_its_square(records):
    short, long = (r["peak_bytes"] for r in records)
    assert long <= 4.5 * short


def test_an_update_receives_what_fsdp_must_and_multiplies_little_twice(records):
    for record in records:
        assert 0.95 <= record["received_bytes"] / record["minimum_received_bytes"] <= 1.3
        assert 1.0 <= record["flops_over_minimum"] <= 1.6  # blocks that are seen in part; remat
        assert record["seconds"] >= record["minimum_seconds"] > 0


def test_a_table_has_a_row_for_each_also_for_those_refused(records):
    refused = {k: records[0][k] for k in ("train", "topology", "tokens", "micro_batch", "before")}
    rows = [{**r, "model": "small"} for r in (*records, {**refused, "refused_bytes": 2**34})]
    lines = table(rows).splitlines()
    assert len(lines) == 5 and "refused: 16.0 GiB" in lines[-1]
    assert len({line.count("|") for line in lines}) == 1
    assert Case("qwen2.5-1.5b", "v5e:2x4", {}, 1024).prompt == 256
