"""Generation: prompts are prefilled once per group, then decoded in one program or by slots.

One compiled loop generates responses that are short or of one length. Responses that end at
different times, or come in parts, run by the engine's slots (continuous batching,
``hjax.rollout.scheduler``). What a sequence draws follows from its number, not from its batch.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError
from hjax.kernels import decode
from hjax.kernels.int8_cache import AUTO, CACHE_DTYPES, INT8
from hjax.models.compute import Compute
from hjax.models.parameters import (
    Layered,
    Network,
    Params,
    Weights,
    decoding_memory_orders,
    in_memory_orders,
    memory_order,
    unstack_layers,
    unstack_layers_abstract,
)
from hjax.rollout.bucketing import MIN_COLUMNS
from hjax.rollout.decode_step import response_tables
from hjax.rollout.engine import Engine
from hjax.rollout.pipelined_engine import PipelinedEngine
from hjax.rollout.rollout_job import (
    GenerationConfig,
    OnPromptDone,
    ResumedResponses,
    RolloutJob,
    StopCheck,
)
from hjax.rollout.sampling import sequence_keys
from hjax.rollout.scheduler import RolloutScheduler
from hjax.sharding.global_arrays import place, to_numpy
from hjax.sharding.layout import Layout
from hjax.xla.abstract_program import AbstractProgram

Rollout = dict[str, jax.Array]


def bucket_length(length: int, limit: int, multiple: int = 64) -> int:
    """``length`` rounded up to a multiple, at most ``limit``: few shapes, few programs."""
    return min(-(-max(length, 1) // multiple) * multiple, limit)


class Generator:
    """Generation programs of one model under one layout.

    Args:
      network: the model.
      layout: the generate layout; prompts are split over its batch axes.
      compute: dtype and loop form of the forward; its kernels become those of the layout's devices.
      cache_form: of the KV cache, see ``hjax.kernels.decode``; None: that of the devices.
      cache_dtype: one of ``CACHE_DTYPES``.

    Raises:
      ConfigError: another cache_dtype.
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
        self.cache_form = cache_form or decode.choose_form(device, head_dim, compute.forms)
        if self._pipelined and self.cache_form != decode.TILES:
            self.cache_form = decode.ROWS  # kernels are split over all axes, stages are not
        if self.cache_form == decode.GPU_KERNEL and not self._heads_divide:
            self.cache_form = decode.ROWS  # the compiler then places the heads
        # A scan copies each layer's weights and cache for every token on a GPU.
        unroll = compute.unroll_layers or self.cache_form in decode.GPU_FORMS
        self.compute = dataclasses.replace(compute.for_layout(layout), unroll_layers=unroll)
        self._programs: dict[GenerationConfig, Any] = {}
        self._engines: dict[int, Engine] = {}
        self._compiled: set[Any] = set()  # keys of schedules whose programs are compiled
        self._keys = jax.jit(
            lambda numbers, rows: jax.random.key_data(sequence_keys(numbers[0], numbers[1], rows)),
            out_shardings=layout.replicated,
        )

    @property
    def kv_dtype(self) -> Any:
        """Of keys and values; None: int8."""
        return None if self.int8 else self.compute.dtype

    @property
    def _copies(self) -> int:
        """Of each key-value head in the kernel's cache: ``KVCache.copies``."""
        if self.cache_form not in decode.TPU_KERNELS + decode.GPU_KERNELS:
            return 1
        return max(1, self.layout.shard_count("heads") // self.network.config.kv_heads)

    @property
    def _heads_divide(self) -> bool:
        """Whether each device has whole key-value heads, or copies, of its own."""
        held = self.network.config.kv_heads * self._copies
        return held % self.layout.shard_count("heads") == 0

    @property
    def _pipelined(self) -> bool:
        return self.layout.shard_count("layers") > 1

    @property
    def multiple(self) -> int:
        """What the number of prompts must divide by: data-parallel parts times stages."""
        return self.layout.shard_count("batch") * self.layout.shard_count("layers")

    @property
    def unstacks_layers(self) -> bool:
        """Whether programs read one array per layer (``Layered``). They unroll layers, and a GPU's
        compiler would copy each layer out of a stacked array in every program."""
        unrolled = self.compute.unroll_layers and not self._pipelined
        return unrolled and self.cache_form in decode.GPU_FORMS

    @property
    def reorders_memory(self) -> bool:
        """Whether decoding reads weights in another memory layout than training: a TPU's compiler
        would change it in every program."""
        return self.cache_form == decode.TPU_KERNEL

    def decoding_params(self, params: Weights, given_up: Params | None = None) -> Any:
        """Parameters as decoding reads them fastest: per layer, in another memory order, or as is.

        Args:
          params: in the generate layout.
          given_up: as in ``hjax.models.parameters.unstack_layers``.
        """
        if isinstance(params, Layered):
            return params
        if self.reorders_memory:
            return in_memory_orders(params, self._memory_orders, given_up)
        if not self.unstacks_layers:
            return params
        if isinstance(jax.tree.leaves(params)[0], jax.ShapeDtypeStruct):
            return unstack_layers_abstract(params)
        return unstack_layers(params, self.network.shardings(self.layout), given_up)

    def beside(self, params: Params, given_up: Params) -> list[jax.ShapeDtypeStruct]:
        """Of abstract parameters, those that stay in memory beside copies by
        ``decoding_params``."""
        if self.unstacks_layers:
            params, given_up = params["layers"], given_up["layers"]
            made = jax.tree.map(lambda _: True, params)
        elif self.reorders_memory:
            orders = self._memory_orders
            made = jax.tree.map(lambda x, order: memory_order(x) != order, params, orders)
        else:
            return []
        each = zip(*map(jax.tree.leaves, (params, made, given_up)), strict=True)
        return [x for x, anew, gone in each if anew and not gone]

    @functools.cached_property
    def _memory_orders(self) -> Params:
        return decoding_memory_orders(self.network.axes, self.layout.shard_count("heads") > 1)

    def generate(
        self,
        params: Weights,
        prompts: jax.Array | np.ndarray,
        prompt_mask: jax.Array | np.ndarray,
        sequence: jax.Array | np.ndarray,
        config: GenerationConfig,
        *,
        seed: int,
        step: int = 0,
        on_prompt_done: OnPromptDone | None = None,
        stop_check: StopCheck | None = None,
    ) -> Rollout:
        """Sample responses.

        Args:
          params: in the generate layout, or of ``decoding_params``, which is else called here.
          prompts: int32 [prompts, prompt_length], padded on the left.
          prompt_mask: bool, like ``prompts``.
          sequence: int32 [prompts * (samples + extra_samples)]; it seeds each row's draws.
          config: how many responses, how long, and how they are drawn; row ``p * samples + s`` is
            sample s of prompt p. With an ``end``, ``truncated`` if a response has not ended.
          seed: of the run.
          step: folded into the seed.
          on_prompt_done: called with a prompt's number and its responses, token ids, as soon as the
            last of them has ended; others are decoded meanwhile.
          stop_check: used by slots. Given a sequence's number among all that are drawn and its new
            tokens, it returns how many of these belong to it if its text ends among them, else
            None. In one program every response is drawn to its end.

        Returns:
          ``prompts`` and ``prompt_mask`` once per row, ``responses`` int32 [rows, max_new_tokens]
          (0 after the end), ``response_mask`` bool, ``logprobs`` float32 of the distribution
          sampled, ``truncated`` bool [rows]; where they differ from ``logprobs`` also
          ``policy_logprobs`` (tempered, no other option applied) and ``untempered_logprobs``. With
          ``lookup`` also ``guessed`` and ``guessed_right``, int32 [rows]: draft tokens of each, and
          accepted ones. By slots, if prompts may be long (``hjax.rollout.prefix_sharing``), also
          ``prompt_known``, int32 [rows]: tokens of the prompt that another's prefill gave.

        Raises:
          ConfigError: a seed beyond 32 bits, or prompts that do not divide over the layout.
        """
        if not 0 <= seed < 2**32:
            raise ConfigError(f"seed={seed}: 0 to {2**32 - 1}")
        if prompts.shape[0] % self.multiple:
            raise ConfigError(
                f"{prompts.shape[0]} prompts do not divide over {self.layout.describe()}; "
                f"use a multiple of {self.multiple}"
            )
        numbers = self._numbers(seed, step)
        if on_prompt_done is not None or self._needs_slots(config, prompts.shape[0]):
            job = self._job(prompts, prompt_mask, sequence, numbers, config)
            return self._run_slots(params, job, on_prompt_done, stop_check)
        params = self.decoding_params(params)
        return self._program(config)(params, prompts, prompt_mask, sequence, numbers)

    def _needs_slots(self, config: GenerationConfig, prompts: int) -> bool:
        """Whether rows enter and leave while others decode; else all run in one program.

        One program is fastest if responses are equally long, or short, and on TPUs, whose kernel
        reads only what is filled.
        """
        stop_check = bool(config.sampling.stop) and config.max_new_tokens > MIN_COLUMNS
        needed = config.lookup > 0 or config.extra_samples > 0 or config.pause_after is not None
        needed = needed or 0 < config.slots < prompts * config.samples
        return needed or (stop_check and not self.engine.uses_kernel)

    @property
    def engine(self) -> Engine:
        """The engine for slots, without draft tokens."""
        return self.engine_for(0)

    def engine_for(self, lookup: int) -> Engine:
        """The engine with this many draft tokens, which the kernel does not support."""
        if lookup not in self._engines:
            compute, form, copies = self.compute, self.cache_form, self._copies
            if lookup and form in decode.TPU_KERNELS:
                form, copies = decode.ROWS, 1
                compute = dataclasses.replace(compute, unroll_layers=True)
            kind = PipelinedEngine if self._pipelined else Engine
            self._engines[lookup] = kind(
                self.network, self.layout, compute, cache_form=form,
                copies=copies, guesses=lookup, int8=self.int8,
            )  # fmt: skip
        return self._engines[lookup]

    def _job(
        self,
        prompts: Any,
        prompt_mask: Any,
        sequence: Any,
        seed_and_step: jax.Array,
        config: GenerationConfig,
    ) -> RolloutJob:
        sequence = place(sequence, self.layout.sharding("batch"))
        keys = to_numpy(self._keys(seed_and_step, sequence))
        return RolloutJob(to_numpy(prompts), to_numpy(prompt_mask), keys, config)

    def _run_slots(
        self,
        params: Weights,
        job: RolloutJob,
        on_prompt_done: OnPromptDone | None = None,
        stop_check: StopCheck | None = None,
    ) -> Rollout:
        params, config = self.decoding_params(params), job.config
        schedule = RolloutScheduler(self.engine_for(config.lookup), job, stop_check, on_prompt_done)
        known = config.sampling, config.lookup, stop_check is None, schedule.program_key
        if known not in self._compiled:
            schedule.precompile(params)
            self._compiled.add(known)
        made = schedule.run(params)
        self.counts = schedule.counts
        # A response without a stop token was truncated.
        length = made["response_mask"].sum(axis=1)
        last = made["responses"][np.arange(len(length)), length - 1]
        made["truncated"] = ~np.isin(last, config.sampling.stop)
        each = {"prompts": job.prompts, "prompt_mask": job.mask}
        if schedule.sharing.active:
            each["prompt_known"] = schedule.sharing.cached_tokens
        made |= {name: np.repeat(x, config.samples, axis=0) for name, x in each.items()}
        split = self.layout.sharding("batch")
        return {name: place(x, split) for name, x in made.items()}

    def resume(
        self,
        params: Weights,
        rollout: Rollout,
        sequence: jax.Array | np.ndarray,
        config: GenerationConfig,
        *,
        seed: int,
        step: int = 0,
        start: int,
        on_prompt_done: OnPromptDone | None = None,
    ) -> Rollout:
        """Continue responses that ``generate`` left unfinished, maybe with other parameters.

        Prompts and unfinished responses are prefilled again as they enter their slots. Draws follow
        from the position, so with the same parameters the tokens are those of one call.

        Args:
          params, sequence, seed, step: as in ``generate``.
          rollout: of ``generate``, with ``pause_after``; rows whose ``truncated`` is false stay.
          config: as in ``generate``, without ``extra_samples``; ``pause_after``: the next pause.
          start: tokens after which it paused, at least 1.
          on_prompt_done: as in ``generate``, for the prompts with unfinished responses.

        Raises:
          ConfigError: ``start`` is not where it paused.
        """
        host = {name: to_numpy(x) for name, x in rollout.items()}
        prompts, mask = (host.pop(name)[:: config.samples] for name in ("prompts", "prompt_mask"))
        resumed = ResumedResponses(start, ~host.pop("truncated"), host)
        lengths = host["response_mask"].sum(axis=1)
        if start < 1 or (lengths[~resumed.ended] != start).any():
            raise ConfigError(f"start={start}: not the tokens after which responses were paused")
        job = self._job(prompts, mask, sequence, self._numbers(seed, step), config)
        return self._run_slots(params, dataclasses.replace(job, resumed=resumed), on_prompt_done)

    def _numbers(self, seed: int, step: int) -> jax.Array:
        return place(np.asarray([seed, step], np.uint32), self.layout.replicated)

    def programs(
        self, call: str, params: Weights, prompts: int, prompt_length: int, config: GenerationConfig
    ) -> Iterator[AbstractProgram]:
        """The programs that ``generate`` runs, to count their cost without running them.

        Args:
          call: its name.
          params: jax.ShapeDtypeStruct with shardings, in the generate layout.
          prompts: how many.
          prompt_length: tokens of each.
          config: as in ``generate``; with an ``end`` responses are paused and resumed.
        """
        params = self.decoding_params(params)
        if not self._needs_slots(config, prompts):
            # The first token is drawn from the prompt, before the loop.
            trips = self.engine.loop_iterations(config.max_new_tokens - 1)
            trace = functools.partial(self.trace, params, prompts, prompt_length, config)
            yield AbstractProgram(call, trace, trips)
            return
        tokens = np.zeros((prompts, prompt_length), np.int32)
        keys = np.zeros((prompts * (config.samples + config.extra_samples), 2), np.uint32)
        job = RolloutJob(tokens, tokens > 0, keys, config)
        yield from RolloutScheduler(self.engine_for(config.lookup), job).programs(call, params)

    def trace(self, params: Any, prompts: int, prompt_length: int, config: GenerationConfig) -> Any:
        """The program traced for abstract ``params``, to count its cost without running it."""
        split, whole = self.layout.sharding("batch"), self.layout.replicated
        tokens = (prompts, prompt_length)
        return self._program(config).trace(
            self.decoding_params(params),
            jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=split),
            jax.ShapeDtypeStruct(tokens, jnp.bool_, sharding=split),
            jax.ShapeDtypeStruct((prompts * config.samples,), jnp.int32, sharding=split),
            jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=whole),
        )

    def _program(self, config: GenerationConfig) -> Any:
        shape = GenerationConfig(config.max_new_tokens, config.samples, config.sampling)
        if shape not in self._programs:

            def run(*arguments: Any) -> Rollout:
                return self._run(shape, *arguments)

            run.__name__ = "generate_greedy" if shape.sampling.greedy else "generate"
            self._programs[shape] = jax.jit(run)
        return self._programs[shape]

    def _run(
        self,
        config: GenerationConfig,
        params: Weights,
        prompts: jax.Array,
        prompt_mask: jax.Array,
        sequence: jax.Array,
        seed_and_step: jax.Array,
    ) -> Rollout:
        split = self.layout.constrain
        prompts, prompt_mask = split(prompts, "batch"), split(prompt_mask, "batch")
        keys = sequence_keys(seed_and_step[0], seed_and_step[1], split(sequence, "batch"))
        keys = jax.random.key_data(keys)
        drawn = self.engine.generate_whole(config, params, prompts, prompt_mask, keys)
        rollout = {
            "prompts": jnp.repeat(prompts, config.samples, axis=0),
            "prompt_mask": jnp.repeat(prompt_mask, config.samples, axis=0),
            **response_tables(drawn),
        }
        return jax.tree.map(lambda x: split(x, "batch"), rollout)
