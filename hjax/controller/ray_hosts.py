"""Discovery of a cluster's hosts before a run, for plans."""

import contextlib

from hjax.controller import ray_calls
from hjax.controller.hosts import FoundDevice, HostGroup, Hosts, devices_per_host, host_groups
from hjax.controller.ray_pool import START_SECONDS
from hjax.errors import ConfigError, RunError
from hjax.machine import device_memory


def discover_hosts(
    address: str, processes: int, devices_per_process: int, colocation_label: str
) -> Hosts:
    """The hosts of a cluster, which is left unchanged.

    Args:
      address, processes, devices_per_process, colocation_label: as of ``RayCluster``.

    Raises:
      ConfigError: there is no cluster, or none of its hosts can take a process.
      RunError: a host does not report its devices in time.
    """
    with contextlib.ExitStack() as ends:
        if not ray_calls.connected():
            ray_calls.connect(address, processes)
            ends.callback(ray_calls.end_here)
        platform, nodes = ray_calls.platform(), ray_calls.nodes()
        each = devices_per_process
        if not each and platform != "cpu":
            each = devices_per_host(nodes, platform)
        groups = host_groups(nodes, platform, processes, each, colocation_label)
        found = tuple(_device_of(group) for group in groups) if platform == "gpu" else ()
        if platform == "tpu":  # by Ray's labels: a slice's hosts start together or not at all
            found = tuple(FoundDevice("tpu", group.kind) for group in groups)
        return Hosts(platform, each, tuple(groups), found)


def _device_of(group: HostGroup) -> FoundDevice:
    """The device that JAX finds on one of these hosts, which must have a free GPU."""
    asked = ray_calls.run_on_host(group.address, local_device, {"GPU": 1})
    done, _ = ray_calls.wait([asked], START_SECONDS)
    if not done:
        raise RunError(
            f"host {group.address} has not said within {START_SECONDS} seconds what its GPUs are; "
            "are others using all of them?"
        )
    try:
        found: FoundDevice = ray_calls.get(asked)
    except ray_calls.RayFailed as error:
        cause = error.cause if isinstance(error, ray_calls.TaskRaised) else error
        raise ConfigError(
            f"host {group.address}: JAX does not start there ({ray_calls.first_line(cause)})"
        ) from error
    if found.platform != "gpu":
        raise ConfigError(
            f"host {group.address} has GPUs, but JAX there finds {found.device_kind!r}; install "
            "hjax[cuda] on it"
        )
    return found


def local_device() -> FoundDevice:
    """This process's first device."""
    import jax

    device = jax.devices()[0]
    return FoundDevice(device.platform, device.device_kind, device_memory(device))
