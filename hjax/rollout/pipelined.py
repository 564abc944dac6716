"""Generation with the layers split over pipeline stages.

The rows are cut into as many micro-batches as there are stages, which take turns: while one
micro-batch is in the last stage, another is in each of the others, and the token drawn from the
last stage's output enters the first stage in the next tick. So after the first round no stage
waits. Embedding, logits and sampling stand outside the stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hjax.kernels.decode import Seen, bounds
from hjax.models.attention import Causal
from hjax.models.decoding import Decode, KVCache
from hjax.models.forward import positions_of
from hjax.models.parameters import Network, Params
from hjax.models.transformer import Compute
from hjax.rollout import decode_state
from hjax.rollout.sampling import Sampling, sequence_keys
from hjax.sharding.layout import Layout

AXIS = "pipe"
_SPLIT, _WHOLE = PartitionSpec(AXIS), PartitionSpec()


class PipelinedRollout:
    """A generate layout with more than one stage; see ``Generator`` for the arguments."""

    def __init__(self, network: Network, layout: Layout, compute: Compute, int8: bool = False):
        self.network, self.int8 = network, int8
        self.layout = layout
        self.compute = dataclasses.replace(compute, unroll_layers=False)
        self.stages = layout.ways("layers")
        self.specs = jax.tree.map(
            lambda axes: _SPLIT if axes[:1] == ("layers",) else _WHOLE,
            network.axes,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    def run(
        self,
        params: Params,
        prompts: jax.Array,
        prompt_mask: jax.Array,
        sequence: jax.Array,
        seed_and_step: jax.Array,
        samples: int,
        length: int,
        sampling: Sampling,
        stop: tuple[int, ...],
    ) -> dict[str, jax.Array]:
        """The rollout's drawn entries, [prompts * samples, length]; inside jit."""
        stages, layout = self.stages, self.layout
        model = self.network.bind(params)
        prompts, masks, sequence = (layout.cut(x, stages) for x in (prompts, prompt_mask, sequence))
        seed, step = seed_and_step[0], seed_and_step[1]
        keys = jax.vmap(sequence_keys, (None, None, 0))(seed, step, sequence)
        lengths = jnp.repeat(jnp.sum(masks, axis=-1, dtype=jnp.int32), samples, axis=1)
        ends = jnp.asarray(stop, jnp.int32)
        rows = sequence.shape[1]

        starts = model.embed(prompts, self.compute, jax.vmap(positions_of)(masks))
        hidden, prompt = self._prefill(params, starts, masks, length)
        cache = KVCache.create(prompt, samples, length)
        cache = jax.tree.map(lambda x: layout.constrain(x, "layers", "batch", "kv_heads"), cache)

        def draw(drawn: decode_state.DecodeState, index: jax.Array, x: jax.Array, at: Any) -> Any:
            """Micro-batch ``index``'s tokens at position ``at``, of hidden states [rows, embed]."""
            logits = layout.constrain(model.logits(x), "batch", "vocab")
            part = jax.tree.map(lambda t: t[index], drawn)
            how = sampling, ends, self.compute.kernels, layout
            part = decode_state.advance(part, logits, keys[index], at, *how)
            return jax.tree.map(lambda t, new: t.at[index].set(new), drawn, part)

        nothing = decode_state.start(rows, length, sampling)
        drawn = jax.tree.map(lambda x: jnp.broadcast_to(x, (stages, *x.shape)), nothing)
        for index in range(stages):
            first = jnp.repeat(model.finish(hidden[index], self.compute), samples, axis=0)
            drawn = draw(drawn, jnp.int32(index), first, jnp.int32(0))
        decode = self._decoder(params, masks, lengths, length)

        def finished(out: jax.Array) -> jax.Array:
            return model.finish(out, self.compute)[:, 0]

        def tick(state: Any) -> Any:
            time, cache, received, drawn = state
            turn = time % stages
            token, at = drawn["last"][turn], lengths[turn] + time // stages
            x = model.embed(token[:, None], self.compute, at[:, None])
            cache, received, out = decode(cache, received, x, time)
            back = time - (stages - 1)
            drawn = jax.lax.cond(
                back >= 0,
                lambda d: draw(d, back % stages, finished(out), back // stages + 1),
                lambda d: d,
                drawn,
            )
            return time + 1, cache, received, drawn

        def unfinished(state: Any) -> jax.Array:
            more = state[0] < length * stages - 1
            return more & ~jnp.all(state[3]["done"]) if stop else more

        width = hidden.shape[-1]
        received = jnp.zeros((stages, rows, 1, width), hidden.dtype)
        state = jnp.int32(0), cache, layout.constrain(received, "layers", "batch"), drawn
        drawn = jax.lax.while_loop(unfinished, tick, state)[3]
        return jax.tree.map(layout.join, decode_state.responses(drawn))

    def _map(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            body,
            mesh=self.layout.mesh,
            axis_names={AXIS},
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _pass_on(self, x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, AXIS, [(s, s + 1) for s in range(self.stages - 1)])

    def _prefill(self, params: Params, starts: jax.Array, masks: jax.Array, length: int) -> Any:
        """Hidden states of the prompts' last tokens, and their keys and values.

        Args:
          params, starts, masks: of all micro-batches.
          length: of a response at most.

        Returns:
          [micro-batches, prompts, embed] before the final norm; (k, v), each
          [layers * micro-batches, prompts, kv_heads, length, head_dim], a stage's layers in its
          part, entry ``layer * micro-batches + micro-batch``.
        """
        stages = self.stages

        def body(params: Params, starts: jax.Array, masks: jax.Array) -> Any:
            stage = jax.lax.axis_index(AXIS)
            model = self.network.bind(params)

            def tick(received: jax.Array, time: jax.Array) -> Any:
                # Outside its turns a stage computes what nobody reads.
                at = jnp.clip(time - stage, 0, stages - 1)
                x, mask = jnp.where(stage == 0, starts[at], received), masks[at]
                attention = Causal(mask, keep=True, form=self.compute.form, int8=self.int8)
                turn = model.rotary(jnp.sum(mask, axis=-1, dtype=jnp.int32) + length)
                x, _, kept = model.run(
                    x, positions_of(mask), attention, compute=self.compute, rotary=turn
                )
                return self._pass_on(x), (kept, x[:, -1])

            times = jnp.arange(2 * stages - 1)
            _, (kept, last) = jax.lax.scan(tick, jnp.zeros_like(starts[0]), times)

            def mine(x: jax.Array) -> jax.Array:
                x = jax.lax.dynamic_slice_in_dim(x, stage, stages)  # [micro, layers, ...]
                return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

            last = jnp.where(stage == stages - 1, last[stages - 1 :], 0)
            return jax.lax.psum(last, AXIS), jax.tree.map(mine, kept)

        in_specs = (self.specs, _WHOLE, _WHOLE)
        return self._map(body, in_specs, (_WHOLE, _SPLIT))(params, starts, masks)

    def _decoder(
        self, params: Params, masks: jax.Array, lengths: jax.Array, length: int
    ) -> Callable[..., tuple[KVCache, jax.Array, jax.Array]]:
        """One tick: every stage runs its layers on the micro-batch whose turn it is there."""
        stages = self.stages

        def body(
            params: Params,
            masks: jax.Array,
            lengths: jax.Array,
            cache: KVCache,
            received: jax.Array,
            x: jax.Array,
            time: jax.Array,
        ) -> Any:
            stage = jax.lax.axis_index(AXIS)
            turn = time - stage
            index = turn % stages
            # Before its first turn a stage writes where its first true token will be written.
            position = jnp.maximum(turn // stages, 0)
            x = jnp.where(stage == 0, x, received[0])
            model = self.network.bind(params)
            out, cache, _ = model.run(
                x,
                lengths[index][:, None] + position,
                Decode(Seen(*bounds(masks[index]), position)),
                cache,
                self.compute,
                first=index,
                stride=stages,
                rotary=model.rotary(lengths[index] + length),
            )
            last = jax.lax.psum(jnp.where(stage == stages - 1, out, 0), AXIS)
            return cache, self._pass_on(out)[None], last

        run = self._map(
            body,
            (self.specs, _WHOLE, _WHOLE, _SPLIT, _SPLIT, _WHOLE, _WHOLE),
            (_SPLIT, _SPLIT, _WHOLE),
        )
        return lambda *state: run(params, masks, lengths, *state)
