"""Hosts of a cluster: which of them a pool's processes may stand on together."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hjax.errors import ConfigError

# The label that hosts of a TPU slice share, in Ray's words.
SLICE = "ray.io/tpu-slice-name"
RESOURCE = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU"}


# What kind of accelerator a host has, and the sides of a TPU slice, in Ray's words.
KIND = "ray.io/accelerator-type"
TOPOLOGY = "ray.io/tpu-topology"


@dataclasses.dataclass(frozen=True)
class ProcessPlacement:
    """Where a pool's processes may stand.

    Attributes:
      strategy: of Ray's placement groups.
      labels: that their hosts must have; None: any.
    """

    strategy: str
    labels: tuple[tuple[str, str], ...] = ()


def rooms(
    nodes: Iterable[Mapping[str, Any]],
    pool: str,
    platform: str,
    processes: int,
    each: int,
    together: str = "auto",
    labels: Mapping[str, str] = MappingProxyType({}),
) -> list[ProcessPlacement]:
    """Where a pool may stand, best first: its processes as near to each other as they can be.

    Processes with GPUs or TPUs share a host where one has enough of them; those that compute on
    CPUs take a host each, for they would share its cores. Within one label's value the smallest
    group of hosts that is large enough comes first.

    Args:
      nodes: the cluster's, with ``Alive``, ``Resources`` and ``Labels`` as ``ray.nodes()`` has.
      pool: its name, for errors.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      processes: of the pool.
      each: devices of a process; 0: it computes on the host.
      together: a label that all of the pool's hosts must agree in; ``auto``, ``none``: the slice
        on TPUs, where hosts name one, else none. Of a slice of several hosts a pool takes all.
      labels: that each of its hosts must have.

    Raises:
      ConfigError: no host has the labels, none of the values enough hosts, or no slice just so
        many.
    """
    alive = [node for node in nodes if node.get("Alive")]
    key = together_label(platform, together)
    if not each:
        key, platform = "", "cpu"
    alive = _labelled(alive, pool, labels)
    capacity = [room_for(node, platform, each) for node in alive]

    def near(
        chosen: Sequence[int], more: tuple[tuple[str, str], ...] = ()
    ) -> list[ProcessPlacement]:
        needed = tuple(sorted({*labels.items(), *more}))
        if platform == "cpu":
            several = len(chosen) > 1 and processes > 1
            return [ProcessPlacement("SPREAD" if several else "PACK", needed)]
        one = processes > 1 and any(capacity[i] >= processes for i in chosen)
        return [
            ProcessPlacement(way, needed) for way in (("STRICT_PACK", "PACK") if one else ("PACK",))
        ]

    groups = _by_value(alive, key) if key else {}
    if not groups and together not in ("auto", "none") and key:
        known = sorted({label for node in alive for label in node.get("Labels") or {}})
        raise ConfigError(
            f"cluster.colocation_label={together!r}: no host has this label; they have "
            f"{', '.join(known) or 'none'}"
        )
    if not groups:
        return near(range(len(alive)))
    sizes = {value: sum(capacity[i] for i in chosen) for value, chosen in groups.items()}
    if key == SLICE:
        one_host = {value for value, chosen in groups.items() if len(chosen) == 1}
        sizes = _whole_slices(sizes, one_host, pool, processes)
    fitting = sorted((size, value) for value, size in sizes.items() if size >= processes)
    if not fitting:
        most = max(sizes, key=lambda value: sizes[value])
        raise ConfigError(
            f"pool {pool} has {processes} processes, which hosts of one {key} are to take "
            f"(cluster.colocation_label={together!r}); the largest, {most}, takes {sizes[most]}: "
            "use smaller pools, or cluster.colocation_label=none"
        )
    return [room for _, value in fitting for room in near(groups[value], ((key, value),))]


def _labelled(
    alive: list[Mapping[str, Any]], pool: str, labels: Mapping[str, str]
) -> list[Mapping[str, Any]]:
    """The hosts that have all of a pool's labels."""
    there = [node for node in alive if labels.items() <= (node.get("Labels") or {}).items()]
    if there or not labels:
        return there
    have = {
        f"{name}={node['Labels'][name]}"
        for node in alive for name in labels if name in (node.get("Labels") or {})
    }  # fmt: skip
    raise ConfigError(
        f"pool {pool} is to stand on hosts with "
        f"{', '.join(f'{name}={value}' for name, value in sorted(labels.items()))}, which none "
        f"has; of these labels there are {', '.join(sorted(have)) or 'none'}"
    )


def _by_value(alive: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[int]]:
    """Numbers of the hosts by their value of a label; those without it are left out."""
    groups: dict[str, list[int]] = {}
    for i, node in enumerate(alive):
        if value := (node.get("Labels") or {}).get(key):
            groups.setdefault(value, []).append(i)
    return groups


def _whole_slices(
    sizes: Mapping[str, int], one_host: Collection[str], pool: str, processes: int
) -> dict[str, int]:
    """The TPU slices that a pool can take, by the processes they take: those of ``one_host``, and
    those of several that it fills."""
    usable = {v: size for v, size in sizes.items() if v in one_host or size == processes}
    if not any(size >= processes for size in usable.values()):
        slices = ", ".join(f"{value}: {n}" for value, n in sorted(sizes.items()))
        raise ConfigError(
            f"pool {pool} has {processes} processes; on TPUs it takes one slice, and of one of "
            f"several hosts all, for libtpu makes one world of a slice; there are {slices}"
        )
    return usable


def together_label(platform: str, together: str) -> str:
    """The label that ``cluster.colocation_label`` stands for; empty: none.

    A world of TPUs is one slice whatever is said: what joins slices is told to libtpu before JAX
    starts, which hjax does not do.
    """
    usual = SLICE if platform == "tpu" else ""
    return usual if together in ("auto", "none") else together


def room_for(node: Mapping[str, Any], platform: str, each: int) -> int:
    """Processes of so many devices that a host can take."""
    per_process = 1 if platform == "cpu" else each
    return int(node["Resources"].get(RESOURCE[platform], 0)) // per_process


def devices_of_a_host(nodes: Iterable[Mapping[str, Any]], platform: str) -> int:
    """GPUs or TPU chips of a host, where all that have some have as many.

    Raises:
      ConfigError: they have different numbers.
    """
    kind = RESOURCE[platform]
    counts = {int(node["Resources"].get(kind, 0)) for node in nodes if node["Alive"]} - {0}
    if len(counts) != 1:
        raise ConfigError(
            f"cluster.devices_per_process=0: the hosts have {sorted(counts)} {kind}s; "
            "say how many each process takes"
        )
    return counts.pop()


@dataclasses.dataclass(frozen=True)
class HostGroup:
    """Hosts of a cluster on which a pool may stand together.

    Attributes:
      labels: that tell them from the cluster's other hosts; empty where there are no others.
      kind: of their devices, as Ray calls it (``H100``, ``TPU-V5P``); empty: it does not say.
      processes: that each host takes.
      topology: sides of the TPU slice that they make up; empty: none, or not known.
      address: of one of them.
    """

    labels: tuple[tuple[str, str], ...]
    kind: str
    processes: tuple[int, ...]
    topology: tuple[int, ...] = ()
    address: str = ""

    @property
    def room(self) -> int:
        """Processes that all of them take."""
        return sum(self.processes)


def host_groups(
    nodes: Iterable[Mapping[str, Any]],
    platform: str,
    processes: int,
    each: int,
    together: str = "auto",
) -> list[HostGroup]:
    """The hosts by kind of device and by the label that a pool's hosts agree in.

    Args:
      nodes, platform, together: as of ``rooms``.
      processes: of the run; on CPUs its hosts share them out evenly.
      each: devices of a process.

    Raises:
      ConfigError: no host takes a process, or some lack a label that tells them from the others.
    """
    alive = [node for node in nodes if node.get("Alive")]
    able = [node for node in alive if room_for(node, platform, each)]
    if not able:
        kinds = ", ".join(f"{int(n['Resources'].get(RESOURCE[platform], 0))}" for n in alive)
        raise ConfigError(
            f"no host of the cluster takes a process with {each} {RESOURCE[platform]}s "
            f"(cluster.devices_per_process); its {len(alive)} hosts have {kinds or 'none'}"
        )
    share = -(-processes // len(able))
    key = together_label(platform, together)
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for node in able:
        names = node.get("Labels") or {}
        kind = names.get(KIND, "") if platform != "cpu" else ""
        found.setdefault((kind, names.get(key, "") if key else ""), []).append(node)
    groups = []
    for (kind, value), hosts in found.items():
        labels = {KIND: kind} if len({k for k, _ in found}) > 1 else {}
        labels |= {key: value} if len({v for _, v in found}) > 1 else {}
        if lacking := [name for name, label in labels.items() if not label]:
            raise ConfigError(
                f"host {hosts[0].get('NodeManagerAddress', '')} has no label {lacking[0]}, which "
                f"others have; start Ray there with --labels={lacking[0]}=..., or leave it out"
            )
        room = [room_for(host, platform, each) for host in hosts]
        if platform == "cpu":  # each host computes on its own cores
            room = [min(n, share) for n in room]
        sides = (hosts[0].get("Labels") or {}).get(TOPOLOGY, "") if key == SLICE else ""
        topology = tuple(int(n) for n in sides.split("x")) if sides else ()
        address = hosts[0].get("NodeManagerAddress", "")
        labelled = tuple(sorted(labels.items()))
        groups.append(HostGroup(labelled, kind, tuple(room), topology, address))
    return groups


@dataclasses.dataclass(frozen=True)
class FoundDevice:
    """A device of another host, as far as a plan needs to know it.

    Attributes:
      platform: ``gpu`` or ``tpu``.
      device_kind: as JAX calls it; of a TPU as Ray does.
      memory: bytes that its programs may use; 0: not known.
    """

    platform: str
    device_kind: str
    memory: int = 0

    def memory_stats(self) -> dict[str, int]:
        """As of a jax.Device."""
        return {"bytes_limit": self.memory}


@dataclasses.dataclass(frozen=True)
class Hosts:
    """A cluster's hosts.

    Attributes:
      platform: ``cpu``, ``gpu`` or ``tpu``.
      each: devices of a process.
      groups: the hosts, those together that a pool may stand on.
      devices: of each group's hosts; none on CPUs.
    """

    platform: str
    each: int
    groups: tuple[HostGroup, ...]
    devices: tuple[FoundDevice, ...] = ()
