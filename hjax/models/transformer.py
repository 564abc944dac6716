"""The decoder: one flax.nnx module for training, prefill and cached decoding.

Llama's architecture (Touvron et al. 2023): RMSNorm, rotary positions (half-split, as in
transformers), grouped-query attention, gated SiLU MLP. Every parameter carries its logical axes
and its kind as metadata, so layouts and optimizers need no model-specific code. Layers are stacked
on a leading ``layers`` dimension and scanned; unrolled on request.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hjax.kernels.sets import REFERENCE, Kernels, choose, kernels_of
from hjax.models import remat
from hjax.models.attention import Attention, Form
from hjax.models.config import ModelConfig
from hjax.models.declaration import Kind, ones, parameter, zeros
from hjax.sharding.layout import Layout
from hjax.sharding.pipeline import Stack, plain


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a forward runs; none of it changes the parameters.

    Attributes:
      dtype: of activations and matrix products; norms, softmax and logits are float32.
      unroll_layers: a Python loop instead of a scan: faster for shallow models on a CPU, but
        compile time grows with depth.
      remat: which of a layer's activations the backward pass computes again, see
        ``hjax.models.remat``.
      layout: the train layout over whose axes activations stay split, or None to leave them to
        the compiler (which would rather split the width of FSDP's embedding than the batch).
      kernel_set: name of the functions that layers are made of, see ``hjax.kernels.sets``; the
        plain reference until ``on`` chooses those of a platform.
      home: the layout whose devices run it, given by ``on``; kernels that a compiler cannot split
        are split over it.
    """

    dtype: Any = jnp.float32
    unroll_layers: bool = False
    remat: str = remat.NONE
    layout: Layout | None = None
    kernel_set: str = REFERENCE
    home: Layout | None = None

    def on(self, layout: Layout) -> Compute:
        """The same with the kernels for a layout's devices."""
        return dataclasses.replace(self, kernel_set=choose(layout.platform), home=layout)

    @property
    def kernels(self) -> Kernels:
        """The functions that layers are made of."""
        return kernels_of(self.kernel_set, whole=self.whole, unrolled=self.unroll_layers)

    @property
    def form(self) -> Form:
        """How attention strategies attend."""
        return Form(self.kernels.attention, self.home or self.layout)

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

    def hold(self, x: jax.Array, *logical_axes: str | None) -> jax.Array:
        """Inside jit: keep activations split as the layout says."""
        return x if self.layout is None else self.layout.constrain(x, *logical_axes)


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

        def matrix(key: jax.Array, *axes: tuple[str, int], scale: float = into) -> nnx.Param:
            names, sizes = zip(("layers", n), *axes)
            return parameter(key, sizes, names, Kind.MATRIX, scale)

        embed = ("embed", d)
        self.attention_norm = ones((n, d), ("layers", "embed"))
        self.q = matrix(keys[0], embed, ("heads", h), ("head_dim", e))
        # Keys and values in one array: one product, split along a dimension no mesh axis splits.
        self.kv = matrix(keys[1], embed, ("pair", 2), ("kv_heads", k), ("head_dim", e))
        back = (h * e) ** -0.5 * out
        self.o = matrix(keys[2], ("heads", h), ("head_dim", e), embed, scale=back)
        self.mlp_norm = ones((n, d), ("layers", "embed"))
        self.gate_up = matrix(keys[3], embed, ("pair", 2), ("mlp", config.mlp_size))
        back = config.mlp_size**-0.5 * out
        self.down = matrix(keys[4], ("mlp", config.mlp_size), embed, scale=back)

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
        kernels = compute.kernels
        h = kernels.rms_norm(x, self.attention_norm[...], self.epsilon)
        q = kernels.product("btd,dhe->bthe", h, self.q[...])
        k, v = _pair(kernels.product("btd,dcke->btcke", h, self.kv[...]))
        q, k = kernels.rotate(q, cos, sin), kernels.rotate(k, cos, sin)
        out, cache, kept = attention(layer, q, k, v, cache)
        x = x + kernels.product("bthe,hed->btd", out, self.o[...])
        h = kernels.rms_norm(x, self.mlp_norm[...], self.epsilon)
        return x + kernels.gated_mlp(h, self.gate_up[...], self.down[...]), cache, kept


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
        self.embedding = parameter(keys[0], shape, axes, Kind.EMBEDDING, 0.02)
        self.layers = Block(config, keys[1])
        self.final_norm = ones((config.hidden_size,), ("embed",))
        if not config.tie_embeddings:
            scale = config.hidden_size**-0.5
            self.unembedding = parameter(keys[2], shape, axes, Kind.EMBEDDING, scale)

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
          compute: dtype, loop form and kernels.
          layers: for unrolled layers, what ``unstack`` returned; a loop over tokens makes it
            once, outside.
          rotary: cos and sin of all positions from 0 on, to look up in; a loop over tokens
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
        return self.finish(x, compute), cache, kept

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
        return self.finish(x, compute)

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

    def finish(self, x: jax.Array, compute: Compute) -> jax.Array:
        """The final norm."""
        return compute.kernels.rms_norm(x, self.final_norm[...], self.config.norm_epsilon)

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
            cos, sin = compute.kernels.rotary_tables(rope_frequencies(self.config), positions)
        graph, _ = nnx.split(self.layers)
        first, stride = numbers

        def run(layer: Any, parameters: Any, x: jax.Array, cache: Any) -> tuple:
            x = remat.layer_input(x)
            block = nnx.merge(graph, parameters)
            x, cache, kept = block(layer, x, cos, sin, attention, cache, compute)
            return compute.hold(x, "batch", "length", None), cache, kept

        run = remat.recomputed(run, compute.remat, unrolled=compute.unroll_layers)
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

    @property
    def output_table(self) -> jax.Array:
        """[vocab, embed], by which hidden states make logits."""
        return (self.embedding if self.config.tie_embeddings else self.unembedding)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [..., vocab] of hidden states [..., embed]."""
        return jnp.einsum(
            "...d,vd->...v",
            hidden,
            self.output_table.astype(hidden.dtype),
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
        self.head = zeros((config.hidden_size,), ("embed",))
        self.bias = zeros((), ())

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
