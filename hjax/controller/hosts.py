"""Cluster hosts: placement of a pool's processes on hosts that are close to each other."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hjax.errors import ConfigError

# Ray's label that all hosts of one TPU slice share.
SLICE_LABEL = "ray.io/tpu-slice-name"
RAY_RESOURCE = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU"}

# Ray's labels for a host's kind of accelerator, and for the sides of its TPU slice.
KIND_LABEL = "ray.io/accelerator-type"
TOPOLOGY_LABEL = "ray.io/tpu-topology"


@dataclasses.dataclass(frozen=True)
class ProcessPlacement:
    """A possible placement of a pool's processes: a request for a Ray placement group.

    Attributes:
      strategy: of the placement group.
      labels: that the hosts must have; empty: any host.
    """

    strategy: str
    labels: tuple[tuple[str, str], ...] = ()


def placements(
    nodes: Iterable[Mapping[str, Any]],
    pool: str,
    platform: str,
    processes: int,
    devices_per_process: int,
    colocation_label: str = "auto",
    labels: Mapping[str, str] = MappingProxyType({}),
) -> list[ProcessPlacement]:
    """Possible placements of a pool, best first: processes as close to each other as possible.

    Processes with GPUs or TPUs share a host if it has enough of them. Processes that compute on
    CPUs get a host each, since they would share its cores. Of several groups of hosts (one per
    value of the colocation label) the smallest that is large enough comes first.

    Args:
      nodes: the cluster's, with ``Alive``, ``Resources`` and ``Labels`` as ``ray.nodes()`` has.
      pool: its name, for errors.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      processes: of the pool.
      devices_per_process: 0: the processes compute on the host.
      colocation_label: label that must have one value on all hosts of the pool. ``auto`` and
        ``none``: the slice on TPUs if hosts name one, else none. A pool on a slice of several
        hosts takes all of them.
      labels: that each host must have.

    Raises:
      ConfigError: no host has ``labels``, no value of the colocation label has enough hosts, or no
        slice has exactly as many hosts as needed.
    """
    alive = [node for node in nodes if node.get("Alive")]
    key = colocation_label_of(platform, colocation_label)
    if not devices_per_process:
        key, platform = "", "cpu"
    alive = _labelled(alive, pool, labels)
    capacity = [processes_on_host(node, platform, devices_per_process) for node in alive]

    def placements_on(
        chosen: Sequence[int], more: tuple[tuple[str, str], ...] = ()
    ) -> list[ProcessPlacement]:
        needed = tuple(sorted({*labels.items(), *more}))
        strategies = _strategies(platform, processes, [capacity[i] for i in chosen])
        return [ProcessPlacement(strategy, needed) for strategy in strategies]

    groups = _by_value(alive, key, needed=colocation_label not in ("auto", "none")) if key else {}
    if not groups:
        return placements_on(range(len(alive)))
    sizes = {value: sum(capacity[i] for i in chosen) for value, chosen in groups.items()}
    if key == SLICE_LABEL:
        sizes = _whole_slices(sizes, groups, pool, processes)
    fitting = sorted((size, value) for value, size in sizes.items() if size >= processes)
    if not fitting:
        most = max(sizes, key=lambda value: sizes[value])
        raise ConfigError(
            f"pool {pool} has {processes} processes, which must fit on hosts of one {key} "
            f"(cluster.colocation_label={colocation_label!r}); the largest, {most}, takes "
            f"{sizes[most]}: use smaller pools, or cluster.colocation_label=none"
        )
    return [room for _, value in fitting for room in placements_on(groups[value], ((key, value),))]


def shortage(
    nodes: Iterable[Mapping[str, Any]],
    platform: str,
    processes: int,
    devices_per_process: int,
    host_processes: int,
) -> str:
    """What all pools together need and the hosts that are there do not have; empty: they have it.

    Args:
      nodes, platform: as of ``placements``.
      processes: of all pools with devices; each takes a CPU besides its GPUs or TPUs.
      devices_per_process: of each of them.
      host_processes: of the pool without devices; each takes a CPU.
    """
    alive = [node["Resources"] for node in nodes if node.get("Alive")]
    needed = {"CPU": processes + host_processes}
    if platform != "cpu":
        needed[RAY_RESOURCE[platform]] = processes * devices_per_process
    have = {kind: sum(int(host.get(kind, 0)) for host in alive) for kind in needed}
    short = [kind for kind, count in needed.items() if count > have[kind]]
    if not short:
        return ""
    functions = f" and cluster.reward_processes={host_processes}"
    verb = "need" if "CPU" in short else "needs"
    machines = f"{len(alive)} machine{'s' if len(alive) != 1 else ''}"
    return (
        f"cluster.processes={processes}{functions if 'CPU' in short else ''} {verb} "
        f"{', '.join(f'{needed[kind]} {kind}s' for kind in short)}; the cluster has "
        f"{', '.join(str(have[kind]) for kind in short)} on {machines}: lower cluster.processes, "
        "or wait for machines with `node.sh wait`"
    )


def _strategies(platform: str, processes: int, capacity: Sequence[int]) -> tuple[str, ...]:
    """Ray's placement strategies, best first, on hosts that each take so many processes."""
    if platform == "cpu":
        return ("SPREAD",) if len(capacity) > 1 and processes > 1 else ("PACK",)
    one_host = processes > 1 and any(count >= processes for count in capacity)
    return ("STRICT_PACK", "PACK") if one_host else ("PACK",)


def labels_of(node: Mapping[str, Any]) -> Mapping[str, str]:
    """A host's labels; none where Ray has none."""
    return node.get("Labels") or {}


def _labelled(
    alive: list[Mapping[str, Any]], pool: str, labels: Mapping[str, str]
) -> list[Mapping[str, Any]]:
    """The hosts that have all of a pool's labels."""
    there = [node for node in alive if labels.items() <= labels_of(node).items()]
    if there or not labels:
        return there
    have = {
        f"{name}={node['Labels'][name]}"
        for node in alive for name in labels if name in labels_of(node)
    }  # fmt: skip
    raise ConfigError(
        f"pool {pool} needs hosts with the labels "
        f"{', '.join(f'{name}={value}' for name, value in sorted(labels.items()))}, but none "
        f"has them; of these labels there are {', '.join(sorted(have)) or 'none'}"
    )


def _by_value(alive: Sequence[Mapping[str, Any]], key: str, needed: bool) -> dict[str, list[int]]:
    """Indices of the hosts by their value of a label; hosts without the label are left out.

    Raises:
      ConfigError: no host has the label, though it is needed.
    """
    groups: dict[str, list[int]] = {}
    for i, node in enumerate(alive):
        if value := labels_of(node).get(key):
            groups.setdefault(value, []).append(i)
    if needed and not groups:
        raise ConfigError(
            f"cluster.colocation_label={key!r}: no host has this label; they have "
            f"{', '.join(sorted(set().union(*map(labels_of, alive)))) or 'none'}"
        )
    return groups


def _whole_slices(
    sizes: Mapping[str, int], hosts: Mapping[str, Sequence[int]], pool: str, processes: int
) -> dict[str, int]:
    """Number of processes by TPU slice, of the slices that a pool can use: those of one host, and
    larger ones that the pool fills."""
    usable = {v: size for v, size in sizes.items() if len(hosts[v]) == 1 or size == processes}
    if not any(size >= processes for size in usable.values()):
        slices = ", ".join(f"{value}: {n}" for value, n in sorted(sizes.items()))
        raise ConfigError(
            f"pool {pool} has {processes} processes; on TPUs a pool is one slice, and all of it if "
            f"it has several hosts, since libtpu makes one world of a slice; there are {slices}"
        )
    return usable


def colocation_label_of(platform: str, colocation_label: str) -> str:
    """The label that ``cluster.colocation_label`` stands for; empty: none.

    A pool on TPUs is always one slice: libtpu must know of several slices before JAX starts, which
    hjax does not support.
    """
    usual = SLICE_LABEL if platform == "tpu" else ""
    return usual if colocation_label in ("auto", "none") else colocation_label


def processes_on_host(node: Mapping[str, Any], platform: str, devices_per_process: int) -> int:
    """Number of processes, of so many devices each, that fit on a host."""
    per_process = 1 if platform == "cpu" else devices_per_process
    return int(node["Resources"].get(RAY_RESOURCE[platform], 0)) // per_process


def devices_per_host(nodes: Iterable[Mapping[str, Any]], platform: str) -> int:
    """GPUs or TPU chips per host, among the hosts that have any.

    Raises:
      ConfigError: hosts have different numbers.
    """
    kind = RAY_RESOURCE[platform]
    counts = {int(node["Resources"].get(kind, 0)) for node in nodes if node["Alive"]} - {0}
    if len(counts) != 1:
        raise ConfigError(
            f"cluster.devices_per_process=0: the hosts have {sorted(counts)} {kind}s; "
            "say how many each process takes"
        )
    return counts.pop()


@dataclasses.dataclass(frozen=True)
class HostGroup:
    """Hosts of a cluster that one pool may span.

    Attributes:
      labels: that distinguish them from the cluster's other hosts; empty if there are no others.
      kind: Ray's name of their devices (``H100``, ``TPU-V5P``); empty: unknown.
      processes: capacity of each host.
      topology: sides of the TPU slice that the hosts form; empty: none, or unknown.
      address: of one of the hosts.
    """

    labels: tuple[tuple[str, str], ...]
    kind: str
    processes: tuple[int, ...]
    topology: tuple[int, ...] = ()
    address: str = ""

    @property
    def capacity(self) -> int:
        """Processes that fit on all of the hosts."""
        return sum(self.processes)


def host_groups(
    nodes: Iterable[Mapping[str, Any]],
    platform: str,
    processes: int,
    devices_per_process: int,
    colocation_label: str = "auto",
) -> list[HostGroup]:
    """Hosts grouped by kind of device and by value of the colocation label.

    Args:
      nodes, platform, colocation_label: as of ``placements``.
      processes: of the run; on CPUs they are spread evenly over the hosts.
      devices_per_process: devices of a process.

    Raises:
      ConfigError: no host can take a process, or a host lacks a label that others have.
    """
    alive = [node for node in nodes if node.get("Alive")]
    able = [node for node in alive if processes_on_host(node, platform, devices_per_process)]
    if not able:
        kinds = ", ".join(f"{int(n['Resources'].get(RAY_RESOURCE[platform], 0))}" for n in alive)
        raise ConfigError(
            "no host of the cluster takes a process with "
            f"{devices_per_process} {RAY_RESOURCE[platform]}s "
            f"(cluster.devices_per_process); its {len(alive)} hosts have {kinds or 'none'}"
        )
    share = -(-processes // len(able))
    key = colocation_label_of(platform, colocation_label)
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for node in able:
        names = labels_of(node)
        kind = names.get(KIND_LABEL, "") if platform != "cpu" else ""
        found.setdefault((kind, names.get(key, "") if key else ""), []).append(node)
    groups = []
    for (kind, value), hosts in found.items():
        labels = {KIND_LABEL: kind} if len({k for k, _ in found}) > 1 else {}
        labels |= {key: value} if len({v for _, v in found}) > 1 else {}
        if lacking := [name for name, label in labels.items() if not label]:
            raise ConfigError(
                f"host {hosts[0].get('NodeManagerAddress', '')} has no label {lacking[0]}, which "
                f"others have; start Ray there with --labels={lacking[0]}=..., or leave it out"
            )
        room = [processes_on_host(host, platform, devices_per_process) for host in hosts]
        if platform == "cpu":  # each host computes on its own cores
            room = [min(n, share) for n in room]
        sides = labels_of(hosts[0]).get(TOPOLOGY_LABEL, "") if key == SLICE_LABEL else ""
        topology = tuple(int(n) for n in sides.split("x")) if sides else ()
        address = hosts[0].get("NodeManagerAddress", "")
        labelled = tuple(sorted(labels.items()))
        groups.append(HostGroup(labelled, kind, tuple(room), topology, address))
    return groups


@dataclasses.dataclass(frozen=True)
class FoundDevice:
    """A device of another host: what a plan needs to know of it.

    Attributes:
      platform: ``gpu`` or ``tpu``.
      device_kind: JAX's name of it; of a TPU Ray's name.
      memory: bytes that programs may use; 0: unknown.
    """

    platform: str
    device_kind: str
    memory: int = 0

    def memory_stats(self) -> dict[str, int]:
        """As ``jax.Device.memory_stats``."""
        return {"bytes_limit": self.memory}


@dataclasses.dataclass(frozen=True)
class Hosts:
    """A cluster's hosts.

    Attributes:
      platform: ``cpu``, ``gpu`` or ``tpu``.
      devices_per_process: devices of a process.
      groups: groups of hosts that one pool may span.
      devices: a device of each group; none on CPUs.
    """

    platform: str
    devices_per_process: int
    groups: tuple[HostGroup, ...]
    devices: tuple[FoundDevice, ...] = ()
