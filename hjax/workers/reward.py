"""Rewards and costs: from a function, or from a model with a scalar head."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.batches import LENGTHS, response_lengths, response_places, sample_rows
from hjax.data.response_text import ResponseText
from hjax.errors import ConfigError, RunError
from hjax.models.forward import map_response_states, sequence_states
from hjax.models.sequence_packing import KEY as PACKING
from hjax.models.sequence_packing import Packing
from hjax.rewards.concurrent_rewards import PendingReward
from hjax.rewards.function import RewardFunction, check_unscored
from hjax.rewards.reward_results import RewardResult
from hjax.rollout.generator import bucket_length
from hjax.sharded_values import ArrayRegions, SummedValue
from hjax.sharding.global_arrays import place, to_numpy
from hjax.sharding.protocols import protocol
from hjax.workers.generating_worker import PENDING_REWARDS, without_padding
from hjax.workers.model import ModelWorker
from hjax.workers.parameter_worker import abstract
from hjax.workers.worker import TOKEN_KEYS, Worker, WorkerContext
from hjax.xla.abstract_program import AbstractProgram

# Entries that a reward model reads; a reward function also reads those below.
TEXT_KEYS = (*TOKEN_KEYS, LENGTHS, "prompt_text", "response_text")
# A ``step_separator``: every token is a step.
EACH_TOKEN = "token"
REWARD_KEYS = (*TEXT_KEYS, "columns", "failed", "episode", PENDING_REWARDS)


class FunctionReward(Worker):
    """Scores with a Python function, without devices.

    Args:
      context: of the role.
      function: the reward function, wrapped with its time limit.
      max_unscored: share of unscored sequences above which the run stops.
    """

    def __init__(self, context: WorkerContext, function: RewardFunction, max_unscored: float = 1.0):
        super().__init__(context)
        self.function = function
        self.max_unscored = max_unscored
        function.start()

    def own_rows(self, batch: Mapping[str, Any]) -> slice:
        """The rows that this process of the pool scores: whole groups of one prompt's samples."""
        index, processes = self.context.process
        rows = len(batch["responses"])
        samples = self.context.samples if rows % self.context.samples == 0 else 1
        groups = rows // samples
        start, stop = (groups * i // processes * samples for i in (index, index + 1))
        return slice(start, stop)

    def score(self, batch: Mapping[str, Any]) -> RewardResult:
        """Rewards of every row from its prompt, response and dataset columns: computed now, or
        during generation."""
        if verdicts := batch.get(PENDING_REWARDS, {}).get(self.context.role):
            result = PendingReward.gathered(verdicts)
            check_unscored(result, self.max_unscored)
            return result
        prompts = without_padding(batch["prompts"], batch["prompt_mask"])
        responses = without_padding(batch["responses"], response_places(batch))
        result = self.function(
            batch.get("prompt_text", prompts),
            batch.get("response_text", responses),
            batch.get("columns", {}),
            prompts,
            responses,
        )
        if "failed" in batch:  # episodes that the environment's fault ended
            result = result.without(np.asarray(batch["failed"])).counted_at(sample_rows(batch))
        check_unscored(result, self.max_unscored)
        return result

    @protocol("ALL_TO_ALL", reads=REWARD_KEYS)
    def compute_reward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """``rewards`` float32 [rows], NaN where unscored; ``reward_outcomes`` counts outcomes.

        With several named rewards also ``named_rewards``, float32 [rows] by name, NaN where one is
        missing; with metrics of the function ``reward_metrics`` alike; with token rewards
        ``token_rewards`` float32 [rows, length].
        """
        result = self._scored(batch)
        return {"rewards": result["rewards"], "reward_outcomes": result["outcomes"]} | {
            key: result[key]
            for key in ("named_rewards", "reward_metrics", "token_rewards")
            if key in result
        }

    @protocol("ALL_TO_ALL", reads=REWARD_KEYS)
    def compute_cost(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """``costs`` float32 [rows], NaN where unscored."""
        return {"costs": self._scored(batch)["rewards"]}

    def _scored(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """``rewards`` and ``outcomes``; of several processes each returns its part."""
        width = batch["responses"].shape[1]
        if self.context.process[1] == 1:
            result = self.score(batch)
            made: dict[str, Any] = {"rewards": result.rewards, "outcomes": result.outcomes}
            tokens = result.by_token(_lengths(batch), width)
            made |= {} if tokens is None else {"token_rewards": tokens}
            by_name = {"named_rewards": result.named, "reward_metrics": result.metrics}
            return made | {key: dict(values) for key, values in by_name.items() if values}
        rows, share = len(batch["responses"]), self.own_rows(batch)
        result = self.score(slice_rows(batch, share))
        region = ((share.start, share.stop),)
        rewards = ArrayRegions((rows,), result.rewards.dtype, ((region, result.rewards),))
        if result.tokens:
            raise RunError(
                f"{self.role}: token rewards work in one process only; set "
                "cluster.reward_processes=1"
            )

        def parts(by_name: Mapping[str, np.ndarray]) -> SummedValue:
            """Zero on other processes' rows: the parts are summed."""
            whole = {name: np.zeros(rows, np.float32) for name in by_name}
            for name, values in by_name.items():
                whole[name][share] = values
            return SummedValue(whole)

        return {
            "rewards": rewards,
            "outcomes": SummedValue(result.outcomes),
            "named_rewards": parts(result.named),
            "reward_metrics": parts(result.metrics),
        }


def step_ends(prompt: list[int], response: list[int], context: WorkerContext) -> list[int]:
    """Indices of a response's tokens that end a step.

    A step ends with the token that completes ``context.step_separator`` in the text. The last step
    ends with the last token before an end token, which belongs to no step. With the separator
    ``token`` every token is a step.

    Args:
      prompt, response: token ids.
      context: with ``step_separator``, the stop tokens of ``sampling`` and the tokenizer.
    """
    own = len(response)
    if response and response[-1] in context.sampling.stop:
        own -= 1
    if context.step_separator == EACH_TOKEN:
        return list(range(own))
    text, seen, ends = "", 0, []
    source = ResponseText(context.tokenizer, prompt)
    for at, token in enumerate(response[:own]):
        text += source.feed(token)
        if (count := text.count(context.step_separator)) > seen:
            seen = count
            ends.append(at)
    rest = (text + source.close()).rpartition(context.step_separator)[2]
    if own and rest.strip() and own - 1 not in ends:
        ends.append(own - 1)
    return ends


def _lengths(batch: Mapping[str, Any]) -> list[int]:
    """Tokens of each response."""
    return to_numpy(response_lengths(batch)).tolist()


def slice_rows(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """Rows of a batch, of its arrays, lists and dicts of lists."""
    return {
        key: slice_rows(value, rows) if isinstance(value, Mapping) else value[rows]
        for key, value in batch.items()
    }


class ModelReward(ModelWorker):
    """Scores with a reward model: its scalar head at the last token of prompt and response.

    A model with another tokenizer than the actor's gets the text, tokenised again. With a
    ``step_separator`` it is a process reward model: it scores each step at the step's last token.

    Raises:
      ConfigError: steps of a model that reads other tokens than the actor's.
    """

    scalar = True

    def __init__(self, context: WorkerContext):
        if context.step_separator and context.retokenize:
            raise ConfigError(
                f"config.reward.step_separator={context.step_separator!r}: step scores belong to "
                "the actor's tokens, and this model has another tokenizer; leave it out, or use a "
                "model with the actor's"
            )
        super().__init__(context)

    @protocol("ALL_TO_ALL", reads=TEXT_KEYS)
    def compute_reward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """``rewards`` float32 [rows]. A process reward model adds ``token_rewards`` float32
        [rows, length], 0 except at each step's last token; ``rewards`` are their sums."""
        if self.context.step_separator:
            by_token = self.step_scores(batch)
            return {"rewards": by_token.sum(axis=1), "token_rewards": by_token}
        return {"rewards": self.last_scores(batch)}

    @protocol("ALL_TO_ALL", reads=TEXT_KEYS)
    def compute_cost(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """``costs`` float32 [rows]."""
        return {"costs": self.last_scores(batch)}

    def last_scores(self, batch: Mapping[str, Any]) -> np.ndarray:
        """float32 [rows] on the host, the head's value at each sequence's last token."""
        sequences = self._sequences(batch)
        arrays = self._arrays(sequences, self._bucket(sequences))
        return to_numpy(self.forward(self._last_score, self.params, arrays))[: len(sequences)]

    def step_scores(self, batch: Mapping[str, Any]) -> np.ndarray:
        """float32 [rows, length] on the host: the head's value at each step's last token, 0
        elsewhere. Rows are always padded, since every position is read."""
        sequences = self._sequences(batch)
        arrays = self._arrays(sequences, self._bucket(sequences), padded=True)
        scores = to_numpy(self.forward(self._every_score, self.params, arrays))
        prompts = to_numpy(batch["prompt_mask"]).sum(axis=1)
        made = np.zeros(batch["responses"].shape, np.float32)
        for row, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
            ends = step_ends(sequence[:prompt], sequence[prompt:], self.context)
            made[row, ends] = scores[row, prompt + np.array(ends, int)]
        return made

    def _bucket(self, sequences: list[list[int]]) -> int:
        """Length of padded rows that hold the sequences (length bucket)."""
        longest = max(map(len, sequences))
        limit = self.network.config.max_length
        if longest > limit:
            raise RunError(
                f"{self.role}: a prompt with its response is {longest} tokens, more than the "
                f"{limit} positions of {self.context.path or 'its model'}; lower "
                "rollout.max_prompt_length or rollout.max_response_length"
            )
        return bucket_length(longest, limit)

    def _arrays(
        self, sequences: list[list[int]], length: int, padded: bool = False
    ) -> dict[str, Any]:
        """The arrays of a forward over sequences of at most so many tokens; ``padded``: never
        packs."""
        ways = self.layouts.train.shard_count("batch")
        rows = -(-len(sequences) // ways) * ways
        counts = np.zeros(rows, int)
        counts[: len(sequences)] = [len(sequence) for sequence in sequences]
        packing = None if padded else self._packing(counts, length)
        tokens = np.zeros((rows, length), np.int32)
        mask = np.zeros((rows, length), bool)
        for row, sequence in enumerate(sequences):
            # In packs prompts are padded on the left.
            start = 0 if packing is None else length - len(sequence)
            at = slice(start, start + len(sequence))
            tokens[row, at], mask[row, at] = sequence, True
        split = self.layouts.train.sharding("batch")
        if packing is None:
            return {"tokens": place(tokens, split), "mask": place(mask, split)}
        return {
            "prompts": place(tokens, split),
            "responses": place(np.zeros((rows, 1), np.int32), split),
            PACKING: packing,
        }

    def _packing(self, counts: np.ndarray, length: int) -> Packing | None:
        """Packs of sequences of so many tokens. Each is a prompt with one response token, so that
        the prompt's last state is read."""
        if self.packer is None:
            return None
        mask = np.arange(length) < counts[:, None]
        masks = {"prompt_mask": mask, "response_mask": mask[:, :1]}
        capacity = max(self.packer.capacity, length)  # for text that was tokenised again
        padded = self._padded(len(counts), (length, 1), grouped=False)
        return self.packer(masks, 1, padded, capacity=capacity).packing

    def _every_score(self, model: Any, batch: Any, share: int) -> jax.Array:
        hidden = sequence_states(model.decoder, batch["tokens"], batch["mask"], self.compute)
        return jnp.where(batch["mask"], model.score(hidden), 0.0)

    def _last_score(self, model: Any, batch: Any, share: int) -> jax.Array:
        if PACKING in batch:
            return map_response_states(
                model.decoder, batch, 1, self.compute, lambda states, _: model.score(states)
            )[:, 0]
        mask = batch["mask"]
        hidden = sequence_states(model.decoder, batch["tokens"], mask, self.compute)
        last = jnp.arange(mask.shape[1]) == mask.sum(axis=1, keepdims=True) - 1
        return jnp.sum(jnp.where(last, model.score(hidden), 0.0), axis=1)

    def programs(self, rows: int, prompt_length: int) -> Iterator[AbstractProgram]:
        """Scoring of ``rows`` sequences of the greatest possible length."""
        longest = prompt_length + self.context.max_response_length
        length = bucket_length(longest, self.network.config.max_length)
        split = self.layouts.train.sharding("batch")

        def array(width: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, width), dtype, sharding=split)

        if not self.context.packing or self.context.step_separator:
            batch: dict[str, Any] = {"tokens": array(length), "mask": array(length, np.bool_)}
        else:
            assert self.packer is not None
            packing = self.packer.abstract(rows, (length, 1), 1)
            batch = {"prompts": array(length), "responses": array(1), PACKING: packing}
        params = abstract(self.network.shapes, self.shardings)
        name = "compute_reward" if self.role == "reward" else "compute_cost"
        score = self._every_score if self.context.step_separator else self._last_score
        yield AbstractProgram(name, lambda: self._forward(score, False).trace(params, batch))

    def _sequences(self, batch: Mapping[str, Any]) -> list[list[int]]:
        if self.context.retokenize:
            texts = zip(batch["prompt_text"], batch["response_text"], strict=True)
            return [self.context.tokenizer.encode(prompt + text) for prompt, text in texts]
        prompts = without_padding(batch["prompts"], batch["prompt_mask"])
        responses = without_padding(batch["responses"], response_places(batch))
        return [p + r for p, r in zip(prompts, responses, strict=True)]
