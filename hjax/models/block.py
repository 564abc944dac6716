"""The transformer block, one layer of the decoder: attention, MLP or experts, norms.

``ModelConfig`` selects its parts (norms, rotary or learned positions, biases, MLPs). The defaults
are Llama's (Touvron et al. 2023): RMSNorm, rotary positions (half-split, as in transformers),
grouped-query attention, gated SiLU MLP.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hjax.kernels.attention import ScoreOptions
from hjax.kernels.backward import scaled_product
from hjax.kernels.registry import KernelSet
from hjax.models import collective_matmul, remat
from hjax.models.architecture import decoder_parameters
from hjax.models.attention_strategies import Attention, AttentionInputs
from hjax.models.collective_matmul import WeightRing
from hjax.models.compute import Compute
from hjax.models.experts import LOGICAL_AXES, ExpertWeights, Routing, mixture_of_experts
from hjax.models.lora_compute import AdaptedMatrix
from hjax.models.model_config import LayerKind, ModelConfig
from hjax.models.parameter_spec import ParameterKind, create_parameters
from hjax.models.rotary import Tables

Rotary = tuple[Tables, ...]  # (cos, sin) of each of the model's ropes


def rotary_tables(
    config: ModelConfig, positions: jax.Array, kernels: KernelSet, lengths: jax.Array | None = None
) -> Rotary:
    """cos and sin of positions, a pair for each rope of the model.

    Args:
      config: of the model.
      positions: int [..., length], of each token in its own sequence.
      kernels: whose ``rotary_tables`` computes them.
      lengths: int [...], final length of each sequence; None: up to its last position.
    """
    make = kernels.rotary_tables
    return tuple(rope.tables(config.head_dim, positions, make, lengths) for rope in config.ropes)


def _pair(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two halves [batch, length, ...] of [batch, length, 2, ...]."""
    return x[:, :, 0], x[:, :, 1]


class Block(nnx.Module):
    """Parameters of all layers, stacked on a leading ``layers`` axis, and the forward of one."""

    sinks: nnx.Param
    router: nnx.Param
    gate_up: nnx.Param
    down: nnx.Param

    def __init__(self, config: ModelConfig, key: jax.Array):
        declared = decoder_parameters(config)["layers"]
        self.config = config
        adapters = {n: p for n, p in declared.items() if p.kind is ParameterKind.ADAPTER}
        base = {n: p for n, p in declared.items() if n not in adapters}
        for specs, start in ((base, key), (adapters, jax.random.fold_in(key, 1))):
            keys = iter(jax.random.split(start, sum(p.scale > 0 for p in specs.values()) or 1))
            create_parameters(self, specs, functools.partial(next, keys))

    def __call__(
        self,
        layer: int | jax.Array,
        x: jax.Array,
        rotary: Rotary,
        attention: Attention,
        cache: Any,
        compute: Compute,
        kind: LayerKind,
        tally_weights: jax.Array | None = None,
        ring: WeightRing | None = None,
    ) -> tuple[jax.Array, Any, Any, jax.Array | None]:
        """Forward of one layer; the block's parameters have been sliced to it.

        Args:
          layer: its number, for the attention strategy and its cache.
          x: input activations [batch, length, embed].
          rotary: cos and sin of the tokens' positions, see ``rotary_tables``.
          attention, cache, compute: as of ``Decoder``.
          kind: this layer's window and rope.
          tally_weights: weight of each token in the routing statistics, see ``mixture_of_experts``.
          ring: for weights that move over the tensor axis (collective matmul); None: they stay.

        Returns:
          output activations, the cache, the keys and values that the strategy returns, and the
          routing statistics.
        """
        config, kernels, compute = self.config, compute.kernels, compute.for_layer(layer)
        h = x if config.norms == "after" else self._norm("attention_norm", x, compute)
        on_ring = functools.partial(collective_matmul.run_on_ring, ring, self)
        scoring = ScoreOptions(config.attention_scale, config.attention_softcap, kind.window or 0)
        rotate = None
        if kind.rope is not None and rotary:
            rotate = functools.partial(_rotate_heads, kernels, *rotary[kind.rope])
        factor = None
        if rotate is None and not config.query_key_norm:  # then the projection scales the queries
            factor = scoring.query_scale(config.head_dim)
            scoring = dataclasses.replace(scoring, scale=1.0)
        made = functools.partial(Block._queries_keys_values, factor=factor)
        q, k, v = map(remat.product, on_ring("to_heads", made, h, compute, "q", "kv"))
        if config.query_key_norm:
            q, k = self._norm_heads("q_norm", q, compute), self._norm_heads("k_norm", k, compute)
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        sinks = self.sinks[...] if config.sinks else None
        out, cache, kv = attention(AttentionInputs(layer, q, k, v, scoring, sinks), cache)
        out = remat.product(on_ring("from_heads", Block._output_projection, out, compute, "o"))
        if config.norms != "before":
            out = self._norm("attention_out_norm", out, compute)
        x = x + out
        h = x if config.norms == "after" else self._norm("mlp_norm", x, compute)
        routing = None
        if config.experts:
            out, routing = self._experts(h, compute, tally_weights)
        else:
            out = on_ring("to_mlp", Block._mlp, h, compute, "gate_up", "up", "down")
        out = remat.product(out)
        if config.norms != "before":
            out = self._norm("mlp_out_norm", out, compute)
        return x + out, cache, kv, routing

    def _product(
        self, spec: str, x: jax.Array, name: str, compute: Compute, factor: float | None = None
    ) -> jax.Array:
        """A projection: product with a weight, plus adapter and bias if any, times ``factor``."""
        weight, scale = getattr(self, name)[...], getattr(self, f"{name}_scale", None)
        bias = self._bias(name)
        if factor is not None and self._is_plain_product(name, x, compute):
            weight, bias = weight * factor, None if bias is None else bias * factor
            factor = None
        if scale is None:
            out = compute.kernels.product(spec, x, weight)
        else:
            out = scaled_product(spec, x, weight, scale[...])
        if self._has_adapter(name):
            out = self._adapted_matrix(name).with_adapter(spec, x, out, compute.dropout)
        out = out if bias is None else out + bias.astype(out.dtype)
        return out if factor is None else out * factor

    def _paired_product(
        self, spec: str, x: jax.Array, name: str, compute: Compute
    ) -> tuple[jax.Array, jax.Array]:
        """Both halves of a projection [batch, length, 2, ...]; ``c`` in ``spec`` is the pair."""
        if not self._is_plain_product(name, x, compute):
            return _pair(self._product(spec, x, name, compute))
        weight, bias, spec = getattr(self, name)[...], self._bias(name), spec.replace("c", "")
        made = [compute.kernels.product(spec, x, weight[:, i]) for i in range(2)]
        if bias is not None:
            made = [y + bias[i].astype(y.dtype) for i, y in enumerate(made)]
        return made[0], made[1]

    def _bias(self, name: str) -> jax.Array | None:
        bias = getattr(self, f"{name}_bias", None)
        return None if bias is None else bias[...]

    def _is_plain_product(self, name: str, x: jax.Array, compute: Compute) -> bool:
        """Whether a weight has no adapter or scale, so that changing it before the product saves
        passes over the result."""
        plain = not self._has_adapter(name) and not hasattr(self, f"{name}_scale")
        return compute.kernels.few_passes and plain and x.shape[1] > 1

    def _has_adapter(self, *names: str) -> bool:
        """Whether one of these weights has an adapter."""
        return any(hasattr(self, f"{name}_a") for name in names)

    def _adapted_matrix(self, name: str) -> AdaptedMatrix:
        read: dict[str, Any] = {
            field: getattr(self, name + end)[...] if hasattr(self, name + end) else None
            for field, end in zip(AdaptedMatrix._fields[3:], ("", "_scale", "_a", "_b", "_m"))
        }
        declared = decoder_parameters(self.config)["layers"][name]
        assert self.config.lora is not None
        return AdaptedMatrix(name, declared, self.config.lora, **read)

    def _norm(self, name: str, x: jax.Array, compute: Compute) -> jax.Array:
        bias = getattr(self, f"{name}_bias", None)
        return norm(self.config, compute, x, getattr(self, name)[...], bias)

    def _norm_heads(self, name: str, x: jax.Array, compute: Compute) -> jax.Array:
        """QK-norm of x [batch, length, heads, head_dim], over each head or over all heads."""
        weight = getattr(self, name)[...]
        if self.config.query_key_norm == "head":
            return norm(self.config, compute, x, weight)
        together = norm(self.config, compute, x.reshape(*x.shape[:2], -1), weight.reshape(-1))
        return together.reshape(x.shape)

    def _queries_keys_values(
        self, x: jax.Array, compute: Compute, factor: float | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = self._product("btd,dhe->bthe", x, "q", compute, factor)
        return q, *self._paired_product("btd,dcke->btcke", x, "kv", compute)

    def _output_projection(self, x: jax.Array, compute: Compute) -> jax.Array:
        return self._product("bthe,hed->btd", x, "o", compute)

    def _experts(
        self, x: jax.Array, compute: Compute, tally_weights: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        read = {name: getattr(self, name)[...] for name in LOGICAL_AXES if hasattr(self, name)}
        for name in ("gate_up_b", "down_b"):
            if name in read:
                assert self.config.lora is not None
                read[name] = self.config.lora.scaling * read[name]
        config = self.config
        activation = functools.partial(gated_activation, config)
        return mixture_of_experts(
            x,
            ExpertWeights(**read),
            Routing(config.experts_per_token, config.normalize_router, activation),
            layout=compute.run_layout,
            kernels=compute.kernels,
            tally_weights=tally_weights,
            move_tokens=compute.move_tokens,
            keep_gates=compute.remat in (remat.NONE, remat.PRODUCTS),
        )

    def _mlp(self, x: jax.Array, compute: Compute) -> jax.Array:
        config = self.config
        plain = not config.mlp_bias and not self._has_adapter("gate_up", "down")
        plain = plain and not config.quantized
        if config.gated_mlp and config.activation == "silu" and plain:
            return compute.kernels.gated_mlp(x, self.gate_up[...], self.down[...])
        if config.gated_mlp:
            both = remat.first_products(self._product("btd,dcm->btcm", x, "gate_up", compute))
            inner = gated_activation(config, *_pair(both))
        else:
            up = remat.first_products(self._product("btd,dm->btm", x, "up", compute))
            inner = ACTIVATIONS[config.activation](up)
        return self._product("btm,md->btd", inner, "down", compute)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def gated_activation(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The activation of a gated MLP, between gate and up projections and the down projection."""
    if config.activation != "clamped_swiglu":
        return ACTIVATIONS[config.activation](gate) * up
    limit = config.activation_limit
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(gate * config.activation_alpha)


def norm(
    config: ModelConfig,
    compute: Compute,
    x: jax.Array,
    weight: jax.Array,
    bias: nnx.Param | None = None,
) -> jax.Array:
    """RMSNorm or LayerNorm of x [..., embed], computed in float32."""
    if config.norm_offset:
        weight = weight.astype(jnp.float32) + config.norm_offset
    if not config.layer_norm:
        return compute.kernels.rms_norm(x, weight, config.norm_epsilon)
    wide = x.astype(jnp.float32)
    wide -= jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_epsilon)
    out = wide * scale * weight.astype(jnp.float32)
    return (out if bias is None else out + bias[...].astype(jnp.float32)).astype(x.dtype)


def _rotate_heads(kernels: KernelSet, cos: jax.Array, sin: jax.Array, x: jax.Array) -> jax.Array:
    """Rotary embedding of x; partial if the tables cover only the first part of each head."""
    size = 2 * cos.shape[-1]
    if size == x.shape[-1]:
        return kernels.rotate(x, cos, sin)
    return jnp.concatenate([kernels.rotate(x[..., :size], cos, sin), x[..., size:]], axis=-1)
