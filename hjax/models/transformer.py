"""The decoder: one flax.nnx module for training, prefill and cached decoding.

Every parameter carries its ``ParameterSpec``, so layouts and optimizers need no model-specific
code. Layers (``hjax.models.block``) are stacked on a leading ``layers`` axis and scanned, one
period of alternating kinds per iteration, or unrolled on request.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hjax.errors import ConfigError
from hjax.kernels.registry import KernelSet
from hjax.models import remat
from hjax.models.architecture import decoder_parameters, scalar_parameters, without_output_table
from hjax.models.attention_strategies import Attention
from hjax.models.block import Block, Rotary, norm, rotary_tables
from hjax.models.collective_matmul import WeightRing
from hjax.models.compute import Compute
from hjax.models.load_balancing import NUM_SUMS, RoutingStats, RoutingTally
from hjax.models.model_config import LayerKind, ModelConfig
from hjax.sharding.pipeline import Stack, first_layer, run_all_layers

RotaryLookup = Callable[[jax.Array], Rotary]  # of int positions [batch, length]


class Decoder(nnx.Module):
    """A causal language model.

    Args:
      config: its shapes.
      key: PRNG key of the initial parameters.
      declared: specs of its parameters; None: the language model's.
    """

    # How a forward without a cache runs the layers; pipeline parallelism replaces it.
    stack: Stack = staticmethod(run_all_layers)
    # Collects the routing statistics of forwards without a cache.
    tally: RoutingTally | None = None
    # Returns the layers' parameters if they are separate arrays.
    unstacked: Callable[[], Iterable[Any]] | None = None
    embedding: nnx.Param
    unembedding: nnx.Param
    positions: nnx.Param
    final_norm: nnx.Param

    def __init__(
        self, config: ModelConfig, key: jax.Array, declared: Mapping[str, Any] | None = None
    ):
        self.config = config
        keys = jax.random.split(key, 3)
        self.layers = Block(config, keys[1])
        declared = dict(decoder_parameters(config) if declared is None else declared)
        del declared["layers"]
        of = {"embedding": keys[0], "unembedding": keys[2]}
        for name, parameter in declared.items():
            setattr(self, name, parameter.create(of.get(name, jax.random.fold_in(key, 3))))

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attention: Attention,
        cache: Any = None,
        compute: Compute = Compute(),
        layers: list[Any] | None = None,
        rotary: RotaryLookup | None = None,
    ) -> tuple[jax.Array, Any, Any]:
        """Run the decoder.

        Args:
          tokens: int [batch, length].
          positions: int [batch, length], of each token in its own sequence.
          attention: the attention strategy.
          cache: the strategy's KV cache.
          compute: dtype, kernels, and whether layers are unrolled.
          layers: for unrolled layers, the result of ``unstack``; compute it outside a decode loop.
          rotary: the result of ``rotary``; compute it outside a decode loop.

        Returns:
          hidden states [batch, length, embed] after the final norm, the cache, and the keys and
          values that the strategy returned for each layer (stacked, or a tuple when unrolled).
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
        tally_weights: jax.Array | None = None,
    ) -> jax.Array:
        """[batch, length, embed] after the final norm, without a cache; through ``stack``.

        Args:
          tokens, positions, attention, compute: as of ``__call__``.
          tally_weights: float32 [batch, length], weight of each token in the ``tally``; None: no
            statistics.
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
            ring = run.weight_ring(config, x.shape)
            x, _, _, sums = self._run_layers(
                stacked,
                None,
                x if ring is None else ring.split_length(x),
                positions,
                attention,
                None,
                run,
                tally_weights=tally_weights,
                ring=ring,
            )
            x = x if ring is None else ring.gather_length(x)
            if sums is not None:
                # Statistics of this stage's layers follow those of the stages before.
                sums = jnp.concatenate([before[sums.shape[0] :], sums])
            return x, sums

        def embed() -> tuple:
            sums = None
            if tally_weights is not None:
                sums = jnp.zeros((config.layers, NUM_SUMS, config.experts), jnp.float32)
            return self.embed(tokens, compute, positions), sums

        x, sums = self.stack(layers, nnx.state(self.layers), embed)
        if self.tally is not None and tally_weights is not None:
            self.tally.add(RoutingStats(sums, jnp.sum(tally_weights)))
        return self.finish(x, compute)

    def embed(self, tokens: jax.Array, compute: Compute, positions: jax.Array) -> jax.Array:
        """Embeddings [..., length, embed] of int tokens and their positions [..., length]."""
        x = self.embedding[...].astype(compute.dtype)[tokens]
        if self.config.embedding_scale != 1:
            x *= jnp.asarray(self.config.embedding_scale, compute.dtype)
        if self.config.learned_positions:
            x += self.positions[...].astype(compute.dtype)[positions]
        return compute.constrain(x, "batch", "length", None)

    def rotary(self, lengths: jax.Array, tables: int = 0) -> RotaryLookup | None:
        """Rotary tables for a decode loop.

        Args:
          lengths: int [sequences], maximal length of each; rows of a sequence are consecutive.
          tables: precompute cos and sin of so many positions from 0 on; 0: compute when used.

        Returns:
          a function of positions; None if tables are computed from positions alone when used.
        """
        if self.config.rope_depends_on_length:

            def of_lengths(positions: jax.Array) -> Rotary:
                each = jnp.repeat(lengths, positions.shape[0] // lengths.shape[0])
                return rotary_tables(self.config, positions, KernelSet(), each)

            return of_lengths
        if not tables:
            return None
        made = rotary_tables(self.config, jnp.arange(tables), KernelSet())
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
        rotary: RotaryLookup | None = None,
    ) -> tuple[jax.Array, Any, Any]:
        """Run the layers that the bound parameters have, without embedding and final norm.

        Layer i has number ``first + stride * i`` for the attention strategy and its cache.
        """
        stacked = nnx.state(self.layers)
        return self._run_layers(
            stacked, layers, x, positions, attention, cache, compute, (first, stride), rotary
        )[:3]

    def finish(self, x: jax.Array, compute: Compute) -> jax.Array:
        """The final norm."""
        bias = getattr(self, "final_norm_bias", None)
        return norm(self.config, compute, x, self.final_norm[...], bias)

    def _run_layers(
        self,
        stacked: Any,
        layers: list[Any] | None,
        x: jax.Array,
        positions: jax.Array,
        attention: Attention,
        cache: Any,
        compute: Compute,
        numbers: tuple[int | jax.Array, int] = (0, 1),
        rotary: RotaryLookup | None = None,
        tally_weights: jax.Array | None = None,
        ring: WeightRing | None = None,
    ) -> tuple[jax.Array, Any, Any, jax.Array | None]:
        if rotary is not None:
            rope_tables = rotary(positions)
        else:
            rope_tables = rotary_tables(self.config, positions, compute.kernels)
        graph, _ = nnx.split(self.layers)

        def constrain(x: jax.Array) -> jax.Array:
            if ring is not None:
                return ring.constrain_length(x)
            return compute.constrain(x, "batch", "length", None)

        def layer_function(kind: LayerKind) -> Callable[..., tuple]:
            def run(layer: Any, parameters: Any, x: jax.Array, cache: Any) -> tuple:
                x = remat.layer_input(x)
                block = nnx.merge(graph, parameters)
                x, cache, kept, sums = block(
                    layer, x, rope_tables, attention, cache, compute, kind, tally_weights, ring
                )
                return constrain(x), cache, (kept, sums)

            return remat.with_remat(run, compute.remat, unrolled=compute.unroll_layers)

        count = jax.tree.leaves(stacked)[0].shape[0]
        period = self.config.period
        if count % len(period) and count != self.config.layers:
            raise ConfigError(
                f"{count} layers in a stage do not divide into periods of {len(period)} "
                f"alternating layers; use fewer stages (pipe)"
            )
        runs = [layer_function(kind) for kind in period]
        first, stride = numbers
        if compute.unroll_layers:
            kept_layers, tallies = [], []
            for index, parameters in enumerate(layers or unstack(stacked)):
                run = runs[index % len(runs)]
                x, cache, (kept_layer, sums) = run(first + stride * index, parameters, x, cache)
                kept_layers.append(kept_layer)
                tallies.append(sums)
            stats = None if tally_weights is None else jnp.stack(tallies)
            return x, cache, tuple(kept_layers), stats
        numbered = first + stride * jnp.arange(count), stacked
        x, cache, kept = _scan_layers(runs, (x, cache), numbered)
        return x, cache, *kept

    def unstack(self) -> list[Any]:
        """The layers' parameters, one tree per layer."""
        if self.unstacked is not None:
            return list(self.unstacked())
        return unstack(nnx.state(self.layers))

    @property
    def output_table(self) -> jax.Array:
        """The output table (LM head), [vocab, embed]."""
        return (self.embedding if self.config.tie_embeddings else self.unembedding)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits, float32 [..., vocab], of hidden states [..., embed]."""
        logits = jnp.einsum(
            "...d,vd->...v",
            hidden,
            self.output_table.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        cap = self.config.final_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits


def _scan_layers(
    runs: list[Callable[..., tuple]], carry: tuple, numbered: Any
) -> tuple[jax.Array, Any, Any]:
    """Scan over layers: over complete periods of alternating kinds, then the incomplete one.

    Args:
      runs: a function per kind in the period, (number, parameters, x, cache) -> (x, cache, kept).
      carry: x and the cache.
      numbered: the layers' numbers and their stacked parameters.
    """
    kept: Any = None
    if len(runs) == 1:

        def step(carry: tuple, item: tuple) -> tuple:
            x, cache, kept_layer = runs[0](item[0], item[1], carry[0], carry[1])
            return (x, cache), kept_layer

        (x, cache), kept = jax.lax.scan(step, carry, numbered)
        return x, cache, kept
    size = len(runs)
    count = numbered[0].shape[0]
    whole = count - count % size

    through = functools.partial(_run_period, runs)

    def unstacked_items(items: Any) -> Iterable[tuple[Any, Any]]:
        return zip(items[0], unstack(items[1]))

    def split(leaf: jax.Array) -> jax.Array:
        return leaf[:whole].reshape(whole // size, size, *leaf.shape[1:])

    def at(index: Any) -> tuple[Any, Any]:
        layer, parameters = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), numbered
        )
        return layer, parameters

    if whole and carry[1] is not None:
        # Decoding indexes each layer, as slicing out a period copies it; backward passes slice.
        carry, kept = jax.lax.scan(
            lambda carry, first: through(carry, [at(first + i) for i in range(size)]),
            carry,
            jnp.arange(0, whole, size),
        )
    elif whole:
        periods = jax.tree.map(split, numbered)
        carry, kept = jax.lax.scan(
            lambda carry, items: through(carry, unstacked_items(items)), carry, periods
        )
    if whole:
        kept = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), kept)
    if count > whole:
        if carry[1] is not None:
            carry, kept_layer = through(carry, [at(i) for i in range(whole, count)])
        else:
            rest = jax.tree.map(lambda leaf: leaf[whole:], numbered)
            carry, kept_layer = through(carry, unstacked_items(rest))
        both = (kept, kept_layer) if whole else (kept_layer,)
        kept = jax.tree.map(lambda *parts: jnp.concatenate(parts), *both)
    return (*carry, kept)


def _run_period(
    runs: list[Callable[..., tuple]], carry: tuple, layers: Iterable[tuple[Any, Any]]
) -> tuple[tuple, Any]:
    """Run a period or part of one, one layer after another."""
    kept_layers = []
    for run, (layer, parameters) in zip(runs, layers):
        x, cache, kept_layer = run(layer, parameters, carry[0], carry[1])
        carry = x, cache
        kept_layers.append(kept_layer)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *kept_layers)


def unstack(stacked: Any) -> list[Any]:
    """Split a tree of stacked layers into one tree per layer.

    One split per leaf makes the backward pass a single concatenation.
    """
    leaves, structure = jax.tree.flatten(stacked)
    count = leaves[0].shape[0]
    parts = [[x[0] for x in jax.lax.split(leaf, [1] * count)] for leaf in leaves]
    return [jax.tree.unflatten(structure, [part[i] for part in parts]) for i in range(count)]


class ScalarDecoder(nnx.Module):
    """A decoder with a scalar head: critic, reward model or cost model."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        self.config = config
        declared = scalar_parameters(config)
        self.decoder = Decoder(without_output_table(config), key, declared["decoder"])
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
        """Scores, float32 [...], of hidden states [..., embed]."""
        return self.unbiased(hidden) + self.bias[...]

    def unbiased(self, hidden: jax.Array) -> jax.Array:
        """``score`` without the bias, which reward models' files do not have."""
        return hidden.astype(jnp.float32) @ self.head[...]
