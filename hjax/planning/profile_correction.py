"""What runs teach a profile: predicted and measured seconds side by side, and which term was wrong.

A stage's seconds are (nearly) linear in the time that each constant stands for. So every call of a
run is an equation in factors of these times, and the profile's own values are what is believed
before: the factors are those that explain the run best and stay near 1 (ridge regression on the
relative errors). A run moves a factor the less, the more runs have spoken before it.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hjax.devices import device_of_kind
from hjax.errors import ConfigError
from hjax.files import json_line, replace_file
from hjax.machine import device_memory
from hjax.planning.auto import predict, run_problem
from hjax.planning.constants import Constants
from hjax.planning.host_pools import pools_at_hand
from hjax.planning.plan_types import Candidate
from hjax.planning.profile import (
    MAKE,
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
# Terms of runs that may be learned: those that a calibration measures.
TERMS = (
    "matmul", "score", "backward", "layer_pass", "layer_update", "dispatch", "decode",
    "decode_layer", "rollout", "memory", "gather", "unsplit", "link", "link_latency",
)  # fmt: skip
WARM_UP = 2  # first steps of a run, which compile
# How strongly a factor is held at 1, against an error of 100 % of a call; how far it may go.
BELIEF, FURTHEST = 0.02, 4.0


@dataclasses.dataclass(frozen=True)
class CallSeconds:
    """A role's calls of one stage of a step.

    Attributes:
      role, stage: whose and when.
      methods: that are called, in order.
      predicted, measured: seconds of a step, the latter a median over steps.
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
    """What a run says of the constants.

    Attributes:
      calls: predicted by the constants that the plan had.
      factors: by constant how many times as long what it stands for takes; those that no call
        depends on are not in it.
      shares: of each, how many seconds of a step its factor explains.
    """

    calls: tuple[CallSeconds, ...]
    factors: Mapping[str, float]
    shares: Mapping[str, float]

    @property
    def wrong(self) -> str:
        """The term that explains most of the difference; empty: there is none to speak of."""
        worst = max(self.shares, key=lambda name: abs(self.shares[name]), default="")
        total = sum(call.measured for call in self.calls)
        return worst if worst and abs(self.shares[worst]) > 0.02 * total else ""


Predict = Callable[[Constants], Candidate]


def measured_seconds(spans: Sequence[Any], steps: int) -> dict[tuple[str, str], float]:
    """Median seconds of a step by role and stage, of a timeline's spans, and by that the methods.

    Raises:
      ConfigError: a run of so few steps that all of them compile.
    """
    if steps <= WARM_UP:
        raise ConfigError(f"{steps} steps say nothing of seconds: the first {WARM_UP} compile")
    found: dict[tuple[str, str], dict[int, float]] = {}
    for span in spans:
        if span.step > WARM_UP and span.phase in PHASES:
            of = found.setdefault((span.role, PHASES[span.phase]), {})
            of[span.step] = of.get(span.step, 0.0) + span.end - span.start
    return {key: statistics.median(taken.values()) for key, taken in found.items()}


def methods_of(spans: Sequence[Any]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Methods by role and stage."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for span in spans:
        if span.phase in PHASES:
            found.setdefault((span.role, PHASES[span.phase]), {})[span.method] = None
    return {key: tuple(names) for key, names in found.items()}


def predicted_seconds(candidate: Candidate) -> dict[tuple[str, str], float]:
    """Seconds of a step by role and stage, where there are any."""
    return {
        (role, stage): seconds
        for s in candidate.sets
        for role, option in zip(s.roles, s.options)
        for stage, seconds in zip(STAGES, option.seconds)
        if seconds
    }


def lesson(
    predict: Predict, constants: Constants, spans: Sequence[Any], steps: int, runs: int = 0
) -> ProfileCorrection:
    """What a run's timeline says of the constants.

    Args:
      predict: the cost model's account of the run as it was set up, for any constants.
      constants: those that it was planned with.
      spans: of the timeline; see ``hjax.controller.timeline.Span``.
      steps: that the run took.
      runs: that have taught these constants before.

    Raises:
      ConfigError: a run that is too short, or nothing that was predicted was measured.
    """
    measured, methods = measured_seconds(spans, steps), methods_of(spans)
    predicted = predicted_seconds(predict(constants))
    keys = [key for key in predicted if measured.get(key)]
    if not keys:
        raise ConfigError("nothing that was predicted was measured in this run")
    calls = tuple(CallSeconds(*key, methods[key], predicted[key], measured[key]) for key in keys)
    parts = {
        name: part
        for name in TERMS
        if (part := _part(predict, constants, name, keys, predicted)).any()
    }
    if not parts:
        return ProfileCorrection(calls, {}, {})
    names = list(parts)
    real = np.array([call.measured for call in calls])
    errors = np.array([call.predicted for call in calls])
    # Relative errors: a fast call says as much as a slow one.
    rows = np.stack([parts[name] for name in names], axis=1) / real[:, None]
    wanted = (real - errors) / real
    held = BELIEF * (1 + runs) * np.eye(len(names))
    moved = np.linalg.solve(rows.T @ rows + held, rows.T @ wanted)
    factors = np.clip(1 + moved, 1 / FURTHEST, FURTHEST)
    shares = {name: float(parts[name].sum() * (f - 1)) for name, f in zip(names, factors)}
    return ProfileCorrection(calls, dict(zip(names, factors.tolist())), shares)


def _part(
    predict: Predict,
    constants: Constants,
    name: str,
    keys: Sequence[tuple[str, str]],
    predicted: Mapping[tuple[str, str], float],
) -> np.ndarray:
    """Seconds of each call that what a constant stands for takes: their slope in its time."""
    step = 1.01
    value = getattr(constants, name)
    if not value:
        return np.zeros(len(keys))
    scaled = value / step if name in RATES else value * step
    after = predicted_seconds(predict(constants.with_values({name: scaled})))
    return np.array([(after[key] - predicted[key]) / (step - 1) for key in keys])


def taught(constants: Constants, found: ProfileCorrection) -> Constants:
    """Constants with a lesson's factors."""
    values = {}
    for name, factor in found.factors.items():
        value = getattr(constants, name)
        values[name] = value / factor if name in RATES else value * factor
        if name in ("gather", "unsplit"):  # a share, and what takes at most so long
            values[name] = min(1.0, values[name])
    return constants.with_values(values, measured=True)


def record(found: ProfileCorrection) -> dict[str, Any]:
    """A lesson as data: ``calls``, ``factors``, ``wrong`` and ``explains_seconds``."""
    return {
        "calls": [
            {**dataclasses.asdict(call), "ratio": call.ratio, "methods": list(call.methods)}
            for call in found.calls
        ],
        "factors": {name: round(factor, 4) for name, factor in found.factors.items()},
        "explains_seconds": {name: round(value, 6) for name, value in found.shares.items()},
        "wrong": found.wrong,
    }


def is_record(found: Any) -> bool:
    """Whether it is what ``record`` makes, with ``constants`` and ``taught``."""
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
    """One line: how near the plan was, and which term was wrong."""
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


FILE = "plan_seconds.json"


def learn_from(trainer: Any, workdir: Path | None = None) -> dict[str, Any] | None:
    """Compare a run's calls with the cost model's account of it; teach the profile by which its
    devices are planned for.

    The profile learns where its devices are the run's, and sets do not share cores: what a set
    waits for another is not its own.

    Args:
      trainer: that has run.
      workdir: takes ``FILE``; None: nothing is written there.

    Returns:
      what was written, of ``learning.record``, with ``constants`` (``measured`` or ``assumed``),
      ``taught``, whether the profile learned, and ``untaught``, why not; None on a cluster, and
      where these devices have no profile and are not in the catalogue.

    Raises:
      ConfigError: a run of which the cost model has no account, with the reason.
    """
    config = trainer.config
    if on_cluster(config) or not trainer.algorithm_class.generates:
        return None
    devices = local_devices(config)
    path, untaught = profile_path(devices), ""
    if path.is_file():
        profile = read_profile(path, MeasuredOn.here(devices))
        pool = pools_at_hand(profile.device, devices).pools[0]
        if len(trainer.roles.plan.placement) > 1 and pool.shares_cores:
            untaught = "the profile does not learn from sets that share cores"
    else:
        known = device_of_kind(str(devices[0].device_kind), device_memory(devices[0]))
        if known is None:
            return None
        profile = Profile(known, Constants(), {})
        untaught = f"no profile is stored that could learn it ({MAKE})"
    found = lesson_of(trainer, profile)
    if not untaught:
        write_profile(improved(profile, found), path)
    said = {
        **record(found),
        "constants": "measured" if profile.constants.measured else "assumed",
        "runs_before": profile.runs,
        "taught": not untaught,
        "untaught": untaught,
    }
    if workdir is not None:
        replace_file(workdir / FILE, json_line(said) + "\n")
    return said


def lesson_of(trainer: Any, profile: Profile) -> Any:
    """What a run says of a profile's constants (``ProfileCorrection``)."""
    return lesson(
        lambda constants: account(trainer, profile, constants),
        profile.constants,
        trainer.timeline.spans(),
        trainer.step_number,
        profile.runs,
    )


def account(trainer: Any, profile: Profile, constants: Constants) -> Candidate:
    """The cost model's account of a run as it is set up."""
    devices = local_devices(trainer.config)
    shapes = {r: m for r, m in trainer.roles.models.items() if r in trainer.roles.layouts}
    problem = run_problem(
        trainer.config,
        trainer.algorithm_class,
        shapes,
        trainer.inputs.prompt_length,
        pools_at_hand(profile.device, devices),
        constants,
        is_float32(trainer.config, devices[0].platform),
    )
    return predict(problem, trainer.roles)


def improved(profile: Profile, found: Any) -> Profile:
    """A profile that has learned a lesson."""
    learned = dict(profile.learned)
    for name, factor in found.factors.items():
        learned[name] = learned.get(name, 1.0) * factor
    return dataclasses.replace(
        profile,
        constants=taught(profile.constants, found),
        runs=profile.runs + 1,
        learned=learned,
    )


def read_record(workdir: Path) -> dict[str, Any]:
    """What ``learn_from`` wrote.

    Raises:
      ConfigError: there is none, or it is not what a run writes.
    """
    try:
        data = (workdir / FILE).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--explain={workdir}: it has no {FILE}; a run writes it at its end where its devices "
            "have a profile (python -m hjax.launch.plan --calibrate, or placement=auto)"
        ) from error
    found = parse_json(data, f"--explain={workdir}: {FILE}")
    if not is_record(found):
        raise ConfigError(
            f"--explain={workdir}: {FILE} is not what a run writes at its end (calls, factors, "
            "explains_seconds, wrong, constants, taught); run it again"
        )
    assert isinstance(found, dict)
    return found
