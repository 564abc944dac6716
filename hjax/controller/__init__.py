"""Who runs where and when: resource pools, worker groups, futures, the timeline."""

from hjax.controller.futures import Future, join, resolve
from hjax.controller.pool import Executor, ResourcePool, ThreadExecutor, WorkerGroup, check_disjoint
from hjax.controller.timeline import Span, Timeline

__all__ = [
    "Executor",
    "Future",
    "ResourcePool",
    "Span",
    "ThreadExecutor",
    "Timeline",
    "WorkerGroup",
    "check_disjoint",
    "join",
    "resolve",
]
