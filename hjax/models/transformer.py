"""The decoder: one flax.nnx module for training, prefill and cached decoding.

Which of the shared parts it has (norms, rotary or learned positions, biases, MLPs) its config says;
left to its defaults it is Llama (Touvron et al. 2023): RMSNorm, rotary positions (half-split, as in
transformers), grouped-query attention, gated SiLU MLP. Every parameter carries its declaration, so
layouts and optimizers need no model-specific code. Layers are stacked on a leading ``layers``
dimension and scanned, a period of alternating kinds at a time; unrolled on request.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hjax.errors import ConfigError
from hjax.kernels import cudnn_trial, quantized
from hjax.kernels.attention import Scoring
from hjax.kernels.sets import AUTO, BLOCKS, CUDNN, REFERENCE, TRIED, Kernels, choose, kernels_of
from hjax.models import lora as low_rank
from hjax.models import remat, weight_ring
from hjax.models.architecture import (
    decoder_parameters,
    scalar_parameters,
    without_output_table,
)
from hjax.models.attention import Attention, Form, Heads
from hjax.models.balance import SUMS, Routed, Tally
from hjax.models.config import LayerKind, ModelConfig
from hjax.models.declaration import Kind, create_in
from hjax.models.dropout import Dropout
from hjax.models.experts import AXES, Routing, Weights, mixture
from hjax.models.rotary import Tables
from hjax.models.weight_ring import WeightRing, ring_of
from hjax.sharding.layout import Layout
from hjax.sharding.pipeline import Stack, first_layer, plain

Rotary = tuple[Tables, ...]  # cos and sin, for each of a model's rotary positions
LookUp = Callable[[jax.Array], Rotary]  # of int positions [batch, length]


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
      attention: as of ``model.attention``, by which ``on`` chooses.
      home: the layout whose devices run it, given by ``on``; kernels that a compiler cannot split
        are split over it.
      dropout: what adapters' inputs lose in an update; None: nothing.
      travel: weights may travel over a tensor axis, see ``hjax.models.weight_ring``; ``on`` chooses
        it for platforms that send while they multiply.
    """

    dtype: Any = jnp.float32
    unroll_layers: bool = False
    remat: str = remat.NONE
    layout: Layout | None = None
    kernel_set: str = REFERENCE
    attention: str = AUTO
    home: Layout | None = None
    dropout: Dropout | None = None
    travel: bool = False

    def in_layer(self, layer: int | jax.Array) -> Compute:
        """The same in a layer, counted from the first that is run."""
        if self.dropout is None:
            return self
        return dataclasses.replace(self, dropout=self.dropout.of_layer(layer))

    def on(self, layout: Layout) -> Compute:
        """The same with the kernels for a layout's devices.

        Raises:
          ConfigError: attention that they do not have.
        """
        platform, attention = layout.platform, self.attention
        if attention == TRIED:
            attention = CUDNN if cudnn_trial.trusted(layout.mesh.devices.flat) else BLOCKS
        kernel_set = choose(platform, attention)
        travel = platform in weight_ring.PLATFORMS
        return dataclasses.replace(self, kernel_set=kernel_set, home=layout, travel=travel)

    @property
    def kernels(self) -> Kernels:
        """The functions that layers are made of."""
        return kernels_of(self.kernel_set, whole=self.whole, unrolled=self.unroll_layers)

    @property
    def form(self) -> Form:
        """How attention strategies attend."""
        kernels = self.kernels
        return Form(kernels.attention, self.home or self.layout, kernels.packs_share)

    @property
    def context(self) -> Layout | None:
        """The layout, if its ``context`` axis splits the length."""
        splits = self.layout is not None and self.layout.ways("length") > 1
        return self.layout if splits else None

    def ring(self, config: ModelConfig, shape: tuple[int, ...]) -> WeightRing | None:
        """Along which weights travel in a pass over activations of [batch, length, embed]."""
        rows, length, _ = shape
        return ring_of(self.layout, config, rows, length, self.dtype) if self.travel else None

    @property
    def whole(self) -> bool:
        """Whether each device is known to hold the whole length and a layer's whole weights."""
        split = ("length", "embed", "heads", "kv_heads", "mlp")
        return self.layout is not None and all(self.layout.ways(name) == 1 for name in split)

    def hold(self, x: jax.Array, *logical_axes: str | None) -> jax.Array:
        """Inside jit: keep activations split as the layout says."""
        return x if self.layout is None else self.layout.constrain(x, *logical_axes)


def rotary_tables(
    config: ModelConfig,
    positions: jax.Array,
    kernels: Kernels,
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
        adapters = {n: p for n, p in declared.items() if p.kind is Kind.ADAPTER}
        base = {n: p for n, p in declared.items() if n not in adapters}
        for some, start in ((base, key), (adapters, jax.random.fold_in(key, 1))):
            keys = iter(jax.random.split(start, sum(p.scale > 0 for p in some.values()) or 1))
            create_in(self, some, functools.partial(next, keys))

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
          counted: tokens of which it is asked how they spread over experts, see ``mixture``.
          ring: along which weights travel; None: they stay.

        Returns:
          what comes out, the cache, what the strategy kept, and how tokens spread over experts.
        """
        config, kernels, compute = self.config, compute.kernels, compute.in_layer(layer)
        h = x if config.norms == "after" else self._norm("attention_norm", x, compute)
        run = functools.partial(weight_ring.along, ring, self)
        scoring = Scoring(config.attention_scale, config.attention_softcap, kind.window or 0)
        turn = None
        if kind.rope is not None and rotary:
            turn = functools.partial(_turn, kernels, *rotary[kind.rope])
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
        out, cache, kept = attention(Heads(layer, q, k, v, scoring, sinks), cache)
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
            out = quantized.product(spec, x, weight, scale[...])
        if self._adapted(name):
            lora, declared = self.config.lora, decoder_parameters(self.config)["layers"]
            assert lora is not None
            a, b = getattr(self, f"{name}_a")[...], getattr(self, f"{name}_b")[...]
            of = low_rank.halves(lora, name, declared[name])
            places = tuple((name, half) for half in of)
            norms, kept = None, None if scale is None else scale[...]
            if lora.dora:
                parts = weight, kept, a, b, getattr(self, f"{name}_m")[...]
                norms = low_rank.layer_scale(*parts, declared[name], lora, of)
            if norms is not None and lora.dropout and compute.dropout is not None:
                frozen, how = (weight, kept, a, b, norms), (lora, places, compute.dropout)
                out += low_rank.spread(low_rank.dropped_change(spec, x, *frozen, *how), of)
            else:
                addition = low_rank.addition(spec, x, a, b, lora, places, compute.dropout)
                out += low_rank.spread(addition, of)
                out = out if norms is None else out * norms.astype(out.dtype)
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
        read = {name: getattr(self, name)[...] for name in AXES if hasattr(self, name)}
        for name in ("gate_up_b", "down_b"):
            if name in read:
                assert self.config.lora is not None
                read[name] = self.config.lora.scaling * read[name]
        weights = Weights(**read)
        keep = compute.remat in (remat.NONE, remat.PRODUCTS)
        how = compute.home, compute.kernels, counted, compute.travel, keep
        return mixture(x, weights, routing_of(self.config), *how)

    def _mlp(self, x: jax.Array, compute: Compute) -> jax.Array:
        config = self.config
        plain = not config.mlp_bias and not self._adapted("gate_up", "down")
        plain = plain and not config.quantized
        if config.gated_mlp and config.activation == "silu" and plain:
            return compute.kernels.gated_mlp(x, self.gate_up[...], self.down[...])
        if config.gated_mlp:
            both = remat.first_products(self._product("btd,dcm->btcm", x, "gate_up", compute))
            inner = gated(config, *_pair(both))
        else:
            up = remat.first_products(self._product("btd,dm->btm", x, "up", compute))
            inner = ACTIVATIONS[config.activation](up)
        return self._product("btm,md->btd", inner, "down", compute)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def gated(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """What goes down in a gated MLP, of gate and up."""
    if config.activation != "clamped_swiglu":
        return ACTIVATIONS[config.activation](gate) * up
    limit = config.activation_limit
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(gate * config.activation_alpha)


def routing_of(config: ModelConfig) -> Routing:
    """How this model's tokens choose their experts."""
    activation = functools.partial(gated, config)
    return Routing(config.experts_per_token, config.normalize_router, activation)


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


def _turn(kernels: Kernels, cos: jax.Array, sin: jax.Array, x: jax.Array) -> jax.Array:
    """The first part of every head rotated, as much as the tables are for."""
    size = 2 * cos.shape[-1]
    if size == x.shape[-1]:
        return kernels.rotate(x, cos, sin)
    turned = kernels.rotate(x[..., :size], cos, sin)
    return jnp.concatenate([turned, x[..., size:]], axis=-1)


class Decoder(nnx.Module):
    """A causal language model.

    Args:
      config: its shapes.
      key: PRNG key of the initial parameters.
    """

    # How a forward without a cache runs the layers; a pipeline puts its own here.
    stack: Stack = staticmethod(plain)
    # Where a forward without a cache tells what its routers did; None: nowhere.
    tally: Tally | None = None
    # Where each layer's parameters are arrays of their own, what gives them.
    unstacked: Callable[[], Iterable[Any]] | None = None
    embedding: nnx.Param
    unembedding: nnx.Param
    positions: nnx.Param
    final_norm: nnx.Param

    def __init__(self, config: ModelConfig, key: jax.Array):
        self.config = config
        keys = jax.random.split(key, 3)
        self.layers = Block(config, keys[1])
        declared = dict(decoder_parameters(config))
        del declared["layers"]
        of = {"embedding": keys[0], "unembedding": keys[2]}
        for name, parameter in declared.items():
            own = of.get(name, jax.random.fold_in(key, 3))
            setattr(self, name, parameter.create(own))

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attention: Attention,
        cache: Any = None,
        compute: Compute = Compute(),
        layers: list[Any] | None = None,
        rotary: LookUp | None = None,
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
          rotary: what ``rotary`` returned; a loop over tokens makes it once, outside.

        Returns:
          hidden states [batch, length, embed] after the final norm, the cache, and what the
          strategy kept of each layer (stacked, or a tuple when unrolled).
        """
        if compute.unroll_layers and layers is None:
            layers = self.unstack()
        x = self.embed(tokens, compute, positions)
        x, cache, kept = self.run(x, positions, attention, cache, compute, layers, rotary=rotary)
        return self.finish(x, compute), cache, kept

    def hidden_states(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attention: Attention,
        compute: Compute = Compute(),
        counted: jax.Array | None = None,
    ) -> jax.Array:
        """[batch, length, embed] after the final norm, without a cache; through ``stack``.

        Args:
          tokens, positions, attention, compute: as of ``__call__``.
          counted: float32 [batch, length], as how many each token counts to the ``tally``; None:
            it is not told.
        """
        config = self.config

        def layers(stacked: Any, flow: tuple) -> tuple:
            x, before = flow
            run = compute
            if compute.dropout is not None:
                first = first_layer(jax.tree.leaves(stacked)[0].shape[0], config.layers)
                run = dataclasses.replace(
                    compute, dropout=dataclasses.replace(compute.dropout, first=first)
                )
            ring = run.ring(config, x.shape)
            x, _, _, sums = self._through(
                stacked,
                None,
                x if ring is None else ring.spread(x),
                positions,
                attention,
                None,
                run,
                counted=counted,
                ring=ring,
            )
            x = x if ring is None else ring.whole(x)
            if sums is not None:
                # The layers of a stage: those of the stages before stand before them.
                sums = jnp.concatenate([before[sums.shape[0] :], sums])
            return x, sums

        def embed() -> tuple:
            sums = None
            if counted is not None:
                sums = jnp.zeros((config.layers, SUMS, config.experts), jnp.float32)
            return self.embed(tokens, compute, positions), sums

        x, sums = self.stack(layers, nnx.state(self.layers), embed)
        if self.tally is not None and counted is not None:
            self.tally.add(Routed(sums, jnp.sum(counted)))
        return self.finish(x, compute)

    def embed(self, tokens: jax.Array, compute: Compute, positions: jax.Array) -> jax.Array:
        """[..., length, embed] of int tokens and their positions [..., length]."""
        x = self.embedding[...].astype(compute.dtype)[tokens]
        if self.config.embedding_scale != 1:
            x *= jnp.asarray(self.config.embedding_scale, compute.dtype)
        if self.config.learned_positions:
            x += self.positions[...].astype(compute.dtype)[positions]
        return compute.hold(x, "batch", "length", None)

    def rotary(self, lengths: jax.Array, tables: int = 0) -> LookUp | None:
        """What turns queries and keys in a loop over tokens.

        Args:
          lengths: int [sequences], tokens that each will have at most; rows of one are consecutive.
          tables: cos and sin of so many positions from 0 on are made now; 0: when they are used.

        Returns:
          a function of positions; None where they can be turned without it.
        """
        if self.config.turns_by_length:

            def of_lengths(positions: jax.Array) -> Rotary:
                each = jnp.repeat(lengths, positions.shape[0] // lengths.shape[0])
                return rotary_tables(self.config, positions, Kernels(), each)

            return of_lengths
        if not tables:
            return None
        made = rotary_tables(self.config, jnp.arange(tables), Kernels())
        return lambda positions: jax.tree.map(lambda table: table[positions], made)

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
        rotary: LookUp | None = None,
    ) -> tuple[jax.Array, Any, Any]:
        """The layers alone, as many as the bound parameters have; ``__call__`` has the rest.

        Layer i is number ``first + stride * i`` to the attention strategy and its cache.
        """
        stacked = nnx.state(self.layers)
        numbers = first, stride
        return self._through(
            stacked, layers, x, positions, attention, cache, compute, numbers, rotary
        )[:3]

    def finish(self, x: jax.Array, compute: Compute) -> jax.Array:
        """The final norm."""
        bias = getattr(self, "final_norm_bias", None)
        return norm(self.config, compute, x, self.final_norm[...], bias)

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
        rotary: LookUp | None = None,
        counted: jax.Array | None = None,
        ring: WeightRing | None = None,
    ) -> tuple[jax.Array, Any, Any, jax.Array | None]:
        if rotary is not None:
            turns = rotary(positions)
        else:
            turns = rotary_tables(self.config, positions, compute.kernels)
        graph, _ = nnx.split(self.layers)
        first, stride = numbers

        def held(x: jax.Array) -> jax.Array:
            return compute.hold(x, "batch", "length", None) if ring is None else ring.hold(x)

        count = jax.tree.leaves(stacked)[0].shape[0]
        period = self.config.period
        if count % len(period) and count != self.config.layers:
            raise ConfigError(
                f"{count} layers in a stage do not divide into the model's runs of {len(period)} "
                f"alternating kinds; use fewer stages (pipe)"
            )

        def of_kind(kind: LayerKind) -> Callable[..., tuple]:
            def run(layer: Any, parameters: Any, x: jax.Array, cache: Any) -> tuple:
                x = remat.layer_input(x)
                block = nnx.merge(graph, parameters)
                x, cache, kept, sums = block(
                    layer, x, turns, attention, cache, compute, kind, counted, ring
                )
                return held(x), cache, (kept, sums)

            return remat.recomputed(run, compute.remat, unrolled=compute.unroll_layers)

        runs = [of_kind(kind) for kind in period]
        if compute.unroll_layers:
            keeps, tallies = [], []
            for index, parameters in enumerate(layers or unstack(stacked)):
                run = runs[index % len(runs)]
                x, cache, (keep, sums) = run(first + stride * index, parameters, x, cache)
                keeps.append(keep)
                tallies.append(sums)
            return x, cache, tuple(keeps), None if counted is None else jnp.stack(tallies)

        kept: Any

        def step(carry: tuple, item: tuple) -> tuple:
            x, cache, keep = runs[0](item[0], item[1], *carry)
            return (x, cache), keep

        numbered = first + stride * jnp.arange(count), stacked
        if len(runs) == 1:
            (x, cache), kept = jax.lax.scan(step, (x, cache), numbered)
        else:
            x, cache, kept = _in_periods(runs, (x, cache), numbered)
        return x, cache, *kept

    def unstack(self) -> list[Any]:
        """The layers' parameters, one tree per layer."""
        if self.unstacked is not None:
            return list(self.unstacked())
        return unstack(nnx.state(self.layers))

    @property
    def output_table(self) -> jax.Array:
        """[vocab, embed], by which hidden states make logits."""
        return (self.embedding if self.config.tie_embeddings else self.unembedding)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [..., vocab] of hidden states [..., embed]."""
        logits = jnp.einsum(
            "...d,vd->...v",
            hidden,
            self.output_table.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        cap = self.config.final_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits


def _in_periods(
    runs: list[Callable[..., tuple]], carry: tuple, numbered: Any
) -> tuple[jax.Array, Any, Any]:
    """Layers of alternating kinds: a scan over whole periods, then what is left of one.

    Args:
      runs: a layer of each kind of the period, (number, parameters, x, cache) to (x, cache, kept).
      carry: x and the cache.
      numbered: the layers' numbers and their stacked parameters.
    """
    size = len(runs)
    count = numbered[0].shape[0]
    whole = count - count % size

    def through(carry: tuple, layers: Iterable[tuple[Any, Any]]) -> tuple[tuple, Any]:
        """One layer after another: a period, or what is left of one."""
        keeps = []
        for run, (layer, parameters) in zip(runs, layers):
            x, cache, keep = run(layer, parameters, *carry)
            carry = x, cache
            keeps.append(keep)
        return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *keeps)

    def taken(items: Any) -> Iterable[tuple[Any, Any]]:
        return zip(items[0], unstack(items[1]))

    def split(leaf: jax.Array) -> jax.Array:
        return leaf[:whole].reshape(whole // size, size, *leaf.shape[1:])

    def at(index: Any) -> tuple[Any, Any]:
        layer, parameters = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), numbered
        )
        return layer, parameters

    kept: Any = None
    if whole and carry[1] is not None:
        # In a loop over tokens each layer is read where it lies: a period that the scan cuts out,
        # to be cut again, would be copied. (A backward pass wants it cut out.)
        carry, kept = jax.lax.scan(
            lambda carry, first: through(carry, [at(first + i) for i in range(size)]),
            carry,
            jnp.arange(0, whole, size),
        )
    elif whole:
        periods = jax.tree.map(split, numbered)
        carry, kept = jax.lax.scan(
            lambda carry, items: through(carry, taken(items)), carry, periods
        )
    if whole:
        kept = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), kept)
    if count > whole:
        if carry[1] is not None:
            carry, keep = through(carry, [at(i) for i in range(whole, count)])
        else:
            carry, keep = through(carry, taken(jax.tree.map(lambda leaf: leaf[whole:], numbered)))
        both = (kept, keep) if whole else (keep,)
        kept = jax.tree.map(lambda *parts: jnp.concatenate(parts), *both)
    return (*carry, kept)


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
        self.decoder = Decoder(without_output_table(config), key)
        declared = scalar_parameters(config)
        self.head, self.bias = declared["head"].create(), declared["bias"].create()

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
        return self.unbiased(hidden) + self.bias[...]

    def unbiased(self, hidden: jax.Array) -> jax.Array:
        """``score`` without the bias, which files of reward models have no place for."""
        return hidden.astype(jnp.float32) @ self.head[...]
