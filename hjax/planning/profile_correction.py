"""Profile correction: compare predicted and measured seconds of a run, and adjust the constants.

A stage's seconds are (nearly) linear in the time that each constant describes. So every call of a
run is one linear equation in correction factors of these times. The factors are fitted by ridge
regression on the relative errors, with 1 (the profile's own values) as the prior. The prior weighs
more with every run, so later runs change the factors less.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hjax.devices import device_of_kind
from hjax.errors import ConfigError
from hjax.files import json_line, read_bytes, replace_file
from hjax.machine import device_memory
from hjax.planning.auto import predict_run, run_problem
from hjax.planning.constants import Constants
from hjax.planning.host_pools import local_cluster
from hjax.planning.plan_types import Candidate
from hjax.planning.profile import (
    CALIBRATE_COMMAND,
    MeasuredOn,
    Profile,
    profile_path,
    read_profile,
    write_profile,
)
from hjax.roles import STAGES
from hjax.run.backends import local_devices
from hjax.run.role_groups import is_float32
from hjax.settings.config_checks import on_cluster
from hjax.user_input import parse_json

PHASES = dict(zip(("generate", "prepare", "update"), STAGES, strict=True))
# Constants that are rates, so that seconds fall as they rise.
RATES = ("matmul", "memory", "link", "network", "host")
# Constants that a run may correct: those that a calibration measures.
TERMS = (
    "matmul", "score", "backward", "layer_pass", "layer_update", "dispatch", "decode",
    "decode_layer", "rollout", "memory", "gather", "unsplit", "link", "link_latency",
)  # fmt: skip
COMPILING_STEPS = 2  # first steps of a run, which compile
# Ridge weight of a factor's distance from 1, against a call's error of 100 %; the largest factor.
PRIOR_WEIGHT, MAX_FACTOR = 0.02, 4.0


@dataclasses.dataclass(frozen=True)
class CallSeconds:
    """Predicted and measured seconds of a role's calls in one stage of a step.

    Attributes:
      role, stage: of the calls.
      methods: that are called, in order.
      predicted, measured: seconds per step; the measured ones are a median over steps.
    """

    role: str
    stage: str
    methods: tuple[str, ...]
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


@dataclasses.dataclass(frozen=True)
class ProfileCorrection:
    """Correction factors of the constants, fitted to a run.

    Attributes:
      calls: with the predictions of the uncorrected constants.
      factors: by constant, measured over predicted time of what it describes. Constants that no
        call depends on are absent.
      shares: by constant, the seconds of a step that its factor explains.
    """

    calls: tuple[CallSeconds, ...]
    factors: Mapping[str, float]
    shares: Mapping[str, float]

    @property
    def wrong(self) -> str:
        """The constant that explains most of the difference; empty: none explains over 2 %."""
        worst = max(self.shares, key=lambda name: abs(self.shares[name]), default="")
        total = sum(call.measured for call in self.calls)
        return worst if worst and abs(self.shares[worst]) > 0.02 * total else ""


Predict = Callable[[Constants], Candidate]


def measured_seconds(spans: Sequence[Any], steps: int) -> dict[tuple[str, str], float]:
    """Median seconds of a step by role and stage, from a timeline's spans.

    Raises:
      ConfigError: a run of so few steps that all of them compile.
    """
    if steps <= COMPILING_STEPS:
        first = f"the first {COMPILING_STEPS} compile"
        raise ConfigError(f"{steps} steps say nothing of seconds: {first}")
    found: dict[tuple[str, str], dict[int, float]] = {}
    for span in spans:
        if span.step > COMPILING_STEPS and span.phase in PHASES:
            by_step = found.setdefault((span.role, PHASES[span.phase]), {})
            by_step[span.step] = by_step.get(span.step, 0.0) + span.end - span.start
    return {key: statistics.median(taken.values()) for key, taken in found.items()}


def methods_of(spans: Sequence[Any]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Methods called in a run, by role and stage."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for span in spans:
        if span.phase in PHASES:
            found.setdefault((span.role, PHASES[span.phase]), {})[span.method] = None
    return {key: tuple(names) for key, names in found.items()}


def predicted_seconds(candidate: Candidate) -> dict[tuple[str, str], float]:
    """Predicted seconds of a step by role and stage; those of 0 are left out."""
    return {
        (role, stage): seconds
        for s in candidate.sets
        for role, option in zip(s.roles, s.options)
        for stage, seconds in zip(STAGES, option.seconds)
        if seconds
    }


def fit_correction(
    predict: Predict, constants: Constants, spans: Sequence[Any], steps: int, runs: int = 0
) -> ProfileCorrection:
    """Fit correction factors of the constants to a run's timeline.

    Args:
      predict: the cost model's prediction of the run's actual plan, for any constants.
      constants: those that it was planned with.
      spans: of the timeline; see ``hjax.controller.timeline.Span``.
      steps: number of steps that the run took.
      runs: number of runs that have corrected these constants before.

    Raises:
      ConfigError: a run that is too short, or none of the predicted calls was measured.
    """
    measured, methods = measured_seconds(spans, steps), methods_of(spans)
    predicted = predicted_seconds(predict(constants))
    keys = [key for key in predicted if measured.get(key)]
    if not keys:
        raise ConfigError("nothing that was predicted was measured in this run")
    calls = tuple(
        CallSeconds(
            role=key[0],
            stage=key[1],
            methods=methods[key],
            predicted=predicted[key],
            measured=measured[key],
        )
        for key in keys
    )
    parts = {
        name: part
        for name in TERMS
        if (part := _sensitivity(predict, constants, name, keys, predicted)).any()
    }
    if not parts:
        return ProfileCorrection(calls, {}, {})
    names = list(parts)
    real = np.array([call.measured for call in calls])
    planned = np.array([call.predicted for call in calls])
    # Relative errors, so that a fast call weighs as much as a slow one.
    rows = np.stack([parts[name] for name in names], axis=1) / real[:, None]
    targets = (real - planned) / real
    ridge = PRIOR_WEIGHT * (1 + runs) * np.eye(len(names))
    changes = np.linalg.solve(rows.T @ rows + ridge, rows.T @ targets)
    factors = np.clip(1 + changes, 1 / MAX_FACTOR, MAX_FACTOR)
    shares = {name: float(parts[name].sum() * (f - 1)) for name, f in zip(names, factors)}
    return ProfileCorrection(calls, dict(zip(names, factors.tolist())), shares)


def _sensitivity(
    predict: Predict,
    constants: Constants,
    name: str,
    keys: Sequence[tuple[str, str]],
    predicted: Mapping[tuple[str, str], float],
) -> np.ndarray:
    """Seconds of each call spent in what a constant describes: the derivative in its time."""
    step = 1.01
    value = getattr(constants, name)
    if not value:
        return np.zeros(len(keys))
    scaled = value / step if name in RATES else value * step
    after = predicted_seconds(predict(constants.with_values({name: scaled})))
    return np.array([(after[key] - predicted[key]) / (step - 1) for key in keys])


def corrected_constants(constants: Constants, found: ProfileCorrection) -> Constants:
    """The constants with a correction's factors applied."""
    values = {}
    for name, factor in found.factors.items():
        value = getattr(constants, name)
        values[name] = value / factor if name in RATES else value * factor
        if name in ("gather", "unsplit"):  # `unsplit` is a share; `gather` takes at most 1 s
            values[name] = min(1.0, values[name])
    return constants.with_values(values, measured=True)


def correction_record(found: ProfileCorrection) -> dict[str, Any]:
    """A correction as data: ``calls``, ``factors``, ``wrong`` and ``explains_seconds``."""
    return {
        "calls": [
            {**dataclasses.asdict(call), "ratio": call.ratio, "methods": list(call.methods)}
            for call in found.calls
        ],
        "factors": {name: round(factor, 4) for name, factor in found.factors.items()},
        "explains_seconds": {name: round(value, 6) for name, value in found.shares.items()},
        "wrong": found.wrong,
    }


def is_correction_record(found: Any) -> bool:
    """Whether data is a ``correction_record``, with ``constants`` and ``taught``."""
    if not _has(found, _RECORD) or not all(_has(call, _CALL) for call in found["calls"]):
        return False
    wrong = found["wrong"]
    said = [found[key].get(wrong) for key in ("factors", "explains_seconds") if wrong]
    methods = [name for call in found["calls"] for name in call["methods"]]
    return all(map(_is_number, said)) and all(isinstance(name, str) for name in methods)


_RECORD = {"calls": list, "factors": dict, "explains_seconds": dict, "wrong": str,
           "constants": str, "taught": bool, "untaught": str}  # fmt: skip
_CALL = {"role": str, "stage": str, "methods": list, "predicted": float, "measured": float,
         "ratio": float}  # fmt: skip


def _has(found: Any, kinds: Mapping[str, type]) -> bool:
    return isinstance(found, dict) and all(
        _is_number(found.get(name)) if kind is float else isinstance(found.get(name), kind)
        for name, kind in kinds.items()
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e15  # not infinite either


def summary(found: Mapping[str, Any]) -> str:
    """One line: predicted and measured seconds, and which constant was most wrong."""
    calls = found["calls"]
    predicted, measured = (sum(c[key] for c in calls) for key in ("predicted", "measured"))
    text = f"predicted {predicted:.3f} s of a step's calls, measured {measured:.3f} s"
    name = found["wrong"]
    if not name:
        return f"{text}: no term stands out"
    factor, seconds = found["factors"][name], found["explains_seconds"][name]
    return (
        f"{text}; most of the difference is `{name}`: what it stands for takes {factor:.2f} times "
        f"as long as the profile said ({seconds:+.3f} s)"
    )


PLAN_SECONDS = "plan_seconds.json"


def correct_profile(trainer: Any, workdir: Path | None = None) -> dict[str, Any] | None:
    """Compare a run's calls with the cost model's prediction, and correct the devices' profile.

    The stored profile is corrected unless sets of models share cores: then part of a set's time is
    waiting for another set.

    Args:
      trainer: that has run.
      workdir: folder for the file ``PLAN_SECONDS``; None: none is written.

    Returns:
      the record (``correction_record``) with ``constants`` (``measured`` or ``assumed``),
      ``taught`` (whether the profile was corrected) and ``untaught`` (why not). None on a cluster,
      and for devices that have no profile and are not in the catalogue.

    Raises:
      ConfigError: a run that the cost model cannot predict, with the reason.
    """
    config = trainer.config
    if on_cluster(config) or not trainer.algorithm_class.generates:
        return None
    devices = local_devices(config)
    path, untaught = profile_path(devices), ""
    if path.is_file():
        profile = read_profile(path, MeasuredOn.here(devices))
        pool = local_cluster(profile.device, devices).pools[0]
        if len(trainer.roles.plan.placement) > 1 and pool.shares_cores:
            untaught = "the profile does not learn from sets that share cores"
    else:
        known = device_of_kind(str(devices[0].device_kind), device_memory(devices[0]))
        if known is None:
            return None
        profile = Profile(known, Constants(), {})
        untaught = f"no profile is stored that could learn it ({CALIBRATE_COMMAND})"
    found = run_correction(trainer, profile)
    if not untaught:
        write_profile(corrected_profile(profile, found), path)
    said = {
        **correction_record(found),
        "constants": "measured" if profile.constants.measured else "assumed",
        "runs_before": profile.runs,
        "taught": not untaught,
        "untaught": untaught,
    }
    if workdir is not None:
        replace_file(workdir / PLAN_SECONDS, json_line(said) + "\n")
    return said


def run_correction(trainer: Any, profile: Profile) -> Any:
    """The correction of a profile's constants by a run (``ProfileCorrection``)."""
    return fit_correction(
        lambda constants: predict_trainer(trainer, profile, constants),
        profile.constants,
        trainer.timeline.spans(),
        trainer.step_number,
        profile.runs,
    )


def predict_trainer(trainer: Any, profile: Profile, constants: Constants) -> Candidate:
    """The cost model's prediction for a trainer's run in its actual placement."""
    devices = local_devices(trainer.config)
    problem = run_problem(
        trainer.config,
        trainer.algorithm_class,
        {r: m for r, m in trainer.roles.models.items() if r in trainer.roles.layouts},
        trainer.inputs.prompt_length,
        local_cluster(profile.device, devices),
        constants,
        is_float32(trainer.config, devices[0].platform),
    )
    return predict_run(problem, trainer.roles)


def corrected_profile(profile: Profile, found: Any) -> Profile:
    """The profile with a correction applied."""
    learned = dict(profile.learned)
    for name, factor in found.factors.items():
        learned[name] = learned.get(name, 1.0) * factor
    return dataclasses.replace(
        profile,
        constants=corrected_constants(profile.constants, found),
        runs=profile.runs + 1,
        learned=learned,
    )


def read_record(workdir: Path) -> dict[str, Any]:
    """Read the record that ``correct_profile`` wrote into a workdir.

    Raises:
      ConfigError: there is none, or it is not what a run writes.
    """
    try:
        data = read_bytes(workdir / PLAN_SECONDS)
    except OSError as error:
        raise ConfigError(
            f"--explain={workdir}: it has no {PLAN_SECONDS}; a run writes it at its end where its "
            "devices have a profile (python -m hjax.launch.plan --calibrate, or placement=auto)"
        ) from error
    found = parse_json(data, f"--explain={workdir}: {PLAN_SECONDS}")
    if not is_correction_record(found):
        raise ConfigError(
            f"--explain={workdir}: {PLAN_SECONDS} is not what a run writes at its end (calls, "
            "factors, explains_seconds, wrong, constants, taught); run it again"
        )
    assert isinstance(found, dict)
    return found
