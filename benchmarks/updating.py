"""How long updates and scores take by data sheet, and why, beside the least that they must.

Of published shapes on devices that are not there: ``benchmarks/performance.py`` prints it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from program_costs.account import READER, limits_of
from program_costs.lower_bound import minimum

from hjax.algorithms.losses import PolicyLoss
from hjax.dryrun.compilation import compile_program
from hjax.dryrun.programs import StepProgram
from hjax.dryrun.topologies import find_topology
from hjax.errors import ConfigError
from hjax.kernels.registry import AUTO, BLOCKS, CUDNN
from hjax.models.compute import Compute
from hjax.models.model_config import ModelConfig
from hjax.models.presets import preset
from hjax.sharding.layout import make_layouts
from hjax.workers import Actor, OptimizerConfig, Reference, WorkerContext
from hjax.workers.memory import RoleMemory


@dataclasses.dataclass(frozen=True)
class Case:
    """An update of a policy by GRPO without KL, or a reference's log-probs, in bfloat16, masters
    and moments in float32.

    Attributes:
      model: a published shape's name, or a shape.
      topology: such as ``v5e:2x4``.
      train: sizes of the mesh axes.
      tokens: of prompt and response; of the prompt 512 or a quarter.
      micro_batch: rows of a pass over all devices; 0: all.
      remat: as of ``model.remat``.
      rows: of all devices.
      samples: of a prompt.
      scores: it is the reference's log-probs.
      attention: as of ``model.attention``.
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
    scores: bool = False
    before: float = 0.0
    attention: str = AUTO

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return min(512, self.tokens // 4)


_FSDP = {"data": 1, "fsdp": -1}
_TENSOR = {"data": 1, "fsdp": 2, "tensor": 4}
_PAIRS = {"data": 2, "fsdp": 16, "expert": 2}
_FOURS = {"data": 1, "fsdp": 16, "expert": 4}
CASES = (
    Case("qwen2.5-1.5b", "v5e:2x4", _FSDP, 2048, 0, before=2.62),
    Case("qwen2.5-1.5b", "v5e:2x4", _FSDP, 8192, 32, before=20.7),
    Case("qwen2.5-1.5b", "v5e:2x4", _FSDP, 8192, 8),
    Case("qwen2.5-1.5b", "v5e:2x4", _FSDP, 32768, 8),
    Case("qwen2.5-1.5b", "v5p:4x4x2", {"data": 1, "fsdp": 2, "context": 16}, 131072, 2),
    Case("llama-3-8b", "v5p:2x2x2", _TENSOR, 2048, 0),
    Case("llama-3-8b", "v5p:2x2x2", _TENSOR, 8192, 16),
    Case("qwen2.5-1.5b", "h100:1x8", _FSDP, 8192, 32, attention=BLOCKS),
    Case("qwen2.5-1.5b", "h100:1x8", _FSDP, 32768, 8, attention=BLOCKS),
    Case("qwen2.5-1.5b", "h100:1x8", _FSDP, 8192, 32, attention=CUDNN),
    Case("qwen2.5-1.5b", "h100:1x8", _FSDP, 32768, 8, attention=CUDNN),
    Case("qwen2.5-1.5b", "v5e:4x4", _FSDP, 8192, 64, rows=512, scores=True),
)
# Each family's update: a size that eight v5p hold, layouts and passes that are large enough to hide
# what they receive; experts over 64 and 16.
FAMILIES = (
    Case("llama-3-8b", "v5p:2x2x2", _TENSOR, 2048, remat="products"),
    Case("qwen2.5-1.5b", "v5e:2x4", _FSDP, 8192, 32),
    Case("qwen3-4b", "v5p:2x2x2", _FSDP, 2048, remat="products", rows=128),
    Case("mistral-7b", "v5p:2x2x2", _FSDP, 2048, remat="products"),
    Case("gemma-2-2b", "v5p:2x2x2", _FSDP, 2048, remat="products", rows=256),
    Case("gemma-3-4b", "v5p:2x2x2", _FSDP, 2048, remat="products", rows=128),
    Case("phi-3-mini-4k", "v5p:2x2x2", _FSDP, 2048, remat="products", rows=128),
    Case("olmo-2-7b", "v5p:2x2x2", _TENSOR, 2048, remat="none"),
    Case("smollm3-3b", "v5p:2x2x2", _FSDP, 2048, remat="products", rows=128),
    Case("gpt2-large", "v5p:2x2x2", {"data": 8}, 1024, remat="products", rows=512),
    Case("mixtral-8x7b", "v5p:4x4x4", _FOURS, 2048, 0, "products", 512),
    Case("qwen3-30b-a3b", "v5p:4x4x4", _PAIRS, 2048, remat="products", rows=1024, samples=4),
    Case("qwen3-30b-a3b", "v5p:4x4x4", _PAIRS, 16384, remat="products", samples=1),
    Case("gpt-oss-20b", "v5p:4x4x4", _PAIRS, 2048, 0, "products", 1024),
    Case("gpt-oss-20b", "v5p:4x4x4", _PAIRS, 16384, remat="products", samples=1),
)


def updating(case: Case, cache: Path | None = None) -> dict[str, Any]:
    """Compile an update, or scores, and account for them.

    Args:
      case: which.
      cache: folder of kept results, as of ``compile_program``.

    Returns:
      the case; ``refused_bytes``, or per device and run: ``seconds`` by data sheet,
      ``minimum_seconds``, ``mfu``, ``flops_over_minimum`` (of matrix products),
      ``received_bytes``, ``minimum_received_bytes``, ``waited_share`` (of the received bytes,
      those that nothing runs beside), ``waited_seconds``, ``memory_seconds`` (of operations that
      memory bounds), ``peak_bytes``,
      ``temporary_bytes``, ``output_bytes`` (not written over arguments), of updates
      ``estimated_bytes`` (of the peak, as ``model.remat=auto`` estimates it), ``bound``;
      ``versions``.

    Raises:
      ConfigError: a topology that is not known or has no data sheet here, or a layout that does
        not fit the model.
      RunError: it does not compile for another reason than memory.
    """
    topology = find_topology(case.topology)
    model = preset(case.model) if isinstance(case.model, str) else case.model
    role, kind = ("reference", Reference) if case.scores else ("actor", Actor)
    worker: Any = kind(
        WorkerContext(
            role=role,
            layouts=make_layouts(topology.devices, dict(case.train), {"tensor": -1}),
            model=model,
            compute=Compute(jnp.bfloat16, remat=case.remat, attention=case.attention),
            max_response_length=case.tokens - case.prompt,
            samples=case.samples,
            loss=PolicyLoss(),
            optimizer=OptimizerConfig(1e-6),
            micro_batch=case.micro_batch,
        )
    )
    placed = list(worker.layouts.train.mesh.devices.ravel())
    limits = limits_of(topology, placed)
    if limits is None:
        raise ConfigError(f"{case.topology}: no data sheet of its devices here")
    programs = worker.programs(case.rows, case.prompt)
    name = "compute_ref_log_prob" if case.scores else "update"
    (wanted,) = [each for each in programs if each.name == name]
    program = StepProgram(role, 0, case.rows, 1, wanted)
    found = compile_program(program, topology, len(placed), "", cache, placed, READER)
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
    if not case.scores:
        memory = RoleMemory.from_worker(worker)
        described["estimated_bytes"] = memory.update_bytes(case.rows, case.prompt, case.remat)
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
        "memory_seconds": account["memory_seconds"],
        "peak_bytes": found["total_bytes"],
        "output_bytes": found["output_bytes"],
        "temporary_bytes": found["temporary_bytes"],
        "bound": account["bound"],
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of what ``updating`` counted, a row each; then what they say together."""
    lines = [
        "| program | before | now | at least | MFU | products ÷ least "
        "| received GB (least) | waited for | memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        split = " × ".join(f"{axis} {n}" for axis, n in r["train"].items() if n > 1)
        passes = f", micro_batch {r['micro_batch']}" if r["micro_batch"] else ""
        remat = "" if r["scores"] else f", remat {r['remat']}"
        attention = "" if r["attention"] == AUTO else f", attention {r['attention']}"
        where = f"{r['topology']}{', ' + split if split else ''}"
        what = "log-probs" if r["scores"] else "update"
        rows = f"{what} of {r['rows']} × {r['tokens'] // 1024}k tokens"
        name = f"{rows}, {r['model']}, {where}{passes}{remat}{attention}"
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
    return "\n".join([*lines, "", *_together(records)])


def family_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of what ``updating`` counted of ``FAMILIES``, beside the least that each takes."""
    lines = [
        "| update | now | at least | ratio | products ÷ least | bound by memory | waited for "
        "| memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        split = " × ".join(f"{axis} {n}" for axis, n in r["train"].items() if n != 1)
        split = split.replace(" -1", "")
        passes = f", micro_batch {r['micro_batch']}" if r["micro_batch"] else ""
        what = f"{r['model']}, {r['rows']} × {r['tokens'] // 1024}k, {r['topology']}, {split}"
        what += f"{passes}, remat {r['remat']}"
        if "refused_bytes" in r:
            lines.append(f"| {what} | refused: {r['refused_bytes'] / 2**30:.1f} GiB |" + " |" * 6)
            continue
        products = r["flops_over_minimum"]
        lines.append(
            f"| {what} | {r['seconds']:.2f} s "
            f"| {r['minimum_seconds']:.2f} s | {r['seconds'] / r['minimum_seconds']:.2f} "
            f"| {products:.2f} | {r['memory_seconds']:.2f} s | {r['waited_seconds']:.2f} s "
            f"| {r['peak_bytes'] / 2**30:.1f} GiB |"
        )
    return "\n".join(lines)


def _together(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences about all of them: how memory grows with the length, what is written anew."""
    said = []
    counted = [r for r in records if "refused_bytes" not in r]
    updates = [r for r in counted if not r["scores"]]
    alike = ("model", "topology", "train", "micro_batch", "remat", "attention")
    for short, long in itertools.combinations(updates, 2):
        if all(short[k] == long[k] for k in alike) and long["tokens"] == 4 * short["tokens"]:
            ratio = long["temporary_bytes"] / short["temporary_bytes"]
            said.append(
                f"Temporaries of {long['tokens'] // 1024}k tokens a row over those of "
                f"{short['tokens'] // 1024}k, {long['model']}, {long['topology']}, micro_batch "
                f"{long['micro_batch']}: {ratio:.2f}."
            )
    if updates:
        most = max(r["output_bytes"] for r in updates)
        said.append(
            f"An update writes {most / 1024:.1f} KiB of its results at most elsewhere than over "
            "what they take the place of."
        )
        ratios = [r["estimated_bytes"] / r["peak_bytes"] for r in updates]
        said.append(
            f"The estimate of `model.remat=auto` is {min(ratios):.2f} to {max(ratios):.2f} of the "
            "memory."
        )
    return said
