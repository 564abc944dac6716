"""Evaluation on held-out data: rewards and accuracy of greedy responses, and the accuracy of models
that predict known outcomes (preference pairs, labels, steps)."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.algorithms.prediction_calibration import calibration_bins, prediction_metrics
from hjax.batches import sample_rows, select_rows
from hjax.controller import join
from hjax.data.sources import MIXTURE
from hjax.errors import ConfigError
from hjax.rewards.estimators import pass_at_k, powers_of_two
from hjax.run.examples import Demonstrations
from hjax.run.inputs import Inputs, prompt_batch
from hjax.run.role_groups import RoleGroups
from hjax.workers.reward import slice_rows

# Sampled answers of an evaluation are drawn as in the step of this number more, which no run takes.
SAMPLES_STEP = 2**30


def evaluate(
    config: ConfigDict, inputs: Inputs, roles: RoleGroups, algorithm: Algorithm, step: int
) -> tuple[dict[str, float], dict[str, Any]]:
    """Answer up to ``eval.prompts`` held-out prompts greedily, in the run's environment if it has
    one, and score the answers; with ``eval.samples`` sampled answers too (``evaluate_samples``).

    Returns:
      ``eval/reward`` where there is a reward, ``eval/accuracy`` where the task has a verifier, both
      by group too, as ``eval/GROUP/reward`` (``eval.by``); and the first batch of responses.
    """
    assert inputs.held_out is not None
    count = min(config.eval.prompts or len(inputs.held_out), len(inputs.held_out))
    rows = eval_batch_size(config, len(inputs.held_out), roles)
    answers = functools.partial(_answers, inputs=inputs, roles=roles, algorithm=algorithm)
    chunks = [answers(range(i, min(i + rows, count)), rows) for i in range(0, count, rows)]
    metrics: dict[str, float] = {}
    if algorithm.environment is not None:
        turns = np.concatenate([chunk["episode_metrics"]["turns"] for chunk in chunks])
        metrics["eval/turns"] = float(turns.mean())
    if "reward" in roles.groups:
        scores = np.concatenate([chunk["rewards"] for chunk in chunks]).astype(np.float64)
        scored = scores[~np.isnan(scores)]
        metrics["eval/reward"] = float(scored.mean()) if scored.size else float("nan")
    correct = [right for chunk in chunks for right in chunk.pop("correct")]
    if correct:
        metrics["eval/accuracy"] = float(np.mean(correct))
    if by := group_column(config, inputs):
        groups = [str(value) for chunk in chunks for value in chunk["columns"][by]]
        values = {"reward": scores if "reward" in roles.groups else (), "accuracy": correct}
        for name, of_rows in values.items():
            if len(of_rows):
                metrics |= {
                    f"eval/{group}/{name}": mean
                    for group, mean in means_by_group(groups, np.asarray(of_rows, float)).items()
                }
    if config.eval.samples > 1:
        metrics |= evaluate_samples(config, answers, count, rows, step)
    return metrics, chunks[0]


def evaluate_samples(
    config: ConfigDict, answers: Callable[..., dict[str, Any]], count: int, rows: int, step: int
) -> dict[str, float]:
    """Score ``eval.samples`` sampled answers, n, to each of the first held-out prompts.

    Args:
      config: of the run.
      answers: ``_answers`` of the run.
      count: prompts.
      rows: of a greedy batch; sampled ones have about as many, and their prompts fill the devices
        as well.
      step: of the run, from which the draws follow.

    Returns:
      ``eval/reward_mean@n`` and ``eval/reward_best@n``, means over prompts; where there is right
      and wrong ``eval/accuracy_mean@n`` and, for k = 1, 2, 4, ... up to n, ``eval/pass@k``
      (unbiased, ``hjax.rewards.estimators``).
    """
    samples = config.eval.samples
    ways = rows // math.gcd(rows, samples)  # so that prompts times samples divide as rows do
    prompts = max(rows // samples // ways, 1) * ways
    rewards: list[np.ndarray] = []
    correct: list[np.ndarray] = []
    for start in range(0, count, prompts):
        chosen = range(start, min(start + prompts, count))
        batch = answers(chosen, prompts, samples=samples, step=SAMPLES_STEP + step)
        if "rewards" in batch:
            rewards += list(np.asarray(batch["rewards"], np.float64).reshape(-1, samples))
        if right := batch["correct"]:
            correct += list(np.asarray(right, bool).reshape(-1, samples))
    metrics: dict[str, float] = {}
    scored = [row[~np.isnan(row)] for row in rewards]
    if scored := [row for row in scored if row.size]:
        metrics[f"eval/reward_mean@{samples}"] = float(np.mean([row.mean() for row in scored]))
        metrics[f"eval/reward_best@{samples}"] = float(np.mean([row.max() for row in scored]))
    if correct:
        metrics[f"eval/accuracy_mean@{samples}"] = float(np.mean(correct))
        for k in powers_of_two(samples):
            passed = [pass_at_k(int(row.sum()), samples, k) for row in correct]
            metrics[f"eval/pass@{k}"] = float(np.mean(passed))
    return metrics


def group_column(config: ConfigDict, inputs: Inputs) -> str:
    """The column by whose values evaluations have metrics too; empty: none."""
    assert inputs.held_out is not None
    named = MIXTURE if MIXTURE in inputs.held_out.columns else ""
    return str(config.eval.by or named)


def means_by_group(groups: Sequence[str], values: np.ndarray) -> dict[str, float]:
    """The mean of each group's values without NaN, of groups that have some.

    Args:
      groups: of the rows, in the order of the result.
      values: float [rows].
    """
    of_rows, found = np.asarray(groups), {}
    for group in dict.fromkeys(groups):
        known = values[(of_rows == group) & ~np.isnan(values)]
        if known.size:
            found[group] = float(known.mean())
    return found


def eval_batch_size(config: ConfigDict, held_out: int, roles: RoleGroups) -> int:
    """Evaluation's batch size: at most a training step's rows, split evenly over the devices."""
    generate = roles.layouts[roles.generating_role].generate
    ways = generate.shard_count("batch") * generate.shard_count("layers")
    if "reward" in roles.layouts:  # a reward model
        ways = math.lcm(ways, roles.layouts["reward"].train.shard_count("batch"))
    rows = config.rollout.prompts * config.rollout.samples
    return -(-min(rows, config.eval.prompts or rows, held_out) // ways) * ways


def _answers(
    indices: range,
    rows: int,
    *,
    inputs: Inputs,
    roles: RoleGroups,
    algorithm: Algorithm,
    samples: int = 0,
    step: int = 0,
) -> dict[str, Any]:
    """The batch of answers to some held-out prompts, with rewards; padded to ``rows`` prompts
    meanwhile.

    Args:
      samples: answers per prompt, as in training; 0: the greedy one.
      step: from which draws follow.

    Returns:
      the batch, with ``correct`` (empty where nothing says so) of its rows.
    """
    assert inputs.held_out is not None
    padded = [*indices, *[indices[-1]] * (rows - len(indices))]
    prompts = prompt_batch(inputs.held_out.rows(padded), inputs.prompt_length, step)
    if samples:
        prompts["first"] = indices[0] * samples
        if "samples" not in inspect.signature(algorithm.answer).parameters:
            raise ConfigError(
                f"config.eval.samples={samples}: {type(algorithm).__name__}.answer takes no "
                "argument `samples`; add it (answers per prompt), or leave the key at 1"
            )
        batch = join(algorithm.answer(prompts, samples=samples))
    else:
        batch = join(algorithm.answer(prompts, greedy=True))
    reward, kept = roles.groups.get("reward"), slice(len(indices) * (samples or 1))
    if "episode" in batch:  # one row of each episode says all
        batch = select_rows(batch, sample_rows(batch))
    if reward is not None and "reward" in roles.layouts:
        # A reward model needs the padded, evenly divisible batch.
        batch |= join(reward.compute_reward(batch))
        batch.pop("reward_outcomes", None)  # they count padding rows
        batch = slice_rows(batch, kept)
    else:
        batch = slice_rows(batch, kept)
        batch |= {} if reward is None else join(reward.compute_reward(batch))
    return batch | {"correct": _correct(batch, inputs)}


def _correct(batch: Mapping[str, Any], inputs: Inputs) -> list[bool]:
    if inputs.task is None:
        return []
    found = inputs.task.correct(batch["prompt_text"], batch["response_text"], **batch["columns"])
    return [] if found is None else list(found)


def evaluate_examples(
    config: ConfigDict, algorithm: Algorithm, inputs: Inputs, step: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Evaluate an algorithm's ``predictions`` on up to ``eval.prompts`` held-out examples, and the
    loss of held-out demonstrations.

    Args:
      config: of the run; the batch size is that of an update.
      algorithm: its ``predictions`` are evaluated.
      inputs: of the run; they have held-out examples.
      step: of the run, for the rows.

    Returns:
      Of predictions ``eval/accuracy``, ``eval/loss`` and ``eval/calibration_error``, with the name
      prefixes that the algorithm gives; of demonstrations ``eval/loss``, the mean negative
      log-likelihood of a response token in nats; all by group too (``eval.by``). And one row of
      calibration.jsonl per prefix.
    """
    examples = _held_out(config, inputs)
    count = min(config.eval.prompts or len(examples), len(examples))
    batch_size = config.rollout.prompts if algorithm.generates else config.warm_start.batch
    size = batch_size // (len(inputs.held_out_examples.examples[0]) - 1)
    found: dict[str, list[tuple[np.ndarray, ...]]] = {}
    losses: list[np.ndarray] = []  # of each example the sum of its tokens' and their number
    for start in range(0, count, size):
        some = range(start, min(start + size, count))
        batch = examples.batch_of([*some, *[some[-1]] * (size - len(some))])
        for name, both in algorithm.predictions(batch).items():
            logits, outcomes = (np.asarray(x, np.float64)[: len(some)] for x in both)
            where = np.broadcast_to(
                np.reshape(some, (-1,) + (1,) * (logits.ndim - 1)), logits.shape
            )
            known = ~np.isnan(outcomes)
            found.setdefault(name, []).append((logits[known], outcomes[known], where[known]))
        if algorithm.source == "demonstrations":
            each = np.asarray(join(algorithm.actor.compute_loss(batch))["token_losses"], np.float64)
            losses.append(
                np.stack([each.sum(axis=1), batch["response_mask"].sum(axis=1)])[:, : len(some)]
            )
    metrics: dict[str, float] = {}
    groups = _groups(config, inputs, count)
    rows = []
    for name, parts in found.items():
        logits, outcomes, where = (np.concatenate(part) for part in zip(*parts, strict=True))
        for group, members in groups.items():
            if (chosen := members[where]).any():
                figures = prediction_metrics(logits[chosen], outcomes[chosen])
                metrics |= {f"eval/{group}{name}{key}": value for key, value in figures.items()}
        if len(logits):
            bins = calibration_bins(logits, outcomes)
            rows.append({"step": step, "of": name.rstrip("_"), "bins": bins})
    if losses:
        sums, tokens = np.concatenate(losses, axis=1)
        for group, members in groups.items():
            if number := tokens[members].sum():
                metrics[f"eval/{group}loss"] = float(sums[members].sum() / number)
    return metrics, rows


def _groups(config: ConfigDict, inputs: Inputs, count: int) -> dict[str, np.ndarray]:
    """Of the first held-out rows by prefix of a metric which belong to a group; "": all do."""
    groups = {"": np.ones(count, bool)}
    if by := group_column(config, inputs):
        assert inputs.held_out is not None
        values = np.array([str(value) for value in inputs.held_out.columns[by][:count]])
        groups |= {f"{value}/": values == value for value in dict.fromkeys(values)}
    return groups


def _held_out(config: ConfigDict, inputs: Inputs) -> Demonstrations:
    found = inputs.held_out_examples
    return Demonstrations(
        found.examples,
        config.warm_start.batch,
        prompt_length=inputs.prompt_length,
        response_length=config.rollout.max_response_length,
        seed=0,
        annotations=found.annotations,
        labels=found.labels or None,
        drawn=found.drawn,
    )
