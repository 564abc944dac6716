"""Cases of what several devices compute together: rings, transitions, SparseCore collectives.

They run on all local devices, on small random models.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from hjax.kernels.registry import choose_kernel_set, make_kernel_set
from hjax.launch.form_checks.comparison import (
    Case,
    Unsuited,
    dtypes_of_case,
    find_difference,
)
from hjax.models import experts
from hjax.models.compute import Compute
from hjax.models.forward import response_states, token_log_probs
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.sharding.layout import RoleLayouts, make_layouts
from hjax.sharding.transition import Transition
from hjax.xla.compiler_flags import compiler_options

_MODEL = ModelConfig(64, 32, 48, 2, 8, 4, 8, 128)
_ROUNDS = 3.0  # by which the errors of two layers and a loss may exceed those of one kernel


def _layouts(axis: str, most: int, generate: dict[str, int] | None = None) -> RoleLayouts:
    """All local devices, up to ``most`` along an axis and the rest along ``data``.

    Raises:
      Unsuited: there is one device.
    """
    devices = jax.local_devices()
    ways = max(n for n in range(1, most + 1) if len(devices) % n == 0)
    if ways == 1:
        raise Unsuited("it takes several devices")
    return make_layouts(devices, {"data": -1, axis: ways}, generate)


def collective_matmul_cases() -> list[Case]:
    """Loss and gradients of a model whose weights travel over a tensor axis."""
    return [
        Case(f"padded prompts and responses, {dtype}", functools.partial(_ring_difference, dtype))
        for dtype in dtypes_of_case(0)
    ]


def _batch(rows: int, prompt: int, length: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    mask = np.arange(prompt) >= prompt - draw.integers(1, prompt + 1, (rows, 1))
    answered = np.arange(length) < draw.integers(1, length + 1, (rows, 1))
    return {
        "prompts": draw.integers(1, 64, mask.shape, dtype=np.int32) * mask,
        "prompt_mask": mask,
        "responses": draw.integers(1, 64, answered.shape, dtype=np.int32) * answered,
        "response_mask": answered,
        "weights": (draw.normal(size=answered.shape) * answered).astype(np.float32),
    }


def _ring_difference(dtype: str) -> str:
    layout = _layouts("tensor", 4).train
    network, batch = decoder_network(_MODEL), _batch(8 * jax.local_device_count(), 21, 42)
    by_compiler = Compute(dtype=jnp.dtype(dtype)).for_layout(layout)
    by_compiler = dataclasses.replace(by_compiler, layout=layout, move_weights=False)
    by_ring = dataclasses.replace(by_compiler, move_weights=True)
    placed = network.create(1, layout)
    rows = {key: jax.device_put(x, layout.sharding("batch")) for key, x in batch.items()}

    def traced(compute: Compute) -> Any:
        def loss(params: Any, batch: Any) -> jax.Array:
            model = network.bind(params)
            states = response_states(model, batch, 1, compute)
            logprobs, _ = token_log_probs(model, states, batch["responses"], layout=layout)
            return jnp.sum(batch["weights"] * logprobs)

        return jax.jit(jax.value_and_grad(loss)).trace(placed, rows)

    ring = traced(by_ring)
    if "ppermute" not in str(ring.jaxpr):
        raise Unsuited("this number of devices does not make a ring")
    return _differs(ring.lower().compile()(placed, rows),
                    traced(by_compiler).lower().compile()(placed, rows), dtype)  # fmt: skip


def _differs(found: Any, expected: Any, dtype: str) -> str:
    """How a tree of arrays differs from another, by the path of each."""
    ours, exact = (
        {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(tree)}
        for tree in (found, expected)
    )
    return find_difference(ours, exact, dtype=dtype, factor=_ROUNDS)


def expert_ring_cases() -> list[Case]:
    """Outputs and gradients of experts whose tokens travel round the expert axis."""
    return [
        Case(f"16 experts, {dtype}", functools.partial(_experts, dtype))
        for dtype in dtypes_of_case(0)
    ]


def _experts(dtype: str) -> str:
    layout = _layouts("expert", 8).train
    width, mlp, count = 64, 48, 16
    keys = jax.random.split(jax.random.key(2), 5)
    shapes = {"router": (width, count), "gate_up": (count, width, 2, mlp),
              "down": (count, mlp, width)}  # fmt: skip
    drawn = zip(keys, shapes.items(), strict=False)
    weights = {name: jax.random.normal(key, shape) / 4 for key, (name, shape) in drawn}
    rows = 2 * jax.local_device_count()
    x, given = (jax.random.normal(key, (rows, 48, width), dtype) for key in keys[3:])
    routing = experts.Routing(3, True, lambda gate, up: jax.nn.silu(gate) * up)
    kernels = make_kernel_set(choose_kernel_set(layout.platform))

    def traced(move_tokens: bool) -> Any:
        def run(x: jax.Array, weights: Any) -> jax.Array:
            made = experts.ExpertWeights(**weights)
            out, _ = experts.mixture_of_experts(
                x, made, routing, layout, kernels, move_tokens=move_tokens
            )
            return out

        def both(x: jax.Array, weights: Any, given: jax.Array) -> Any:
            out, back = jax.vjp(run, x, weights)
            return out, back(given)

        return jax.jit(both).trace(x, weights, given)

    ring = traced(True)
    if "ppermute" not in str(ring.jaxpr):
        raise Unsuited("this number of devices does not make a ring")
    return _differs(ring.lower().compile()(x, weights, given),
                    traced(False).lower().compile()(x, weights, given), dtype)  # fmt: skip


def transition_cases() -> list[Case]:
    """Weights moved from the training to the generation layout and back."""
    return [
        Case("tensor to data parallel", functools.partial(_transition, "tensor", {})),
        Case("tensor to fewer", functools.partial(_transition, "tensor", {"tensor": 2})),
        Case("fsdp to whole weights", functools.partial(_transition, "fsdp", {})),
    ]


def _transition(axis: str, generate: dict[str, int]) -> str:
    layouts = _layouts(axis, 4, generate)
    network = decoder_network(_MODEL)
    params = network.create(3, layouts.train)
    exact = jax.tree.map(np.asarray, params)
    train, generate_shardings = (network.shardings(x) for x in (layouts.train, layouts.generate))
    dtypes = network.compute_dtypes(jnp.float32)
    transition = Transition(train, generate_shardings, network.shapes, dtypes)
    held = transition.start(params)
    there = jax.tree.map(np.asarray, transition.to_generate(held))
    back = jax.tree.map(np.asarray, transition.to_train(held))
    for name, tree in (("in the generation layout", there), ("back", back)):
        same = jax.tree.map(np.array_equal, tree, exact)
        if not all(jax.tree.leaves(same)):
            return f"weights {name} are not those that were moved"
    return ""


def sparsecore_cases() -> list[Case]:
    """Gathers, sums and scattered sums with the options that put them on SparseCores."""
    return [Case(f"collectives of {name}", functools.partial(_collectives, name))
            for name in dtypes_of_case(0)]  # fmt: skip


def _collectives(dtype: str) -> str:
    layout = _layouts("fsdp", 8).train
    device = layout.mesh.devices.flat[0]
    without, options = (
        compiler_options(device.platform, device.device_kind, heads_split=False, sparsecore=each)
        for each in (False, True)
    )
    if options == without:
        raise Unsuited("it has no SparseCores that collectives run on")
    count = layout.mesh.shape["fsdp"]
    x = jax.random.normal(jax.random.key(4), (count * 512, count * 512), dtype)

    def run(x: jax.Array) -> Any:
        def each(x: jax.Array) -> Any:
            whole = jax.lax.all_gather(x, "fsdp", tiled=True)
            return whole, jax.lax.psum(x, "fsdp"), jax.lax.psum_scatter(whole, "fsdp", tiled=True)

        split, whole = PartitionSpec("fsdp"), PartitionSpec()
        return jax.shard_map(
            each, mesh=layout.mesh, in_specs=split, out_specs=(whole, whole, split), check_vma=False
        )(x)

    found, expected = (jax.jit(run, compiler_options=each)(x) for each in (options, without))
    return _differs(found, expected, dtype)
