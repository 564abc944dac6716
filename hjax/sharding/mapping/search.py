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

import numpy as np

from hjax.sharding.mapping import memory
from hjax.sharding.mapping.allocate import Choices, allocate
from hjax.sharding.mapping.constants import Constants
from hjax.sharding.mapping.cost import Place
from hjax.sharding.mapping.hardware import legal_counts
from hjax.sharding.mapping.options import Space, front, role_options, vectors
from hjax.sharding.mapping.records import (
    Cluster,
    Dataflow,
    ModelCounts,
    Numerics,
    Option,
    Plan,
    PlannedSet,
    Pool,
    Workload,
)

Placement = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything a search is asked.

    Attributes:
      models: by role.
    """

    dataflow: Dataflow
    models: Mapping[str, ModelCounts]
    work: Workload
    cluster: Cluster
    constants: Constants = Constants()
    numerics: Numerics = Numerics()
    space: Space = Space()

    def place(self, pool: Pool, devices: int) -> Place:
        """Some devices of a pool under these constants."""
        return Place(pool, devices, self.constants, self.numerics)


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
    """A set's ways to run on one number of devices: vectors [n, 5] and the options behind each."""

    points: np.ndarray
    options: list[tuple[Option, ...]]


class Search:
    """Fronts of one problem, kept over placements."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._roles: dict[tuple, _Front] = {}
        self._sets: dict[tuple, _Front] = {}
        self._choices: dict[tuple[str, ...], Choices | None] = {}

    def role_front(self, role: str, pool: Pool, devices: int) -> _Front:
        """The front of one role alone; roles with equal models and calls share it."""
        problem = self.problem
        calls = tuple((c.kind, c.rows) for c in problem.dataflow.calls if c.role == role)
        key = (problem.models[role], calls, pool, devices)
        if key not in self._roles:
            place = problem.place(pool, devices)
            model = problem.models[role]
            found = role_options(place, model, problem.dataflow, role, problem.work, problem.space)
            points = vectors(found)
            kept = front(points)
            self._roles[key] = _Front(points[kept], [(found[i],) for i in kept])
        return self._roles[key]

    def set_front(self, roles: tuple[str, ...], pool: Pool, devices: int) -> _Front:
        """The front of a set: seconds and resident bytes add up, the largest transient counts."""
        key = (roles, pool, devices)
        if key not in self._sets:
            last = self.role_front(roles[-1], pool, devices)
            if len(roles) == 1:
                self._sets[key] = last
            else:
                before = self.set_front(roles[:-1], pool, devices)
                limit = memory.capacity(self.problem.place(pool, devices))
                self._sets[key] = _combine(before, last, limit)
        return self._sets[key]

    def choices(self, roles: tuple[str, ...]) -> Choices | None:
        """A set's ways on all legal numbers of devices; None where it fits nowhere."""
        if roles not in self._choices:
            where, index, seconds = [], [], []
            for number, pool in enumerate(self.problem.cluster.pools):
                for devices in legal_counts(pool):
                    points = self.set_front(roles, pool, devices).points[:, :3]
                    for row in front(points):
                        where.append((number, devices))
                        index.append(row)
                        seconds.append(points[row])
            found = Choices(np.array(where), np.array(index), np.array(seconds)) if where else None
            self._choices[roles] = found
        return self._choices[roles]

    def best(self, placement: Placement, bound: float = np.inf) -> Plan | None:
        """The fastest plan of a placement; None where it does not fit or is not below a bound."""
        sets = [self.choices(roles) for roles in placement]
        known = [chosen for chosen in sets if chosen is not None]
        if len(known) < len(sets):
            return None
        found = allocate(self.problem.cluster, known, bound)
        if found is None:
            return None
        planned = []
        for roles, chosen, row in zip(placement, known, found[1], strict=True):
            number, devices = (int(n) for n in chosen.where[row])
            pool = self.problem.cluster.pools[number]
            options = self.set_front(roles, pool, devices).options[chosen.index[row]]
            planned.append(PlannedSet(roles, pool, devices, options))
        return Plan(tuple(planned))

    def fits(self, placement: Placement) -> bool:
        """Whether each set has a number of devices on which it fits, all of them together."""
        sets = [self.choices(roles) for roles in placement]
        least = [chosen.least for chosen in sets if chosen is not None]
        return len(least) == len(sets) and sum(least) <= self.problem.cluster.size


@dataclasses.dataclass(frozen=True)
class Result:
    """What a search found.

    Attributes:
      plans: the best of each placement that fits and is among the best, fastest first.
      slower: placements that were left before their best was known, being slower than ``plans``.
      impossible: placements that do not fit.
      seconds: how long it took.
    """

    plans: tuple[Plan, ...]
    slower: tuple[Placement, ...]
    impossible: tuple[Placement, ...]
    seconds: float


def search(
    problem: Problem, placements: Sequence[Placement] | None = None, candidates: int = 5
) -> Result:
    """The best plans, one per placement.

    Args:
      placements: those to look at; None: every set partition of the roles.
      candidates: of how many placements the best is wanted.
    """
    start = time.perf_counter()
    tried = Search(problem)
    plans: list[Plan] = []
    slower, impossible = [], []
    for placement in placements or list(partitions(problem.dataflow.roles)):
        totals = sorted(plan.total for plan in plans)
        bound = totals[candidates - 1] if len(totals) >= candidates else np.inf
        plan = tried.best(placement, bound)
        if plan is not None:
            plans.append(plan)
        elif np.isfinite(bound) and tried.fits(placement):
            slower.append(placement)
        else:
            impossible.append(placement)
    plans.sort(key=lambda plan: (plan.total, plan.devices))
    for plan in plans[candidates:]:
        slower.append(tuple(s.roles for s in plan.sets))
    taken = time.perf_counter() - start
    return Result(tuple(plans[:candidates]), tuple(slower), tuple(impossible), taken)


def _combine(before: _Front, last: _Front, limit: float) -> _Front:
    """Both fronts on the same devices: every pair that fits, less those that another dominates."""
    a, b = before.points[:, None], last.points[None]
    pairs = np.concatenate([a[..., :4] + b[..., :4], np.maximum(a[..., 4:], b[..., 4:])], axis=-1)
    pairs = pairs.reshape(-1, 5)
    fits = np.flatnonzero(pairs[:, 3] + pairs[:, 4] <= limit)
    kept = fits[front(pairs[fits])]
    width = len(last.options)
    options = [before.options[i // width] + last.options[i % width] for i in kept]
    return _Front(pairs[kept], options)
