"""Profiles: measured rates of devices, stored on disk for planning.

Rates are per device with all devices busy. Simulated CPU devices share the cores, so a profile also
has how the rate of each depends on the number of busy ones. A profile is valid only for the
machine, devices and versions it was measured on.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hjax.devices import Device
from hjax.errors import ConfigError, DataError
from hjax.files import cache_folder, replace_file
from hjax.machine import available_cores
from hjax.planning.constants import Constants
from hjax.user_input import read_object

CALIBRATE_COMMAND = "python -m hjax.launch.plan --calibrate"
_FIGURES = ("memory", "bandwidth", "link", "network")
CALIBRATION_VERSION = "2"  # to be raised when calibrations measure or count something differently


@dataclasses.dataclass(frozen=True)
class MeasuredOn:
    """The machine, devices and versions that a profile was measured on.

    Attributes:
      kind: JAX's name of the devices.
      devices: how many.
      cpu: model of the host's processor.
      cores: number that the process may use.
      versions: of jax, jaxlib and hjax; under ``calibration``, ``CALIBRATION_VERSION``.
    """

    kind: str
    devices: int
    cpu: str
    cores: int
    versions: tuple[tuple[str, str], ...]

    @classmethod
    def here(cls, devices: Sequence[Any]) -> MeasuredOn:
        """These devices of this process."""
        names = ("hjax", "jax", "jaxlib")
        versions = tuple((name, importlib.metadata.version(name)) for name in names)
        versions = (("calibration", CALIBRATION_VERSION), *versions)
        kind = str(devices[0].device_kind)
        return cls(kind, len(devices), cpu_model(), available_cores(), versions)

    @property
    def summary(self) -> str:
        """All of it in one line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions)
        return f"{self.devices} x {self.kind} ({self.cpu}, cores: {self.cores}; {versions})"

    def difference(self, other: MeasuredOn) -> str:
        """The differences from another record, in words; empty: none."""
        found = []
        for field in dataclasses.fields(self):
            mine, its = getattr(self, field.name), getattr(other, field.name)
            if field.name == "versions":
                ours, theirs = dict(mine), dict(its)
                for name in ours | theirs:
                    one, another = ours.get(name, "none"), theirs.get(name, "none")
                    found += [f"{name} {one}, not {another}"] if one != another else []
            elif mine != its:
                found.append(f"{field.name} {mine}, not {its}")
        return "; ".join(found)


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measured rates, in the form of a catalogue device whose efficiencies are 1.

    Attributes:
      busy: FLOP/s of updates per device, by the number of devices they are spread over.
      made_on: where it was measured; None: an entry of the catalogue.
      runs: number of runs that have corrected the constants since.
      learned: by constant, the total factor of these corrections.
    """

    device: Device
    constants: Constants
    busy: dict[int, float]
    made_on: MeasuredOn | None = None
    runs: int = 0
    learned: dict[str, float] = dataclasses.field(default_factory=dict)

    def origins(self) -> dict[str, str]:
        """The source of each number, by name."""
        if self.made_on is None:
            return {"hardware": self.device.source}
        at = f"measured on {self.made_on.devices} x {self.made_on.kind} ({self.made_on.cpu})"
        found = dict.fromkeys(("flops", "memory bandwidth", "link"), at)
        network = "data sheet" if self.device.network != self.device.link else at
        found["network"] = f"{network}; no other host was reached" if network == at else network
        for name in sorted(self.constants.measured):
            moved = self.learned.get(name)
            found[name] = f"{at}, times {moved:.2f} by {self.runs} runs" if moved else at
        for name in self.constants.calibrated():
            if whole := self.constants.part_of(name):
                found[name] = f"part of what is measured as {whole}"
        return found


def cpu_model() -> str:
    """The processor's name as the system has it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^(?:model name|Model|cpu model)\s*: *(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def profile_path(devices: Sequence[Any]) -> Path:
    """Where the profile of these devices is kept."""
    kind = re.sub(r"[^\w.-]+", "-", str(devices[0].device_kind)).strip("-").lower()
    return cache_folder("profiles") / f"{devices[0].platform}-{kind}-{len(devices)}.json"


def read_profile(path: Path, here: MeasuredOn | None = None) -> Profile:
    """A stored profile.

    Args:
      path: of the file.
      here: machine and devices that it must match; None: any.

    Raises:
      ConfigError: no such file, not a profile, or one of other devices, another machine or other
        versions.
    """
    try:
        content = read_object(path)
        figures = dict(content["device"])
        alone = tuple(
            (int(n), float(faster), float(cores)) for n, faster, cores in figures.pop("alone", ())
        )
        figures["flops"] = {name: float(rate) for name, rate in figures["flops"].items()}
        figures |= {name: float(figures[name]) for name in _FIGURES}
        device = Device(**figures, alone=alone)
        values = {key: float(value) for key, value in content["constants"].items()}
        busy = {int(n): float(rate) for n, rate in content["busy"].items()}
        given = content["made_on"]
        versions = tuple(sorted((str(n), str(v)) for n, v in given["versions"].items()))
        kind, cpu = str(given["kind"]), str(given["cpu"])
        made_on = MeasuredOn(kind, int(given["devices"]), cpu, int(given["cores"]), versions)
        runs = int(content.get("runs", 0))
        learned = {key: float(value) for key, value in content.get("learned", {}).items()}
    except DataError as error:
        raise ConfigError(f"--profile={error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        why = f"not a profile ({type(error).__name__}: {error})"
        raise ConfigError(f"--profile={path}: {why}; make one with {CALIBRATE_COMMAND}") from error
    if here is not None and (other := made_on.difference(here)):
        raise ConfigError(
            f"the profile {path} was measured elsewhere: {other}; make one here with "
            f"{CALIBRATE_COMMAND}"
        )
    try:
        constants = Constants().with_values(values, measured=True)
    except ConfigError as error:
        raise ConfigError(
            f"--profile={path}: not a profile ({error}); make one with {CALIBRATE_COMMAND}"
        ) from error
    return Profile(device, constants, busy, made_on, runs, learned)


def write_profile(profile: Profile, path: Path) -> dict[str, Any]:
    """Store a profile; returns what was written."""
    assert profile.made_on is not None, "a catalogue's entry is not stored"
    made_on = dataclasses.asdict(profile.made_on)
    content = {
        "made_on": {**made_on, "versions": dict(profile.made_on.versions)},
        "device": dataclasses.asdict(profile.device),
        "constants": profile.constants.calibrated(),
        "busy": profile.busy,
        "runs": profile.runs,
        "learned": profile.learned,
        "origins": profile.origins(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, indent=1) + "\n")
    return content
