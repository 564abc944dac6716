"""Health checks: warnings about a run that is going wrong or is probably set up wrongly.

Each check reads the steps' metrics and batches, changes nothing, and warns at most once, with a
remedy. Thresholds are set for what nobody intends, not for what is merely unusual.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.masks import constant
from hjax.batches import response_lengths, sample_rows
from hjax.controller import BuildWorker
from hjax.data.dataset import Dataset
from hjax.errors import RunError
from hjax.models.model_config import ModelConfig
from hjax.models.parameter_counts import parameter_count
from hjax.run.role_groups import RoleGroups

# Held-out prompts below which an accuracy says little.
MIN_HELD_OUT_PROMPTS = 16
EQUAL_STEPS = 3  # consecutive steps with mostly equal groups before a warning
# Of all weights of a pretrained model; adapters need some twenty times as much.
FULL_RATE = 2e-6
# Rates from here on are those of training from scratch, and of models of less than this size.
SCRATCH_RATE, SMALL_MODEL = 1e-4, 50_000_000
# A metric's mean over the recent steps is compared with that over at most so many earlier ones.
RECENT_STEPS, EARLIER_STEPS = 5, 20
# Generation may take so many times the lower bound of reading the weights once per token.
SLOW_RATIO = 10.0

Metrics = Mapping[str, float]


def setup_warnings(
    config: ConfigDict, devices: int, roles: RoleGroups, held_out: Dataset | None
) -> list[str]:
    """Warnings about the set-up, before the first step."""
    allocation, rows = roles.plan.allocation, None if held_out is None else len(held_out)
    warnings = [idle_devices_warning(devices, sum(allocation), config.placement, allocation)]
    if config.eval.every:
        warnings.append(held_out_warning(rows, config.data.eval_path))
    for role in ("actor", "critic"):
        warnings.append(adapters_warning(role, config[role]))
        if role in roles.models:
            warnings.append(pretrained_rate_warning(role, config[role], roles.models[role]))
    return [remark for remark in warnings if remark]


def schedule_remarks(
    config: ConfigDict, builds: Mapping[str, BuildWorker], earlier: int | None, step: int
) -> list[str]:
    """Remarks on learning rates that change at once, where a run is resumed with other ``steps``.

    Args:
      config: of the run that goes on.
      builds: by role, the message that builds its worker.
      earlier: ``steps`` before; None: unknown.
      step: the last one taken.
    """
    remarks: list[str] = []
    if earlier is None or earlier == config.steps or config.steps <= step:
        return remarks
    for role, build in builds.items():
        optimizer = getattr(build.arguments[0], "optimizer", None)
        if optimizer is None or optimizer.schedule == "constant":
            continue
        each = optimizer.total_updates // config.steps
        before = dataclasses.replace(optimizer, total_updates=earlier * each)
        rates = [float(x.rate()(step * each - 1)) for x in (before, optimizer)]
        remarks.append(
            f"warning (other schedule): steps={config.steps} after {earlier}: the {role}'s "
            f"{optimizer.schedule} schedule now ends there, and its learning rate goes at once "
            f"from {rates[0]:.3g} to {rates[1]:.3g}; for a new decay from these weights start "
            "another run with actor.path=WORKDIR"
        )
    return remarks


def held_out_warning(held_out: int | None, path: str = "") -> str | None:
    """The warning about too few held-out prompts; None for enough, or for no held-out data."""
    if held_out is None or held_out >= MIN_HELD_OUT_PROMPTS:
        return None
    more = "raise data.eval_fraction or data.eval_size, or give data.eval_path"
    if path:
        more = f"give data.eval_path={path} more rows"
    return (
        f"warning (few held-out prompts): {held_out}, so that one answer is "
        f"{100 / held_out:.0f} points of accuracy; {more}"
    )


def adapters_warning(role: str, section: ConfigDict) -> str | None:
    """The warning about adapters that learn at the rate of all weights; None for others."""
    if not section.lora.rank or not 0 < section.learning_rate <= FULL_RATE:
        return None
    return (
        f"warning (slow adapters): {role}.learning_rate={section.learning_rate:g} is a rate for "
        f"all weights; adapters (lora.rank={section.lora.rank}) hardly move at it: 1e-5 to 1e-4 "
        "is usual"
    )


def pretrained_rate_warning(role: str, section: ConfigDict, model: ModelConfig) -> str | None:
    """The warning about a pretrained model, all of whose weights learn at a rate for models from
    scratch; None for others, and for small ones."""
    if not section.path or section.lora.rank or section.learning_rate < SCRATCH_RATE:
        return None
    if (count := parameter_count(model)) < SMALL_MODEL:
        return None
    return (
        f"warning (fast weights): {role}.learning_rate={section.learning_rate:g} is a rate for "
        f"training from scratch; all {count / 1e6:,.0f} million weights of {section.path} learn at "
        "it: about 1e-6 is usual in reinforcement learning, 1e-5 in supervised learning"
    )


def idle_devices_warning(
    devices: int, used: int, placement: str, sets: Sequence[int]
) -> str | None:
    """The warning about devices that no role uses; None if all are used.

    Args:
      devices: number of devices.
      used: devices that the placement uses.
      placement: the config key's value.
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
    """Warns once when most groups have equal rewards for some steps, so give no learning signal.

    Args:
      config: of the run.
    """

    def __init__(self, config: ConfigDict):
        self._samples = config.rollout.samples
        # Only for algorithms that compare a group's samples and do not resample such groups.
        compares = "resample" in config.algorithm and not config.algorithm.resample
        self._active = compares and config.rollout.samples > 1
        self._steps = 0

    def message(self, metrics: Metrics, batch: Mapping[str, Any]) -> str | None:
        """The warning after a step, or None."""
        if not self._active or "rewards" not in batch:
            return None
        rewards = np.asarray(batch["rewards"])
        if "episode" in batch:
            rewards = rewards[sample_rows(batch)]
        share = equal_groups(rewards, self._samples)
        self._steps = self._steps + 1 if share > 0.5 else 0
        if self._steps < EQUAL_STEPS:
            return None
        self._active = False
        return (
            f"in {share:.0%} of the groups all {self._samples} rewards are equal up to a millionth "
            f"(their mean is {metrics.get('reward/mean', math.nan):.3g}): they teach nothing. "
            "Where that is not the end of learning, take prompts nearer to what the model can do, "
            "a reward with parts, more rollout.samples, or algorithm.resample, which draws them "
            "anew"
        )


def equal_groups(rewards: Any, samples: int) -> float:
    """Fraction of groups whose scored rewards are all equal, or ``constant``, among groups with
    any.

    Args:
      rewards: [groups * samples], NaN where unscored.
      samples: per group, adjacent.
    """
    rewards = np.asarray(rewards, np.float64)
    if not rewards.size or rewards.size % samples:
        return 0.0
    table = rewards.reshape(-1, samples)
    table = table[~np.isnan(table).all(axis=1)]
    if not len(table):
        return 0.0
    return float(np.mean(constant(np.nanmin(table, axis=1), np.nanmax(table, axis=1))))


class RunawayCheck:
    """Warns once when a metric's recent mean rises far above its earlier range.

    Args:
      metric: its key.
      min_mean: recent means below it are ignored.
      min_ratio: smallest ratio of the recent mean to the earlier mean of absolute values.
      text: the warning; ``{now}`` and ``{before}`` are the two means.
    """

    def __init__(self, metric: str, min_mean: float, min_ratio: float, text: str):
        self._metric, self._text = metric, text
        self._min_mean, self._min_ratio = min_mean, min_ratio
        self._values: deque[float] = deque(maxlen=RECENT_STEPS + EARLIER_STEPS)
        self._warned = False

    def message(self, metrics: Metrics, batch: Mapping[str, Any]) -> str | None:
        """The warning after a step, or None."""
        value = metrics.get(self._metric)
        if self._warned or value is None or not math.isfinite(value):
            return None
        self._values.append(value)
        if len(self._values) < 2 * RECENT_STEPS:
            return None
        values = list(self._values)
        now = float(np.mean(values[-RECENT_STEPS:]))
        before = float(np.mean(np.abs(values[:-RECENT_STEPS])))
        if now < self._min_mean or now < self._min_ratio * before:
            return None
        self._warned = True
        return self._text.format(now=now, before=before)


class EntropyCollapseCheck:
    """Warns once when the policy's entropy has collapsed.

    Args:
      share: fraction of the first steps' entropy below which it counts as collapsed.
      max_entropy: nats per token above which it never counts as collapsed.
    """

    def __init__(self, share: float = 0.02, max_entropy: float = 0.02):
        self._share, self._max_entropy = share, max_entropy
        self._first: list[float] = []
        self._low = 0
        self._warned = False

    def message(self, metrics: Metrics, batch: Mapping[str, Any]) -> str | None:
        """The warning after a step, or None."""
        entropy = metrics.get("actor/entropy")
        if self._warned or entropy is None or not math.isfinite(entropy):
            return None
        if metrics.get("reward/unscored") == 1.0:  # no token counts, so its mean is 0
            return None
        if len(self._first) < RECENT_STEPS:
            self._first.append(entropy)
            return None
        first = float(np.mean(self._first))
        low = entropy < min(self._max_entropy, self._share * first)
        self._low = self._low + 1 if low else 0
        if self._low < RECENT_STEPS:
            return None
        self._warned = True
        return (
            f"actor/entropy is {entropy:.2g} nats per token and was {first:.2g}: answers hardly "
            "vary any more, so that rewards have little to compare. Where that is not the end of "
            "learning, raise algorithm.entropy_coef, rollout.temperature or algorithm.kl_coef, or "
            "lower actor.learning_rate"
        )


class SlowGenerationCheck:
    """Warns once when generation is far slower than its memory-bandwidth bound.

    Args:
      token_seconds: to read the weights once, by data sheet; 0: unknown.
      slots: sequences at a time; 0: all.
    """

    def __init__(self, token_seconds: float, slots: int = 0):
        self._token_seconds, self._slots = token_seconds, slots
        self._steps = 0
        self._warned = not token_seconds

    def message(self, metrics: Metrics, batch: Mapping[str, Any]) -> str | None:
        """The warning after a step, or None. The first two steps compile and do not count."""
        spent = metrics.get("time/generate")
        self._steps += 1
        if self._warned or spent is None or self._steps <= 2 or "response_mask" not in batch:
            return None
        lengths = response_lengths(batch)
        passes = float(lengths.max()) if len(lengths) else 0.0
        if self._slots > 0:
            passes = max(passes, float(lengths.sum()) / self._slots)
        bound = passes * self._token_seconds
        spent -= metrics.get("time/transition", 0.0)
        if not bound or spent < SLOW_RATIO * bound:
            return None
        self._warned = True
        return (
            f"generation took {spent:.1f} s; reading the weights once for each of {passes:.0f} "
            f"tokens takes {bound:.1f} s on these devices. benchmarks/roofline.py in hjax's "
            "repository says where the rest should go; larger layout.actor.generate.tensor reads "
            "less per device, and reward functions under reward.while_generating share its time"
        )


class HealthChecks:
    """All checks of a run's steps.

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
        """The warnings after a step, one line each, with the checks' names."""
        found = {name: message(metrics, batch) for name, message in self._all.items()}
        step = metrics["step"]
        return [f"step {step}: warning ({name}): {text}" for name, text in found.items() if text]


class TruncationWarning:
    """Warns once when the length limit truncates most of a step's responses.

    Args:
      max_response_length: ``rollout.max_response_length``, in tokens.
      longest: tokens of a built-in task's longest right answer; there is no warning if the limit
        leaves room for it. None: unknown.
    """

    def __init__(self, max_response_length: int, longest: int | None = None):
        self._limit = max_response_length
        self._warned = longest is not None and longest <= max_response_length

    def message(self, metrics: Metrics) -> str | None:
        """The warning after a step, once, if more than half was truncated; else None. Episodes
        count that had no room for another turn, not those that had all their turns."""
        share = metrics.get("episode/stop_context", metrics.get("response/truncated", 0.0))
        if self._warned or not share > 0.5:
            return None
        self._warned = True
        return (
            f"step {metrics['step']}: warning (truncated): {share:.0%} of the responses were cut "
            f"at rollout.max_response_length={self._limit} tokens; raise it if they are to end by "
            "themselves"
        )


class SamplerCheck:
    """Warns once, or stops the run, when the sampler's log-probs differ from the trainer's.

    ``rollout/token_prob_error`` is the mean of exp|difference| over a step's tokens: 1.00 if both
    compute in float32, a little more in bfloat16 or with an int8 cache. It is ignored if a
    difference is intended: with older weights sampling, or dropout in adapters.

    Args:
      config: of the run.
    """

    def __init__(self, config: ConfigDict):
        rollout = config.rollout
        intended = rollout.max_staleness or rollout.partial_tokens or config.actor.lora.dropout
        self._warn = math.inf if intended else rollout.warn_prob_error or math.inf
        self._stop = math.inf if intended else rollout.max_prob_error or math.inf
        self._warned = False

    def message(self, metrics: Metrics) -> str | None:
        """The warning after a step, once; else None.

        Raises:
          RunError: the error is above ``rollout.max_prob_error``.
        """
        error = metrics.get("rollout/token_prob_error", 1.0)
        if error <= min(self._warn, self._stop) or math.isnan(error):
            return None  # NaN: the update was not finite, so it is skipped and counted elsewhere
        found = f"rollout/token_prob_error is {error:.4g}"
        if error > self._stop:
            raise RunError(
                f"{found}, above rollout.max_prob_error={self._stop:g}: the sampler's log-probs "
                "are not learning's, which would learn from the wrong ratios; raise that key (0: "
                "never stop) to go on, or start another run with model.dtype=float32 or "
                "rollout.cache_dtype=auto"
            )
        if self._warned:
            return None
        self._warned = True
        return (
            f"warning (sampler): {found}, above rollout.warn_prob_error={self._warn:g}: the "
            "sampler's log-probs are not quite learning's; algorithm.correction=truncated corrects "
            "for it by importance sampling"
        )
