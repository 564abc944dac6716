"""Exact search over placements, allocations and layouts (HybridFlow's Algorithms 1 and 2).

For a set of models on n devices the search keeps the Pareto front of (seconds per stage, resident
bytes, transient bytes) over layouts. The front is built one model at a time and shared between
placements. ``allocate`` then combines sets within the number of devices. Partial plans that are
dominated, or that cannot become one of the best, are dropped (branch and bound).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from hjax.models.cost_inputs import ModelCounts, Numerics, Offload, Workload
from hjax.planning.allocate import SetOptions, allocate
from hjax.planning.constants import Constants
from hjax.planning.cost import DeviceSet
from hjax.planning.hardware import legal_counts
from hjax.planning.plan_types import (
    Candidate,
    Cluster,
    Dataflow,
    DevicePool,
    PlannedSet,
    RoleOption,
)
from hjax.planning.role_options import (
    COLUMNS,
    SUMMED,
    cost_vectors,
    pareto_front,
    peak_of,
    role_options,
)
from hjax.planning.search_space import SearchSpace

Placement = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class PlanProblem:
    """The input of a search.

    Attributes:
      models: by role.
      offload: by role the state offloaded to host memory; ``any``: the search chooses. Roles that
        offload nothing are absent.
    """

    dataflow: Dataflow
    models: Mapping[str, ModelCounts]
    work: Workload
    cluster: Cluster
    constants: Constants = Constants()
    numerics: Numerics = Numerics()
    space: SearchSpace = SearchSpace()
    offload: Mapping[str, Offload | Literal["any"]] = dataclasses.field(default_factory=dict)

    def options(self, role: str, place: DeviceSet, **changes: Any) -> list[RoleOption]:
        """How a role may run there (``role_options``, with changes of its arguments)."""
        given: dict[str, Any] = {"work": self.work, "space": self.space}
        given |= {"offload": self.offload.get(role, "none"), **changes}
        return role_options(place, self.models[role], self.dataflow, role, **given)

    def place(self, pool: DevicePool, devices: int) -> DeviceSet:
        """So many devices of a pool, with this problem's constants and numerics."""
        return DeviceSet(pool, devices, self.constants, self.numerics)


def partitions(items: Sequence[str]) -> Iterator[Placement]:
    """All set partitions of some items, the first item's set first."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield ((first,), *smaller)
        for i, chosen in enumerate(smaller):
            yield ((first, *chosen), *smaller[:i], *smaller[i + 1 :])


@dataclasses.dataclass
class _Front:
    """A Pareto front of some roles on n devices: cost vectors [n, 7], and the options of each."""

    points: np.ndarray
    options: list[tuple[RoleOption, ...]]

    def subset(self, kept: np.ndarray) -> _Front:
        """The points with these indices."""
        return _Front(self.points[kept], [self.options[i] for i in kept])


class RoleFronts:
    """Cache of the Pareto fronts of single roles, which do not depend on the placement."""

    def __init__(self, problem: PlanProblem):
        self.problem = problem
        self._fronts: dict[tuple, _Front] = {}
        self._places: dict[tuple[DevicePool, int], DeviceSet] = {}

    def place(self, pool: DevicePool, devices: int) -> DeviceSet:
        """The DeviceSet of so many devices of a pool, one object each (a cache key)."""
        if (pool, devices) not in self._places:
            self._places[pool, devices] = self.problem.place(pool, devices)
        return self._places[pool, devices]

    def front(self, role: str, pool: DevicePool, devices: int) -> _Front:
        """The Pareto front of one role; roles with equal models and calls share it."""
        problem = self.problem
        calls = tuple((c.kind, c.rows) for c in problem.dataflow.calls if c.role == role)
        offload = problem.offload.get(role, "none")
        passes = problem.space.micro_batches.get(role)
        key = (problem.models[role], calls, offload, passes, pool, devices)
        if key not in self._fronts:
            found = problem.options(role, self.place(pool, devices))
            points = cost_vectors(found, any(what != "none" for what in problem.offload.values()))
            kept = pareto_front(points)
            self._fronts[key] = _Front(points[kept], [(found[i],) for i in kept])
        return self._fronts[key]

    def least_memory(self, roles: Sequence[str], pool: DevicePool, devices: int) -> float:
        """Least bytes per device with which these roles can share devices; inf if none fits."""
        built = np.zeros((1, COLUMNS))
        for role in roles:
            points = self.front(role, pool, devices).points.copy()
            points[:, :3] = 0
            built = _joined(built[:, None], points[pareto_front(points)][None]).reshape(-1, COLUMNS)
            built = built[pareto_front(built)]
        return float(peak_of(built).min(initial=np.inf))

    def fits(self, placement: Placement) -> bool:
        """Whether some allocation of devices fits all sets at the same time."""
        sets = []
        for roles in placement:
            where = [
                (number, devices)
                for number, pool in enumerate(self.problem.cluster.pools)
                for devices in legal_counts(pool)
                if self.least_memory(roles, pool, devices) <= self.place(pool, devices).capacity
            ]
            if not where:
                return False
            shape = (len(where), 3)
            sets.append(SetOptions(np.array(where), np.zeros(len(where), int), np.zeros(shape)))
        return allocate(self.problem.cluster, sets, np.inf) is not None


class BoundedSearch:
    """Branch-and-bound search for candidates that take at most ``bound`` seconds.

    Args:
      role_fronts: of the problem, shared between searches.
      bound: seconds; partial plans that cannot stay within it are dropped.
      thin: options kept per role: a fast search that gives an upper bound of the optimum. 0: all.
      bounds: by placement, seconds that its best candidate is known not to exceed. They bound the
        sets that occur in no other placement. By default ``bound`` holds for all.
    """

    def __init__(
        self,
        role_fronts: RoleFronts,
        bound: float = np.inf,
        thin: int = 0,
        bounds: Mapping[Placement, float] | None = None,
    ):
        self.role_fronts = role_fronts
        self.problem = role_fronts.problem
        self.bound = bound
        self.thin = thin
        self._bounds: dict[tuple[str, ...], float] = {}
        for placement, least in (bounds or {}).items():
            for names in placement:
                self._bounds[names] = max(self._bounds.get(names, 0.0), min(bound, least))
        self._choices: dict[tuple[str, ...], SetOptions | None] = {}
        self._fronts: dict[tuple, _Front] = {}
        self._tables: dict[str, np.ndarray] = {}

    def _role(self, role: str, pool: DevicePool, devices: int) -> _Front:
        whole = self.role_fronts.front(role, pool, devices)
        if not self.thin or not whole.options:
            return whole
        return whole.subset(_representative(whole.points, self.thin))

    def _set(self, names: tuple[str, ...], pool: DevicePool, devices: int) -> _Front:
        """The front of a set: seconds and resident bytes add up, the largest transient counts. It
        is built role by role, that of fewest options first. ``rest`` is a lower bound of what the
        remaining roles add, ``outside`` of what other sets take on the other devices."""
        fronts = [self._role(role, pool, devices) for role in names]
        if not all(f.options for f in fronts):
            return _Front(np.empty((0, COLUMNS)), [])
        alone = set(names) == set(self.problem.dataflow.roles)
        if alone:  # no other set waits for its stages: only their sum counts
            fronts = [_Front(_summed(f.points), f.options) for f in fronts]
            fronts = [f.subset(pareto_front(f.points)) for f in fronts]
        order = sorted(range(len(names)), key=lambda i: len(fronts[i].options))
        fronts = [fronts[i] for i in order]
        least = np.array([f.points.min(axis=0) for f in fronts])
        outside = self._outside(names, self.problem.cluster.size - devices)
        limit = self.role_fronts.place(pool, devices).capacity
        bound = self._bounds.get(names, self.bound)
        built = _Front(np.zeros((1, COLUMNS)), [()])
        for number, joined in enumerate(fronts):
            rest = least[number + 1 :]
            largest = rest[:, SUMMED:].max(axis=0, initial=0.0)
            added = np.append(rest[:, :SUMMED].sum(axis=0), largest)
            built = _combine(built, joined, added, outside, limit, bound, number == len(fronts) - 1)
        back = np.argsort(order)
        return _Front(built.points, [tuple(chosen[i] for i in back) for chosen in built.options])

    def _outside(self, names: tuple[str, ...], left: int) -> np.ndarray:
        """float64 [3]: seconds per stage of the slowest role outside the set, at its fastest."""
        slowest = np.zeros(3)
        for role in self.problem.dataflow.roles:
            if role not in names:
                slowest = np.maximum(slowest, self._least_seconds(role)[left])
        return slowest

    def _least_seconds(self, role: str) -> np.ndarray:
        """float64 [size + 1, 3]: least seconds of a role per stage on at most n devices."""
        if role not in self._tables:
            table = np.full((self.problem.cluster.size + 1, 3), np.inf)
            for pool in self.problem.cluster.pools:
                for devices in legal_counts(pool):
                    points = self.role_fronts.front(role, pool, devices).points
                    if len(points):
                        table[devices] = np.minimum(table[devices], points[:, :3].min(axis=0))
            self._tables[role] = np.minimum.accumulate(table, axis=0)
        return self._tables[role]

    def choices(self, names: tuple[str, ...]) -> SetOptions | None:
        """A set's options on all legal numbers of devices; None if it fits on none."""
        if names not in self._choices:
            where: list[tuple[int, int]] = []
            index: list[int] = []
            seconds: list[np.ndarray] = []
            for number, pool in enumerate(self.problem.cluster.pools):
                for devices in legal_counts(pool):
                    found = self._set(names, pool, devices)
                    found = found.subset(pareto_front(found.points[:, :3]))
                    self._fronts[names, pool, devices] = found
                    where += [(number, devices)] * len(found.options)
                    index += range(len(found.options))
                    seconds.append(found.points[:, :3])
            self._choices[names] = (
                SetOptions(np.array(where), np.array(index), np.concatenate(seconds))
                if where
                else None
            )
        return self._choices[names]

    def best(self, placement: Placement, bound: float = np.inf) -> Candidate | None:
        """The fastest candidate of a placement; None if all take longer than ``bound``."""
        sets = [self.choices(names) for names in placement]
        known = [chosen for chosen in sets if chosen is not None]
        if len(known) < len(sets):
            return None
        found = allocate(self.problem.cluster, known, min(bound, self.bound))
        if found is None:
            return None
        planned = []
        for names, chosen, row in zip(placement, known, found[1], strict=True):
            number, devices = (int(n) for n in chosen.where[row])
            pool = self.problem.cluster.pools[number]
            options = self._fronts[names, pool, devices].options[chosen.index[row]]
            planned.append(PlannedSet(names, pool, devices, options))
        return Candidate(tuple(planned))


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
      problem: that was searched; a strategy may have added roles to the original one.
      candidates: the best candidates of different placements, fastest first.
      slower: placements that fit, but whose best is slower than all of ``candidates``.
      impossible: placements that do not fit.
      seconds: how long it took.
    """

    problem: PlanProblem
    candidates: tuple[Candidate, ...]
    slower: tuple[Placement, ...]
    impossible: tuple[Placement, ...]
    seconds: float

    @property
    def fastest(self) -> Candidate:
        """The first candidate; there must be one."""
        return self.candidates[0]


# Number of candidates that are shown.
MAX_SHOWN = 5
# Options per role in the quick first search.
_QUICK_OPTIONS = 5


def search(
    problem: PlanProblem, placements: Sequence[Placement] | None = None, count: int = MAX_SHOWN
) -> SearchResult:
    """Find the fastest candidates, one per placement. A quick search over a few options of each
    role gives an upper bound of their seconds; the exact search drops what cannot reach it.

    Args:
      placements: to search; None: every set partition of the roles.
      count: number of candidates to return.
    """
    start = time.perf_counter()
    searched = list(placements or partitions(problem.dataflow.roles))
    count = min(count, len(searched))  # so that there is a bound where all were found quickly
    fronts = RoleFronts(problem)
    quick = _fastest(BoundedSearch(fronts, thin=_QUICK_OPTIONS), searched, count)
    bound = quick[-1].total * (1 + 1e-9) if len(quick) == count else np.inf
    bounds = dict.fromkeys(searched, bound)
    bounds |= {tuple(s.roles for s in c.sets): c.total * (1 + 1e-9) for c in quick}
    found = _fastest(BoundedSearch(fronts, bound, bounds=bounds), searched, count)
    kept = {tuple(s.roles for s in candidate.sets) for candidate in found}
    others = [placement for placement in searched if placement not in kept]
    possible = {placement: fronts.fits(placement) for placement in others}
    return SearchResult(
        problem,
        tuple(found),
        tuple(p for p in others if possible[p]),
        tuple(p for p in others if not possible[p]),
        time.perf_counter() - start,
    )


def _fastest(within: BoundedSearch, placements: Sequence[Placement], count: int) -> list[Candidate]:
    """The best candidate of each placement, at most ``count``, fastest first."""
    found: list[Candidate] = []
    for placement in placements:
        best = within.best(placement, found[-1].total if len(found) == count else np.inf)
        if best is not None:
            found = sorted([*found, best], key=lambda c: (c.total, c.devices))[:count]
    return found


def _representative(points: np.ndarray, count: int) -> np.ndarray:
    """Indices of a few points: of least memory, and the fastest under falling memory limits."""
    total, needed = points[:, :3].sum(axis=1), peak_of(points)
    chosen = {int(np.argmin(needed)), int(np.argmin(points[:, 3]))}
    for share in np.linspace(1, 0, count, endpoint=False):
        within = np.flatnonzero(needed <= np.quantile(needed, share))
        chosen.add(int(within[np.argmin(total[within])]))
    return np.array(sorted(chosen), int)


# Pairs of points of two fronts that are compared at a time.
_PAIRS_AT_A_TIME = 1 << 18


def _combine(
    before: _Front,
    last: _Front,
    rest: np.ndarray,
    outside: np.ndarray,
    limit: float,
    bound: float,
    whole: bool,
) -> _Front:
    """Combine two fronts on the same devices: the Pareto front of all pairs that can be in a plan.

    Args:
      rest: float64 [7], lower bound of what the remaining roles add.
      outside: float64 [3], least seconds per stage of other sets.
      limit: bytes per device.
      bound: seconds of a plan.
      whole: no role remains, so among pairs that fit only the seconds count.
    """
    points = [np.empty((0, COLUMNS))]
    numbers = [np.empty((0, 2), int)]
    few = max(1, _PAIRS_AT_A_TIME // max(1, len(last.points)))
    compared = slice(0, 3) if whole else slice(None)
    for start in range(0, len(before.points), few):
        pairs = _joined(before.points[start : start + few, None], last.points[None])
        reached = _joined(pairs, rest)
        good = np.maximum(reached[..., :3], outside).sum(axis=-1) <= bound
        good &= peak_of(reached) <= limit
        first, second = np.nonzero(good)
        some = pairs[first, second]
        kept = pareto_front(some[:, compared])
        points.append(some[kept])
        numbers.append(np.column_stack([first[kept] + start, second[kept]]))
    found, pair = np.concatenate(points), np.concatenate(numbers)
    kept = pareto_front(found[:, compared])
    options = [before.options[pair[i, 0]] + last.options[pair[i, 1]] for i in kept]
    return _Front(found[kept], options)


def _summed(points: np.ndarray) -> np.ndarray:
    """float64 [n, 7]: the seconds of all stages summed in the first column."""
    return np.column_stack([points[:, :3].sum(axis=1), np.zeros((len(points), 2)), points[:, 3:]])


def _joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64 [..., 7]: cost vector of two sets of roles that share devices."""
    added = a[..., :SUMMED] + b[..., :SUMMED]
    return np.concatenate([added, np.maximum(a[..., SUMMED:], b[..., SUMMED:])], axis=-1)
