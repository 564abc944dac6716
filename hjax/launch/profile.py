"""Calibration: what the devices at hand really do, measured and kept for plans.

Rates are per device with all of them busy; simulated CPU devices share the cores, so a device's
own rate falls with how many are busy, which is kept too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError
from hjax.sharding.mapping.constants import Constants
from hjax.sharding.mapping.hardware import DEVICES
from hjax.sharding.mapping.records import Device

_SHARES = ("matmul", "memory", "link")


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measured rates as a device of the catalogue, whose shares are 1.

    Attributes:
      busy: FLOP/s per device by the number of devices that compute at the same time.
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
        alone = tuple((int(n), float(f)) for n, f in content["device"].pop("alone", ()))
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
    calibration now.

    Raises:
      ConfigError: a device that is neither calibrated nor in the catalogue.
    """
    path = profile_path(devices)
    if path.is_file():
        return read_profile(path)
    kind = re.sub(r"[^a-z0-9]", "", str(devices[0].device_kind).lower())
    for name, device in DEVICES.items():
        if name.replace("-", "").removesuffix("80g").removesuffix("40g") in kind:
            fits = dataclasses.replace(device, memory=_memory(devices[0]) or device.memory)
            return Profile(fits, Constants(), {})
    if devices[0].platform == "cpu":
        return calibrate(devices)
    raise ConfigError(
        f"placement=auto knows no {devices[0].device_kind!r}; run python -m hjax.launch.plan "
        "--calibrate first"
    )


def calibrate_command(as_json: bool) -> int:
    """Measure the devices of this process, store the profile and show it."""
    import jax

    from hjax.launch.command import json_line
    from hjax.launch.machine import quiet_tpu_compiler
    from hjax.launch.tables import print_description

    quiet_tpu_compiler()
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


def calibrate(devices: Sequence[Any]) -> Profile:
    """Measure matrix products, memory, collectives and the decode loop. Takes seconds.

    Args:
      devices: of one host; all are used.
    """
    cpu = devices[0].platform == "cpu"
    dtypes = ("float32",) if cpu else ("bfloat16", "float32")
    size = 512 if cpu else 8192
    counts = [n for n in (1, 2, 4, 8) if n <= len(devices)]
    counts += [len(devices)] if len(devices) not in counts else []
    busy = {n: _matmul(devices[:n], size, dtypes[0]) for n in counts}
    flops = {dtypes[0]: busy[len(devices)]}
    flops |= {d: _matmul(devices, size, d) for d in dtypes[1:]}
    bandwidth = _copy(devices, (1 << 22) if cpu else (1 << 28))
    latency, link = _all_gather(devices, (1 << 20) if cpu else (1 << 26))
    step, dispatch = _decode_step(devices), _dispatch(devices)
    device = Device(
        name=re.sub(r"\s+", "-", str(devices[0].device_kind).lower()),
        memory=_memory(devices[0]) or _host_memory() / len(devices),
        flops=flops,
        bandwidth=bandwidth,
        link=link,
        network=link,
        per_host=len(devices),
        torus=0,
        source="measured by plan --calibrate",
        alone=tuple((n, rate / busy[len(devices)]) for n, rate in busy.items()) if cpu else (),
    )
    values = dict.fromkeys(_SHARES, 1.0)
    values |= {"link_latency": latency, "decode_step": step, "decode_row": 0.0}
    values["dispatch"] = dispatch
    return Profile(device, Constants().with_values(values, measured=True), busy)


def _memory(device: Any) -> float:
    stats = device.memory_stats() if device.platform != "cpu" else None
    return float(stats.get("bytes_limit", 0)) if stats else 0.0


def _host_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of a call that is waited for; the first, which compiles, is left out."""
    import jax

    jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _spread(devices: Sequence[Any], shape: tuple[int, ...], dtype: str) -> Any:
    """Random numbers, one [shape] per device (zeros would be multiplied faster)."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(devices), ("d",))
    make = jax.jit(
        lambda: jax.random.normal(jax.random.key(0), (len(devices), *shape), dtype),
        out_shardings=NamedSharding(mesh, PartitionSpec("d")),
    )
    return make(), mesh


def _matmul(devices: Sequence[Any], size: int, dtype: str, times: int = 4) -> float:
    """FLOP/s per device of square products."""
    import jax
    import jax.numpy as jnp

    x, _ = _spread(devices, (size, size), dtype)

    @jax.jit
    def run(x: Any) -> Any:
        y = x
        for _ in range(times):
            y = jnp.einsum("dij,djk->dik", y, x) * (size**-0.5)
        return y

    return times * 2.0 * size**3 / _seconds(lambda: run(x))


def _copy(devices: Sequence[Any], elements: int) -> float:
    """Bytes/s per device read and written by an elementwise pass."""
    import jax

    x, _ = _spread(devices, (elements,), "float32")
    run = jax.jit(lambda x: x * 1.5 + 1.0)
    return 8.0 * elements / _seconds(lambda: run(x))


def _all_gather(devices: Sequence[Any], elements: int) -> tuple[float, float]:
    """(seconds of a small one per doubling, bytes/s of a large one) over all devices."""
    import math

    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    count = len(devices)
    if count == 1:
        return 1e-6, 1e12
    times = []
    for n in (16, elements):
        x, mesh = _spread(devices, (n,), "float32")
        whole = NamedSharding(mesh, PartitionSpec())
        gather = jax.jit(lambda x: x * 1.0, out_shardings=whole)
        times.append(_seconds(lambda gather=gather, x=x: gather(x), 15))  # type: ignore[misc]
    small, large = times
    moved = 4.0 * elements * (count - 1)
    return small / math.ceil(math.log2(count)), moved / max(large - small, 1e-9)


def _decode_step(devices: Sequence[Any], steps: int = 64) -> float:
    """Seconds of a decode step that hardly computes: the loop's own cost."""
    import jax
    import jax.numpy as jnp

    x, _ = _spread(devices, (64,), "float32")

    @jax.jit
    def run(x: Any) -> Any:
        def body(state: Any) -> Any:
            i, y = state
            return i + 1, jnp.tanh(y * 1.01) + jnp.sort(y, axis=-1)

        return jax.lax.while_loop(lambda s: s[0] < steps, body, (0, x))[1]

    return _seconds(lambda: run(x)) / steps


def _dispatch(devices: Sequence[Any]) -> float:
    """Seconds of a call that computes nothing: its batch sent out, its result fetched."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    _, mesh = _spread(devices, (1,), "float32")
    split = NamedSharding(mesh, PartitionSpec("d"))
    batch = {str(i): np.ones((len(devices), 64), np.float32) for i in range(8)}
    run = jax.jit(lambda batch: jax.tree.map(lambda x: x + 1.0, batch))
    return _seconds(lambda: np.asarray(run(jax.device_put(batch, split))["0"]), 15)
