"""Rematerialisation: which activations of a layer the backward pass computes again.

Chen et al. 2016, arXiv 1604.06174; selectively, Korthikanti et al. 2022, arXiv 2205.05198. A policy
says what is kept of each layer besides its input; the rest is made again from it.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from hjax.kernels.attention import KEPT
from hjax.kernels.reference import GATES

NONE, PRODUCTS, ATTENTION, FULL, OFFLOAD = "none", "products", "attention", "full", "offload"
POLICIES = (NONE, PRODUCTS, ATTENTION, FULL, OFFLOAD)  # of less and less on the device
_INPUT, _PRODUCT = "layer_input", "layer_product"
_CUDNN = "dot_product_attention_fwd"  # JAX's name of it, which has no place for names of ours


def layer_input(x: jax.Array) -> jax.Array:
    """A layer's input, named for ``offload``."""
    return checkpoint_name(x, _INPUT)


def first_products(x: jax.Array) -> jax.Array:
    """What an MLP's, or its experts', first products give, named for ``products``."""
    return checkpoint_name(x, GATES)


def product(x: jax.Array) -> jax.Array:
    """What another product of a layer gives, named for ``products``."""
    return checkpoint_name(x, _PRODUCT)


def with_remat(run: Callable[..., Any], policy: str, unrolled: bool) -> Callable[..., Any]:
    """One layer's function under a policy.

    Args:
      run: (number of the layer, parameters, x, cache) -> arrays.
      policy: ``none``: all activations are kept; ``attention``: the outputs of long sequences'
        attention and their log-sums, so that attention is not computed again; ``products``:
        beside these what products with weights give (of experts too), so that none of them is made
        again; ``full``: nothing; ``offload``: nothing on the device, the
        layer's input goes to the host's memory and back.
      unrolled: layers are called one after another, not in a scan.
    """
    if policy == NONE:
        return run
    policies = jax.checkpoint_policies

    def named(*names: str) -> Callable[..., Any]:
        return policies.save_from_both_policies(policies.save_only_these_names(*names), _of_cudnn)

    kept = {
        ATTENTION: named(KEPT),
        PRODUCTS: named(KEPT, GATES, _PRODUCT),
        FULL: policies.nothing_saveable,
        OFFLOAD: policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[policy]
    # In a scan the compiler cannot undo it, and needs no barriers.
    static = (0,) if unrolled else ()
    return jax.checkpoint(run, policy=kept, static_argnums=static, prevent_cse=unrolled)


def _of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether these are outputs and log-sums of cuDNN's attention."""
    return primitive.name.startswith(_CUDNN)
