"""How long an update takes by data sheet, and why, beside the least that it must.

Of published shapes on devices that are not there: ``benchmarks/performance.py`` prints it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from hjax.algorithms.losses import PolicyLoss
from hjax.dryrun.account import limits_of
from hjax.dryrun.compilation import compile_program
from hjax.dryrun.minimum import minimum
from hjax.dryrun.programs import StepProgram
from hjax.dryrun.topologies import find_topology
from hjax.errors import ConfigError
from hjax.models.config import ModelConfig
from hjax.models.published import published
from hjax.models.transformer import Compute
from hjax.sharding.layout import make_layouts
from hjax.workers import Actor, OptimizerConfig, WorkerContext


@dataclasses.dataclass(frozen=True)
class Case:
    """An update of a policy by GRPO without KL, in bfloat16, masters and moments in float32.

    Attributes:
      model: a published shape's name, or a shape.
      topology: such as ``v5e:2x4``.
      train: sizes of the mesh axes.
      tokens: of prompt and response; of the prompt 512 or a quarter.
      micro_batch: rows of a pass over all devices; 0: all.
      remat: as of ``model.remat``.
      rows: of all devices.
      samples: of a prompt.
      before: seconds predicted of commit 9b2d171, whose figures this began with; 0: none.
    """

    model: str | ModelConfig
    topology: str
    train: Mapping[str, int]
    tokens: int
    micro_batch: int = 0
    remat: str = "attention"
    rows: int = 64
    samples: int = 8
    before: float = 0.0

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return min(512, self.tokens // 4)


_FSDP = {"data": 1, "fsdp": -1}
_TENSOR = {"data": 1, "fsdp": 2, "tensor": 4}
CASES = (
    Case("qwen2.5-1.5b", "v5e:2x4", _FSDP, 2048, 0, before=2.62),
    Case("qwen2.5-1.5b", "v5e:2x4", _FSDP, 8192, 32, before=20.7),
    Case("qwen2.5-1.5b", "v5e:2x4", _FSDP, 32768, 8),
    Case("llama-3-8b", "v5p:2x2x2", _TENSOR, 2048, 0),
    Case("llama-3-8b", "v5p:2x2x2", _TENSOR, 8192, 16),
    Case("qwen2.5-1.5b", "h100:1x8", _FSDP, 8192, 32),
    Case("qwen2.5-1.5b", "h100:1x8", _FSDP, 32768, 8),
)


def updating(case: Case, cache: Path | None = None) -> dict[str, Any]:
    """Compile an update and account for it.

    Args:
      case: which.
      cache: folder of kept results, as of ``compile_program``.

    Returns:
      the case; ``refused_bytes``, or per device and run: ``seconds`` by data sheet,
      ``minimum_seconds``, ``mfu``, ``flops_over_minimum`` (of matrix products),
      ``received_bytes``, ``minimum_received_bytes``, ``waited_share`` (of the received bytes,
      those that nothing runs beside), ``waited_seconds``, ``peak_bytes``, ``bound``; ``versions``.

    Raises:
      ConfigError: a topology that is not known or has no data sheet here, or a layout that does
        not fit the model.
      RunError: it does not compile for another reason than memory.
    """
    topology = find_topology(case.topology)
    limits = limits_of(topology)
    if limits is None:
        raise ConfigError(f"{case.topology}: no data sheet of its devices here")
    model = published(case.model) if isinstance(case.model, str) else case.model
    worker = Actor(
        WorkerContext(
            role="actor",
            layouts=make_layouts(topology.devices, dict(case.train), {"tensor": -1}),
            model=model,
            compute=Compute(jnp.bfloat16, remat=case.remat),
            max_response_length=case.tokens - case.prompt,
            samples=case.samples,
            loss=PolicyLoss(),
            optimizer=OptimizerConfig(1e-6),
            micro_batch=case.micro_batch,
        )
    )
    traces = dict(worker.programs(case.rows, case.prompt))
    program = StepProgram("actor", "update", 0, case.rows, 1, traces["update"], None)
    found = compile_program(program, topology, len(topology.devices), "", cache)
    described = {
        **dataclasses.asdict(case),
        "model": case.model if isinstance(case.model, str) else "",
        "versions": topology.versions,
    }
    if "refused_bytes" in found:
        return {**described, "refused_bytes": found["refused_bytes"]}
    least = minimum(program, worker, case.prompt, limits)
    assert least is not None
    account = found["roofline"]
    received = account["received_bytes"]
    return {
        **described,
        "seconds": account["seconds"],
        "minimum_seconds": least["seconds"],
        "mfu": least["flops"] / limits.flops["bfloat16"] / account["seconds"],
        "flops_over_minimum": account["flops"] / least["flops"],
        "received_bytes": received,
        "minimum_received_bytes": least["received_bytes"],
        "waited_share": account["synchronous_bytes"] / received if received else 0.0,
        "waited_seconds": account["network_seconds"],
        "peak_bytes": found["total_bytes"],
        "bound": account["bound"],
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of what ``updating`` counted, a row each."""
    lines = [
        "| update of 64 rows | before | now | at least | MFU | products ÷ least "
        "| received GB (least) | waited for | memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        split = " × ".join(f"{axis} {n}" for axis, n in r["train"].items() if n > 1)
        passes = f", micro_batch {r['micro_batch']}" if r["micro_batch"] else ""
        where = f"{r['topology']}{', ' + split if split else ''}"
        name = f"{r['model']}, {r['tokens'] // 1024}k tokens, {where}{passes}"
        before = f"{r['before']:.2f} s" if r["before"] else ""
        if "refused_bytes" in r:
            needed = f"{r['refused_bytes'] / 2**30:.1f} GiB"
            lines.append(f"| {name} | {before} | refused: {needed} |" + " |" * 6)
            continue
        received, least = (r[k] / 1e9 for k in ("received_bytes", "minimum_received_bytes"))
        lines.append(
            f"| {name} | {before} | {r['seconds']:.2f} s | {r['minimum_seconds']:.2f} s "
            f"| {r['mfu']:.0%} | {r['flops_over_minimum']:.2f} | {received:.1f} ({least:.1f}) "
            f"| {r['waited_share']:.0%}, {r['waited_seconds']:.2f} s "
            f"| {r['peak_bytes'] / 2**30:.1f} GiB |"
        )
    return "\n".join(lines)
