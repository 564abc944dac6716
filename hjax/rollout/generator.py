"""Generation: the prompt prefilled once per group, then a compiled decode loop, or slots.

Responses of one length, and short ones, are decoded in one program; where they end by themselves
after long and different times, or come in parts, they have the engine's slots
(``hjax.rollout.scheduler``). What a sequence draws follows from its number, not from the batch it
is in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError
from hjax.kernels import decode
from hjax.kernels.int8_cache import AUTO, CACHE_DTYPES, INT8
from hjax.models.attention import Causal
from hjax.models.compute import Compute
from hjax.models.decoding import Decode, KVCache
from hjax.models.forward import positions_of
from hjax.models.parameters import (
    Layered,
    Network,
    Params,
    Weights,
    by_layer,
    by_layer_abstract,
    decoding_orders,
    lies_in,
    relaid,
)
from hjax.rollout import decode_state
from hjax.rollout.counts import Counts
from hjax.rollout.engine import Engine
from hjax.rollout.options import Sampling
from hjax.rollout.sampling import sequence_keys
from hjax.rollout.scheduler import COLUMNS, Schedule
from hjax.rollout.staged import StagedEngine
from hjax.rollout.stepping import Drawing
from hjax.rollout.work import Begun, Ends, Work, announced, tables
from hjax.sharding.arrays import place, to_numpy
from hjax.sharding.layout import Layout
from hjax.xla.program import Program

Rollout = dict[str, jax.Array]
# Called with a prompt's number and its responses, token ids.
OnEnded = Callable[[int, list[list[int]]], None]


def bucket_length(length: int, limit: int, multiple: int = 64) -> int:
    """``length`` rounded up to a multiple, at most ``limit``: few shapes, few programs."""
    return min(-(-max(length, 1) // multiple) * multiple, limit)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What a generation program is compiled for."""

    samples: int
    max_new_tokens: int
    sampling: Sampling


@dataclasses.dataclass(frozen=True)
class _Ways:
    """How rows enter and leave, as ``generate`` has it."""

    slots: int = 0
    lookup: int = 0
    surplus: int = 0
    on_ended: OnEnded | None = None
    end: int | None = None
    begun: Begun | None = None
    ends: Ends | None = None


class Generator:
    """Generation programs of one model under one layout.

    Args:
      network: the model.
      layout: the generate layout; prompts are split over its batch axes.
      compute: dtype and loop form of the forward; its kernels will be those for the layout's
        devices.
      cache_form: of the cache and its attention, see ``hjax.kernels.decode``; None: that of the
        devices.
      cache_dtype: of ``CACHE_DTYPES``.

    Raises:
      ConfigError: another one.
    """

    def __init__(
        self,
        network: Network,
        layout: Layout,
        compute: Compute = Compute(),
        cache_form: str | None = None,
        cache_dtype: str = AUTO,
    ):
        if cache_dtype not in CACHE_DTYPES:
            raise ConfigError(f"cache_dtype={cache_dtype!r}; allowed: {', '.join(CACHE_DTYPES)}")
        self.network = network
        self.layout = layout
        self.int8 = cache_dtype == INT8
        device, head_dim = layout.mesh.devices.flat[0], network.config.head_dim
        self.cache_form = cache_form or decode.choose(device, head_dim)
        if self._staged and self.cache_form != decode.TILES:
            self.cache_form = decode.ROWS  # without the kernels, which are split over all axes
        if self.cache_form == decode.FILLED and not self._heads_divide:
            self.cache_form = decode.ROWS  # which leaves it to the compiler who has which heads
        # A scan copies each layer's weights and cache for every token on a GPU.
        unroll = compute.unroll_layers or self.cache_form in decode.ON_GPUS
        self.compute = dataclasses.replace(compute.on(layout), unroll_layers=unroll)
        self._programs: dict[_Shape, Any] = {}
        self._engines: dict[int, Engine] = {}
        self._warm: set[Any] = set()  # schedules whose programs are compiled
        self._keys = jax.jit(
            lambda numbers, rows: jax.random.key_data(sequence_keys(numbers[0], numbers[1], rows)),
            out_shardings=layout.replicated,
        )

    @property
    def kept_dtype(self) -> Any:
        """Of keys and values; None: int8."""
        return None if self.int8 else self.compute.dtype

    @property
    def _copies(self) -> int:
        """Of each key-value head in the kernel's cache: ``KVCache.copies``."""
        if self.cache_form not in decode.KERNELS + decode.BY_PARTS:
            return 1
        return max(1, self.layout.ways("heads") // self.network.config.kv_heads)

    @property
    def _heads_divide(self) -> bool:
        """Whether each device has key-value heads, or a copy, of its own."""
        held = self.network.config.kv_heads * self._copies
        return held % self.layout.ways("heads") == 0

    @property
    def _staged(self) -> bool:
        return self.layout.ways("layers") > 1

    @property
    def multiple(self) -> int:
        """What the number of prompts must divide by: data-parallel parts times stages."""
        return self.layout.ways("batch") * self.layout.ways("layers")

    @property
    def reads_layers(self) -> bool:
        """Whether programs want an array of each layer (``Layered``): they unroll layers, and a
        GPU's compiler would copy each of them out of its stack in every program."""
        return self.compute.unroll_layers and self.cache_form in decode.ON_GPUS and not self._staged

    @property
    def relays(self) -> bool:
        """Whether programs want weights laid out in memory otherwise than training: a TPU's
        compiler would lay them out anew in every program."""
        return self.cache_form == decode.KERNEL

    def as_read(self, params: Weights, given_up: Params | None = None) -> Any:
        """Parameters as the programs read them fastest: by layer, laid out anew, or as they are.

        Args:
          params: in the generate layout.
          given_up: as of ``hjax.models.parameters.by_layer``.
        """
        if isinstance(params, Layered):
            return params
        if self.relays:
            return relaid(params, self._orders, given_up)
        if not self.reads_layers:
            return params
        if isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
            return by_layer_abstract(params)
        return by_layer(params, self.network.shardings(self.layout), given_up)

    def beside(self, params: Params, given_up: Params) -> list[jax.ShapeDtypeStruct]:
        """Of abstract parameters, those that stay while ``as_read`` has others of them."""
        if self.reads_layers:
            params, given_up = params["layers"], given_up["layers"]
            made = jax.tree.map(lambda _: True, params)
        elif self.relays:
            made = jax.tree.map(lambda x, order: lies_in(x) != order, params, self._orders)
        else:
            return []
        each = zip(*map(jax.tree.leaves, (params, made, given_up)), strict=True)
        return [x for x, anew, gone in each if anew and not gone]

    @functools.cached_property
    def _orders(self) -> Params:
        return decoding_orders(self.network.axes, self.layout.ways("heads") > 1)

    def generate(
        self,
        params: Weights,
        prompts: jax.Array | np.ndarray,
        prompt_mask: jax.Array | np.ndarray,
        sequence: jax.Array | np.ndarray,
        *,
        seed: int,
        step: int = 0,
        samples: int = 1,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        end: int | None = None,
        slots: int = 0,
        lookup: int = 0,
        surplus: int = 0,
        on_ended: OnEnded | None = None,
        ends: Ends | None = None,
    ) -> Rollout:
        """Sample responses.

        Args:
          params: in the generate layout, or of ``as_read``, which is done otherwise for this call.
          prompts: int32 [prompts, prompt_length], padded on the left.
          prompt_mask: bool, like ``prompts``.
          sequence: int32 [prompts * (samples + surplus)], the number that seeds each row's draws.
          seed: of the run.
          step: folded into the seed.
          samples: responses per prompt; row ``p * samples + s`` is sample s of prompt p.
          max_new_tokens: length limit of a response, in tokens.
          sampling: how tokens are drawn, and which end a response.
          end: tokens after which to leave off, for ``resume``; ``truncated`` where a response has
            not ended. None: ``max_new_tokens``.
          slots: rows that are decoded at a time, others following as these end; 0: all.
          lookup: tokens that are guessed at a time from what a text said before, see
            ``hjax.rollout.lookup``; the responses are the same.
          surplus: further responses to each prompt, of which as many are given up as have not ended
            when ``samples`` have; the shortest are kept, in their order.
          on_ended: called with a prompt's number and its responses, token ids, as soon as the last
            of them has ended; others are decoded meanwhile.
          ends: by slots, given a sequence's number among all that are drawn and its new tokens, how
            many of these belong to it where its text ends among them, else None. In one program
            every response is drawn to its end.

        Returns:
          ``prompts`` and ``prompt_mask`` once per row, ``responses`` int32
          [rows, max_new_tokens] (0 after the end), ``response_mask`` bool, ``logprobs`` float32
          of the distribution sampled, ``truncated`` bool [rows]; where they
          differ from ``logprobs`` also ``policy_logprobs`` (tempered, no other option applied)
          and ``untempered_logprobs``; with ``lookup`` also ``guessed`` and ``guessed_right``, int32
          [rows], tokens of each and those of them that were drawn; by slots, where prompts may be
          long (``hjax.rollout.beginnings``), also ``prompt_known``, int32 [rows], tokens of the
          prompt that were read for another one.

        Raises:
          ConfigError: a seed that does not fit 32 bits.
        """
        if not 0 <= seed < 2**32:
            raise ConfigError(f"seed={seed}: 0 to {2**32 - 1}")
        if prompts.shape[0] % self.multiple:
            raise ConfigError(
                f"{prompts.shape[0]} prompts do not divide over {self.layout.describe()}; "
                f"use a multiple of {self.multiple}"
            )
        params = self.as_read(params)
        shape = _Shape(samples, max_new_tokens, sampling)
        inputs = prompts, prompt_mask, sequence, self._numbers(seed, step)
        ways = _Ways(slots, lookup, surplus, on_ended, end, None, ends)
        if self._ragged(shape, prompts.shape[0] * samples, ways):
            return self._by_slots(shape, ways, params, *inputs)
        return self._program(shape)(params, *inputs)

    def _ragged(self, shape: _Shape, rows: int, ways: _Ways) -> bool:
        """Whether rows enter and leave while others are decoded; else all run in one program.

        That is the quickest where all are equally long, or short, and on TPUs, whose kernel reads
        what is filled.
        """
        ends = bool(shape.sampling.stop) and shape.max_new_tokens > COLUMNS
        asked = ways.on_ended is not None or ways.lookup > 0 or ways.surplus > 0
        asked = asked or ways.end is not None
        return asked or 0 < ways.slots < rows or (ends and not self.engine.by_kernel)

    @property
    def engine(self) -> Engine:
        """For sequences that come and go."""
        return self.engine_for(0)

    def engine_for(self, lookup: int) -> Engine:
        """One that guesses so many tokens at a time; then without the kernel, which knows none."""
        if lookup not in self._engines:
            compute, form, copies = self.compute, self.cache_form, self._copies
            if lookup and form in decode.KERNELS:
                form, copies = decode.ROWS, 1
                compute = dataclasses.replace(compute, unroll_layers=True)
            made: Engine
            if self._staged:
                how = form, lookup, self.int8
                made = StagedEngine(self.network, self.layout, compute, *how)
            else:
                made = Engine(self.network, self.layout, compute, form, copies, lookup, self.int8)
            self._engines[lookup] = made
        return self._engines[lookup]

    def _by_slots(
        self,
        shape: _Shape,
        ways: _Ways,
        params: Weights,
        prompts: Any,
        prompt_mask: Any,
        sequence: Any,
        seed_and_step: jax.Array,
    ) -> Rollout:
        split, samples = self.layout.sharding("batch"), shape.samples
        sequence = place(sequence, split)
        keys = to_numpy(self._keys(seed_and_step, sequence))
        asked = to_numpy(prompts), to_numpy(prompt_mask)
        drawn = samples + ways.surplus
        parts = ways.end, ways.begun
        work = Work(*asked, keys, drawn, shape.max_new_tokens, ways.surplus, *parts)
        sampling, engine = shape.sampling, self.engine_for(ways.lookup)
        schedule = Schedule(engine, sampling, work, ways.slots, ways.ends)
        known = sampling, ways.lookup, ways.ends is None, schedule.programs_met
        if known not in self._warm:
            schedule.warm(params)
            self._warm.add(known)
        told = schedule.run(params)
        if ways.on_ended is not None:
            told = announced(work, told, ways.on_ended)
        made = tables(work, told)
        self.counts = schedule.counts
        # Who has not drawn one of the tokens that end a response was cut off.
        length = made["response_mask"].sum(axis=1)
        last = made["responses"][np.arange(len(length)), length - 1]
        made["truncated"] = ~np.isin(last, sampling.stop)
        if schedule.beginnings.active:
            made["prompt_known"] = np.repeat(schedule.beginnings.known, samples)
        made["prompts"], made["prompt_mask"] = (np.repeat(x, samples, axis=0) for x in asked)
        return {name: place(x, split) for name, x in made.items()}

    def resume(
        self,
        params: Weights,
        rollout: Rollout,
        sequence: jax.Array | np.ndarray,
        *,
        seed: int,
        step: int = 0,
        samples: int = 1,
        start: int,
        end: int | None = None,
        sampling: Sampling = Sampling(),
        slots: int = 0,
        lookup: int = 0,
        on_ended: OnEnded | None = None,
    ) -> Rollout:
        """Go on with responses that ``generate`` left off, maybe with other parameters.

        Prompts and what there is of the responses go through the model anew, as they enter their
        slots. Draws follow from the position, so with the same parameters the tokens are those of
        one call.

        Args:
          params, sequence, seed, step, samples, sampling, slots, lookup: as of ``generate``.
          rollout: what it gave, with an ``end``; rows whose ``truncated`` is false stay.
          start: tokens after which it left off, at least 1.
          end: tokens after which to leave off now; None: the length of ``responses``.
          on_ended: as of ``generate``, for the prompts of whose responses some had not ended.

        Raises:
          ConfigError: ``start`` is not where it left off.
        """
        host = {name: to_numpy(x) for name, x in rollout.items()}
        prompts, mask = (host.pop(name)[::samples] for name in ("prompts", "prompt_mask"))
        begun = Begun(start, ~host.pop("truncated"), host)
        if start < 1 or (begun.lengths[~begun.ended] != start).any():
            raise ConfigError(f"start={start}: responses were not left off after so many tokens")
        limit = rollout["responses"].shape[1]
        shape = _Shape(samples, limit, sampling)
        ways = _Ways(slots, lookup, 0, on_ended, end, begun)
        numbers = self._numbers(seed, step)
        return self._by_slots(shape, ways, self.as_read(params), prompts, mask, sequence, numbers)

    def _numbers(self, seed: int, step: int) -> jax.Array:
        return place(np.asarray([seed, step], np.uint32), self.layout.replicated)

    def programs(
        self,
        call: str,
        params: Weights,
        prompts: int,
        prompt_length: int,
        *,
        samples: int,
        max_new_tokens: int,
        sampling: Sampling,
        slots: int = 0,
        lookup: int = 0,
        surplus: int = 0,
        in_parts: bool = False,
    ) -> Iterator[Program]:
        """What ``generate`` runs, to count what it costs without running it.

        Args:
          call: its name.
          params: jax.ShapeDtypeStruct with shardings, in the generate layout.
          prompts: how many.
          prompt_length: tokens of each.
          samples, max_new_tokens, sampling, slots, lookup, surplus: as of ``generate``.
          in_parts: whether responses are left off and resumed.
        """
        params = self.as_read(params)
        shape = _Shape(samples, max_new_tokens, sampling)
        ways = _Ways(slots, lookup, surplus)
        if not in_parts and not self._ragged(shape, prompts * samples, ways):
            # The first token is drawn from the prompt, before the loop.
            trips = self.engine.trips(max_new_tokens - 1)
            trace = functools.partial(self.trace, params, prompts, prompt_length, **vars(shape))
            yield Program(call, trace, trips)
            return
        tokens = np.zeros((prompts, prompt_length), np.int32)
        drawn = samples + surplus
        keys = np.zeros((prompts * drawn, 2), np.uint32)
        until = max_new_tokens if in_parts else None
        work = Work(tokens, tokens > 0, keys, drawn, max_new_tokens, surplus, until)
        schedule = Schedule(self.engine_for(lookup), sampling, work, slots)
        yield from schedule.programs(call, params)

    def trace(self, params: Any, prompts: int, prompt_length: int, **options: Any) -> Any:
        """The program traced for abstract ``params``, to count what it costs without running it."""
        params, shape = self.as_read(params), _Shape(**options)
        split, whole = self.layout.sharding("batch"), self.layout.replicated
        tokens = (prompts, prompt_length)
        return self._program(shape).trace(
            params,
            jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=split),
            jax.ShapeDtypeStruct(tokens, jnp.bool_, sharding=split),
            jax.ShapeDtypeStruct((prompts * shape.samples,), jnp.int32, sharding=split),
            jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=whole),
        )

    def _program(self, shape: _Shape) -> Any:
        if shape not in self._programs:

            def run(*arguments: Any) -> Rollout:
                return self._run(shape, *arguments)

            run.__name__ = "generate_greedy" if shape.sampling.greedy else "generate"
            self._programs[shape] = jax.jit(run)
        return self._programs[shape]

    def _run(
        self,
        shape: _Shape,
        params: Weights,
        prompts: jax.Array,
        prompt_mask: jax.Array,
        sequence: jax.Array,
        seed_and_step: jax.Array,
    ) -> Rollout:
        inputs = prompts, prompt_mask, sequence, seed_and_step
        if self._staged:
            engine = self.engine
            assert isinstance(engine, StagedEngine)
            keys = jax.random.key_data(sequence_keys(seed_and_step[0], seed_and_step[1], sequence))
            size = shape.samples, shape.max_new_tokens
            made = engine.whole(shape.sampling, params, prompts, prompt_mask, keys, *size)
            drawn = decode_state.responses(made)
        else:
            drawn = self._run_whole(shape, params, *inputs)
        rollout = {
            "prompts": jnp.repeat(prompts, shape.samples, axis=0),
            "prompt_mask": jnp.repeat(prompt_mask, shape.samples, axis=0),
            **drawn,
        }
        return jax.tree.map(lambda x: self.layout.constrain(x, "batch"), rollout)

    def _run_whole(
        self,
        shape: _Shape,
        params: Weights,
        prompts: jax.Array,
        prompt_mask: jax.Array,
        sequence: jax.Array,
        seed_and_step: jax.Array,
    ) -> Rollout:
        """All layers on every device, all rows together."""
        model = self.network.bind(params)
        split = self.layout.constrain
        rows = prompts.shape[0] * shape.samples
        length = shape.max_new_tokens

        prompts, prompt_mask = split(prompts, "batch"), split(prompt_mask, "batch")
        layers = model.unstack() if self.compute.unroll_layers else None
        once = jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32)
        prompt_lengths = jnp.repeat(once, shape.samples)
        rotary = model.rotary(once + length, tables=prompts.shape[1] + length)
        hidden, _, kept = model(
            prompts,
            positions_of(prompt_mask),
            Causal(prompt_mask, keep=True, form=self.compute.form, int8=self.int8),
            compute=self.compute,
            layers=layers,
            rotary=rotary,
        )
        cache = KVCache.create(kept, shape.samples, length, self.cache_form, self._copies)
        lead = () if isinstance(cache.k, tuple) else (None,)
        heads = "kv_heads" if self._copies == 1 else "heads"
        cache = jax.tree.map(lambda x: split(x, *lead, "batch", heads), cache)
        begins, ends = decode.bounds(prompt_mask)
        keys = sequence_keys(seed_and_step[0], seed_and_step[1], split(sequence, "batch"))
        keys = jax.random.key_data(keys)
        drawing = Drawing(shape.sampling, self.compute, self.layout)
        counts = None
        if shape.sampling.penalised:
            tokens, there = (jnp.repeat(x, shape.samples, axis=0) for x in (prompts, prompt_mask))
            vocab = self.network.config.vocab_size
            counts = Counts.of(tokens, there, vocab, layout=self.layout)

        def draw(state: dict[str, Any], logits: jax.Array) -> dict[str, Any]:
            # As they are made: otherwise XLA gathers the output table, for every token.
            at, logits = state["position"], split(logits, "batch", "vocab")
            given = state["drawn"], logits, None, state["counts"]
            drawn, counts = drawing.token(*given, keys, position=at, at=at, allowed=None)
            return state | {"position": at + 1, "drawn": drawn, "counts": counts}

        def one_token(state: dict[str, Any]) -> dict[str, Any]:
            at = state["position"] - 1
            hidden, cache, _ = model(
                state["drawn"]["last"][:, None],
                (prompt_lengths + at)[:, None],
                Decode(decode.Seen(begins, ends, at), self.layout, length / 2),
                state["cache"],
                self.compute,
                layers,
                rotary,
            )
            return draw(state | {"cache": cache}, model.logits(hidden[:, 0]))

        def unfinished(state: dict[str, Any]) -> jax.Array:
            more = state["position"] < length
            return more & ~jnp.all(state["drawn"]["done"]) if shape.sampling.stop else more

        before = decode_state.start(rows, length, shape.sampling)
        drawn = jax.tree.map(lambda x: split(x, "batch"), before)
        state = {"cache": cache, "position": jnp.int32(0), "drawn": drawn, "counts": counts}
        logits = model.logits(hidden[:, -1])
        state = draw(state, jnp.repeat(logits, shape.samples, axis=0))
        return decode_state.responses(jax.lax.while_loop(unfinished, one_token, state)["drawn"])
