"""The decoder: one flax.nnx module for training, prefill and cached decoding.

Llama's architecture (Touvron et al. 2023): RMSNorm, rotary positions (half-split, as in
transformers), grouped-query attention, gated SiLU MLP. Every parameter carries its logical axes
as metadata, so a layout shards it without model-specific code. Layers are stacked on a leading
``layers`` dimension and scanned; unrolled on request.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hjax.models.attention import Attention
from hjax.models.config import ModelConfig
from hjax.models.gradients import gated_mlp, product, rms_norm
from hjax.sharding.layout import Layout
from hjax.sharding.pipeline import Stack, plain


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a forward runs; none of it changes the parameters.

    Attributes:
      dtype: of activations and matrix products; norms, softmax and logits are float32.
      unroll_layers: a Python loop instead of a scan: faster for shallow models on a CPU, but
        compile time grows with depth.
      remat: recompute each layer in the backward pass instead of keeping its activations.
      layout: the train layout over whose axes activations stay split, or None to leave them to
        the compiler (which would rather split the width of FSDP's embedding than the batch).
    """

    dtype: Any = jnp.float32
    unroll_layers: bool = False
    remat: bool = False
    layout: Layout | None = None

    @property
    def context(self) -> Layout | None:
        """The layout, if its ``context`` axis splits the length."""
        splits = self.layout is not None and self.layout.ways("length") > 1
        return self.layout if splits else None

    @property
    def whole(self) -> bool:
        """Whether each device is known to hold the whole length and a layer's whole weights."""
        split = ("length", "embed", "heads", "kv_heads", "mlp")
        return self.layout is not None and all(self.layout.ways(name) == 1 for name in split)

    @property
    def logit_parts(self) -> int:
        """Over how many devices the layout splits logits."""
        if self.layout is None:
            return 1
        return math.prod(self.layout.ways(name) for name in ("batch", "length", "vocab"))

    def hold(self, x: jax.Array, *logical_axes: str | None) -> jax.Array:
        """Inside jit: keep activations split as the layout says."""
        return x if self.layout is None else self.layout.constrain(x, *logical_axes)


def parameter(
    key: jax.Array, shape: tuple[int, ...], logical_axes: tuple[str, ...], scale: float
) -> nnx.Param:
    """A float32 parameter drawn from a truncated normal with standard deviation ``scale``."""
    value = scale * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
    return nnx.Param(value, logical_axes=logical_axes)


def ones(shape: tuple[int, ...], logical_axes: tuple[str, ...]) -> nnx.Param:
    """A float32 parameter of ones (norm weights)."""
    return nnx.Param(jnp.ones(shape, jnp.float32), logical_axes=logical_axes)


def rope_frequencies(config: ModelConfig) -> jax.Array:
    """Inverse wavelengths, float32 [head_dim / 2], with Llama 3's scaling where set."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_length * frequencies / (2 * jnp.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    smooth = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (smooth + (1 - smooth) / scaling.factor)


def rotary_tables(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., 1, head_dim / 2], of int positions [...]."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def _computed_once(tables: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The same tables, out of a loop of two turns, into which XLA fuses nothing.

    Otherwise unrolled layers' cos and sin are computed again for every head of every layer.
    """
    first, second = tables
    both = jax.lax.map(lambda turn: jnp.where(turn, second, first), jnp.array([False, True]))
    return both[0], both[1]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of [batch, length, heads, head_dim], halves rotated against each other.

    The halves are padded and added, forward and backward: XLA on a CPU concatenates an element at
    a time, five times as slowly.
    """
    half, wide = x.shape[-1] // 2, x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]

    def put(part: jax.Array, before: int) -> jax.Array:
        last = (before, half - before, 0)
        return jax.lax.pad(part, jnp.float32(0), [(0, 0, 0)] * (part.ndim - 1) + [last])

    turned = put(first * cos - second * sin, 0) + put(second * cos + first * sin, half)
    return turned.astype(x.dtype)


def _pair(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two halves [batch, length, ...] of [batch, length, 2, ...]."""
    return x[:, :, 0], x[:, :, 1]


class Block(nnx.Module):
    """All layers' parameters, stacked on a leading ``layers`` dimension."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        n, d, h, k, e = (
            config.layers,
            config.hidden_size,
            config.heads,
            config.kv_heads,
            config.head_dim,
        )
        keys = jax.random.split(key, 5)
        into, out = d**-0.5, (2 * n) ** -0.5
        self.epsilon = config.norm_epsilon
        self.attention_norm = ones((n, d), ("layers", "embed"))
        self.q = parameter(keys[0], (n, d, h, e), ("layers", "embed", "heads", "head_dim"), into)
        # Keys and values in one array: one product, split along a dimension no mesh axis splits.
        self.kv = parameter(
            keys[1],
            (n, d, 2, k, e),
            ("layers", "embed", "pair", "kv_heads", "head_dim"),
            into,
        )
        self.o = parameter(
            keys[2],
            (n, h, e, d),
            ("layers", "heads", "head_dim", "embed"),
            (h * e) ** -0.5 * out,
        )
        self.mlp_norm = ones((n, d), ("layers", "embed"))
        self.gate_up = parameter(
            keys[3], (n, d, 2, config.mlp_size), ("layers", "embed", "pair", "mlp"), into
        )
        self.down = parameter(
            keys[4],
            (n, config.mlp_size, d),
            ("layers", "mlp", "embed"),
            config.mlp_size**-0.5 * out,
        )

    def __call__(
        self,
        layer: int | jax.Array,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        attention: Attention,
        cache: Any,
        compute: Compute = Compute(),
    ) -> tuple[jax.Array, Any, Any]:
        """One layer (of a block whose parameters were sliced to it): x [batch, length, embed]."""
        whole = compute.whole
        h = rms_norm(x, self.attention_norm[...], self.epsilon)
        q = product("btd,dhe->bthe", h, self.q[...], whole)
        k, v = _pair(product("btd,dcke->btcke", h, self.kv[...], whole))
        out, cache, kept = attention(layer, rotate(q, cos, sin), rotate(k, cos, sin), v, cache)
        o, spec = self.o[...], "bthe,hed->btd"
        if compute.unroll_layers and not whole:
            # With two dimensions to sum over, XLA on a CPU copies the weights, for every token.
            out, o, spec = out.reshape(*x.shape[:2], -1), o.reshape(-1, o.shape[-1]), "btm,md->btd"
        x = x + product(spec, out, o, whole)
        h = rms_norm(x, self.mlp_norm[...], self.epsilon)
        return x + gated_mlp(h, self.gate_up[...], self.down[...], whole), cache, kept


class Decoder(nnx.Module):
    """A causal language model.

    Args:
      config: its shapes.
      key: PRNG key of the initial parameters.
    """

    # How a forward without a cache runs the layers; a pipeline puts its own here.
    stack: Stack = staticmethod(plain)

    def __init__(self, config: ModelConfig, key: jax.Array):
        self.config = config
        keys = jax.random.split(key, 3)
        shape, axes = (config.vocab_size, config.hidden_size), ("vocab", "embed")
        self.embedding = parameter(keys[0], shape, axes, 0.02)
        self.layers = Block(config, keys[1])
        self.final_norm = ones((config.hidden_size,), ("embed",))
        if not config.tie_embeddings:
            self.unembedding = parameter(keys[2], shape, axes, config.hidden_size**-0.5)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attention: Attention,
        cache: Any = None,
        compute: Compute = Compute(),
        layers: list[Any] | None = None,
        rotary: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, Any, Any]:
        """Run the decoder.

        Args:
          tokens: int [batch, length].
          positions: int [batch, length], of each token in its own sequence.
          attention: the strategy that says what each token sees.
          cache: handed to the strategy.
          compute: dtype and loop form.
          layers: for unrolled layers, what ``unstack`` returned; a loop over tokens makes it
            once, outside.
          rotary: ``rotary_tables`` of all positions from 0 on, to look up in; a loop over tokens
            makes them once, outside.

        Returns:
          hidden states [batch, length, embed] after the final norm, the cache, and what the
          strategy kept of each layer (stacked, or a tuple when unrolled).
        """
        if compute.unroll_layers and layers is None:
            layers = self.unstack()
        x = self.embed(tokens, compute)
        x, cache, kept = self.run(
            x, positions, attention, cache, compute, layers, rotary=rotary
        )
        return self.finish(x), cache, kept

    def hidden_states(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attention: Attention,
        compute: Compute = Compute(),
    ) -> jax.Array:
        """[batch, length, embed] after the final norm, without a cache; through ``stack``."""

        def layers(stacked: Any, x: jax.Array) -> jax.Array:
            return self._through(stacked, None, x, positions, attention, None, compute)[0]

        x = self.stack(layers, nnx.state(self.layers), lambda: self.embed(tokens, compute))
        return self.finish(x)

    def embed(self, tokens: jax.Array, compute: Compute) -> jax.Array:
        """[batch, length, embed] of int tokens [batch, length]."""
        x = self.embedding[...].astype(compute.dtype)[tokens]
        return compute.hold(x, "batch", "length", None)

    def run(
        self,
        x: jax.Array,
        positions: jax.Array,
        attention: Attention,
        cache: Any = None,
        compute: Compute = Compute(),
        layers: list[Any] | None = None,
        first: int | jax.Array = 0,
        stride: int = 1,
        rotary: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, Any, Any]:
        """The layers alone, as many as the bound parameters have; ``__call__`` has the rest.

        Layer i is number ``first + stride * i`` to the attention strategy and its cache.
        """
        stacked = nnx.state(self.layers)
        numbers = first, stride
        return self._through(
            stacked, layers, x, positions, attention, cache, compute, numbers, rotary
        )

    def finish(self, x: jax.Array) -> jax.Array:
        """The final norm."""
        return rms_norm(x, self.final_norm[...], self.config.norm_epsilon)

    def _through(
        self,
        stacked: Any,
        layers: list[Any] | None,
        x: jax.Array,
        positions: jax.Array,
        attention: Attention,
        cache: Any,
        compute: Compute,
        numbers: tuple[int | jax.Array, int] = (0, 1),
        rotary: tuple[jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, Any, Any]:
        if rotary is not None:
            cos, sin = (table[positions] for table in rotary)
        else:
            cos, sin = rotary_tables(self.config, positions)
            if compute.unroll_layers:
                cos, sin = _computed_once((cos, sin))
        graph, _ = nnx.split(self.layers)
        first, stride = numbers

        def run(layer: Any, parameters: Any, x: jax.Array, cache: Any) -> tuple:
            block = nnx.merge(graph, parameters)
            x, cache, kept = block(layer, x, cos, sin, attention, cache, compute)
            return compute.hold(x, "batch", "length", None), cache, kept

        if compute.remat:
            run = jax.checkpoint(run, static_argnums=(0,) if compute.unroll_layers else ())
        if compute.unroll_layers:
            keeps = []
            for index, parameters in enumerate(layers or unstack(stacked)):
                x, cache, keep = run(first + stride * index, parameters, x, cache)
                keeps.append(keep)
            return x, cache, tuple(keeps)

        kept: Any

        def step(carry: tuple, item: tuple) -> tuple:
            x, cache, keep = run(item[0], item[1], *carry)
            return (x, cache), keep

        indices = first + stride * jnp.arange(jax.tree.leaves(stacked)[0].shape[0])
        (x, cache), kept = jax.lax.scan(step, (x, cache), (indices, stacked))
        return x, cache, kept

    def unstack(self) -> list[Any]:
        """The layers' parameters, one tree per layer."""
        return unstack(nnx.state(self.layers))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [..., vocab] of hidden states [..., embed]."""
        table = self.embedding if self.config.tie_embeddings else self.unembedding
        return jnp.einsum(
            "...d,vd->...v",
            hidden,
            table[...].astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )


def unstack(stacked: Any) -> list[Any]:
    """One tree per layer of a tree of stacked ones.

    Splitting all at once keeps the backward pass a single concatenation.
    """
    leaves, structure = jax.tree.flatten(stacked)
    count = leaves[0].shape[0]
    parts = [[x[0] for x in jax.lax.split(leaf, [1] * count)] for leaf in leaves]
    return [jax.tree.unflatten(structure, [part[i] for part in parts]) for i in range(count)]


class ScalarDecoder(nnx.Module):
    """A decoder with one number per token: a value head, or a reward or cost head."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        self.config = config
        # Nothing reads an output table here, so none is made: as if embeddings were tied.
        self.decoder = Decoder(dataclasses.replace(config, tie_embeddings=True), key)
        # Zero: a new critic predicts 0 everywhere, so the first advantages are the rewards.
        self.head = nnx.Param(jnp.zeros((config.hidden_size,)), logical_axes=("embed",))
        self.bias = nnx.Param(jnp.zeros(()), logical_axes=())

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attention: Attention,
        compute: Compute = Compute(),
    ) -> jax.Array:
        """float32 [batch, length] scores; arguments as of ``Decoder``."""
        return self.score(self.decoder.hidden_states(tokens, positions, attention, compute))

    def score(self, hidden: jax.Array) -> jax.Array:
        """float32 [...] of hidden states [..., embed]."""
        return hidden.astype(jnp.float32) @ self.head[...] + self.bias[...]
