"""METIS: the policy judges which prompts it can learn from, before any is answered.

Zheng et al. 2026, arXiv 2605.11235; of the paper the abstract and a note were read, not the body.
What they leave open is decided here and said in docs/algorithms/judged_prompts.md.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.algorithms.grpo import GRPO
from hjax.algorithms.policy_loss import PolicyLoss
from hjax.batches import CHOICE, sample_rows, select_rows
from hjax.controller import join
from hjax.data.dataset import pad_left, pad_right
from hjax.errors import ConfigError, RunError
from hjax.rules import Key, Rule, at_least, below_one, between, one_of

_LOG = logging.getLogger(__name__)
# A judgement is a digit: so many steps of this size, of a variance from 0 to 0.25.
BINS, BIN = 6, 0.05
# The first sequence number of judgements, so that they draw other tokens than the answers.
FIRST_SEQUENCE = 2**30
# Steps in a row with equal estimates after which a collapse is said.
COLLAPSED_AFTER = 5


class JudgedPrompts(Algorithm):
    r"""Mixin for any algorithm that answers prompts: the policy estimates each prompt's variance.

    With rewards in [0, 1], :math:`v = \frac1n\sum_i (r_i - \bar r)^2` of a prompt's responses. The
    policy reads the last prompts with their v, and a candidate, and writes its estimate
    :math:`\hat v`. Of a pool the prompts of the largest estimates are answered. The judgements of
    those learn by REINFORCE on :math:`1 - (4(\hat v - v))^2`, minus its moving average.
    """

    keys = {
        "judge": Key(
            "policy",
            "what estimates a prompt's variance: the policy, in text; rollouts, of which "
            "`judge_samples` are drawn for every prompt of the pool (an oracle that costs them); "
            "or none: prompts are uniform",
            one_of("policy", "rollouts", "none"),
        ),
        "judge_pool": Key(4, "prompts that are judged for one that is answered", at_least(1)),
        "judge_samples": Key(16, "of judge rollouts: responses to each prompt", at_least(2)),
        "judge_uniform": Key(
            0.1, "share of a step's prompts that are drawn from the rest of the pool", between(0, 1)
        ),
        "judge_memory": Key(
            3, "last prompts with their variances that a judgement sees", at_least(0)
        ),
        "judge_weight": Key(0.01, "weight of the judgements' loss; 0: frozen", at_least(0)),
        "judge_baseline": Key(
            0.9, "share of the moving average of the judgements' reward that a step leaves",
            below_one(),
        ),
        "judge_warm_start": Key(
            0,
            "first steps, of uniform prompts, in which the policy is shown the variances that "
            "came out and imitates them",
            at_least(0),
        ),
        "judge_context": Key(
            512,
            "tokens of the longest judgement prompt; where more examples would not fit, fewer are "
            "shown, and of a longer candidate its end",
            at_least(8),
        ),
        "judge_example": Key(
            "Task: {prompt}\nSpread of the rewards, from 0 (all equal) to 5: {bin}\n\n",
            "how a prompt and its variance are shown; the candidate's ends before {bin}",
            Rule("a text with {prompt} and then {bin}, each once", lambda x: _is_template(x)),
        ),
    }  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.config.get("pretraining_coef"):
            raise ConfigError(
                f"config.algorithm.pretraining_coef={self.config.pretraining_coef}: the loss of "
                "judgements has its place; set it to 0"
            )
        # (version, prompt, bin) of prompts that were learned from, the last ones last.
        self._memory: list[tuple[int, str, int]] = []
        self._lock = threading.Lock()
        self._baseline: float | None = None
        self._judgements: Batch | None = None  # of the step in progress
        self._recent: list[tuple[str, int]] = []
        self._judge_metrics: dict[str, float] = {}
        self._collapsed = 0

    @classmethod
    def longest_prompt(cls, config: ConfigDict, prompt_length: int) -> int:
        """Judgement prompts may be longer than the data's."""
        judged = config.judge_context if config.judge == "policy" else 0
        return max(super().longest_prompt(config, prompt_length), judged)

    @classmethod
    def check_samples(cls, config: ConfigDict, samples: int) -> None:
        """Refuse a single response to a prompt: its variance is always 0."""
        super().check_samples(config, samples)
        if samples < 2:
            raise ConfigError(
                f"config.rollout.samples={samples}: {cls.__name__} judges the variance of a "
                "prompt's rewards; set it to 2 or more"
            )

    @classmethod
    def pretraining_loss(cls, config: ConfigDict) -> Any:
        """REINFORCE on the judgements: tokens are summed, and judgements averaged."""
        return PolicyLoss(ratio="none", aggregation="sum", clip_low=None, clip_high=None)

    def choose(self, order: Any, count: int) -> Batch:
        """Judge a pool of prompts; take those of the largest estimates, and some uniformly."""
        config, version = self.config, order.version
        if config.judge == "none":
            return super().choose(order, count)
        policy = config.judge == "policy"
        if policy and self.tokenizer is None:
            raise ConfigError(
                f"{type(self).__name__} writes judgements as text, and there is no tokenizer: set "
                "config.tokenizer.path, or algorithm.judge=rollouts"
            )
        uniform = policy and version < config.judge_warm_start
        pool = super().choose(order, count * (1 if uniform else config.judge_pool))
        size = len(pool["prompts"])
        said: dict[str, list[Any]] = {"version": [version] * size}
        if policy:
            contexts = self._contexts(pool["prompt_text"], self._memory_at(version))
            said["judgement"] = [{"context": context} for context in contexts]
        if uniform:
            return pool | {CHOICE: pool[CHOICE] | said}
        if policy:
            said |= self._judged(said["judgement"], pool["columns"], order.number)
        else:
            said |= self._sampled(pool)
        chosen = self._selected(np.array(said["estimate"]), count, order.number)
        said["uniform"] = [float(x) for x in chosen < 0]
        said["tokens"] = [sum(said["tokens"]) / count] * size
        said["pool_estimate"] = [_mean(said["estimate"])] * size
        made = pool | {CHOICE: pool[CHOICE] | said}
        return select_rows(made, np.flatnonzero(chosen))

    def _contexts(self, texts: Sequence[str], memory: Sequence[tuple[str, int]]) -> list[list[int]]:
        """Token ids of the judgement prompts: the memory that fits, then the candidate."""
        example, limit = self.config.judge_example, self.config.judge_context
        shown = [_filled(example, text, str(number)) for text, number in memory]
        begun = example[: example.index("{bin}")]
        found = []
        for text in texts:
            candidate = _filled(begun, text)
            for first in range(len(shown) + 1):
                tokens = list(self.tokenizer.encode("".join(shown[first:]) + candidate))
                if len(tokens) <= limit:
                    break
            found.append(tokens[-limit:])
        return found

    def _judged(
        self, judgements: list[dict[str, Any]], columns: Mapping[str, Any], number: int
    ) -> dict[str, list[Any]]:
        """The policy's judgements of contexts; adds their ``tokens``."""
        prompts, mask = pad_left([x["context"] for x in judgements], self.config.judge_context)
        asked: Batch = {"prompts": prompts, "prompt_mask": mask, "columns": columns}
        asked |= {"step": number, "first": FIRST_SEQUENCE}
        judged = join(self.actor.generate_sequences(asked, samples=1))
        if "judged" in judged:
            raise RunError(
                f"{type(self).__name__} has the policy write judgements, which "
                "config.reward.while_generating would score as answers: set it to False"
            )
        rows = zip(judged["responses"], np.asarray(judged["response_mask"], bool), strict=True)
        drawn = [np.asarray(tokens)[kept].tolist() for tokens, kept in rows]
        estimates = [judgement_of(self.tokenizer.decode(tokens)) for tokens in drawn]
        for judgement, tokens, estimate in zip(judgements, drawn, estimates, strict=True):
            judgement |= {"tokens": tokens, "estimate": estimate}
        spent = [len(x["context"]) + len(x["tokens"]) for x in judgements]
        failed = [float(np.isnan(x)) for x in estimates]
        return {"estimate": estimates, "failed": failed, "tokens": spent}

    def _sampled(self, pool: Batch) -> dict[str, list[Any]]:
        """Variances of so many rollouts of every prompt."""
        samples = self.config.judge_samples
        drawn = self.answer(pool | {"first": FIRST_SEQUENCE}, samples=samples)
        drawn = join(drawn, self.reward.compute_reward(drawn))
        rows = sample_rows(drawn)
        variances = reward_variances(np.asarray(drawn["rewards"])[rows], samples)
        spent = np.asarray(drawn["response_mask"]).sum() + np.asarray(drawn["prompt_mask"]).sum()
        each = float(spent) / len(variances)
        return {"estimate": variances.tolist(), "tokens": [each] * len(variances)}

    def _selected(self, estimates: np.ndarray, count: int, number: int) -> np.ndarray:
        """int [pool]: 1 of those with the largest estimates, -1 of those that were drawn uniformly
        from the rest, 0 of others. Ties are broken, and the rest drawn, by a seed."""
        rng = np.random.default_rng([self.seed, number, BINS])
        places = rng.permutation(len(estimates))
        ranked = places[np.argsort(-estimates[places], kind="stable")]
        ranked = ranked[~np.isnan(estimates[ranked])]
        best = ranked[: count - round(self.config.judge_uniform * count)]
        chosen = np.zeros(len(estimates), int)
        chosen[best] = 1
        rest = np.flatnonzero(chosen == 0)
        chosen[rng.choice(rest, count - len(best), replace=False)] = -1
        return chosen

    def compute_advantages(self, batch: Batch) -> Batch:
        """Also makes the judgements' batch, of the variances that came out."""
        self._judge(batch)
        return super().compute_advantages(batch)

    def _judge(self, batch: Batch) -> None:
        said = batch[CHOICE]
        first = sample_rows(batch)[:: self.samples]
        variances = reward_variances(np.asarray(batch["rewards"])[sample_rows(batch)], self.samples)
        metrics = {"variance": _mean(variances), "zero_variance": _mean(variances == 0)}
        self._judgements = None
        if "estimate" in said:
            estimates = np.array([said["estimate"][i] for i in first.tolist()], float)
            metrics |= judgement_metrics(estimates, variances)
            self._notice_collapse(metrics)
        if "judgement" in said:
            judgements = [said["judgement"][i] for i in first.tolist()]
            texts = [batch["prompt_text"][i] for i in first.tolist()]
            known = [(t, v) for t, v in zip(texts, variances.tolist(), strict=True) if v == v]
            shown = max(self.config.judge_memory, 0)
            self._recent = [(t, bin_of(v)) for t, v in known[len(known) - shown :]] if shown else []
            metrics |= self._judgement_batch(judgements, variances)
        self._judge_metrics = {f"judge/{name}": value for name, value in metrics.items()}

    def _judgement_batch(
        self, judgements: Sequence[Mapping[str, Any]], variances: np.ndarray
    ) -> dict[str, float]:
        """Make ``_judgements``; returns metrics. Judgements that were not written are imitated."""
        imitates = "tokens" not in judgements[0]
        scored = ~np.isnan(variances)
        metrics: dict[str, float] = {}
        if imitates:
            eos = [] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]
            bins = [0 if v != v else bin_of(v) for v in variances.tolist()]
            encode = self.tokenizer.encode
            tokens = [[*encode(str(number), add_special=False), *eos] for number in bins]
            advantages = np.ones(len(tokens), np.float32)
        else:
            tokens = [x["tokens"] for x in judgements]
            rewards = judgement_rewards(np.array([x["estimate"] for x in judgements]), variances)
            mean = _mean(rewards)
            baseline = mean if self._baseline is None else self._baseline
            advantages = np.nan_to_num(rewards - baseline).astype(np.float32)
            decay = self.config.judge_baseline
            self._baseline = decay * baseline + (1 - decay) * mean if mean == mean else baseline
            metrics = {"reward": mean, "baseline": baseline}
        weight = 1.0 if imitates else self.config.judge_weight
        if not weight:
            return metrics
        longest = max(max(map(len, tokens)), 1)
        width = min(-(-longest // 64) * 64, max(self.max_response_length, longest))
        prompts, prompt_mask = pad_left(
            [x["context"] for x in judgements], self.config.judge_context
        )
        responses, mask = pad_right(tokens, width)
        self._judgements = {
            "prompts": prompts,
            "prompt_mask": prompt_mask,
            "responses": responses,
            "response_mask": mask & scored[:, None],
            "advantages": np.where(mask, advantages[:, None], np.float32(0)),
            "row_mask": scored,
            "coefficient": np.asarray(weight, np.float32),
        }
        return metrics

    def _notice_collapse(self, metrics: Mapping[str, float]) -> None:
        equal = metrics.get("estimate_std") == 0
        self._collapsed = self._collapsed + 1 if equal else 0
        if self._collapsed == COLLAPSED_AFTER:
            _LOG.warning(
                "the judgements have collapsed: in %d steps in a row all estimates of the chosen "
                "prompts were equal (judge/estimate_std 0), so prompts are taken at random; lower "
                "algorithm.judge_weight, or raise judge_warm_start",
                COLLAPSED_AFTER,
            )

    def pretraining_batch(self) -> Batch | None:
        """The judgements of the step's prompts, for every update of the actor."""
        return self._judgements

    def remember(self, batch: Batch) -> None:
        """Keep the last prompts with their variances, for judgements by later weights."""
        super().remember(batch)
        with self._lock:
            self._memory += [(self.step_number, *known) for known in self._recent]
        self._recent = []

    def _memory_at(self, version: int) -> list[tuple[str, int]]:
        """The last prompts that the weights of a version have learned from. Versions rise, so
        older ones are given up."""
        shown = self.config.judge_memory
        with self._lock:
            known = [each for each in self._memory if each[0] <= version]
            later = [each for each in self._memory if each[0] > version]
            known = known[len(known) - shown :] if 0 < shown < len(known) else known
            self._memory = known + later if shown else []
        return [(text, number) for _, text, number in known] if shown else []

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """What came of the judgements, under ``judge/``."""
        return super().batch_metrics(batch) | self._judge_metrics

    def state(self) -> dict[str, Any]:
        """With the memory and the moving average."""
        with self._lock:
            memory = [list(each) for each in self._memory]
        judge = {"memory": memory, "baseline": self._baseline, "collapsed": self._collapsed}
        return super().state() | {"judge": judge}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        super().restore(state)
        judge = state["judge"]
        with self._lock:
            self._memory = [(int(at), text, int(bin)) for at, text, bin in judge["memory"]]
        self._baseline, self._collapsed = judge["baseline"], int(judge["collapsed"])


class METIS(JudgedPrompts, GRPO):
    """GRPO without the standard deviation on prompts that the policy has judged worth it."""

    keys = {**JudgedPrompts.keys}
    defaults = {"normalise": "none", "kl_coef": 0.0}


def _is_template(text: str) -> bool:
    there = text.count("{prompt}") == 1 == text.count("{bin}")
    return there and text.index("{prompt}") < text.index("{bin}")


def _filled(template: str, prompt: str, number: str = "") -> str:
    """The template with its places filled, whatever braces the prompt has."""
    before, _, after = template.partition("{prompt}")
    return before + prompt + after.replace("{bin}", number)


def _mean(values: Any) -> float:
    numbers = np.asarray(values, float)
    numbers = numbers[~np.isnan(numbers)]
    return float(numbers.mean()) if numbers.size else float("nan")


def bin_of(variance: float) -> int:
    """The digit of a variance: the nearest multiple of 0.05, 0 to 5.

    Example:
        >>> bin_of(0.1875), bin_of(0.25)
        (4, 5)
    """
    return min(int(variance / BIN + 0.5), BINS - 1)


def judgement_of(text: str) -> float:
    """The variance that a judgement says: of its last digit 0 to 5; NaN without one.

    Example:
        >>> judgement_of("rather hard, so 1")
        0.05
    """
    digits = re.findall(r"(?<![0-9.])[0-5](?![0-9]|\.[0-9])", text)
    return round(int(digits[-1]) * BIN, 2) if digits else float("nan")


def judgement_rewards(estimates: np.ndarray, variances: np.ndarray) -> np.ndarray:
    r""":math:`1 - (4(\hat v - v))^2`; -1 without an estimate, NaN without a variance.

    Args:
        estimates, variances: float [prompts].
    """
    rewards = 1 - (4 * (estimates - variances)) ** 2
    return np.where(np.isnan(estimates) & ~np.isnan(variances), -1.0, rewards)


def reward_variances(rewards: np.ndarray, samples: int) -> np.ndarray:
    """Variance (over n) of each prompt's scored rewards; NaN of those with fewer than two.

    Args:
        rewards: float [prompts * samples], NaN unscored.
        samples: adjacent responses of a prompt.

    Returns:
        float64 [prompts].

    Raises:
        RunError: a reward outside of 0 to 1.
    """
    groups = np.asarray(rewards, np.float64).reshape(-1, samples)
    scored = ~np.isnan(groups)
    if (groups[scored] < 0).any() or (groups[scored] > 1).any():
        raise RunError(
            f"judged variances are of rewards from 0 to 1, and there are rewards from "
            f"{groups[scored].min():g} to {groups[scored].max():g}: let reward.function return "
            "rewards from 0 to 1"
        )
    count = scored.sum(axis=1)
    values = np.where(scored, groups, 0.0)
    mean = values.sum(axis=1) / np.maximum(count, 1)
    squares = np.where(scored, (groups - mean[:, None]) ** 2, 0.0).sum(axis=1)
    equal = np.where(scored, groups, -np.inf).max(axis=1) == np.where(scored, groups, np.inf).min(
        axis=1
    )
    variances = np.where(equal, 0.0, squares / np.maximum(count, 1))
    return np.where(count >= 2, variances, np.nan)


def judgement_metrics(estimates: np.ndarray, variances: np.ndarray) -> dict[str, float]:
    """``estimate_std``, and ``rank_correlation`` (Spearman's) of estimates and variances, where
    both are there and differ.

    Args:
        estimates, variances: float [prompts], NaN where there is none.
    """
    both = ~np.isnan(estimates) & ~np.isnan(variances)
    if both.sum() < 2:
        return {}
    found = {"estimate_std": 0.0 if np.ptp(estimates[both]) == 0 else float(estimates[both].std())}
    ranks = [_ranks(x[both]) for x in (estimates, variances)]
    if all(np.ptp(x) > 0 for x in ranks):
        found["rank_correlation"] = float(np.corrcoef(ranks)[0, 1])
    return found


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; of equal values their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]
