"""What decoding moves for a token, by the compilers' own text, beside the least that it must.

Of published shapes on devices that are not there: ``benchmarks/performance.py`` prints it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from program_costs.account import READER
from program_costs.lower_bound import Tokens, decoding_bytes

from hjax.dryrun.compilation import compile_program
from hjax.dryrun.programs import StepProgram
from hjax.dryrun.topologies import find_topology
from hjax.kernels.int8_cache import AUTO, INT8, element_bytes
from hjax.models.compute import Compute
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.models.presets import preset
from hjax.rollout.engine import STEPS
from hjax.rollout.generator import Generator
from hjax.rollout.rollout_job import GenerationConfig
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_state import SlotSizes
from hjax.sharding.layout import fit_layout, make_layouts
from hjax.xla.abstract_program import AbstractProgram


@dataclasses.dataclass(frozen=True)
class Case:
    """A rollout, in bfloat16.

    Attributes:
      model: a published shape's name, or a shape.
      topology: such as ``v5e:2x4``.
      tensor: ways in which heads, MLP and vocabulary are split; rows are split over the rest.
      rows: responses of all devices.
      samples: of a prompt.
      prompt, response: tokens of each.
      bar: the ratio of bytes to the least that is asked of it; 0: none.
      slots: whether rows come and go, as requests do (``hjax.rollout.service``): each has a slot of
        prompt and response columns, and they are filled to every length alike.
      cache: what keys and values are kept in, of ``CACHE_DTYPES``.
    """

    model: str | ModelConfig
    topology: str
    tensor: int
    rows: int
    samples: int
    prompt: int = 512
    response: int = 1024
    bar: float = 0.0
    slots: bool = False
    cache: str = AUTO


CASES = (
    Case("qwen2.5-1.5b", "v5e:2x4", 1, 256, 8, bar=1.12),
    Case("llama-3-8b", "v5p:2x2x2", 4, 256, 1, bar=1.3),
    Case("llama-3-8b", "v5p:2x2x2", 4, 256, 8),
    Case("qwen2.5-1.5b", "h100:1x8", 1, 256, 8, bar=1.5),
    Case("gemma-3-1b", "v5e:2x4", 1, 256, 8, bar=1.12),  # layers of alternating kinds
    Case("qwen2.5-1.5b", "v5e:2x4", 1, 256, 1, bar=1.2, slots=True),
    Case("qwen2.5-1.5b", "h100:1x8", 1, 256, 1, bar=1.2, slots=True),
    Case("llama-3-8b", "v5p:2x2x2", 4, 256, 1, bar=1.2, slots=True),
    Case("qwen2.5-1.5b", "v5e:2x4", 1, 256, 8, bar=1.2, cache=INT8),
    Case("qwen2.5-1.5b", "v5e:2x4", 1, 256, 1, bar=1.25, slots=True, cache=INT8),
    Case("qwen2.5-1.5b", "h100:1x8", 1, 256, 1, bar=1.25, slots=True, cache=INT8),
)


def decoding(
    case: Case, cache: Path | None = None, cache_form: str | None = None
) -> dict[str, Any]:
    """Compile a rollout and count a token of it.

    Args:
      case: which.
      cache: folder of kept results, as of ``compile_program``.
      cache_form: of the cache and its attention, see ``hjax.kernels.decode``; None: that of the
        devices.

    Returns:
      the case; ``bytes_per_token``: of the loop over tokens, per device and turn, averaged over the
      response; ``minimum_bytes``; ``ratio``; ``copies``: arrays of the size of a weight or cache
      that a turn copies; ``milliseconds_per_token``: by data sheet; ``received_bytes`` per turn;
      ``temporary_bytes``; ``versions``.

    Raises:
      ConfigError: a topology that is not known, or a layout that does not fit the model.
      RunError: it does not compile.
    """
    topology = find_topology(case.topology)
    devices = topology.devices
    model = preset(case.model) if isinstance(case.model, str) else case.model
    sizes = {"fsdp": len(devices) // case.tensor, "tensor": case.tensor}
    layout = make_layouts(devices, sizes, {"tensor": -1}).generate
    layout = fit_layout(layout, model.dimensions, "generation")
    network = decoder_network(model)
    dtype = jnp.bfloat16
    generator = Generator(network, layout, Compute(dtype=dtype), cache_form, case.cache)
    params = jax.tree.map(
        lambda x, kind, s: jax.ShapeDtypeStruct(x.shape, kind, sharding=s),
        network.shapes,
        network.compute_dtypes(dtype),
        network.shardings(layout),
    )
    params = generator.decoding_params(params)
    prompts = case.rows // case.samples
    room = case.prompt + case.response

    def trace() -> Any:
        if case.slots:
            size = SlotSizes(case.rows, case.rows, 1, 0, room)
            return generator.engine.trace_decode(SamplingParams(stop=(1,)), params, size, STEPS)
        config = GenerationConfig(case.response, case.samples, SamplingParams(stop=(1,)))
        return generator.trace(params, prompts, case.prompt, config)

    generate = AbstractProgram("generate", trace, STEPS if case.slots else case.response - 1)
    program = StepProgram("actor", 0, case.rows, 1, generate)
    order = list(layout.mesh.devices.ravel())
    found = compile_program(program, topology, len(devices), "", cache, order, READER)
    turn = found["roofline"]["turn"]
    # Filled to every length alike, slots hold half of what they have room for.
    drawn, before = (room, 0) if case.slots else (case.response, case.prompt)
    tokens = Tokens(case.rows, case.samples, before, drawn)
    kept = element_bytes(generator.kv_dtype, model.head_dim)
    least = decoding_bytes(model, layout, tokens, jnp.dtype(dtype).itemsize, kept) / drawn
    return {
        **dataclasses.asdict(case),
        "model": case.model if isinstance(case.model, str) else "",
        "bytes_per_token": turn["bytes"],
        "minimum_bytes": least,
        "ratio": turn["bytes"] / least,
        "copies": len(turn["copies"]),
        "milliseconds_per_token": 1e3 * turn["seconds"],
        "received_bytes": turn["received_bytes"],
        "temporary_bytes": found["temporary_bytes"],
        "versions": topology.versions,
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of what ``decoding`` counted, a row each."""
    lines = [
        "| rollout | GB a token | at least | ratio | bar | copies in the loop | ms a token |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        split = f", tensor {record['tensor']}"
        answers = "a sample" if record["samples"] == 1 else f"{record['samples']} samples"
        rows = f"{record['rows']} rows, {answers} of a prompt"
        if record["slots"]:
            rows = f"{record['rows']} slots of {record['prompt'] + record['response']} tokens"
        kept = f", cache in {record['cache']}" if record["cache"] != AUTO else ""
        name = f"{record['model']}, {record['topology']}{split}, {rows}{kept}"
        bar = f"{record['bar']:.2f}" if record["bar"] else ""
        moved, least = (record[key] / 1e9 for key in ("bytes_per_token", "minimum_bytes"))
        lines.append(
            f"| {name} | {moved:.2f} | {least:.2f} | {record['ratio']:.2f} | {bar} "
            f"| {record['copies']} | {record['milliseconds_per_token']:.2f} |"
        )
    return "\n".join(lines)
