"""Signs that a run is going wrong: each is told once, by a name, with what to do about it.

Every watch is a pure reader of the steps' metrics and batches. Thresholds are for what nobody
means, not for what is merely unusual.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

# Held-out prompts below which an accuracy says little.
FEW_PROMPTS = 16
# Steps in a row with mostly equal groups, steps of a recent mean, and of what it is compared with.
EQUAL_STEPS, RECENT, BEFORE = 3, 5, 20
# Generation may take so many times what its device needs to read the weights for each token.
SLOW = 10.0

Metrics = Mapping[str, float]


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


class EqualGroups:
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


class Runaway:
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


class Collapse:
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


class SlowGeneration:
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


class Watches:
    """All of them: what to tell of each step.

    Args:
      config: of the run.
      token_seconds: of ``SlowGeneration``.
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
            "equal rewards": EqualGroups(config).message,
            "KL running away": Runaway("kl/reference", 1.0, 5.0, kl).message,
            "reward running away": Runaway("reward/mean", 10.0, 10.0, reward).message,
            "entropy collapsed": Collapse().message,
            "slow generation": SlowGeneration(token_seconds, slots).message,
        }

    def messages(self, metrics: Metrics, batch: Mapping[str, Any]) -> list[str]:
        """The lines of a step, each with its name."""
        found = {name: message(metrics, batch) for name, message in self._all.items()}
        step = metrics["step"]
        return [f"step {step}: warning ({name}): {text}" for name, text in found.items() if text]
