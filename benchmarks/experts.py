"""Grouped products of experts: hjax's by blocks of rows beside ``jax.lax.ragged_dot``.

    python benchmarks/experts.py [--rounds=7]

Rows of random experts times their experts' matrices, float32, on one device of this machine:
forward, and forward with both gradients. In turns, medians. Prints one JSON line; ``times_as_fast``
is ragged_dot's time over ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import machine

from hjax.kernels import grouped_blocks, reference

PRODUCTS = {"ragged_dot": reference.grouped_product, "blocks": grouped_blocks.product}
# Rows, inputs, outputs, experts.
CASES = ((2048, 256, 512, 8), (2048, 256, 512, 64), (64, 256, 512, 64))


def made(size: tuple[int, ...]) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By product what runs it forward, and with gradients; they agree to 1e-5 of the largest."""
    count, inner, outer, experts = size
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (count, inner))
    weights = jax.random.normal(keys[1], (experts, inner, outer)) / inner**0.5
    chosen = jax.random.randint(keys[2], (count,), 0, experts)
    sizes = jnp.bincount(chosen, length=experts).astype(jnp.int32)

    def programs(product: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        forward = jax.jit(lambda rows, weights: product(rows, weights, sizes))
        both = jax.jit(jax.grad(lambda *given: jnp.square(product(*given, sizes)).sum(), (0, 1)))
        return lambda: forward(rows, weights), lambda: both(rows, weights)

    found = {name: programs(product) for name, product in PRODUCTS.items()}
    for one, other in zip(*found.values(), strict=True):
        pairs = zip(jax.tree.leaves(one()), jax.tree.leaves(other()), strict=True)
        if any(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a))) > 1e-5 for a, b in pairs):
            raise SystemExit(f"{size}: the products differ")
    return found


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    results = {}
    for case in CASES:
        programs = made(case)
        names = [(name, part) for part in (0, 1) for name in programs]
        taken: dict[tuple[str, int], list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, part in names:
                taken[name, part].append(timed(programs[name][part]))
        seconds = {name: statistics.median(row) for name, row in taken.items()}
        results["{} rows, {} x {}, {} experts".format(*case)] = {
            what: {
                **{f"{name}_ms": round(1e3 * seconds[name, part], 2) for name in programs},
                "times_as_fast": round(seconds["ragged_dot", part] / seconds["blocks", part], 2),
            }
            for part, what in enumerate(("forward", "with gradients"))
        }
    versions = machine.versions("hjax", "jax", "jaxlib")
    print(
        json.dumps({"benchmark": "experts", **machine.describe(), "versions": versions, **results})
    )


if __name__ == "__main__":
    main()
