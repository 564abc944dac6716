"""One layer of the decoder: attention and an MLP or experts, with the norms around them.

Which of the shared parts it has (norms, rotary or learned positions, biases, MLPs) its config says;
left to its defaults it is Llama's (Touvron et al. 2023): RMSNorm, rotary positions (half-split, as
in transformers), grouped-query attention, gated SiLU MLP.
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

Rotary = tuple[Tables, ...]  # cos and sin, for each of a model's rotary positions


def rotary_tables(
    config: ModelConfig,
    positions: jax.Array,
    kernels: KernelSet,
    lengths: jax.Array | None = None,
) -> Rotary:
    """cos and sin of positions, a pair for each of the model's rotary positions.

    Args:
      config: of the model.
      positions: int [..., length], of each token in its own sequence.
      kernels: that make them.
      lengths: int [...], tokens that each sequence will have; None: those up to its last position.
    """
    make = kernels.rotary_tables
    return tuple(rope.tables(config.head_dim, positions, make, lengths) for rope in config.ropes)


def _pair(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two halves [batch, length, ...] of [batch, length, 2, ...]."""
    return x[:, :, 0], x[:, :, 1]


class Block(nnx.Module):
    """All layers' parameters, stacked on a leading ``layers`` dimension."""

    sinks: nnx.Param
    router: nnx.Param
    gate_up: nnx.Param
    down: nnx.Param

    def __init__(self, config: ModelConfig, key: jax.Array):
        declared = decoder_parameters(config)["layers"]
        self.config = config
        adapters = {n: p for n, p in declared.items() if p.kind is ParameterKind.ADAPTER}
        base = {n: p for n, p in declared.items() if n not in adapters}
        for some, start in ((base, key), (adapters, jax.random.fold_in(key, 1))):
            keys = iter(jax.random.split(start, sum(p.scale > 0 for p in some.values()) or 1))
            create_parameters(self, some, functools.partial(next, keys))

    def __call__(
        self,
        layer: int | jax.Array,
        x: jax.Array,
        rotary: Rotary,
        attention: Attention,
        cache: Any,
        compute: Compute,
        kind: LayerKind,
        counted: jax.Array | None = None,
        ring: WeightRing | None = None,
    ) -> tuple[jax.Array, Any, Any, jax.Array | None]:
        """One layer (of a block whose parameters were sliced to it): x [batch, length, embed].

        Args:
          layer: its number, for the attention strategy and its cache.
          x: what comes in.
          rotary: of the tokens' positions, see ``rotary_tables``.
          attention, cache, compute: as of ``Decoder``.
          kind: what this layer has of its own.
          counted: weight of each token in the routing statistics, see ``mixture_of_experts``.
          ring: along which weights travel; None: they stay.

        Returns:
          what comes out, the cache, what the strategy kept, and how tokens spread over experts.
        """
        config, kernels, compute = self.config, compute.kernels, compute.in_layer(layer)
        h = x if config.norms == "after" else self._norm("attention_norm", x, compute)
        run = functools.partial(collective_matmul.run_on_ring, ring, self)
        scoring = ScoreOptions(config.attention_scale, config.attention_softcap, kind.window or 0)
        turn = None
        if kind.rope is not None and rotary:
            turn = functools.partial(_rotate_heads, kernels, *rotary[kind.rope])
        times = None
        if turn is None and not config.query_key_norm:  # nothing else passes over the queries
            times = scoring.factor(config.head_dim)
            scoring = dataclasses.replace(scoring, scale=1.0)
        made = functools.partial(Block._queries_keys_values, times=times)
        q, k, v = map(remat.product, run("to_heads", made, h, compute, "q", "kv"))
        if config.query_key_norm:
            q, k = self._norm_heads("q_norm", q, compute), self._norm_heads("k_norm", k, compute)
        if turn is not None:
            q, k = turn(q), turn(k)
        sinks = self.sinks[...] if config.sinks else None
        out, cache, kept = attention(AttentionInputs(layer, q, k, v, scoring, sinks), cache)
        out = remat.product(run("from_heads", Block._attended, out, compute, "o"))
        if config.norms != "before":
            out = self._norm("attention_out_norm", out, compute)
        x = x + out
        h = x if config.norms == "after" else self._norm("mlp_norm", x, compute)
        sums = None
        if config.experts:
            out, sums = self._experts(h, compute, counted)
        else:
            out = run("within", Block._mlp, h, compute, "gate_up", "up", "down")
        out = remat.product(out)
        if config.norms != "before":
            out = self._norm("mlp_out_norm", out, compute)
        return x + out, cache, kept, sums

    def _product(
        self, spec: str, x: jax.Array, name: str, compute: Compute, times: float | None = None
    ) -> jax.Array:
        """A product with a weight, and its adapter and bias where it has them; then ``times``."""
        weight, scale = getattr(self, name)[...], getattr(self, f"{name}_scale", None)
        bias = self._bias(name)
        if times is not None and self._alone(name, x, compute):
            weight, bias = weight * times, None if bias is None else bias * times
            times = None
        if scale is None:
            out = compute.kernels.product(spec, x, weight)
        else:
            out = scaled_product(spec, x, weight, scale[...])
        if self._adapted(name):
            out = self._with_adapter(name).added(spec, x, out, compute.dropout)
        out = out if bias is None else out + bias.astype(out.dtype)
        return out if times is None else out * times

    def _halves(
        self, spec: str, x: jax.Array, name: str, compute: Compute
    ) -> tuple[jax.Array, jax.Array]:
        """Of a product [batch, length, 2, ...] (``c`` in ``spec``) both."""
        if not self._alone(name, x, compute):
            return _pair(self._product(spec, x, name, compute))
        weight, bias, spec = getattr(self, name)[...], self._bias(name), spec.replace("c", "")
        made = [compute.kernels.product(spec, x, weight[:, i]) for i in range(2)]
        if bias is not None:
            made = [y + bias[i].astype(y.dtype) for i, y in enumerate(made)]
        return made[0], made[1]

    def _bias(self, name: str) -> jax.Array | None:
        bias = getattr(self, f"{name}_bias", None)
        return None if bias is None else bias[...]

    def _alone(self, name: str, x: jax.Array, compute: Compute) -> bool:
        """Whether a product is of tokens and a plain weight, which may be changed before it to
        save passes of its result through memory."""
        plain = not self._adapted(name) and not hasattr(self, f"{name}_scale")
        return compute.kernels.few_passes and plain and x.shape[1] > 1

    def _adapted(self, *names: str) -> bool:
        """Whether one of these weights has an adapter."""
        return any(hasattr(self, f"{name}_a") for name in names)

    def _with_adapter(self, name: str) -> AdaptedMatrix:
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
        """x [batch, length, heads, head_dim], normed over each head or over all of them."""
        weight = getattr(self, name)[...]
        if self.config.query_key_norm == "head":
            return norm(self.config, compute, x, weight)
        together = norm(self.config, compute, x.reshape(*x.shape[:2], -1), weight.reshape(-1))
        return together.reshape(x.shape)

    def _queries_keys_values(
        self, x: jax.Array, compute: Compute, times: float | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = self._product("btd,dhe->bthe", x, "q", compute, times)
        return q, *self._halves("btd,dcke->btcke", x, "kv", compute)

    def _attended(self, x: jax.Array, compute: Compute) -> jax.Array:
        return self._product("bthe,hed->btd", x, "o", compute)

    def _experts(
        self, x: jax.Array, compute: Compute, counted: jax.Array | None
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
            layout=compute.home,
            kernels=compute.kernels,
            counted=counted,
            travel=compute.travel,
            keep=compute.remat in (remat.NONE, remat.PRODUCTS),
        )

    def _mlp(self, x: jax.Array, compute: Compute) -> jax.Array:
        config = self.config
        plain = not config.mlp_bias and not self._adapted("gate_up", "down")
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
    """What goes down in a gated MLP, of gate and up."""
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
    """x [..., embed], normed as this model does; computed in float32."""
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
    """The first part of every head rotated, as much as the tables are for."""
    size = 2 * cos.shape[-1]
    if size == x.shape[-1]:
        return kernels.rotate(x, cos, sin)
    turned = kernels.rotate(x[..., :size], cos, sin)
    return jnp.concatenate([turned, x[..., size:]], axis=-1)
