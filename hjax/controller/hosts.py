"""Hosts of a cluster: which of them a pool's processes may stand on together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hjax.errors import ConfigError

# The label that hosts of a TPU slice share, in Ray's words.
SLICE = "ray.io/tpu-slice-name"
RESOURCE = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU"}


@dataclasses.dataclass(frozen=True)
class Room:
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
) -> list[Room]:
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
      together: a label that all of the pool's hosts must agree in; ``auto``: the slice on TPUs,
        where hosts name one, else none; ``none``.

    Raises:
      ConfigError: no host has the label, or none of its values enough hosts.
    """
    alive = [node for node in nodes if node.get("Alive")]
    key = {"auto": SLICE if platform == "tpu" else "", "none": ""}.get(together, together)
    if not each:
        key, platform = "", "cpu"
    kind = RESOURCE[platform]
    per_process = 1 if platform == "cpu" else each
    capacity = [int(node["Resources"].get(kind, 0)) // per_process for node in alive]

    def near(chosen: Sequence[int], labels: tuple[tuple[str, str], ...] = ()) -> list[Room]:
        if platform == "cpu":
            several = len(chosen) > 1 and processes > 1
            return [Room("SPREAD" if several else "PACK", labels)]
        one = processes > 1 and any(capacity[i] >= processes for i in chosen)
        return [Room(way, labels) for way in (("STRICT_PACK", "PACK") if one else ("PACK",))]

    everywhere = near(range(len(alive)))
    if not key:
        return everywhere
    groups: dict[str, list[int]] = {}
    for i, node in enumerate(alive):
        if value := (node.get("Labels") or {}).get(key):
            groups.setdefault(value, []).append(i)
    if not groups and together == "auto":
        return everywhere
    if not groups:
        known = sorted({label for node in alive for label in node.get("Labels") or {}})
        raise ConfigError(
            f"cluster.together={together!r}: no host has this label; they have "
            f"{', '.join(known) or 'none'}"
        )
    sizes = {value: sum(capacity[i] for i in chosen) for value, chosen in groups.items()}
    fitting = sorted((size, value) for value, size in sizes.items() if size >= processes)
    if not fitting:
        most = max(sizes, key=lambda value: sizes[value])
        raise ConfigError(
            f"pool {pool} has {processes} processes, which hosts of one {key} are to take "
            f"(cluster.together={together!r}); the largest, {most}, takes {sizes[most]}: use "
            "smaller pools, or cluster.together=none"
        )
    return [room for _, value in fitting for room in near(groups[value], ((key, value),))]
