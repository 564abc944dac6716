"""Rematerialisation (activation checkpointing): which activations the backward pass recomputes.

Chen et al. 2016, arXiv 1604.06174; selectively, Korthikanti et al. 2022, arXiv 2205.05198. A policy
names the activations of each layer that are kept besides its input; the others are recomputed.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from hjax.kernels.attention import CHECKPOINT_NAME
from hjax.kernels.reference import GATES

NONE, PRODUCTS, ATTENTION, FULL, OFFLOAD = "none", "products", "attention", "full", "offload"
POLICIES = (NONE, PRODUCTS, ATTENTION, FULL, OFFLOAD)  # in the order of decreasing device memory
_INPUT, _PRODUCT = "layer_input", "layer_product"
_CUDNN = "dot_product_attention_fwd"  # JAX's primitive, whose outputs cannot be named


def layer_input(x: jax.Array) -> jax.Array:
    """A layer's input, named for ``offload``."""
    return checkpoint_name(x, _INPUT)


def first_products(x: jax.Array) -> jax.Array:
    """Outputs of an MLP's or its experts' gate and up projections, named for ``products``."""
    return checkpoint_name(x, GATES)


def product(x: jax.Array) -> jax.Array:
    """Output of another product of a layer, named for ``products``."""
    return checkpoint_name(x, _PRODUCT)


def with_remat(run: Callable[..., Any], policy: str, unrolled: bool) -> Callable[..., Any]:
    """A layer's function with ``jax.checkpoint`` under a policy.

    Args:
      run: (layer's number, parameters, x, cache) -> arrays.
      policy: what is kept. ``none``: all activations; ``attention``: outputs and log-sums of long
        sequences' attention; ``products``: these and the outputs of products with weights,
        experts' included; ``full``: nothing; ``offload``: nothing on the device, the layer's input
        goes to host memory and back.
      unrolled: whether layers run one after another, not in a scan.
    """
    if policy == NONE:
        return run
    policies = jax.checkpoint_policies

    def save_named(*names: str) -> Callable[..., Any]:
        return policies.save_from_both_policies(policies.save_only_these_names(*names), _of_cudnn)

    policy_function = {
        ATTENTION: save_named(CHECKPOINT_NAME),
        PRODUCTS: save_named(CHECKPOINT_NAME, GATES, _PRODUCT),
        FULL: policies.nothing_saveable,
        OFFLOAD: policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[policy]
    # In a scan XLA's CSE cannot undo remat, so no barriers are needed.
    static = (0,) if unrolled else ()
    return jax.checkpoint(run, policy=policy_function, static_argnums=static, prevent_cse=unrolled)


def _of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a primitive is cuDNN's attention, with outputs and log-sums."""
    return primitive.name.startswith(_CUDNN)
