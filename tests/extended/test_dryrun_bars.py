"""One small compiled case of each bar that programs of published shapes are held to.

The shapes are small and the devices GPUs, whose compiler takes seconds. The published shapes are
compiled by slow tests and ``benchmarks/performance.py``; decoding's small cases are in
``test_dryrun_decoding.py``.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from updating import Case

from hjax.models.model_config import ModelConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
        reason="JAX's CUDA plugin, the GPU compiler, is not installed",
    ),
]
FSDP = {"data": 1, "fsdp": -1}
SPLIT = {"data": 1, "fsdp": 2, "tensor": 2}
NARROW = ModelConfig(2048, 256, 512, 2, 2, 1, 128, 8192)
HEADS = ModelConfig(2048, 512, 2048, 2, 4, 4, 128, 8192)
UPDATE = Case(NARROW, "h100:1x4", FSDP, 1024, rows=8, samples=2)
SCORES = dataclasses.replace(UPDATE, micro_batch=8, rows=16, samples=8, scores=True)
CASES = {
    "update, 1k": UPDATE,
    "update, 4k": dataclasses.replace(UPDATE, tokens=4096),
    "update, tensor": Case(HEADS, "h100:1x4", SPLIT, 256, rows=16),
    "scores, 16": SCORES,
    "scores, 64": dataclasses.replace(SCORES, rows=64),
}


def counted(*names):
    """``updating`` of each, in one process that loads the compiler."""
    command = [sys.executable, str(pathlib.Path(__file__)), *names]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_an_update_receives_little_more_than_fsdp_must_and_grows_as_its_length():
    """Bars 1 and 5; an output that takes the place of arguments, bar 4."""
    short, long = counted("update, 1k", "update, 4k")
    # Layers of so few parameters: what is received beside them counts for more. 1.47 and 1.49.
    for found in (short, long):
        assert 1 <= found["received_bytes"] / found["minimum_received_bytes"] <= 1.55
        assert found["output_bytes"] < 1024  # metrics
    assert long["temporary_bytes"] <= 4.5 * short["temporary_bytes"]
    assert 1 <= long["flops_over_minimum"] <= 1.35
    assert long["minimum_seconds"] <= long["seconds"]


def test_an_update_over_a_tensor_axis_stays_near_what_it_must_receive():
    """Bar 2. Activations are summed here: weights travel on TPUs alone."""
    (found,) = counted("update, tensor")
    assert 1 <= found["received_bytes"] / found["minimum_received_bytes"] <= 1.6  # 1.51
    assert 1 <= found["flops_over_minimum"] <= 1.35
    assert found["output_bytes"] < 1024


def test_scores_of_more_rows_take_no_more_memory():
    """Bar 4: rows beyond a micro-batch are arguments and results alone."""
    few, many = counted("scores, 16", "scores, 64")
    assert many["temporary_bytes"] == few["temporary_bytes"]
    # 12 more rows on each device: prompts of 256 and responses of 768, a byte of mask and four of
    # token for each, and four of log-prob for those of responses.
    row = 5 * 256 + 5 * 768 + 4 * 768
    assert many["peak_bytes"] - few["peak_bytes"] == pytest.approx(12 * row, rel=1e-3)
    for found in (few, many):
        assert 1 <= found["received_bytes"] / found["minimum_received_bytes"] <= 1.4  # 1.28


def main(names):
    from hjax.dryrun.topologies import prepare_environment

    prepare_environment()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    from updating import updating

    for name in names:
        found = updating(CASES[name])
        print(json.dumps({k: v for k, v in found.items() if k != "model"}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
