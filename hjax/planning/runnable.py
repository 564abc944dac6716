"""Of the plans that a search finds those that hjax runs, not only compiles.

A pool of processes on TPUs is all hosts of one slice (``hjax.controller.hosts.rooms``): a set on a
part of a slice of several hosts, or over several slices, compiles and does not run.
"""

from __future__ import annotations

import dataclasses

from hjax.planning.hardware import legal_counts
from hjax.planning.records import Candidate, Pool
from hjax.planning.search import SHOWN, Problem, SearchResult
from hjax.planning.strategies import search_strategy

BESIDE = 2  # of the plans that only compile, so many stand beside those that run


def only_compiles(candidate: Candidate) -> list[str]:
    """Sets that hjax compiles and does not run, in words."""
    found = []
    for group in candidate.sets:
        pool, roles = group.pool, ", ".join(group.roles)
        if pool.shape and group.devices > pool.domain:
            found.append(f"{roles} on {group.devices // pool.domain} slices")
        elif pool.shape and group.devices < pool.domain and pool.hosts > pool.slices:
            part = f"{group.devices} of {pool.domain} devices of a slice of several hosts"
            found.append(f"{roles} on {part}")
    return found


def search_runnable(problem: Problem, strategy: str, count: int = SHOWN) -> SearchResult:
    """``search_strategy``, the plans that run first; after them ``BESIDE`` of those that only
    compile, if they are among the fastest. Where nothing that fits runs, those that compile."""
    found = search_strategy(problem, strategy, count)
    others = [c for c in found.candidates if only_compiles(c)]
    if not others:
        return found
    pools = tuple(map(_as_run, problem.cluster.pools))
    cluster = dataclasses.replace(problem.cluster, pools=pools)
    run = search_strategy(dataclasses.replace(problem, cluster=cluster), strategy, count)
    if not run.candidates:
        return found
    beside = others[: min(BESIDE, count - 1)]
    candidates = (*run.candidates[: count - len(beside)], *beside)
    return dataclasses.replace(run, candidates=candidates, seconds=found.seconds + run.seconds)


def _as_run(pool: Pool) -> Pool:
    if not pool.shape:
        return pool
    least = pool.domain if pool.hosts > pool.slices else 1
    sizes = tuple(n for n in legal_counts(pool) if least <= n <= pool.domain)
    return dataclasses.replace(pool, counts=sizes) if sizes else pool
