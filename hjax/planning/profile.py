"""Calibration: what the devices at hand really do, measured and kept for plans.

Rates are per device with all of them busy; simulated CPU devices share the cores, so a device's
own rate falls with how many are busy, which is kept too.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hjax.devices import Device
from hjax.errors import ConfigError
from hjax.files import cache_folder, replace_file
from hjax.planning.constants import Constants


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measured rates as a device of the catalogue, whose shares are 1.

    Attributes:
      busy: FLOP/s of updates per device, by the number of devices they are spread over.
    """

    device: Device
    constants: Constants
    busy: dict[int, float]


def profile_path(devices: Sequence[Any]) -> Path:
    """Where the profile of these devices is kept."""
    kind = re.sub(r"[^\w.-]+", "-", str(devices[0].device_kind)).strip("-").lower()
    return cache_folder("profiles") / f"{devices[0].platform}-{kind}-{len(devices)}.json"


def read_profile(path: Path) -> Profile:
    """A stored profile.

    Raises:
      ConfigError: no such file, or not a profile.
    """
    try:
        content = json.loads(path.read_text())
        alone = tuple(
            (int(n), float(faster), float(cores))
            for n, faster, cores in content["device"].pop("alone", ())
        )
        device = Device(**content["device"], alone=alone)
        values = {key: float(value) for key, value in content["constants"].items()}
        busy = {int(n): float(rate) for n, rate in content["busy"].items()}
    except OSError as error:
        raise ConfigError(f"--profile={path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--profile={path}: not a profile ({type(error).__name__}: {error}); make one with "
            "python -m hjax.launch.plan --calibrate"
        ) from error
    return Profile(device, Constants().with_values(values, measured=True), busy)


def write_profile(profile: Profile, path: Path) -> dict[str, Any]:
    """Store a profile; returns what was written."""
    constants = {name: getattr(profile.constants, name) for name in profile.constants.measured}
    content = {
        "device": dataclasses.asdict(profile.device),
        "constants": dict(sorted(constants.items())),
        "busy": profile.busy,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, indent=1) + "\n")
    return content
