"""What decoding moves for a token, by the accelerators' own compilers."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from decoding import CASES, Case, table

from hjax.kernels import decode
from hjax.models.model_config import ModelConfig

COMPILERS = {"v5e": "libtpu", "v5p": "libtpu", "h100": "jax_plugins.xla_cuda13"}
# Small weights beside a cache that no chip's own memory holds: 906 MB a device.
SMALL = Case(
    ModelConfig(1024, 256, 512, 3, heads=8, kv_heads=4, head_dim=128, max_length=2048),
    "v5e:2x2", tensor=2, rows=512, samples=1, prompt=128, response=1024,
)  # fmt: skip


# Of requests, on GPUs.
SLOTS = dataclasses.replace(SMALL, topology="h100:1x4", slots=True)
SMALL_INT8 = dataclasses.replace(SMALL, cache="int8")
# Large weights beside a small cache, heads whole and split.
WIDE = Case(
    ModelConfig(1024, 1024, 4096, 2, heads=8, kv_heads=4, head_dim=128, max_length=2048),
    "v5e:2x2", tensor=1, rows=64, samples=1, prompt=128, response=128, slots=True,
)  # fmt: skip
WIDE_SPLIT = dataclasses.replace(WIDE, tensor=2)
MEASURED = (SMALL, SLOTS, SMALL_INT8, WIDE, WIDE_SPLIT, *CASES)


def counted(case, form=""):
    """``decoding`` in a process of its own, which loads the compiler."""
    compiler = COMPILERS[case.topology.partition(":")[0]]
    package = compiler.partition(".")[0]
    if not importlib.util.find_spec(package) or not importlib.util.find_spec(compiler):
        pytest.skip(f"{compiler}, the compiler of {case.topology}, is not installed")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(__file__)), str(MEASURED.index(case)), form],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_token_copies_no_cache_and_reads_what_is_filled():
    found = counted(SMALL)
    assert found["copies"] == 0
    # By hand: 256 rows a device of two key-value heads, of whose own tokens half are there.
    token = 3 * 2 * 2 * 128 * 2
    cache = token * 256 * (128 + 512)
    weights = 2 * (1024 * 256 + 3 * 256 * (3 * 512 + 128 * (2 * 8 + 2 * 4))) / 2
    assert found["minimum_bytes"] == pytest.approx(cache + weights, rel=2e-3)
    # Half a block more is read than is filled, and a tile written.
    read = cache + token * 256 * (64 + 16)
    assert read <= found["bytes_per_token"] <= 1.05 * read + weights


@pytest.mark.slow
@pytest.mark.parametrize("case", [WIDE, WIDE_SPLIT], ids=["whole", "split"])
def test_weights_are_not_laid_out_anew_in_a_program(case):
    """Gate and up alone would be 2 layers x 1024 x 8192 x 2 bytes."""
    assert counted(case)["temporary_bytes"] < 2 * 1024 * 8192 * 2 / case.tensor / 8


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_in_int8_a_token_reads_a_byte_for_each_number_and_the_scales():
    found = counted(SMALL_INT8)
    assert found["copies"] == 0
    token = 3 * 2 * 2 * (128 + 4)
    cache = token * 256 * (128 + 512)
    weights = 2 * (1024 * 256 + 3 * 256 * (3 * 512 + 128 * (2 * 8 + 2 * 4))) / 2
    assert found["minimum_bytes"] == pytest.approx(cache + weights, rel=2e-3)
    # Half a block more is read than is filled; a tile of 32 tokens is written, scales of 128.
    read = cache + token * 256 * 64 + 3 * 2 * 2 * 256 * (32 * 128 + 128 * 4)
    assert read <= found["bytes_per_token"] <= 1.05 * read + weights


@pytest.mark.slow
def test_a_gpu_s_token_reads_of_each_slot_what_is_filled_and_no_weight_is_cut_out():
    found = counted(SLOTS)
    assert found["copies"] == 0
    # By hand: half of 256 rows' columns, of two key-value heads, and the weights.
    cache = 3 * 2 * 2 * 128 * 2 * 256 * (128 + 1024) / 2
    weights = 2 * (1024 * 256 + 3 * 256 * (3 * 512 + 128 * (2 * 8 + 2 * 4))) / 2
    assert found["minimum_bytes"] == pytest.approx(cache + weights, rel=2e-3)
    assert cache + weights <= found["bytes_per_token"] <= 1.15 * (cache + weights)
    assert found["temporary_bytes"] < 0.1 * (cache + weights)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_without_the_kernel_each_layer_is_cut_out_for_every_token():
    assert counted(SMALL, decode.TILES)["copies"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.model} {c.topology} {c.samples}")
def test_decoding_stays_below_its_bar(case):
    found = counted(case)
    assert found["copies"] == 0
    assert 1 < found["ratio"] <= (case.bar or 1.3)


def test_the_table_has_a_row_for_each():
    record = dataclasses.asdict(CASES[1]) | {
        "bytes_per_token": 9.1e9, "minimum_bytes": 7e9, "ratio": 1.3, "copies": 2,
        "milliseconds_per_token": 4.4321,
    }  # fmt: skip
    *_, row = table([record]).splitlines()
    assert row == (
        "| llama-3-8b, v5p:2x2x2, tensor 4, 256 rows, a sample of a prompt | 9.10 | 7.00 | 1.30 "
        "| 1.30 | 2 | 4.43 |"
    )


def main(number, form):
    from hjax.dryrun.topologies import prepare_environment

    prepare_environment()
    import jax
    from decoding import decoding

    jax.config.update("jax_enable_compilation_cache", False)
    print(json.dumps(decoding(MEASURED[int(number)], cache_form=form or None)))


if __name__ == "__main__":
    main(*sys.argv[1:])
