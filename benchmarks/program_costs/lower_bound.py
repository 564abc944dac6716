"""The least that a step's program has to do, by arithmetic alone: what its account stands beside.

Per device and run: the matrix products of the tokens that there are, parameters and moments read
and written once, and the collectives that the layout cannot do without. What a program passes many
times over has a cause.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from hjax.dryrun.programs import StepProgram, phase_of
from hjax.models import parameter_counts
from hjax.models.collective_matmul import weights_travel
from hjax.models.cost_inputs import MeshSizes, model_counts
from hjax.models.model_config import ModelConfig
from hjax.sharding.layout import Layout, shard_bytes
from program_costs.limits import Limits


def minimum(
    program: StepProgram, worker: Any, prompt_length: int, limits: Limits
) -> dict[str, float] | None:
    """What a program of a worker has to do at the least.

    Returns:
      ``flops``, ``bytes``, ``received_bytes``, per device and run, and ``seconds``, the longest
      that one of the three takes; None of a transition (HybridFlow's formula is its minimum) and
      of models that a worker of a user's own makes.
    """
    phase = phase_of(program.name)
    network = getattr(worker, "network", None)
    if network is None or program.name.startswith("transition"):
        return None
    context, model = worker.context, network.config
    generates = phase == "generate"
    layout: Layout = worker.layouts.generate if generates else worker.layouts.train
    greedy = program.program.call.endswith("greedy")
    samples = 1 if greedy else context.samples + context.extra_samples
    tokens = Tokens(program.rows, samples, prompt_length, context.max_response_length)
    element = np.dtype(context.compute.dtype).itemsize
    # Of the parameters, of which each device needs all that passes it.
    held = _held(parameter_counts.parameter_count(model, worker.scalar), model, layout) * element
    parts = layout.ways("embed")
    gather = held * (parts - 1) / parts
    forward = tokens.forward_flops(model, worker.scalar) / layout.mesh.size
    passed = tokens.all
    if generates and program.program.tokens == 0:
        # Prompts alone: as many of them as a run reads.
        tokens = Tokens(program.rows // program.runs, samples, prompt_length, 0)
        moved = _held(parameter_counts.parameter_count(model), model, layout) * element
        passed = tokens.all
        flops, received = tokens.forward_flops(model, False) / layout.mesh.size, 0.0
    elif generates and program.program.tokens is not None:
        # Some tokens of the rows that are decoded at a time, in the middle of their responses.
        passed, steps = program.program.tokens, program.program.loop_trips or 1
        tokens = Tokens(passed // steps, samples, prompt_length, context.max_response_length)
        share = steps / tokens.response
        moved = share * decoding_bytes(model, layout, tokens, element, worker.cache_element_bytes)
        prompts = Tokens(tokens.rows, samples, prompt_length, 0)
        flops = tokens.forward_flops(model, False) - prompts.forward_flops(model, False)
        flops, received = share * flops / layout.mesh.size, 0.0
    elif generates:
        moved = decoding_bytes(model, layout, tokens, element, worker.cache_element_bytes)
        flops, received = forward, 0.0
    elif phase == "update":
        state = sum(shard_bytes(tree) for tree in worker.abstract_state().values())
        passes = parameter_counts.update_passes(model, worker.scalar)
        moved, flops = 2.0 * state, passes * forward
        copies = layout.ways("batch") // parts
        # In each micro-batch gathered for the forward and the backward pass, and its gradients
        # scattered; then these are summed over whole copies.
        received = passes * gather * worker.micro_batches.count_for(program.rows)
        received += 2 * (passes - 2) * held / parts * (copies - 1) / copies
    else:
        stored = {"params": worker.abstract_state()["params"]}
        moved = float(sum(shard_bytes(tree) for tree in jax.tree.leaves(stored)))
        flops, received = forward, gather * worker.micro_batches.count_for(program.rows)
    if (t := layout.ways("heads")) > 1:
        rows = passed / layout.ways("batch")
        both = 2 if phase == "update" else 1
        pieces = 1 if generates else worker.micro_batches.count_for(program.rows)
        mesh = MeshSizes.of(layout)
        if not generates and weights_travel(model_counts(model), mesh, rows / pieces):
            # Of every layer the other parts of its weights, and of their gradients; queries, keys,
            # values and what attention makes of them.
            times = parameter_counts.update_passes(model, worker.scalar) if phase == "update" else 1
            exchanged = 2 * (model.heads + model.kv_heads) * model.head_dim * rows / t
            moves = times * pieces * parameter_counts.layer_parameters(model) + both * exchanged
        else:
            # Of every layer's two sums over its parts, a reduce-scatter and an all-gather each.
            moves = both * 2 * 2 * rows * model.hidden_size
        received += (t - 1) / t * model.layers / layout.ways("layers") * moves * element
    if (parted := layout.ways("experts")) > 1:
        # Of the others' tokens those that have an expert here, and as many sums back.
        reached = 1 - (1 - 1 / parted) ** model.experts_per_token
        rows = passed / layout.ways("batch") * (parted - 1) * reached
        passes = {"update": 2}.get(phase, 1)
        received += (
            passes * 2 * model.layers / layout.ways("layers") * rows * (model.hidden_size * element)
        )
    kind = "bfloat16" if element == 2 or not limits.default_float32 else "float32"
    seconds = max(flops / limits.flops[kind], moved / limits.bandwidth, received / limits.link)
    return {"flops": flops, "bytes": moved, "received_bytes": received, "seconds": seconds}


def decoding_bytes(
    model: ModelConfig, layout: Layout, tokens: Tokens, element: int, cache_element: float
) -> float:
    """What a device reads to decode all tokens of a rollout: for each the weights that multiply it
    (of the embedding, where it is no output table, only rows), and what it sees of the cache.

    Args:
      model, layout: of generation.
      tokens: of the rollout.
      element: bytes of a weight.
      cache_element: of an entry of the cache, see ``hjax.kernels.int8_cache.element_bytes``.
    """
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    weights = _held(parameter_counts.parameter_count(model) - looked_up, model, layout) * element
    cache = (
        parameter_counts.cache_elements(model) * cache_element * tokens.read_while_decoding(model)
    )
    return tokens.response * weights + cache / layout.mesh.size


def _held(parameters: int, model: ModelConfig, layout: Layout) -> float:
    """Of so many parameters those that multiply what passes one device: its part of the heads and
    layers, and of experts its own."""
    experts = parameter_counts.expert_parameters(model) * model.layers
    held = parameters - experts + experts / layout.ways("experts")
    return held / (layout.ways("heads") * layout.ways("layers"))


class Tokens:
    """Those of a batch, of whose prompts each is passed once for all its samples.

    Args:
      rows: responses.
      samples: of a prompt.
      prompt, response: tokens of each.
    """

    def __init__(self, rows: int, samples: int, prompt: int, response: int):
        self.rows, self.groups = rows, max(rows // samples, 1)
        self.prompt, self.response = prompt, response

    @property
    def all(self) -> int:
        """Tokens that pass the layers."""
        return self.groups * self.prompt + self.rows * self.response

    def read_while_decoding(self, model: ModelConfig) -> float:
        """Tokens whose keys and values are read, over all steps and layers: each prompt's once a
        step for all its samples, of each response those before; of a layer with a window those
        within it."""
        own = parameter_counts.attention_pairs(model, self.response)
        return self.groups * (self._responding(model) - own) + self.rows * own

    def _responding(self, model: ModelConfig) -> float:
        """Pairs of a response's token and one that it attends to, in all layers."""
        whole = parameter_counts.attention_pairs(model, self.prompt + self.response)
        return whole - parameter_counts.attention_pairs(model, self.prompt)

    def forward_flops(self, model: ModelConfig, scalar: bool) -> float:
        """Matrix products of a forward pass; the head's of the responses alone."""
        layers = 2.0 * model.layers * parameter_counts.active_layer_parameters(model) * self.all
        head = 2.0 * model.hidden_size * (1 if scalar else model.vocab_size)
        pairs = self.groups * parameter_counts.attention_pairs(model, self.prompt)
        pairs += self.rows * self._responding(model)
        attention = 4.0 * model.heads * model.head_dim * pairs
        return math.fsum([layers, head * self.rows * self.response, attention])
