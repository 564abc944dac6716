"""Calibration: what the devices at hand really do, measured and kept for plans.

Rates are per device with all of them busy; simulated CPU devices share the cores, so a device's
own rate falls with how many are busy, which is kept too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError
from hjax.sharding.mapping.constants import Constants
from hjax.sharding.mapping.hardware import DEVICES
from hjax.sharding.mapping.records import Device


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
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kind = re.sub(r"[^\w.-]+", "-", str(devices[0].device_kind)).strip("-").lower()
    return root / "hjax" / "profiles" / f"{devices[0].platform}-{kind}-{len(devices)}.json"


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


def find_profile(devices: Sequence[Any]) -> Profile:
    """For a plan on these devices: their stored profile, the catalogue's entry, or (CPUs) a
    calibration now, which is stored.

    Raises:
      ConfigError: a device that is neither calibrated nor in the catalogue.
    """
    path = profile_path(devices)
    if path.is_file():
        return read_profile(path)
    kind = re.sub(r"[^a-z0-9]", "", str(devices[0].device_kind).lower())
    for name, device in DEVICES.items():
        if name.replace("-", "").removesuffix("80g").removesuffix("40g") in kind:
            fits = dataclasses.replace(device, memory=device_memory(devices[0]) or device.memory)
            return Profile(fits, Constants(), {})
    if devices[0].platform == "cpu":
        from hjax.launch.calibrate import calibrate

        profile = calibrate(devices)
        write_profile(profile, path)
        return profile
    raise ConfigError(
        f"placement=auto knows no {devices[0].device_kind!r}; run python -m hjax.launch.plan "
        "--calibrate first"
    )


def calibrate_command(as_json: bool) -> int:
    """Measure the devices of this process, store the profile and show it."""
    import jax

    from hjax.launch.calibrate import calibrate
    from hjax.launch.command import json_line
    from hjax.launch.machine import compile_quickly, quiet_tpu_compiler
    from hjax.launch.tables import print_description

    quiet_tpu_compiler()
    compile_quickly()  # as a run does
    devices = jax.devices()
    profile = calibrate(devices)
    path = profile_path(devices)
    content = write_profile(profile, path)
    print_description(
        {
            "stored in": str(path),
            "device": {k: v for k, v in content["device"].items() if k not in ("flops", "source")},
            "FLOP/s": content["device"]["flops"],
            "constants": content["constants"],
            "FLOP/s per device by devices busy": {str(n): r for n, r in profile.busy.items()},
        },
        title=f"{len(devices)} x {devices[0].device_kind}",
    )
    if as_json:
        sys.stdout.flush()
        print(json_line(content))
    return 0


def write_profile(profile: Profile, path: Path) -> dict[str, Any]:
    """Store a profile; returns what was written."""
    from hjax.launch.workdir import replace_file

    constants = {name: getattr(profile.constants, name) for name in profile.constants.measured}
    content = {
        "device": dataclasses.asdict(profile.device),
        "constants": dict(sorted(constants.items())),
        "busy": profile.busy,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, indent=1) + "\n")
    return content


def device_memory(device: Any) -> float:
    """Bytes that a device says it has; 0 where it does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return float(stats.get("bytes_limit", 0)) if stats else 0.0
