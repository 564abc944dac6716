"""The search of HybridFlow's Algorithms 1 and 2, exact over legal allocations and layouts.

A set of models on n devices keeps the Pareto front of (seconds per stage, resident, transient
bytes) of its models' layouts, built one model at a time and kept over placements. Sets are then
put together under the number of devices, partial plans that another dominates dropped, as are
those that cannot become one of the best.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

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
from hjax.planning.role_options import SUMS, WIDTH, front, peak, role_options, vectors
from hjax.planning.search_space import SearchSpace

Placement = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class PlanProblem:
    """Everything a search is asked.

    Attributes:
      models: by role.
      offload: by role what waits in the host's memory, of those that offload something; ``any``:
        whatever is best.
    """

    dataflow: Dataflow
    models: Mapping[str, ModelCounts]
    work: Workload
    cluster: Cluster
    constants: Constants = Constants()
    numerics: Numerics = Numerics()
    space: SearchSpace = SearchSpace()
    offload: Mapping[str, Offload | Literal["any"]] = dataclasses.field(default_factory=dict)

    def place(self, pool: DevicePool, devices: int) -> DeviceSet:
        """Some devices of a pool under these constants."""
        return DeviceSet(pool, devices, self.constants, self.numerics)


def partitions(items: Sequence[str]) -> Iterator[Placement]:
    """Every set partition, the first item's set first."""
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
    """Ways to run some roles on one number of devices: vectors [n, 7] and the options of each."""

    points: np.ndarray
    options: list[tuple[RoleOption, ...]]

    def of(self, kept: np.ndarray) -> _Front:
        """Some of them."""
        return _Front(self.points[kept], [self.options[i] for i in kept])


class RoleFronts:
    """The fronts of single roles, which do not depend on the placement."""

    def __init__(self, problem: PlanProblem):
        self.problem = problem
        self._fronts: dict[tuple, _Front] = {}
        self._places: dict[tuple[DevicePool, int], DeviceSet] = {}

    def place(self, pool: DevicePool, devices: int) -> DeviceSet:
        """The one record of some devices of a pool (collectives are cached by it)."""
        if (pool, devices) not in self._places:
            self._places[pool, devices] = self.problem.place(pool, devices)
        return self._places[pool, devices]

    def front(self, role: str, pool: DevicePool, devices: int) -> _Front:
        """The front of one role; roles with equal models and calls share it."""
        problem = self.problem
        calls = tuple((c.kind, c.rows) for c in problem.dataflow.calls if c.role == role)
        offload = problem.offload.get(role, "none")
        passes = problem.space.micro_batches.get(role)
        key = (problem.models[role], calls, offload, passes, pool, devices)
        if key not in self._fronts:
            place, model = self.place(pool, devices), problem.models[role]
            found = role_options(
                place,
                model,
                problem.dataflow,
                role=role,
                work=problem.work,
                space=problem.space,
                offload=offload,
            )
            points = vectors(found, any(what != "none" for what in problem.offload.values()))
            kept = front(points)
            self._fronts[key] = _Front(points[kept], [(found[i],) for i in kept])
        return self._fronts[key]

    def least_memory(self, roles: Sequence[str], pool: DevicePool, devices: int) -> float:
        """Fewest bytes per device on which these roles can share; inf where one has no layout."""
        built = np.zeros((1, WIDTH))
        for role in roles:
            points = self.front(role, pool, devices).points.copy()
            points[:, :3] = 0
            built = _joined(built[:, None], points[front(points)][None]).reshape(-1, WIDTH)
            built = built[front(built)]
        return float(peak(built).min(initial=np.inf))

    def fits(self, placement: Placement) -> bool:
        """Whether the sets have numbers of devices on which they fit at the same time."""
        sets = []
        for roles in placement:
            where = [
                (number, devices)
                for number, pool in enumerate(self.problem.cluster.pools)
                for devices in legal_counts(pool)
                if self.least_memory(roles, pool, devices)
                <= self.place(pool, devices).capacity
            ]
            if not where:
                return False
            shape = (len(where), 3)
            sets.append(SetOptions(np.array(where), np.zeros(len(where), int), np.zeros(shape)))
        return allocate(self.problem.cluster, sets, np.inf) is not None


class BoundedSearch:
    """Looks for candidates that take at most ``bound`` seconds.

    Args:
      role_fronts: of the problem, shared between searches.
      bound: whatever cannot become part of a plan below it is dropped on the way.
      thin: keep only so many ways to run each role: quick, and an upper bound of the optimum.
      bounds: of placements whose best is known to be at most so slow: sets that no other placement
        has need not be slower. By default all of them have ``bound``.
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
        return whole.of(_few(whole.points, self.thin))

    def _set(self, names: tuple[str, ...], pool: DevicePool, devices: int) -> _Front:
        """The front of a set: seconds and resident bytes add up, the largest transient counts.

        Built role by role, the one with the fewest ways first; ``rest`` is the least that the roles
        to come add, ``outside`` what the roles of other sets take at least on the devices left.
        """
        fronts = [self._role(role, pool, devices) for role in names]
        if not all(f.options for f in fronts):
            return _Front(np.empty((0, WIDTH)), [])
        alone = set(names) == set(self.problem.dataflow.roles)
        if alone:  # no other set waits for its stages: only their sum counts
            fronts = [_Front(_summed(f.points), f.options) for f in fronts]
            fronts = [f.of(front(f.points)) for f in fronts]
        order = sorted(range(len(names)), key=lambda i: len(fronts[i].options))
        fronts = [fronts[i] for i in order]
        least = np.array([f.points.min(axis=0) for f in fronts])
        outside = self._outside(names, self.problem.cluster.size - devices)
        limit = self.role_fronts.place(pool, devices).capacity
        bound = self._bounds.get(names, self.bound)
        built = _Front(np.zeros((1, WIDTH)), [()])
        for number, joined in enumerate(fronts):
            rest = least[number + 1 :]
            added = np.append(rest[:, :SUMS].sum(axis=0), rest[:, SUMS:].max(axis=0, initial=0.0))
            whole = number == len(fronts) - 1
            built = _combine(built, joined, added, outside, limit, bound, whole)
        back = np.argsort(order)
        options = [tuple(chosen[i] for i in back) for chosen in built.options]
        return _Front(built.points, options)

    def _outside(self, names: tuple[str, ...], left: int) -> np.ndarray:
        """float64 [3]: seconds per stage of the slowest role outside the set, at its fastest."""
        slowest = np.zeros(3)
        for role in self.problem.dataflow.roles:
            if role not in names:
                slowest = np.maximum(slowest, self._least_seconds(role)[left])
        return slowest

    def _least_seconds(self, role: str) -> np.ndarray:
        """float64 [size + 1, 3]: least seconds of a role per stage on at most so many devices."""
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
        """A set's ways on all legal numbers of devices; None where there is none."""
        if names not in self._choices:
            where: list[tuple[int, int]] = []
            index: list[int] = []
            seconds: list[np.ndarray] = []
            for number, pool in enumerate(self.problem.cluster.pools):
                for devices in legal_counts(pool):
                    found = self._set(names, pool, devices)
                    found = found.of(front(found.points[:, :3]))
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
        """The fastest candidate of a placement; None where none is at most ``bound``."""
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
    """What a search found.

    Attributes:
      problem: what was searched; a strategy may have added roles to the one that was asked.
      candidates: the best of each placement that fits and is among the best, fastest first.
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
        """The first candidate; only where there is one."""
        return self.candidates[0]


# How many candidates are shown.
SHOWN = 5
# Ways to run a role that the quick first search looks at.
_THIN = 5


def search(
    problem: PlanProblem, placements: Sequence[Placement] | None = None, count: int = SHOWN
) -> SearchResult:
    """The fastest candidates, one per placement.

    A quick search over a few ways to run each role gives an upper bound of the candidates' times;
    the exact one drops what cannot reach it.

    Args:
      placements: those to look at; None: every set partition of the roles.
      count: how many candidates are wanted.
    """
    start = time.perf_counter()
    asked = list(placements or partitions(problem.dataflow.roles))
    count = min(count, len(asked))  # with all of them found quickly there is a bound too
    fronts = RoleFronts(problem)
    quick = _fastest(BoundedSearch(fronts, thin=_THIN), asked, count)
    bound = quick[-1].total * (1 + 1e-9) if len(quick) == count else np.inf
    bounds = dict.fromkeys(asked, bound)
    bounds |= {tuple(s.roles for s in c.sets): c.total * (1 + 1e-9) for c in quick}
    found = _fastest(BoundedSearch(fronts, bound, bounds=bounds), asked, count)
    kept = {tuple(s.roles for s in candidate.sets) for candidate in found}
    others = [placement for placement in asked if placement not in kept]
    possible = {placement: fronts.fits(placement) for placement in others}
    return SearchResult(
        problem,
        tuple(found),
        tuple(p for p in others if possible[p]),
        tuple(p for p in others if not possible[p]),
        time.perf_counter() - start,
    )


def _fastest(within: BoundedSearch, placements: Sequence[Placement], count: int) -> list[Candidate]:
    """The best candidate of each placement, at most so many, fastest first."""
    found: list[Candidate] = []
    for placement in placements:
        bound = found[-1].total if len(found) == count else np.inf
        best = within.best(placement, bound)
        if best is not None:
            found = sorted([*found, best], key=lambda c: (c.total, c.devices))[:count]
    return found


def _few(points: np.ndarray, count: int) -> np.ndarray:
    """Indices of some points: the leanest, and the fastest of those within less and less memory."""
    total, needed = points[:, :3].sum(axis=1), peak(points)
    chosen = {int(np.argmin(needed)), int(np.argmin(points[:, 3]))}
    for share in np.linspace(1, 0, count, endpoint=False):
        within = np.flatnonzero(needed <= np.quantile(needed, share))
        chosen.add(int(within[np.argmin(total[within])]))
    return np.array(sorted(chosen), int)


# Pairs of two fronts that are looked at at a time.
_PAIRS = 1 << 18


def _combine(
    before: _Front,
    last: _Front,
    rest: np.ndarray,
    outside: np.ndarray,
    limit: float,
    bound: float,
    whole: bool,
) -> _Front:
    """Every pair of two fronts on the same devices that can become part of a plan, less those
    that another pair dominates.

    Args:
      rest: float64 [7], least that roles still to come add.
      outside: float64 [3], least seconds per stage of other sets.
      limit: bytes per device.
      bound: seconds of a plan.
      whole: no role is to come: of pairs that fit only the seconds count.
    """
    points = [np.empty((0, WIDTH))]
    numbers = [np.empty((0, 2), int)]
    few = max(1, _PAIRS // max(1, len(last.points)))
    compared = slice(0, 3) if whole else slice(None)
    for start in range(0, len(before.points), few):
        pairs = _joined(before.points[start : start + few, None], last.points[None])
        reached = _joined(pairs, rest)
        good = np.maximum(reached[..., :3], outside).sum(axis=-1) <= bound
        good &= peak(reached) <= limit
        first, second = np.nonzero(good)
        some = pairs[first, second]
        kept = front(some[:, compared])
        points.append(some[kept])
        numbers.append(np.column_stack([first[kept] + start, second[kept]]))
    found, pair = np.concatenate(points), np.concatenate(numbers)
    kept = front(found[:, compared])
    options = [before.options[pair[i, 0]] + last.options[pair[i, 1]] for i in kept]
    return _Front(found[kept], options)


def _summed(points: np.ndarray) -> np.ndarray:
    """float64 [n, 7]: the seconds of all stages in the first column."""
    total = points[:, :3].sum(axis=1)
    return np.column_stack([total, np.zeros((len(points), 2)), points[:, 3:]])


def _joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64 [..., 7]: of two sets of roles on the same devices together."""
    added = a[..., :SUMS] + b[..., :SUMS]
    return np.concatenate([added, np.maximum(a[..., SUMS:], b[..., SUMS:])], axis=-1)
