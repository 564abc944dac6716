"""Generation as a call on a worker: the actor's between updates, or a rollout's apart from it."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.kernels.int8_cache import element_bytes
from hjax.models.parameters import Params
from hjax.rewards.concurrent_rewards import ConcurrentScorer, PendingReward, PromptResponses
from hjax.rollout.generator import Generator, bucket_length
from hjax.rollout.prompt_encoding import StopConditions, text_ends
from hjax.rollout.rollout_job import Ends, GenerationConfig, OnEnded
from hjax.sharding.global_arrays import place, to_numpy
from hjax.sharding.protocols import PROMPT_ID, protocol
from hjax.workers.model import ModelWorker
from hjax.workers.worker import WorkerContext
from hjax.xla.abstract_program import AbstractProgram

# What generation reads: token ids and what comes back once per row.
PROMPT_KEYS = ("prompts", "prompt_mask", "step", "first", "columns", "prompt_text")
# What reward functions said of the rows already, by role, a verdict each.
JUDGED = "judged"


class GeneratingWorker(ModelWorker):
    """A worker with a language model that answers prompts."""

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        self.generator = Generator(
            self.network.base, self.layouts.generate, context.compute,
            cache_dtype=context.cache_dtype,
        )  # fmt: skip
        self._asked = 0  # prompts so far, by which their rows know each other
        self._stops = StopConditions(
            context.stop_strings, context.tokenizer, context.sampling.min_tokens
        )
        self._judges = {
            role: ConcurrentScorer(function) for role, function in context.judges.items()
        }

    def generation_config(
        self, greedy: bool = False, samples: int | None = None, end: int | None = None
    ) -> GenerationConfig:
        """How prompts are answered; the arguments are those of ``answer``."""
        context, sampling = self.context, self.context.sampling
        return GenerationConfig(
            context.max_response_length,
            samples=1 if greedy else samples or context.samples,
            sampling=dataclasses.replace(sampling, temperature=0.0) if greedy else sampling,
            slots=context.slots,
            lookup=context.speculative_tokens,
            surplus=0 if greedy else context.extra_samples,
            end=end,
        )

    @property
    def cache_element(self) -> float:
        """Bytes of an element of keys and values while it generates, with its share of a scale."""
        return element_bytes(self.generator.kept_dtype, self.network.config.head_dim)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Any]:
        """Lend out the parameters as generation reads them."""
        yield self.params

    @protocol("3D_ALL_MICRO_DP", phase="generate", reads=PROMPT_KEYS)
    def generate_sequences(
        self, prompts: Mapping[str, Any], greedy: bool = False, samples: int | None = None
    ) -> dict[str, Any]:
        """Answer prompts.

        Args:
          prompts: ``prompts`` int32 [prompts, prompt_length] padded on the left, ``prompt_mask``,
            ``step``, ``first`` (sequences drawn for the step before; 0 where absent);
            ``columns`` and ``prompt_text`` come back once per row.
          greedy: one response per prompt, the most likely tokens.
          samples: responses per prompt, if not the configured number.

        Returns:
          the batch: rows = prompts x samples, see docs/design.md.
        """
        return self.with_text(self.answer(prompts, greedy, samples))

    def answer(
        self,
        prompts: Mapping[str, Any],
        greedy: bool,
        samples: int | None,
        end: int | None = None,
    ) -> dict[str, Any]:
        """``generate_sequences`` but for the text of the responses.

        Args:
          prompts, greedy, samples: as there.
          end: tokens after which to leave off, the arrays as long as responses may become; None:
            to the end, the arrays cut to what is needed.
        """
        context, config = self.context, self.generation_config(greedy, samples, end)
        count = config.samples
        asked = prompts["prompts"].shape[0]
        rows = asked * count
        # Of this call alone: the same prompt in another call is another.
        ids = np.arange(self._asked, self._asked + asked, dtype=np.int64)
        self._asked += asked
        judged = {role: [PendingReward()] * rows for role in self._judges}
        with self.gathered() as params:
            rollout: dict[str, Any] = self.generator.generate(
                params,
                prompts["prompts"],
                prompts["prompt_mask"],
                self.sequence(rows + asked * config.surplus, prompts.get("first", 0)),
                config,
                seed=context.seed,
                step=prompts.get("step", 0),
                on_ended=self.judging(prompts, judged),
                ends=self._text_ends(prompts, count + config.surplus) if end is None else None,
            )
            # This waits for the responses: the cache is gone before training's parameters return.
            rollout = self.ended(rollout) if end is None else rollout
        rollout[PROMPT_ID] = np.repeat(ids, count)
        rollout["columns"] = {
            name: [value for value in values for _ in range(count)]
            for name, values in prompts.get("columns", {}).items()
        }
        if judged:
            rollout[JUDGED] = judged
        if texts := prompts.get("prompt_text"):
            rollout["prompt_text"] = [text for text in texts for _ in range(count)]
        return rollout

    def judging(
        self, prompts: Mapping[str, Any], judged: dict[str, list[PendingReward]]
    ) -> OnEnded | None:
        """What has answers to these prompts judged as soon as they have ended, and puts what will
        be said among ``judged``; None: nobody judges so early."""
        if not judged:
            return None
        # Here, in every process: later each of them looks at prompts of its own.
        tokens = ragged(prompts["prompts"], prompts["prompt_mask"])
        return functools.partial(self._judge, prompts, tokens, judged)

    def _judge(
        self,
        prompts: Mapping[str, Any],
        asked_tokens: list[list[int]],
        judged: dict[str, list[PendingReward]],
        number: int,
        responses: list[list[int]],
    ) -> None:
        """Have a prompt's answers judged, and put what will be said of each among ``judged``.

        Every process of a pool hears of all prompts. They take turns, so that each prompt is
        judged by one.
        """
        index, processes = self.context.process
        if number % processes != index:
            return
        tokens = asked_tokens[number]
        responses = [self._cut(tokens, response) for response in responses]
        count, tokenizer = len(responses), self.context.tokenizer
        asked: list[Any] = [tokens] * count
        answers: list[Any] = responses
        if tokenizer is not None:
            texts = prompts.get("prompt_text")
            asked = [tokenizer.decode(tokens) if texts is None else texts[number]] * count
            answers = [tokenizer.decode_response(tokens, response) for response in responses]
        given = {name: [x[number]] * count for name, x in prompts.get("columns", {}).items()}
        group = PromptResponses(asked, answers, given, [tokens] * count, responses)
        for role, judge in self._judges.items():
            judged[role][number * count : (number + 1) * count] = judge.submit(group)

    def ended(self, rollout: Mapping[str, Any]) -> dict[str, Any]:
        """A rollout whose responses end with the first of the strings that end them, its arrays cut
        to what is needed.

        What was drawn behind such a string is padding then; a response that was cut is not
        ``truncated``. Over several processes all of them ask.
        """
        if not self._stops.strings:
            return trim(rollout)
        prompts = ragged(rollout["prompts"], rollout["prompt_mask"])
        responses = ragged(rollout["responses"], rollout["response_mask"])
        tokenizer = self.context.tokenizer
        pairs = list(zip(prompts, responses, strict=True))
        cuts = [self._stops.cut(tokenizer, prompt, response) for prompt, response in pairs]
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

    def _text_ends(self, prompts: Mapping[str, Any], samples: int) -> Ends | None:
        """What ends responses to these prompts with a string; None: there are no such strings."""
        if not self._stops.strings:
            return None
        tokens = ragged(prompts["prompts"], prompts["prompt_mask"])
        return text_ends(self._stops, self.context.tokenizer, tokens, samples)

    def _cut(self, prompt: list[int], response: list[int]) -> list[int]:
        """A response up to the token that completes the first of the strings that end it."""
        cut = self._stops.cut(self.context.tokenizer, prompt, response)
        return response if cut is None else cut[0]

    def sequence(self, rows: int, first: int = 0) -> jax.Array:
        """int32 [rows]: the number by which each row draws its tokens.

        Args:
          rows: how many.
          first: the first one's: sequences that were drawn for this step before.
        """
        split = self.layouts.generate.sharding("batch")
        return place(np.arange(first, first + rows, dtype=np.int32), split)

    def with_text(self, rollout: dict[str, Any]) -> dict[str, Any]:
        """The batch with ``response_text`` and ``prompt_text``, where there is a tokenizer."""
        tokenizer = self.context.tokenizer
        if tokenizer is None:
            return {key: value for key, value in rollout.items() if key != "prompt_text"}
        prompts = ragged(rollout["prompts"], rollout["prompt_mask"])
        responses = ragged(rollout["responses"], rollout["response_mask"])
        prompt_text = rollout.get("prompt_text") or [tokenizer.decode(p) for p in prompts]
        response_text = [
            tokenizer.decode_response(prompt, response)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        return rollout | {"prompt_text": prompt_text, "response_text": response_text}

    def programs(self, rows: int, prompt_length: int) -> Iterator[AbstractProgram]:
        """Generation of ``rows`` sequences, and of greedy ones."""
        context = self.context
        end = context.max_response_length if context.in_parts else None
        ways = {
            "generate": self.generation_config(end=end),
            "generate_greedy": self.generation_config(greedy=True),
        }
        for call, config in ways.items():
            params, prompts = self._generation_copy(), rows // context.samples
            yield from self.generator.programs(call, params, prompts, prompt_length, config)

    def _generation_copy(self) -> Params:
        """What generation reads, as jax.ShapeDtypeStruct with shardings."""
        return jax.tree.map(
            lambda x, dtype, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s),
            self.network.base.shapes,
            self.network.base.compute_dtypes(self.context.compute.dtype),
            self.network.base.shardings(self.layouts.generate),
        )


def trim(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the response arrays to the bucket of the longest response; other entries stay."""
    limit = rollout["responses"].shape[1]
    longest = int(to_numpy(rollout["response_mask"]).sum(axis=1).max(initial=1))
    length = bucket_length(longest, limit)
    prompt = ("prompts", "prompt_mask")
    return {
        key: x[:, :length] if length < limit and np.ndim(x) == 2 and key not in prompt else x
        for key, x in rollout.items()
    }


def once_per_prompt(rollout: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """The prompts of a rollout as it was asked for, of so many samples each."""
    made = {key: to_numpy(rollout[key])[::samples] for key in ("prompts", "prompt_mask")}
    if "prompt_text" in rollout:
        made["prompt_text"] = rollout["prompt_text"][::samples]
    columns = rollout.get("columns", {})
    return made | {"columns": {name: values[::samples] for name, values in columns.items()}}


def ragged(tokens: Any, mask: Any) -> list[list[int]]:
    """Rows of token ids without their padding."""
    tokens, mask = to_numpy(tokens), to_numpy(mask)
    return [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)]
