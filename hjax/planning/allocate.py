"""Device allocation: how many devices of which pool each set of models gets."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from hjax.planning.hardware import fit_together, fits_by_sum, legal_counts
from hjax.planning.plan_types import Cluster, DevicePool
from hjax.planning.role_options import pareto_front

STAGE_COUNT = 3


@dataclasses.dataclass
class SetOptions:
    """Options of a set of models, on every legal number of devices of every pool.

    Attributes:
      where: int [n, 2]: index of the pool, number of devices.
      index: int [n]: which of the set's options on those devices.
      seconds: float64 [n, 3] per stage.
    """

    where: np.ndarray
    index: np.ndarray
    seconds: np.ndarray

    @property
    def least(self) -> int:
        """Fewest devices on which the set fits."""
        return int(self.where[:, 1].min())

    def fastest(self, size: int) -> np.ndarray:
        """float64 [size + 1, 3]: row n has the least seconds per stage on at most n devices."""
        table = np.full((size + 1, STAGE_COUNT), np.inf)
        np.minimum.at(table, self.where[:, 1], self.seconds)
        return np.minimum.accumulate(table, axis=0)


class DeviceUsage:
    """Devices in use as a vector of counts, by which partial plans are compared.

    Counts add up over sets; a plan whose counts are nowhere larger fits wherever another one does.
    A pool with ``fits_by_sum`` has one count: its devices. Any other has a count per set size up to
    a host: the sets of at least that size, where a set counts once for each whole host.
    """

    def __init__(self, cluster: Cluster):
        self.pools = cluster.pools
        self.columns: list[tuple[int, int]] = []  # pool, least size that counts (0: devices)
        weights: list[int] = []
        for number, pool in enumerate(self.pools):
            sizes = [n for n in legal_counts(pool) if n < pool.per_host]
            sizes = [0] if fits_by_sum(pool) else [*sizes, pool.per_host]
            self.columns += [(number, n) for n in sizes]
            weights += [1] if fits_by_sum(pool) else [b - a for a, b in zip([0, *sizes], sizes)]
        self.weights = np.array(weights)

    def counts(self, where: np.ndarray) -> np.ndarray:
        """int [n, columns]: the counts of sets, given as (pool, devices) pairs [n, 2]."""
        used = np.zeros((len(where), len(self.columns)), int)
        for column, (number, size) in enumerate(self.columns):
            here, devices = where[:, 0] == number, where[:, 1]
            if size:
                parts = np.maximum(devices // self.pools[number].per_host, devices >= size)
                used[:, column] = np.where(here, parts, 0)
            else:
                used[:, column] = np.where(here, devices, 0)
        return used

    def fits(self, used: np.ndarray) -> np.ndarray:
        """bool [n]: whether the sets fit into their pools."""
        good = np.ones(len(used), bool)
        for number, pool in enumerate(self.pools):
            columns = [i for i, (p, _) in enumerate(self.columns) if p == number]
            good &= (used[:, columns] * self.weights[columns]).sum(axis=1) <= pool.size
            if len(columns) > 1:
                for row in np.flatnonzero(good):
                    good[row] = self._packs(pool, columns, used[row])
        return good

    def _packs(self, pool: DevicePool, columns: list[int], used: np.ndarray) -> bool:
        *parts, whole = (int(used[c]) for c in columns)
        counts = [whole * pool.per_host] if whole else []
        for column, here, above in zip(columns, parts, [*parts[1:], whole]):
            counts += [self.columns[column][1]] * (here - above)
        return fit_together(pool, tuple(sorted(counts)))

    def loads(self, chosen: SetOptions) -> np.ndarray:
        """float64 [n, 3 * pools that share cores]: seconds per stage of all the pool's cores."""
        shared = [(i, pool) for i, pool in enumerate(self.pools) if pool.shares_cores]
        found = np.zeros((len(chosen.index), len(shared), STAGE_COUNT))
        for column, (number, pool) in enumerate(shared):
            for row in np.flatnonzero(chosen.where[:, 0] == number):
                devices = int(chosen.where[row, 1])
                found[row, column] = chosen.seconds[row] * pool.core_share(devices)
        return found.reshape(len(found), -1)

    def devices(self, used: np.ndarray) -> np.ndarray:
        """int [n]: total number of devices in use."""
        return (used * self.weights).sum(axis=1)


def allocate(
    cluster: Cluster, sets: Sequence[SetOptions], bound: float
) -> tuple[float, tuple[int, ...]] | None:
    """Choose an option per set for the shortest step; among equals the one of fewest devices.

    Sets are added one at a time. A partial plan is dropped if another one dominates it: as fast in
    every stage, with no more devices and no more time of shared cores. It is also dropped if every
    completion takes longer than ``bound``.

    Returns:
      (seconds, row of each set's choices), or None where nothing fits within ``bound``.
    """
    usage = DeviceUsage(cluster)
    fastest = [chosen.fastest(cluster.size) for chosen in sets]
    least = [chosen.least for chosen in sets]
    used = np.zeros((1, len(usage.columns)), int)
    seconds = np.zeros((1, STAGE_COUNT))
    loads = np.zeros((1, STAGE_COUNT * sum(pool.shares_cores for pool in cluster.pools)))
    rows = np.zeros((1, 0), int)
    for number, chosen in enumerate(sets):
        here = np.repeat(np.arange(len(used)), len(chosen.index))
        there = np.tile(np.arange(len(chosen.index)), len(used))
        joint_seconds = np.maximum(seconds[here], chosen.seconds[there])
        joint_loads = loads[here] + usage.loads(chosen)[there]
        joint_used = used[here] + usage.counts(chosen.where)[there]
        left = cluster.size - usage.devices(joint_used)
        good = left >= sum(least[number + 1 :])
        reachable = _stages(joint_seconds, joint_loads)
        for later in range(number + 1, len(sets)):
            others = sum(least[number + 1 :]) - least[later]
            room = np.clip(left - others, 0, cluster.size)
            reachable = np.maximum(reachable, fastest[later][room])
        good &= reachable.sum(axis=1) <= bound
        chosen_rows = np.flatnonzero(good)
        chosen_rows = chosen_rows[usage.fits(joint_used[chosen_rows])]
        if not len(chosen_rows):
            return None
        state = np.concatenate([joint_seconds, joint_loads, joint_used], axis=1)[chosen_rows]
        chosen_rows = chosen_rows[pareto_front(state)]
        used, seconds = joint_used[chosen_rows], joint_seconds[chosen_rows]
        loads = joint_loads[chosen_rows]
        rows = np.concatenate([rows[here[chosen_rows]], there[chosen_rows, None]], axis=1)
    totals = _stages(seconds, loads).sum(axis=1)
    best = min(range(len(totals)), key=lambda i: (totals[i], usage.devices(used[i : i + 1])[0]))
    return float(totals[best]), tuple(int(i) for i in rows[best])


def _stages(seconds: np.ndarray, loads: np.ndarray) -> np.ndarray:
    """float64 [n, 3]: seconds per stage: of the slowest set, or of a pool's shared cores."""
    for column in range(0, loads.shape[1], STAGE_COUNT):
        seconds = np.maximum(seconds, loads[:, column : column + STAGE_COUNT])
    return seconds.copy()
