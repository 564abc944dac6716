"""Signs that a run is going wrong: each is told once, by a name, with what to do about it.

Every watch is a pure reader of the steps' metrics and batches. Thresholds are for what nobody
means, not for what is merely unusual. With them what is probably not meant.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.data.dataset import Dataset
from hjax.errors import RunError
from hjax.run.placement import Plan

# Held-out prompts below which an accuracy says little.
FEW_PROMPTS = 16
# Steps in a row with mostly equal groups, steps of a recent mean, and of what it is compared with.
EQUAL_STEPS, RECENT, BEFORE = 3, 5, 20
# Generation may take so many times what its device needs to read the weights for each token.
SLOW = 10.0

Metrics = Mapping[str, float]


def first_remarks(
    config: ConfigDict, devices: int, plan: Plan, held_out: Dataset | None
) -> list[str]:
    """What is probably not meant, as far as it is known before the first step."""
    allocation, rows = plan.allocation, None if held_out is None else len(held_out)
    remarks = [idle_remark(devices, sum(allocation), config.placement, allocation)]
    if config.eval.every:
        remarks.append(held_out_remark(rows))
    return [remark for remark in remarks if remark]


def held_out_remark(held_out: int | None) -> str | None:
    """What to tell of so many held-out prompts (None: there are none) before the first step."""
    if held_out is None or held_out >= FEW_PROMPTS:
        return None
    return (
        f"warning (few held-out prompts): {held_out}, so that one answer is "
        f"{100 / held_out:.0f} points of accuracy; raise data.eval_fraction or data.eval_size, or "
        "give data.eval_path"
    )


def idle_remark(devices: int, used: int, placement: str, sets: Sequence[int]) -> str | None:
    """What to tell of devices that no role stands on.

    Args:
      devices: that there are.
      used: of them.
      placement: the key's value.
      sets: devices of each set of roles.
    """
    if used >= devices:
        return None
    shares = " + ".join(map(str, sets))
    if placement == "auto":
        why = f"the search found no faster plan than sets of {shares}, see plan.json"
        remedy = "other batch sizes may use more"
    elif placement.endswith(".json"):
        why, remedy = f"{placement} allocates {shares}", "allocate the rest there"
    else:
        why = f"{placement} gives its sets powers of two where they cannot be equal: {shares}"
        remedy = "take a number that the sets divide, placement=colocate, or a plan.json"
    return f"warning (idle devices): {devices - used} of {devices} do nothing: {why}; {remedy}"


class EqualGroupsCheck:
    """Says once when most groups have equal rewards for some steps, where that is all they teach.

    Args:
      config: of the run.
    """

    def __init__(self, config: ConfigDict):
        self._samples = config.rollout.samples
        # Only algorithms that compare a group's samples, and do not draw such groups anew.
        compares = "resample" in config.algorithm and not config.algorithm.resample
        self._watches = compares and config.rollout.samples > 1
        self._steps = 0

    def message(self, metrics: Metrics, batch: Mapping[str, Any]) -> str | None:
        """What to tell of a step; None: nothing."""
        if not self._watches or "rewards" not in batch:
            return None
        share = equal_groups(batch["rewards"], self._samples)
        self._steps = self._steps + 1 if share > 0.5 else 0
        if self._steps < EQUAL_STEPS:
            return None
        self._watches = False
        return (
            f"in {share:.0%} of the groups all {self._samples} rewards are equal (their mean is "
            f"{metrics.get('reward/mean', math.nan):.3g}): they teach nothing. Where that is not "
            "the end of learning, take prompts nearer to what the model can do, a reward with "
            "parts, more rollout.samples, or algorithm.resample, which draws them anew"
        )


def equal_groups(rewards: Any, samples: int) -> float:
    """The share of groups whose scored rewards are all equal, of those with any.

    Args:
      rewards: [groups * samples], NaN where unscored.
      samples: of a group, side by side.
    """
    rewards = np.asarray(rewards, np.float64)
    if not rewards.size or rewards.size % samples:
        return 0.0
    table = rewards.reshape(-1, samples)
    table = table[~np.isnan(table).all(axis=1)]
    if not len(table):
        return 0.0
    return float(np.mean(np.nanmax(table, axis=1) == np.nanmin(table, axis=1)))


class RunawayCheck:
    """Says once when a metric leaves, upwards, the range it has had.

    Args:
      metric: of the steps' rows.
      least: a mean of the last steps below it is no matter.
      times: how many times the mean of the steps before (of their sizes) it must be.
      text: what to tell; ``{now}`` and ``{before}`` are the two means.
    """

    def __init__(self, metric: str, least: float, times: float, text: str):
        self._metric, self._least, self._times, self._text = metric, least, times, text
        self._seen: deque[float] = deque(maxlen=RECENT + BEFORE)
        self._said = False

    def message(self, metrics: Metrics, batch: Mapping[str, Any]) -> str | None:
        """What to tell of a step; None: nothing."""
        value = metrics.get(self._metric)
        if self._said or value is None or not math.isfinite(value):
            return None
        self._seen.append(value)
        if len(self._seen) < 2 * RECENT:
            return None
        seen = list(self._seen)
        now = float(np.mean(seen[-RECENT:]))
        before = float(np.mean(np.abs(seen[:-RECENT])))
        if now < self._least or now < self._times * before:
            return None
        self._said = True
        return self._text.format(now=now, before=before)


class EntropyCollapseCheck:
    """Says once when the policy's entropy has all but gone.

    Args:
      share: of the first steps' entropy below which it has.
      most: nats per token above which it has not, whatever it was.
    """

    def __init__(self, share: float = 0.02, most: float = 0.02):
        self._share, self._most = share, most
        self._first: list[float] = []
        self._low = 0
        self._said = False

    def message(self, metrics: Metrics, batch: Mapping[str, Any]) -> str | None:
        """What to tell of a step; None: nothing."""
        entropy = metrics.get("actor/entropy")
        if self._said or entropy is None or not math.isfinite(entropy):
            return None
        if len(self._first) < RECENT:
            self._first.append(entropy)
            return None
        first = float(np.mean(self._first))
        low = entropy < min(self._most, self._share * first)
        self._low = self._low + 1 if low else 0
        if self._low < RECENT:
            return None
        self._said = True
        return (
            f"actor/entropy is {entropy:.2g} nats per token and was {first:.2g}: answers hardly "
            "vary any more, so that rewards have little to compare. Where that is not the end of "
            "learning, raise algorithm.entropy_coef, rollout.temperature or algorithm.kl_coef, or "
            "lower actor.learning_rate"
        )


class SlowGenerationCheck:
    """Says once when generation takes far longer than its devices need.

    Args:
      token_seconds: what reading the weights once takes there, by data sheet; 0: not known.
      slots: sequences at a time; 0: all.
    """

    def __init__(self, token_seconds: float, slots: int = 0):
        self._token_seconds, self._slots = token_seconds, slots
        self._steps = 0
        self._said = not token_seconds

    def message(self, metrics: Metrics, batch: Mapping[str, Any]) -> str | None:
        """What to tell of a step; None: nothing. The first two compile, and do not count."""
        spent = metrics.get("time/generate")
        self._steps += 1
        if self._said or spent is None or self._steps <= 2 or "response_mask" not in batch:
            return None
        lengths = np.sum(batch["response_mask"], axis=1)
        passes = float(lengths.max()) if len(lengths) else 0.0
        if self._slots > 0:
            passes = max(passes, float(lengths.sum()) / self._slots)
        bound = passes * self._token_seconds
        spent -= metrics.get("time/transition", 0.0)
        if not bound or spent < SLOW * bound:
            return None
        self._said = True
        return (
            f"generation took {spent:.1f} s; reading the weights once for each of {passes:.0f} "
            f"tokens takes {bound:.1f} s on these devices. benchmarks/roofline.py in hjax's "
            "repository says where the rest should go; larger layout.actor.generate.tensor reads "
            "less per device, and reward functions under reward.while_generating share its time"
        )


class HealthChecks:
    """All of them: what to tell of each step.

    Args:
      config: of the run.
      token_seconds: of ``SlowGenerationCheck``.
    """

    def __init__(self, config: ConfigDict, token_seconds: float = 0.0):
        kl = (
            "kl/reference is {now:.3g} nats per token over the last steps and was {before:.3g}: "
            "the policy runs away from its reference; lower actor.learning_rate, raise "
            "algorithm.kl_coef, or set algorithm.kl_target"
        )
        reward = (
            "reward/mean is {now:.4g} over the last steps and was of the size of {before:.4g}: "
            "look at samples.jsonl for answers that deceive the reward function; "
            "algorithm.reward_clip bounds it, algorithm.kl_coef holds the policy"
        )
        slots = max(config.rollout.slots, 0)
        self._all: dict[str, Callable[[Metrics, Mapping[str, Any]], str | None]] = {
            "equal rewards": EqualGroupsCheck(config).message,
            "KL running away": RunawayCheck("kl/reference", 1.0, 5.0, kl).message,
            "reward running away": RunawayCheck("reward/mean", 10.0, 10.0, reward).message,
            "entropy collapsed": EntropyCollapseCheck().message,
            "slow generation": SlowGenerationCheck(token_seconds, slots).message,
        }

    def messages(self, metrics: Metrics, batch: Mapping[str, Any]) -> list[str]:
        """The lines of a step, each with its name."""
        found = {name: message(metrics, batch) for name, message in self._all.items()}
        step = metrics["step"]
        return [f"step {step}: warning ({name}): {text}" for name, text in found.items() if text]


class TruncationWarning:
    """Says once when the length limit cuts most of a step's responses.

    Args:
      max_response_length: ``rollout.max_response_length``, in tokens.
      longest: tokens of the longest right answer, where a built-in task knows it; a limit that
        leaves room for it is meant, and nothing is said. None: not known.
    """

    def __init__(self, max_response_length: int, longest: int | None = None):
        self._limit = max_response_length
        self._said = longest is not None and longest <= max_response_length

    def message(self, metrics: Metrics) -> str | None:
        """What to tell of a step's row: once, where more than half was cut; else None."""
        share = metrics.get("response/truncated", 0.0)
        if self._said or not share > 0.5:
            return None
        self._said = True
        return (
            f"step {metrics['step']}: warning (truncated): {share:.0%} of the responses were cut "
            f"at rollout.max_response_length={self._limit} tokens; raise it if they are to end by "
            "themselves"
        )


class SamplerCheck:
    """Says once, or stops a run, when its sampler's log-probs are not those of learning.

    ``rollout/token_prob_error`` is the mean of exp|difference| over a step's tokens: 1.00 where
    both compute in float32, a little more in bfloat16 or with a cache in int8. It is not looked at
    where older weights sample, or learning drops features of adapters: there it is meant.

    Args:
      config: of the run.
    """

    def __init__(self, config: ConfigDict):
        rollout = config.rollout
        meant = rollout.max_staleness or rollout.partial_tokens or config.actor.lora.dropout
        self._warn = math.inf if meant else rollout.warn_prob_error or math.inf
        self._stop = math.inf if meant else rollout.max_prob_error or math.inf
        self._said = False

    def message(self, metrics: Metrics) -> str | None:
        """What to tell of a step's metrics, once; else None.

        Raises:
          RunError: the error is above ``rollout.max_prob_error``.
        """
        error = metrics.get("rollout/token_prob_error", 1.0)
        if error <= min(self._warn, self._stop) or math.isnan(error):
            return None  # an update that is not finite is skipped and counted
        found = f"rollout/token_prob_error is {error:.4g}"
        if error > self._stop:
            raise RunError(
                f"{found}, above rollout.max_prob_error={self._stop:g}: the sampler's log-probs "
                "are not learning's, which would learn from the wrong ratios; raise that key (0: "
                "never stop) to go on, or start another run with model.dtype=float32 or "
                "rollout.cache_dtype=auto"
            )
        if self._said:
            return None
        self._said = True
        return (
            f"warning (sampler): {found}, above rollout.warn_prob_error={self._warn:g}: the "
            "sampler's log-probs are "
            "not quite learning's; algorithm.correction=truncated weighs for it"
        )
