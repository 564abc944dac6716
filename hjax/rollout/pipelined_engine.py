"""The engine's programs with the layers split over pipeline stages.

The rows of each data-parallel part are cut into one micro-batch per stage. While one micro-batch is
in the last stage, the others are in the other stages; the token drawn from the last stage's output
enters the first stage in the next tick. So once the pipeline has filled, no stage idles until the
last tokens. Embedding, logits and sampling are outside the stages. A device holds its stage's
layers and their part of the cache.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from hjax.models.append_attention import CacheBlocks
from hjax.models.attention_strategies import Attention
from hjax.models.compute import Compute
from hjax.models.decoding import KVCache
from hjax.models.parameters import Network, Weights
from hjax.rollout.decode_step import DecodeState, DecodeStep
from hjax.rollout.engine import Engine
from hjax.rollout.rollout_job import GenerationConfig
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_layout import SlotLayout
from hjax.rollout.slot_state import PrefilledPrompts, RunningSequences, SlotSizes, SlotState
from hjax.sharding.layout import Layout
from hjax.sharding.pipeline import psum_tree

AXIS = "pipe"
_SPLIT, _WHOLE = PartitionSpec(AXIS), PartitionSpec()


class _StagedSeats(SlotLayout):
    """Slot layout of a cache that is laid out by turn."""

    def insert_kv(self, forward: Any, old: jax.Array, *more: jax.Array) -> jax.Array:
        engine = self.engine
        made: jax.Array = engine._by_turn(super().insert_kv(forward, engine._by_layer(old), *more))
        return made

    def select_kv(self, x: jax.Array, *more: Any) -> jax.Array:
        made: jax.Array = self.engine._by_turn(super().select_kv(self.engine._by_layer(x), *more))
        return made


class PipelinedEngine(Engine):
    """An engine of a layout with several stages; see ``Engine`` for the arguments.

    In each data-parallel part, rows and groups lie micro-batch by micro-batch. Each micro-batch is
    a part with row numbers of its own, see ``SlotMask.parts``.
    """

    def __init__(self, network: Network, layout: Layout, compute: Compute, **options: Any):
        compute = dataclasses.replace(compute, unroll_layers=False)
        super().__init__(network, layout, compute, **options)
        self.stages = layout.shard_count("layers")
        self._map = functools.partial(
            jax.shard_map, mesh=layout.mesh, axis_names={AXIS}, check_vma=False
        )
        # While the pipeline drains, its first stages write beyond the last token.
        self.spare_columns = 1
        self._of_params = jax.tree.map(
            lambda axes: _SPLIT if axes[:1] == ("layers",) else _WHOLE,
            network.axes,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    @property
    def packs_prompts(self) -> bool:
        return False

    def loop_iterations(self, steps: Any) -> Any:
        """A tick of each micro-batch for every token, and the ticks that drain the pipeline."""
        return steps * self.stages + self.stages - 1

    def prefill_states(
        self,
        params: Weights,
        tokens: jax.Array,
        mask: jax.Array,
        attention: Attention,
        lengths: jax.Array,
        blocks: CacheBlocks | None,
        at: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        assert blocks is None, "the prefix cache needs a single stage"
        stages, cut = self.stages, self._cut_rows
        positions, _ = self._positions(tokens, mask, attention)
        if at is None:
            at = jnp.full((tokens.shape[0], 1), tokens.shape[1] - 1, jnp.int32)
        masks = {
            field.name: value
            for field in dataclasses.fields(attention)  # type: ignore[arg-type]
            if isinstance(value := getattr(attention, field.name), jax.Array)
        }
        model = self.network.bind(params)
        inputs = cut({"positions": positions, "at": at, "lengths": lengths, "masks": masks})
        starts = model.embed(cut(tokens), self.compute, inputs["positions"])

        def body(params: Weights, starts: jax.Array, inputs: Any) -> Any:
            stage = jax.lax.axis_index(AXIS)
            model = self.network.bind(params)

            def tick(received: jax.Array, time: jax.Array) -> Any:
                # Outside its turns a stage computes what nobody reads.
                turn = jnp.clip(time - stage, 0, stages - 1)
                own = jax.tree.map(lambda x: x[turn], inputs)
                x = jnp.where(stage == 0, starts[turn], received)
                sees: Any = dataclasses.replace(attention, **own["masks"])  # type: ignore[type-var]
                x, _, kept = model.run(
                    x,
                    own["positions"],
                    sees,
                    compute=self.compute,
                    rotary=model.rotary(own["lengths"]),
                )
                states = jnp.take_along_axis(x, own["at"][:, :, None], axis=1)
                return self._pass_on(x), (kept, states)

            times = jnp.arange(2 * stages - 1)
            _, (kept, states) = jax.lax.scan(tick, jnp.zeros_like(starts[0]), times)

            def mine(x: jax.Array) -> jax.Array:
                x = jax.lax.dynamic_slice_in_dim(x, stage, stages)  # [micro, layers, ...]
                return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

            states = jnp.where(stage == stages - 1, states[stages - 1 :], 0)
            return psum_tree(states, AXIS), jax.tree.map(mine, kept)

        in_specs = (self._of_params, _WHOLE, _WHOLE)
        run = self._map(body, in_specs=in_specs, out_specs=(_WHOLE, _SPLIT))
        hidden, kept = run(params, starts, inputs)
        hidden = jax.tree.map(self.layout.merge_micro_batches, model.finish(hidden, self.compute))
        return hidden, jax.tree.map(self._by_layer, kept)

    def _decoded(
        self,
        sampling: SamplingParams,
        most: int,
        params: Weights,
        state: SlotState,
        numbers: jax.Array,
        bitmask: jax.Array | None,
    ) -> tuple[SlotState, DecodeState]:
        steps = numbers[0]  # enough_live does not apply: a full pipeline goes on
        model, forward, stages = self.network.bind(params), self._pass(sampling, state), self.stages
        slots = dataclasses.replace(state.slots, parts=self.layout.shard_count("batch"))
        slots, bits, before = self._cut_rows((slots, bitmask, state.rows.drawn))

        run = self._stages_tick(forward)

        def of(tree: Any, index: int | jax.Array) -> Any:
            return jax.tree.map(lambda x: x[index], tree)

        def drawn_of(index: jax.Array, hidden: jax.Array, step: jax.Array, rows: Any) -> Any:
            """Advance a micro-batch's rows by the hidden states that came out of the last stage."""
            logits = forward.logits(model, model.finish(hidden, self.compute))
            running, drawn = of(rows, index)
            inputs, allowed = forward.inputs(running), of(bits, index)
            new = forward.advance(running, drawn, logits, inputs, before[index], step, allowed)
            return jax.tree.map(lambda x, one: x.at[index].set(one), rows, new)

        def tick(carry: Any) -> Any:
            time, cache, received, rows = carry
            entering = of(rows[0], time % stages)
            x = model.embed(forward.inputs(entering), self.compute, forward.positions(entering))
            # A stage needs neither sampling options nor token counts.
            few = dataclasses.replace(rows[0], options=None, counts=None, text=None)
            cache, received, out = run(params, cache, received, x, (few, time, slots))
            turn = time - (stages - 1)
            index, step = turn % stages, turn // stages
            # A micro-batch that has finished, or lacks room for its drafts, skips its turn.
            now = (turn >= 0) & forward.can_continue(of(rows[0], index), before[index], most)
            rows = jax.lax.cond(now, lambda x: drawn_of(index, out, step, x), lambda x: x, rows)
            return time + 1, cache, received, rows

        def unfinished(carry: Any) -> jax.Array:
            time, _, _, (running, _) = carry
            going = [forward.can_continue(of(running, i), before[i], most) for i in range(stages)]
            return (time < self.loop_iterations(steps)) & jnp.any(jnp.stack(going))

        running = self._cut_rows(state.rows)
        tables = self._cut_rows(forward.empty_tables(state.rows, most))
        shape = running.done.shape[1], 1 + self.draft_tokens, self.network.config.hidden_size
        received = jnp.zeros((stages, *shape), self.compute.dtype)
        begin = jnp.int32(0), state.cache, self.layout.constrain(received, "layers", "batch")
        time, cache, _, rows = jax.lax.while_loop(unfinished, tick, (*begin, (running, tables)))
        running, drawn = jax.tree.map(self.layout.merge_micro_batches, rows)
        taken = jnp.minimum(-(-time // stages), steps)
        slots = dataclasses.replace(state.slots, column=state.slots.column + taken)
        return SlotState(cache, slots, running), drawn | {"steps": taken, "done": running.done}

    def _stages_tick(self, forward: DecodeStep) -> Callable[..., Any]:
        """One tick of all stages: each updates its cache and passes activations on."""
        stages = self.stages

        def body(params: Weights, cache: KVCache, received: Any, x: Any, now: Any) -> Any:
            running, time, slots = now
            stage, turn = jax.lax.axis_index(AXIS), time - jax.lax.axis_index(AXIS)
            index = turn % stages
            slots, running = jax.tree.map(lambda x: x[index], (slots, running))
            # Before its first turn a stage writes into the column of its first real token.
            slots = dataclasses.replace(slots, column=slots.column + jnp.maximum(turn // stages, 0))
            model = self.network.bind(params)
            out, cache, _ = model.run(
                jnp.where(stage == 0, x, received[0]),
                forward.positions(running),
                forward.attention(slots, running),
                cache,
                self.compute,
                first=index,
                stride=stages,
                rotary=model.rotary(running.prompt_lengths + running.final_limit),
            )
            last = psum_tree(jnp.where(stage == stages - 1, out, 0), AXIS)
            return cache, self._pass_on(out)[None], last

        in_specs = (self._of_params, _SPLIT, _SPLIT, _WHOLE, _WHOLE)
        return self._map(body, in_specs=in_specs, out_specs=(_SPLIT, _SPLIT, _WHOLE))

    def _decode_rest(
        self,
        config: GenerationConfig,
        params: Weights,
        mask: jax.Array,
        read: PrefilledPrompts,
        running: RunningSequences,
        drawn: DecodeState,
    ) -> DecodeState:
        samples, limit, (groups, prompt) = config.samples, config.max_new_tokens, mask.shape
        rows = groups * samples
        state = self._zeros(SlotSizes(rows, groups, samples, prompt, limit), jnp.int32(0))
        prompt_k, prompt_v = (jax.tree.map(self._by_turn, x) for x in (read.k, read.v))
        cache = dataclasses.replace(state.cache, prompt_k=prompt_k, prompt_v=prompt_v)
        end = jnp.full(groups, prompt, jnp.int32)
        slots = dataclasses.replace(state.slots, begin=end - read.tokens, end=end)
        if samples > 1:
            number = jnp.arange(rows, dtype=jnp.int32) % (rows // self.parts)
            members = number.reshape(groups, samples)
            slots = dataclasses.replace(slots, members=members, place=number)
        state = SlotState(cache, slots, running)
        numbers = jnp.array([limit - 1, 0], jnp.int32)
        _, more = self._decoded(config.sampling, max(limit - 1, 1), params, state, numbers, None)

        def joined(first: jax.Array, others: jax.Array) -> jax.Array:
            return jnp.concatenate([first[:, :1], others], axis=1)[:, :limit]

        names = ("tokens", "mask", "logprobs")
        return {name: jax.tree.map(joined, drawn[name], more[name]) for name in names}

    def _cut_rows(self, tree: Any) -> Any:
        """Arrays [rows, ...] by micro-batch, [stages, rows / stages, ...]."""
        return jax.tree.map(lambda x: self.layout.split_micro_batches(x, self.stages), tree)

    # A state's cache is laid out by turn, so that a stage has its part of a micro-batch in one
    # piece. Prefill, and changes outside of the decode loop, use the order by layer.

    def _zeros(self, size: SlotSizes, column: jax.Array) -> SlotState:
        state = super()._zeros(size, column)
        return dataclasses.replace(state, cache=jax.tree.map(self._by_turn, state.cache))

    def _make_slot_layout(self) -> SlotLayout:
        return _StagedSeats(self)

    def _held(self, x: jax.Array) -> jax.Array:
        return self.layout.constrain(x, "layers", "batch", "kv_heads")

    def _by_turn(self, x: jax.Array) -> jax.Array:
        """[layers, rows, heads, ...] as [layers * stages, rows / stages, heads, ...], entry ``layer
        * stages + micro-batch``."""
        ways, stages, layers = self.layout.shard_count("batch"), self.stages, x.shape[0]
        x = x.reshape(layers, ways, stages, -1, *x.shape[2:]).swapaxes(1, 2)
        return self._held(x.reshape(layers * stages, -1, *x.shape[4:]))

    def _by_layer(self, x: jax.Array) -> jax.Array:
        """The inverse of ``_by_turn``."""
        ways, stages = self.layout.shard_count("batch"), self.stages
        x = x.reshape(-1, stages, ways, x.shape[1] // ways, *x.shape[2:]).swapaxes(1, 2)
        return self._held(x.reshape(x.shape[0], -1, *x.shape[4:]))

    def _pass_on(self, x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, AXIS, [(s, s + 1) for s in range(self.stages - 1)])
