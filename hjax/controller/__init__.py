"""The single controller: resource pools, worker groups, messages, futures, the timeline."""

from hjax.controller.executors import Executor, ThreadExecutor
from hjax.controller.futures import Future, join, resolve
from hjax.controller.messages import BuildWorker, Call
from hjax.controller.pool import ResourcePool, WorkerGroup, check_disjoint
from hjax.controller.timeline import Span, Timeline

__all__ = [
    "BuildWorker",
    "Call",
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
