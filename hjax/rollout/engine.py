"""The rollout engine: continuous batching over slots, which sequences enter and leave.

Its interface is JetStream's (``prefill``, ``insert``, ``generate``), in three programs. ``admit``
prefills prompts and draws their first tokens; ``decode`` draws some tokens for every slot in one
compiled loop; ``move`` compacts the slots or gives them more columns. All take the state and return
it in place (donated). ``hjax.rollout.scheduler`` decides who enters when.

A state has fixed ``SlotSizes``. A sequence's draws follow from its own number, so neither its slot
nor its neighbours change what is drawn.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError
from hjax.kernels import cache_axis, decode, int8_cache
from hjax.kernels.decode import SlotMask
from hjax.models.append_attention import BLOCK, AppendAttention, CacheBlocks
from hjax.models.attention_strategies import Attention, Causal, SharedPrompt
from hjax.models.compute import Compute
from hjax.models.decoding import Decode, KVCache, keys_and_values
from hjax.models.forward import token_positions
from hjax.models.packed_prefill import PackedPrefill
from hjax.models.parameters import Network, Weights
from hjax.rollout.chunked_prefill import ChunkedPrefill
from hjax.rollout.decode_step import DecodeState, DecodeStep, append_token
from hjax.rollout.rollout_job import GenerationConfig
from hjax.rollout.row_continuation import RowContinuation
from hjax.rollout.row_sampling import RowSampling
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_layout import SlotLayout, split_resumed
from hjax.rollout.slot_state import (
    Admission,
    CachedPrompts,
    ContinuedRows,
    DecodedTokens,
    PrefilledPrompts,
    RunningSequences,
    SlotSizes,
    SlotState,
)
from hjax.rollout.token_counts import TokenCounts
from hjax.sharding.global_arrays import place, place_all
from hjax.sharding.layout import Layout

# Most tokens of a decode dispatch; after each, finished sequences leave.
STEPS = 16


class Engine:
    """The programs of one model under one layout with a single stage;
    ``hjax.rollout.pipelined_engine`` has those of several stages.

    Args:
      network: the model.
      layout: the generate layout; rows and prompts are split over its batch axes.
      compute: of the forward, with the kernels for the layout's devices.
      cache_form: of the KV cache, see ``hjax.kernels.decode``.
      copies: of each key-value head, see ``KVCache``.
      guesses: draft tokens per pass, see ``hjax.rollout.prompt_lookup``; 0 with the kernel.
      int8: whether keys and values are kept in int8, see ``hjax.kernels.int8_cache``.
      row_columns: whether each row's tokens begin in its own column 0, so that rows may stay in
        their slots and be continued; else all write into one column. With a kernel or drafts it is
        always so.
    """

    def __init__(
        self,
        network: Network,
        layout: Layout,
        compute: Compute,
        cache_form: str,
        copies: int = 1,
        guesses: int = 0,
        int8: bool = False,
        row_columns: bool = False,
    ):
        self.network, self.layout, self.compute = network, layout, compute
        self.form, self.copies, self.int8 = cache_form, copies, int8
        self.draft_tokens = guesses
        self.row_columns = row_columns or self.uses_kernel or guesses > 0
        self.spare_columns = 0  # columns that programs need beyond those of all tokens
        if guesses and self.uses_kernel:
            raise ConfigError(f"lookup={guesses}: the kernel {cache_form!r} takes one token a step")
        # Parts of the rows: data-parallel parts, each cut into a micro-batch per stage.
        self.parts = layout.shard_count("batch") * layout.shard_count("layers")
        # The cache is one array of all layers, or an array per layer.
        self.stacked = self.uses_kernel or not compute.unroll_layers
        heads = "kv_heads" if copies == 1 else "heads"
        over = ("layers",) if self.stacked else ()
        held = self.block_sharding = layout.sharding(*over, "batch", heads)
        self.slot_layout = self._make_slot_layout()
        self.chunked_prefill = ChunkedPrefill(self)
        split: Any = layout.sharding("batch")
        whole: Any = layout.replicated
        # Outputs always have the same shardings, so that programs are not compiled again.
        slots = SlotMask(split, split, split, whole, split, split, self.parts)
        state = SlotState(cast(Any, held), slots, split)
        read = PrefilledPrompts(held, held, split, split, split, cast(Any, held))
        self._sharding, rest, both = state, (slots, split), (state, whole)
        self.row_continuation = RowContinuation(self, state)
        self._empty = jax.jit(self._zeros, static_argnums=0, out_shardings=state)
        self._prefill = jax.jit(self._prefill_program, static_argnums=0, out_shardings=read)
        self._first = jax.jit(self._first_tokens, static_argnums=0, out_shardings=(split, whole))
        self._insert_rows = jax.jit(
            self.slot_layout.insert_rows,
            static_argnums=0,
            donate_argnums=(1, 2),
            out_shardings=(*rest, split),
        )
        self._insert_kv = jax.jit(
            self.slot_layout.insert_kv, static_argnums=0, donate_argnums=1, out_shardings=held
        )
        self._decode = jax.jit(
            self._decoded, static_argnums=(0, 1), donate_argnums=3, out_shardings=both
        )
        self._stop = jax.jit(self._stopped, donate_argnums=0, out_shardings=state)
        self._select_rows = jax.jit(self.slot_layout.select_rows, out_shardings=rest)
        self._select_kv = jax.jit(self.slot_layout.select_kv, static_argnums=1, out_shardings=held)

    @property
    def uses_kernel(self) -> bool:
        """Whether a decode kernel reads the cache: only what each row has filled, so slots stay in
        place. Each row's tokens then begin in its own column 0."""
        return self.form in decode.TPU_KERNELS

    def loop_iterations(self, steps: Any) -> Any:
        """Iterations of ``decode``'s loop for this many tokens."""
        return steps

    @functools.cached_property
    def of_lasting_rows(self) -> "Engine":
        """The same engine with ``row_columns``."""
        if self.row_columns:
            return self
        return Engine(
            self.network, self.layout, self.compute, self.form, self.copies, int8=self.int8,
            row_columns=True,
        )  # fmt: skip

    @property
    def packs_prompts(self) -> bool:
        """Whether prompts may be prefilled packed, without padding: not if rotary positions depend
        on a sequence's length."""
        return not self.network.config.rope_depends_on_length

    @property
    def kv_dtype(self) -> Any:
        """Of keys and values; None: int8."""
        return None if self.int8 else self.compute.dtype

    # Called by schedulers

    def empty(self, size: SlotSizes, column: int = 0) -> SlotState:
        """A state of free slots, whose next token goes into ``column``."""
        return self._empty(size, place(np.int32(column), self.layout.replicated))

    def admit(
        self,
        sampling: SamplingParams,
        params: Weights,
        state: SlotState,
        new: Admission,
        blocks: CacheBlocks | None = None,
    ) -> tuple[SlotState, DecodedTokens]:
        """Prefill prompts, insert them into free slots and draw each sequence's first token.

        Args:
          sampling: of sequences without options of their own.
          params: in the generate layout.
          state: donated.
          new: what enters.
          blocks: the blocks that hold cached tokens of the prompts.

        Returns:
          the state, and a token of each new row.
        """
        samples = new.rows.size // new.groups.size
        counted = state.rows.counts is not None
        prompts, rows, drawn = self.prefill(sampling, params, new, samples, counted, blocks)
        return self.insert(state, prompts, rows, new.groups, new.rows), drawn

    def prefill(
        self,
        sampling: SamplingParams,
        params: Weights,
        new: Admission,
        samples: int = 1,
        counted: bool = False,
        blocks: CacheBlocks | None = None,
    ) -> tuple[PrefilledPrompts, RunningSequences, DecodedTokens]:
        """The first half of ``admit``. It needs no state, so others may decode meanwhile.

        Args:
          sampling, params, new, blocks: as in ``admit``; target groups and rows are ignored.
          samples: sequences of each prompt.
          counted: whether the state counts tokens.

        Returns:
          what ``insert`` takes, and a token of each new row.
        """
        split = self.layout.sharding("batch")
        most = new.limit if new.final_limit is None else new.final_limit
        new = dataclasses.replace(new, groups=None, rows=None, final_limit=most)
        new = place_all(new, split)
        # Only what the prefill program reads: sizes of the rest would compile it again.
        inputs = dataclasses.replace(
            new, keys=None, limit=None, options=None, text=None, bitmask=None
        )
        prompts = self._prefill((samples, counted), params, inputs, blocks)
        read = dataclasses.replace(prompts, k=None, v=None, response_kv=None)
        entering = dataclasses.replace(new, prompts=None, mask=None, cached=None, packed_size=0)
        rows, drawn = self._first(sampling, read, entering)
        return prompts, rows, DecodedTokens.of(drawn)

    def insert(
        self,
        state: SlotState,
        prompts: PrefilledPrompts,
        new: RunningSequences,
        groups: np.ndarray,
        rows: np.ndarray,
    ) -> SlotState:
        """The second half of ``admit``: insert prefilled prompts into free slots.

        Args:
          state: donated.
          prompts, new: of ``prefill``.
          groups, rows: as in ``Admission``.
        """
        split, cache = self.layout.sharding("batch"), state.cache
        of_groups, of_rows = place(groups, split), place(rows, split)
        own, resumed = cache.prompts_in_rows, prompts.response_kv
        columns = None if own else (_tokens_of(cache.prompt_k), _tokens_of(prompts.k))
        slots, running, edges = self._insert_rows(
            columns, state.slots, state.rows, prompts.tokens, new, of_groups, of_rows
        )

        def entered(name: str, some: Any, where: jax.Array) -> Any:
            """One array at a time: one program for all layers, whatever else the state has."""
            rows = not name.startswith("prompt")
            axis = cache.key_axis if name == "k" else cache_axis.ROWS

            def one(axis: int, scaled: bool, old: jax.Array, x: jax.Array) -> jax.Array:
                kind = rows, axis, scaled, resumed is not None
                return self._insert_kv(kind, old, x, where, edges)

            return int8_cache.map_arrays(one, getattr(cache, name), some, axis=axis)

        of_prompts = {"k": prompts.k, "v": prompts.v}
        if not own:
            of_prompts = {"prompt_k": prompts.k, "prompt_v": prompts.v}
        where = of_rows if own else of_groups
        parts = {name: entered(name, some, where) for name, some in of_prompts.items()}
        if resumed is not None:
            # For the kernel, rows lie by group.
            where = of_groups if self.uses_kernel else of_rows
            parts |= {name: entered(name, x, where) for name, x in zip("kv", resumed, strict=True)}
        return SlotState(dataclasses.replace(cache, **parts), slots, running)

    def decode(
        self,
        sampling: SamplingParams,
        params: Weights,
        state: SlotState,
        steps: int,
        most: int = STEPS,
        bitmask: np.ndarray | jax.Array | None = None,
        enough_live: int = 0,
        new: ContinuedRows | None = None,
    ) -> tuple[SlotState, DecodedTokens]:
        """Draw up to ``steps`` tokens for every running row, fewer if all finish.

        Args:
          sampling, params, state: as in ``admit``.
          steps: tokens, at most ``most``, and at most the columns that are left.
          most: columns of the returned tables.
          bitmask: of each row, as in ``Admission``, for every token that is drawn.
          enough_live: stop once no part has more running rows than this; a pipeline of several
            stages, which is full, goes on.
          new: tokens to append first to rows that have ended, which then run again and draw one
            token more than ``steps``. See ``RowContinuation``.
        """
        numbers = place(np.array([steps, enough_live], np.int32), self.layout.replicated)
        bits = None if bitmask is None else place(bitmask, self.layout.sharding("batch"))
        first = None
        if new is not None:
            state, first = self.row_continuation(sampling, params, state, new, bits)
        state, drawn = self._decode(sampling, most, params, state, numbers, bits)
        if first is None:
            return state, DecodedTokens.of(drawn)
        return state, DecodedTokens.of(first).followed_by(DecodedTokens.of(drawn))

    def share_prompts(
        self, state: SlotState, members: np.ndarray | None, row_place: np.ndarray | None
    ) -> SlotState:
        """The same state with other rows sharing prompts, as in
        ``hjax.kernels.decode.SlotMask``."""
        split = self.layout.sharding("batch")
        held = [None if x is None else place(x, split) for x in (members, row_place)]
        slots = dataclasses.replace(state.slots, members=held[0], place=held[1])
        return dataclasses.replace(state, slots=slots)

    def stop_rows(self, state: SlotState, rows: np.ndarray) -> SlotState:
        """The same state with more rows done; ``rows``: bool [rows]."""
        return self._stop(state, place(rows, self.layout.sharding("batch")))

    def move(
        self,
        state: SlotState,
        rows: np.ndarray | None = None,
        groups: np.ndarray | None = None,
        length: int = 0,
        first: int = 0,
    ) -> SlotState:
        """Select slots, in any order, and move columns: compaction and resizing.

        Args:
          state: donated.
          rows, groups: int32, which of them, numbers as in ``Admission``; None: all as they are.
            Call ``share_prompts`` afterwards.
          length: columns; 0: unchanged.
          first: the old column that becomes the first; negative: add this many before the old ones.
        """
        split = self.layout.sharding("batch")
        of_rows, of_groups = (None if x is None else place(x, split) for x in (rows, groups))
        at = place(np.int32(first), self.layout.replicated) if first else None
        cache = state.cache
        slots, running = self._select_rows(state.slots, state.rows, of_rows, of_groups, at)
        parts = {"prompt_k": cache.prompt_k, "prompt_v": cache.prompt_v}

        def of(held: Any, index: jax.Array | None, own: bool = False, keys: bool = False) -> Any:
            """One array at a time, so that at most one of them exists twice."""

            def one(axis: int, scaled: bool, x: jax.Array) -> jax.Array:
                to = axis if scaled or not keys else after
                columns = (axis, to, length) if own else (0, 0, 0)
                made = self._select_kv(x, columns, index, at if own else None)
                x.delete()
                return made

            axis = cache.key_axis if keys else cache_axis.ROWS
            return int8_cache.map_arrays(one, held, axis=axis)

        after = decode.key_axis(self.form, length or _tokens_of(cache.v))

        if groups is not None:
            parts = {name: of(held, of_groups) for name, held in parts.items()}
        if rows is not None or length or first:
            parts["k"] = of(cache.k, of_rows, True, True)
            parts["v"] = of(cache.v, of_rows, True)
        return SlotState(dataclasses.replace(cache, **parts), slots, running)

    def generate_whole(
        self,
        config: GenerationConfig,
        params: Weights,
        prompts: jax.Array,
        mask: jax.Array,
        keys: jax.Array,
    ) -> DecodeState:
        """Inside jit: all samples of each prompt from prefill to end, in one program.

        Args:
          config: as in ``Generator.generate``.
          params: as in ``admit``.
          prompts, mask: as in ``Admission``.
          keys: uint32 [prompts * samples, n].

        Returns:
          the tables [prompts * samples, limit], and ``done`` for rows that drew a stop token.
        """
        sampling = config.sampling
        limits = jnp.full(keys.shape[0], config.max_new_tokens, jnp.int32)
        new = Admission(prompts, mask, None, None, keys, limits, final_limit=limits)
        read = self._prefill_program((config.samples, sampling.penalised), params, new, None)
        running, drawn = self._first_tokens(sampling, read, new, config.max_new_tokens)
        drawn = self._decode_rest(config, params, mask, read, running, drawn)
        ends = drawn["tokens"][:, :, None] == jnp.asarray(sampling.stop, jnp.int32)
        return drawn | {"done": jnp.any(ends & drawn["mask"][:, :, None], axis=(1, 2))}

    def _decode_rest(
        self,
        config: GenerationConfig,
        params: Weights,
        mask: jax.Array,
        read: PrefilledPrompts,
        running: RunningSequences,
        drawn: DecodeState,
    ) -> DecodeState:
        """Tables with the tokens after the first."""
        length, split = config.max_new_tokens, self.layout.constrain
        kept = (read.k, read.v) if self.stacked else tuple(zip(read.k, read.v, strict=True))
        cache = KVCache.create(kept, config.samples, length, self.form)
        cache = dataclasses.replace(cache, copies=self.copies)  # prefill made them
        over = (None,) if self.stacked else ()
        heads = "kv_heads" if self.copies == 1 else "heads"
        cache = jax.tree.map(lambda x: split(x, *over, "batch", heads), cache)
        begins, ends = decode.mask_bounds(mask)
        model = self.network.bind(params)
        layers = model.unstack() if self.compute.unroll_layers else None
        rotary = model.rotary(read.tokens + length, tables=mask.shape[1] + length)
        forward = DecodeStep(self, config.sampling, length)

        def step(carry: Any) -> Any:
            at, cache, running, drawn = carry
            sees = Decode(decode.CacheMask(begins, ends, at - 1), self.layout, length / 2)
            tokens = forward.inputs(running)
            hidden, cache, _ = model(
                tokens, forward.positions(running), sees, cache, self.compute, layers, rotary
            )
            running, drawn = forward.advance(
                running, drawn, forward.logits(model, hidden), tokens, running.drawn, at, None
            )
            return at + 1, cache, running, drawn

        def unfinished(carry: Any) -> jax.Array:
            more = carry[0] < length
            return more & ~jnp.all(carry[2].done) if config.sampling.stop else more

        begin = jnp.int32(1), cache, running, drawn
        made: DecodeState = jax.lax.while_loop(unfinished, step, begin)[3]
        return made

    # Described without running

    def abstract(self, size: SlotSizes) -> SlotState:
        """A state as jax.ShapeDtypeStruct with shardings."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        made = jax.eval_shape(functools.partial(self._zeros, size), number)

        def of(sharding: Any, some: Any) -> Any:  # one may stand for many arrays
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), some
            )

        return cast(SlotState, jax.tree.map(of, self._sharding, made))

    def trace_prefill(
        self,
        params: Weights,
        prompts: tuple[int, int],
        samples: int,
        known: tuple[int, int] = (0, 0),
    ) -> Any:
        """``prefill`` of abstract parameters, without the first tokens: its jax.stages.Traced.

        Args:
          params: jax.ShapeDtypeStruct with shardings, in the generate layout.
          prompts: how many, and tokens of each.
          samples: of each.
          known: columns for whole prompts, and number of blocks; 0: nothing is cached.
        """
        split = self.layout.sharding("batch")
        groups, (columns, count) = prompts[0], known

        def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

        held, blocks = None, None
        if columns:
            there = array(groups, columns, dtype=jnp.bool_)
            numbers = array(groups, columns // BLOCK)
            held = CachedPrompts(array(groups, columns), there, numbers, array(groups))
            blocks = self.chunked_prefill.abstract(count)
        tokens, mask = array(*prompts), array(*prompts, dtype=jnp.bool_)
        new = Admission(
            tokens, mask, None, None, None, None, cached=held, final_limit=array(groups * samples)
        )
        return self._prefill.trace((samples, False), params, new, blocks)

    def trace_decode(
        self, sampling: SamplingParams, params: Weights, size: SlotSizes, most: int
    ) -> Any:
        """``decode`` of abstract parameters and states: its jax.stages.Traced."""
        numbers = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=self.layout.replicated)
        return self._decode.trace(sampling, most, params, self.abstract(size), numbers, None)

    # Programs

    def _make_slot_layout(self) -> SlotLayout:
        return SlotLayout(self)

    def _zeros(self, size: SlotSizes, column: jax.Array) -> SlotState:
        config, kept = self.network.config, self.kv_dtype

        def prompts(count: int) -> Any:
            # The kernel always has a prompt, which may be empty.
            prompt = max(size.prompt, 1) if self.uses_kernel else size.prompt
            over = () if self.compute.unroll_layers else (config.layers,)
            x = int8_cache.zeros((*over, count, config.kv_heads, prompt, config.head_dim), kept)
            return (x, x) if over else ((x, x),) * config.layers

        samples = size.samples
        create = functools.partial(
            KVCache.create, length=size.length, form=self.form, copies=self.copies
        )
        cache = create(prompts(size.groups), samples)
        if samples > 1 and not self.uses_kernel:  # rows are not grouped
            own = create(prompts(size.rows), 1)
            cache = dataclasses.replace(cache, k=own.k, v=own.v)
        cache = dataclasses.replace(cache, prompts_in_rows=not size.prompt)
        numbers, none = jnp.zeros(size.rows, jnp.int32), jnp.zeros(size.groups, jnp.int32)
        slots = SlotMask(none, none, numbers, column, parts=self.parts)
        if samples > 1 and not self.uses_kernel:
            members = jnp.zeros((size.groups, samples), jnp.int32)
            slots = dataclasses.replace(slots, members=members, place=numbers)
        keys = jnp.zeros((size.rows, jax.random.key_data(jax.random.key(0)).size), jnp.uint32)
        done = jnp.ones(size.rows, bool)
        options = counts = None
        if size.sampling_sizes is not None:
            options = RowSampling.of([None] * size.rows, size.sampling_sizes)
            options = jax.tree.map(jnp.asarray, options)
        if size.counted:
            table = jnp.zeros((size.rows, config.vocab_size), jnp.int32)
            counts = TokenCounts(table > 0, table)
        text = jnp.zeros((size.rows, size.text), jnp.int32) if size.text else None
        running = RunningSequences(
            numbers, numbers, numbers, numbers, numbers, done, keys, options, counts, text
        )
        return SlotState(cache, slots, running)

    def _prefill_program(
        self, rows: tuple[int, bool], params: Weights, new: Admission, blocks: CacheBlocks | None
    ) -> PrefilledPrompts:
        """``rows``: samples of each prompt, and whether their tokens are counted."""
        split, (samples, counted) = self.layout.constrain, rows
        known, resumed, flat = new.cached, new.resumed, new.packed_size
        prompts, mask = split(new.prompts, "batch"), split(new.mask, "batch")
        whole, there, copies, at, read = prompts, mask, self.copies, None, prompts
        attention: Any = Causal(mask, keep=True, form=self.compute.form, int8=self.int8)
        if known is not None:
            whole, there, copies = split(known.tokens, "batch"), split(known.mask, "batch"), 1
            attention = AppendAttention(known.blocks, known.count, mask, self.copies)
        elif resumed is not None:
            attention = SharedPrompt(mask, samples, self.compute.form, True, self.int8)
            answers = resumed.tokens.reshape(prompts.shape[0], -1)
            read = split(jnp.concatenate([prompts, answers], axis=1), "batch")
            # The column of each response's last token.
            first = prompts.shape[1] + resumed.tokens.shape[1] * jnp.arange(samples)
            at = first + resumed.count.reshape(-1, samples) - 1
        if flat:
            attention = PackedPrefill(attention, mask, flat, self.parts)
            read = split(attention.pack(read), "batch")
        tokens = jnp.sum(there, axis=-1, dtype=jnp.int32)
        lengths = jnp.max(new.final_limit.reshape(-1, samples), axis=-1) + tokens
        hidden, kept = self.prefill_states(params, read, mask, attention, lengths, blocks, at)
        k, v = keys_and_values(kept, self.stacked)
        if copies > 1:
            k, v = jax.tree.map(lambda x: jnp.repeat(x, copies, axis=-3), (k, v))
        own = None
        if resumed is not None:
            cut = functools.partial(split_resumed, prompts.shape[1], samples)
            own = tuple(int8_cache.map_arrays(functools.partial(cut, 1), held) for held in (k, v))
            k, v = (int8_cache.map_arrays(functools.partial(cut, 0), held) for held in (k, v))
        counts = None
        if counted:
            whole, there = (jnp.repeat(x, samples, axis=0) for x in (whole, there))
            answers = answers_mask = None
            if resumed is not None:
                answers = resumed.tokens
                answers_mask = jnp.arange(answers.shape[1]) < resumed.count[:, None]
            vocab = self.network.config.vocab_size
            counts = TokenCounts.of(whole, there, vocab, answers, answers_mask, self.layout)
        model = self.network.bind(params)
        logits = split(model.logits(hidden.reshape(-1, hidden.shape[-1])), "batch", "vocab")
        return PrefilledPrompts(k, v, tokens, logits, counts, cast(Any, own))

    def _first_tokens(
        self, sampling: SamplingParams, read: PrefilledPrompts, new: Admission, most: int = 1
    ) -> tuple[RunningSequences, DecodeState]:
        """Sequences with their first tokens, in tables of ``most`` columns."""
        entering, forward = new.limit.shape[0], DecodeStep(self, sampling)
        logits = jnp.repeat(read.logits, entering // read.logits.shape[0], axis=0)
        logits = self.layout.constrain(logits, "batch", "vocab")
        zeros = jnp.zeros(entering, jnp.int32)
        before = zeros if new.resumed is None else new.resumed.count
        tokens = jnp.repeat(read.tokens, entering // read.tokens.shape[0])
        rows = RunningSequences(
            tokens, before, new.limit, new.final_limit, zeros, zeros > 0, new.keys, new.options,
            read.counts, new.text,
        )  # fmt: skip
        drawn = forward.empty_tables(rows, most)
        drawn, counts = forward.sample(drawn, logits, rows, jnp.int32(0), new.bitmask)
        last, done = drawn["last"], drawn["done"] | (new.limit <= before + 1)
        text = append_token(new.text, tokens + before, last, True)
        rows = dataclasses.replace(
            rows, drawn=before + 1, last_token=last, done=done, counts=counts, text=text
        )
        return rows, drawn | {"done": done}

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
        """Inside jit: hidden states of prompts, and keys and values as ``attention`` keeps them.

        Args:
          params: of the model.
          tokens: int32 [groups, length], prompts, with resumed responses after them; or [parts,
            size] of a ``PackedPrefill``.
          mask: bool [groups, prompt], of the prompts.
          attention: what tokens attend to.
          lengths: int32 [groups], tokens that each sequence will have.
          blocks: of an ``AppendAttention``.
          at: int32 [groups, n], columns whose hidden states are returned; None: the last.

        Returns:
          [groups, n, embed], and the keys and values.
        """
        model = self.network.bind(params)
        positions, columns = self._positions(tokens, mask, attention)
        hidden, _, kept = model(
            tokens,
            positions,
            attention,
            blocks,
            compute=self.compute,
            layers=model.unstack() if self.compute.unroll_layers else None,
            rotary=model.rotary(lengths, tables=columns),
        )
        if isinstance(attention, PackedPrefill):
            return attention.last_tokens(hidden), kept
        if at is None:
            return hidden[:, -1:], kept
        return jnp.take_along_axis(hidden, at[:, :, None], axis=1), kept

    @staticmethod
    def _positions(
        tokens: jax.Array, mask: jax.Array, attention: Attention
    ) -> tuple[jax.Array, int]:
        """Positions of ``prefill_states``'s tokens, and an upper bound of them."""
        if isinstance(attention, PackedPrefill):
            positions, columns = Engine._positions(mask, mask, attention.inner)
            return attention.pack(positions), columns
        columns = tokens.shape[1]
        if isinstance(attention, AppendAttention):
            return attention.positions, attention.block_table.shape[1] * BLOCK
        if isinstance(attention, SharedPrompt):
            return attention.positions((columns - mask.shape[1]) // attention.samples), columns
        return token_positions(mask), columns

    def _pass(self, sampling: SamplingParams, state: SlotState) -> DecodeStep:
        return DecodeStep(self, sampling, _tokens_of(state.cache.v), state.cache.prompts_in_rows)

    def _decoded(
        self,
        sampling: SamplingParams,
        most: int,
        params: Weights,
        state: SlotState,
        numbers: jax.Array,
        bitmask: jax.Array | None,
    ) -> tuple[SlotState, DecodeState]:
        """``numbers``: int32 [2], ``steps`` and ``enough_live`` of ``decode``."""
        steps, enough_live = numbers
        model, forward = self.network.bind(params), self._pass(sampling, state)
        layers = model.unstack() if self.compute.unroll_layers else None
        most_tokens = state.rows.prompt_lengths + state.rows.final_limit
        rotary = model.rotary(most_tokens, tables=_tokens_of(state.cache.prompt_k) + forward.length)
        before = state.rows.drawn

        def step(carry: Any) -> Any:
            taken, state, drawn = carry
            slots, running = state.slots, state.rows
            tokens, sees = forward.inputs(running), forward.attention(slots, running)
            hidden, cache, _ = model(
                tokens, forward.positions(running), sees, state.cache, self.compute, layers, rotary
            )
            logits = forward.logits(model, hidden)
            running, drawn = forward.advance(running, drawn, logits, tokens, before, taken, bitmask)
            slots = dataclasses.replace(slots, column=slots.column + 1)
            return taken + 1, SlotState(cache, slots, running), drawn

        def unfinished(carry: Any) -> jax.Array:
            taken, state, _ = carry
            many = jnp.max(jnp.sum(~state.rows.done.reshape(self.parts, -1), axis=1)) > enough_live
            return (taken < steps) & forward.can_continue(state.rows, before, most, many)

        begin = jnp.int32(0), state, forward.empty_tables(state.rows, most)
        taken, state, drawn = jax.lax.while_loop(unfinished, step, begin)
        return state, drawn | {"steps": taken, "done": state.rows.done}

    @staticmethod
    def _stopped(state: SlotState, rows: jax.Array) -> SlotState:
        running = dataclasses.replace(state.rows, done=state.rows.done | rows)
        return dataclasses.replace(state, rows=running)


def _tokens_of(held: Any) -> int:
    """Tokens (columns) of a cache's array, or of its layers' arrays."""
    return int(jax.tree.leaves(held)[0].shape[-2])
