"""Long sequences' attention: by blocks beside in one piece, on this machine's devices.

    python benchmarks/attention.py [--rows=2] [--length=4096] [--heads=8] [--kv_heads=4]
                                   [--head_dim=32] [--repeats=3]

Value and gradients of causal attention, float32. Prints one JSON line: of each the median seconds
(turns interleaved) and the bytes of temporaries, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import machine

from hjax.kernels import blockwise
from hjax.models.attention_strategies import AttentionBackend, AttentionInputs, Causal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("rows", 2), ("length", 4096), ("heads", 8), ("kv_heads", 4), ("head_dim", 32),
        ("repeats", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (o.heads, o.kv_heads, o.kv_heads)
    arrays = [
        jax.random.normal(key, (o.rows, o.length, n, o.head_dim))
        for key, n in zip(keys, heads, strict=True)
    ]
    mask = jnp.ones((o.rows, o.length), bool)
    programs: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name, form in {
        "one_piece": AttentionBackend(),
        "blocks": AttentionBackend(blockwise.attend),
    }.items():
        attention = Causal(mask, form=form)

        def loss(q: jax.Array, k: jax.Array, v: jax.Array, attention: Causal = attention) -> Any:
            return attention(AttentionInputs(0, q, k, v), None)[0].sum()

        program = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays).compile()
        jax.block_until_ready(program(*arrays))
        programs[name] = program
        memory: Any = program.memory_analysis()
        found[name] = {"temporary_bytes": memory.temp_size_in_bytes, "seconds": []}
    for _ in range(o.repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            found[name]["seconds"].append(time.perf_counter() - start)
    for figures in found.values():
        figures["seconds"] = statistics.median(figures["seconds"])
    ratios = {
        f"{key}_ratio": found["one_piece"][key] / found["blocks"][key]
        for key in ("seconds", "temporary_bytes")
    }
    print(
        json.dumps(
            {
                "benchmark": "attention",
                **vars(o),
                **machine.describe(),
                "versions": machine.versions("jax"),
                "device": jax.devices()[0].device_kind,
                **found,
                **ratios,
            }
        )
    )


if __name__ == "__main__":
    main()
