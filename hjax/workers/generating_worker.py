"""Generation (rollout) as a call on a worker: the actor, or a rollout worker in its place."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.batches import REPEATED, repeat_columns, response_lengths, response_places
from hjax.environments.episode import COHORTS, DrawnTurn, TurnRequest
from hjax.kernels.int8_cache import element_bytes
from hjax.models.parameters import Params
from hjax.rewards.concurrent_rewards import ConcurrentScorer, PendingReward, PromptResponses
from hjax.rollout.generator import Generator, bucket_length
from hjax.rollout.prompt_encoding import StopConditions, stop_string_check
from hjax.rollout.rollout_job import GenerationConfig, OnPromptDone, StopCheck
from hjax.rollout.turn_generator import TurnGenerator
from hjax.sharding.global_arrays import place, to_numpy
from hjax.sharding.protocols import PROMPT_ID, protocol
from hjax.workers.model import ModelWorker
from hjax.workers.parameter_worker import abstract
from hjax.workers.worker import WorkerContext
from hjax.xla.abstract_program import AbstractProgram

# Entries that generation reads: token ids, and columns that come back once per row.
PROMPT_KEYS = ("prompts", "prompt_mask", "step", "first", *REPEATED, "prompt_text")
# Batch entry: rewards computed during generation, by role, one per row.
PENDING_REWARDS = "judged"


class GeneratingWorker(ModelWorker):
    """A worker with a language model that generates responses to prompts."""

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        self.generator = Generator(
            self.network.base, self.layouts.generate, context.compute,
            cache_dtype=context.cache_dtype,
        )  # fmt: skip
        self._prompt_count = 0  # prompts so far, for prompt_id
        self._turns: TurnGenerator | None = None
        self._turn_weights = contextlib.ExitStack()  # holds them between turns
        self._stop = StopConditions(
            context.stop_strings, context.tokenizer, context.sampling.min_tokens
        )
        self._scorers = {
            role: ConcurrentScorer(function) for role, function in context.reward_functions.items()
        }

    def generation_config(
        self, greedy: bool = False, samples: int | None = None, end: int | None = None
    ) -> GenerationConfig:
        """The generator's settings; arguments are those of ``generate_tokens``."""
        context, sampling = self.context, self.context.sampling
        return GenerationConfig(
            context.max_response_length,
            samples=1 if greedy else samples or context.samples,
            sampling=dataclasses.replace(sampling, temperature=0.0) if greedy else sampling,
            slots=context.slots,
            lookup=context.speculative_tokens,
            extra_samples=0 if greedy else context.extra_samples,
            pause_after=end,
        )

    @property
    def cache_element_bytes(self) -> float:
        """Bytes per element of the KV cache, its share of a quantization scale included."""
        return element_bytes(self.generator.kv_dtype, self.network.config.head_dim)

    @contextlib.contextmanager
    def generation_weights(self) -> Iterator[Any]:
        """Context manager: the parameters in the layout and dtypes of generation."""
        yield self.params

    @protocol("3D_ALL_MICRO_DP", phase="generate", reads=PROMPT_KEYS)
    def generate_sequences(
        self, prompts: Mapping[str, Any], greedy: bool = False, samples: int | None = None
    ) -> dict[str, Any]:
        """Generate responses.

        Args:
          prompts: ``prompts`` int32 [prompts, prompt_length] padded on the left, ``prompt_mask``,
            ``step``, ``first`` (number of sequences drawn for the step before; 0 if absent).
            ``columns``, ``choice`` and ``prompt_text`` come back once per row.
          greedy: one response per prompt, of the most likely tokens.
          samples: responses per prompt, if not the configured number.

        Returns:
          the batch: rows = prompts x samples, see docs/design.md.
        """
        return self.with_text(self.generate_tokens(prompts, greedy, samples))

    def generate_tokens(
        self, prompts: Mapping[str, Any], greedy: bool, samples: int | None, end: int | None = None
    ) -> dict[str, Any]:
        """``generate_sequences`` without the text of the responses.

        Args:
          prompts, greedy, samples: as there.
          end: tokens after which to pause (partial rollouts); arrays then have the full response
            length. None: run to the end, and trim the arrays.
        """
        context, config = self.context, self.generation_config(greedy, samples, end)
        count = config.samples
        prompt_count = prompts["prompts"].shape[0]
        rows = prompt_count * count
        # Unique per call: the same prompt in another call gets another id.
        ids = np.arange(self._prompt_count, self._prompt_count + prompt_count, dtype=np.int64)
        self._prompt_count += prompt_count
        pending = {role: [PendingReward()] * rows for role in self._scorers}
        stop_check = None
        if end is None:
            stop_check = self._stop_ends(prompts, count + config.extra_samples)
        with self.generation_weights() as params:
            rollout: dict[str, Any] = self.generator.generate(
                params,
                prompts["prompts"],
                prompts["prompt_mask"],
                self.sequence_numbers(
                    rows + prompt_count * config.extra_samples, prompts.get("first", 0)
                ),
                config,
                seed=context.seed,
                step=prompts.get("step", 0),
                on_prompt_done=self.reward_callback(prompts, pending),
                stop_check=stop_check,
            )
            # Waits for the responses, so the cache is freed before training's weights come back.
            rollout = self.cut_at_stop_strings(rollout) if end is None else rollout
        rollout[PROMPT_ID] = np.repeat(ids, count)
        rollout |= repeat_columns(prompts, [i for i in range(prompt_count) for _ in range(count)])
        if pending:
            rollout[PENDING_REWARDS] = pending
        if texts := prompts.get("prompt_text"):
            rollout["prompt_text"] = [text for text in texts for _ in range(count)]
        return rollout

    @protocol("ALL_TO_ALL", phase="generate")
    def begin_turns(
        self, rows: int, row_tokens: int, version: int | None = None
    ) -> dict[str, int | None]:
        """Bring the weights to the generate layout, for ``draw_turns`` until ``end_turns``.

        Args:
          rows: episodes that are open at a time.
          row_tokens: most tokens of an episode's row.
          version: of the weights that must generate, where there are versions.

        Returns:
          ``version`` of the weights here, None where there are no versions.
        """
        self.end_turns()
        self.check_version(version)
        params = self._turn_weights.enter_context(self.generation_weights())
        params = self.generator.decoding_params(params)
        together = -(-rows // COHORTS)
        slots = min(self.context.slots, together) if self.context.slots > 0 else together
        if self._turns is None or self._turns.sizes != (slots, row_tokens, rows):
            self._turns = TurnGenerator(
                self.generator.engine, params, self.context.tokenizer,
                slots=slots, row_tokens=row_tokens, rows=rows,
            )  # fmt: skip
            self._turns.precompile()
        else:
            self._turns.replace_params(params)
        return {"version": getattr(self, "version", None)}

    @protocol("ALL_TO_ALL", phase="generate")
    def draw_turns(
        self, requests: Sequence[TurnRequest], step: int = 0, greedy: bool = False
    ) -> list[DrawnTurn]:
        """Draw the next turns of episodes, between ``begin_turns`` and ``end_turns``.

        Args:
          requests: one for each of these episodes; every process of a pool gets the same.
          step: of the run.
          greedy: the most likely tokens.
        """
        context, sampling = self.context, self.context.sampling
        assert self._turns is not None
        if greedy:
            sampling = dataclasses.replace(sampling, temperature=0.0)
        return self._turns.draw(
            requests, seed=context.seed, step=step, sampling=sampling, stop=self._stop
        )

    @protocol("ALL_TO_ALL", phase="generate")
    def end_turns(self) -> None:
        """Give up the cache of ``draw_turns``, and bring training's weights back."""
        if self._turns is not None:
            self._turns.replace_params(None)
        self._turn_weights.close()

    def check_version(self, version: int | None) -> None:
        """Raise RunError unless the weights here are of this version (None: any)."""

    def reward_callback(
        self, prompts: Mapping[str, Any], pending: dict[str, list[PendingReward]]
    ) -> OnPromptDone | None:
        """A callback that submits a prompt's responses for scoring once all have ended, and stores
        the pending rewards in ``pending``; None without such reward functions."""
        if not pending:
            return None
        # Fetched here, since every process must take part.
        tokens = without_padding(prompts["prompts"], prompts["prompt_mask"])
        return functools.partial(self._submit_for_scoring, prompts, tokens, pending)

    def _submit_for_scoring(
        self,
        prompts: Mapping[str, Any],
        prompt_tokens: list[list[int]],
        pending: dict[str, list[PendingReward]],
        number: int,
        responses: list[list[int]],
    ) -> None:
        """Submit a prompt's responses to the reward functions, and store their pending rewards.

        Every process of a pool is called for all prompts; each prompt is scored by one of them, in
        turn.
        """
        index, processes = self.context.process
        if number % processes != index:
            return
        tokens = prompt_tokens[number]
        responses = [self._cut_response(tokens, response) for response in responses]
        count, tokenizer = len(responses), self.context.tokenizer
        shown: list[Any] = [tokens] * count
        answers: list[Any] = responses
        if tokenizer is not None:
            texts = prompts.get("prompt_text")
            shown = [tokenizer.decode(tokens) if texts is None else texts[number]] * count
            answers = [tokenizer.decode_response(tokens, response) for response in responses]
        columns = {name: [x[number]] * count for name, x in prompts.get("columns", {}).items()}
        group = PromptResponses(shown, answers, columns, [tokens] * count, responses)
        for role, scorer in self._scorers.items():
            pending[role][number * count : (number + 1) * count] = scorer.submit(group)

    def cut_at_stop_strings(self, rollout: Mapping[str, Any]) -> dict[str, Any]:
        """A rollout with responses cut at the first stop string, and trimmed arrays.

        Tokens after a stop string become padding, and a response that was cut is not ``truncated``.
        In a pool of several processes all must call this.
        """
        if not self._stop.strings:
            return trim(rollout)
        prompts = without_padding(rollout["prompts"], rollout["prompt_mask"])
        responses = without_padding(rollout["responses"], rollout["response_mask"])
        tokenizer = self.context.tokenizer
        pairs = list(zip(prompts, responses, strict=True))
        cuts = [self._stop.cut(tokenizer, prompt, response) for prompt, response in pairs]
        ends = zip(responses, cuts, strict=True)
        kept = np.array([len(response if cut is None else cut[0]) for response, cut in ends])
        shape = rollout["responses"].shape
        split = self.layouts.generate.sharding("batch")
        mask = place(np.arange(shape[1]) < kept[:, None], split)
        whole = place(np.array([cut is None for cut in cuts]), split)
        made = {
            key: jnp.where(mask, x, jnp.zeros_like(x))
            if getattr(x, "shape", None) == shape and key not in ("prompts", "prompt_mask")
            else x
            for key, x in rollout.items()
        }
        return trim(made | {"truncated": rollout["truncated"] & whole})

    def _stop_ends(self, prompts: Mapping[str, Any], samples: int) -> StopCheck | None:
        """What ends responses to these prompts at a stop string; None without stop strings."""
        if not self._stop.strings:
            return None
        tokens = without_padding(prompts["prompts"], prompts["prompt_mask"])
        return stop_string_check(self._stop, self.context.tokenizer, tokens, samples)

    def _cut_response(self, prompt: list[int], response: list[int]) -> list[int]:
        """A response up to the token that completes its first stop string."""
        cut = self._stop.cut(self.context.tokenizer, prompt, response)
        return response if cut is None else cut[0]

    def sequence_numbers(self, rows: int, first: int = 0) -> jax.Array:
        """int32 [rows]: the sequence number from which each row's random draws follow.

        Args:
          rows: how many.
          first: the first number: sequences drawn for this step before.
        """
        split = self.layouts.generate.sharding("batch")
        return place(np.arange(first, first + rows, dtype=np.int32), split)

    def with_text(self, rollout: dict[str, Any]) -> dict[str, Any]:
        """The batch with ``response_text`` and ``prompt_text``, if there is a tokenizer."""
        tokenizer = self.context.tokenizer
        if tokenizer is None:
            return {key: value for key, value in rollout.items() if key != "prompt_text"}
        prompts = without_padding(rollout["prompts"], rollout["prompt_mask"])
        responses = without_padding(rollout["responses"], response_places(rollout))
        prompt_text = rollout.get("prompt_text") or [tokenizer.decode(p) for p in prompts]
        response_text = [
            tokenizer.decode_response(prompt, response)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        return rollout | {"prompt_text": prompt_text, "response_text": response_text}

    def programs(self, rows: int, prompt_length: int) -> Iterator[AbstractProgram]:
        """The programs that generate ``rows`` sequences, sampled and greedy."""
        context = self.context
        end = context.max_response_length if context.partial_rollouts else None
        configs = {
            "generate": self.generation_config(end=end),
            "generate_greedy": self.generation_config(greedy=True),
        }
        for call, config in configs.items():
            params, prompts = self._generation_copy(), rows // context.samples
            yield from self.generator.programs(call, params, prompts, prompt_length, config)

    def _generation_copy(self) -> Params:
        """The weights that generation reads, as jax.ShapeDtypeStruct with shardings."""
        base = self.network.base
        shapes = base.compute_shapes(self.context.compute.dtype)
        return abstract(shapes, base.shardings(self.layouts.generate))


def trim(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """Cut response arrays to the length bucket of the longest response; other entries stay."""
    limit = rollout["responses"].shape[1]
    longest = int(to_numpy(response_lengths(rollout)).max(initial=1))
    length = bucket_length(longest, limit)
    prompt = ("prompts", "prompt_mask")
    return {
        key: x[:, :length] if length < limit and np.ndim(x) == 2 and key not in prompt else x
        for key, x in rollout.items()
    }


def once_per_prompt(rollout: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """A rollout's prompts as they were passed in: one row per prompt instead of ``samples``."""
    made = {key: to_numpy(rollout[key])[::samples] for key in ("prompts", "prompt_mask")}
    if "prompt_text" in rollout:
        made["prompt_text"] = rollout["prompt_text"][::samples]
    return made | repeat_columns(rollout, range(0, len(rollout["prompts"]), samples))


def without_padding(tokens: Any, mask: Any) -> list[list[int]]:
    """Rows of token ids without their padding."""
    tokens, mask = to_numpy(tokens), to_numpy(mask)
    return [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]
