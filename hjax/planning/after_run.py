"""After a run: what was predicted beside what was measured, and a profile that learns from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hjax.devices import device_of_kind
from hjax.errors import ConfigError
from hjax.files import json_line, replace_file
from hjax.given import parse_json
from hjax.machine import device_memory
from hjax.planning.auto import predict, run_problem
from hjax.planning.constants import Constants
from hjax.planning.hosts import pools_at_hand
from hjax.planning.learning import is_record, lesson, record, taught
from hjax.planning.profile import (
    MAKE,
    MadeOn,
    Profile,
    profile_path,
    read_profile,
    write_profile,
)
from hjax.planning.records import Candidate
from hjax.run.machines import local_devices
from hjax.run.roles import is_float32
from hjax.settings.checking import on_cluster

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
        profile = read_profile(path, MadeOn.here(devices))
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
    """What a run says of a profile's constants (``hjax.planning.learning.Lesson``)."""
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
