"""The model classes of the roles; subclass ``Worker`` for one of your own."""

from hjax.workers.actor import Actor
from hjax.workers.base import ModelWorker, TrainedWorker, Worker, WorkerContext
from hjax.workers.critic import Critic
from hjax.workers.optimizer import OptimizerConfig, Updater
from hjax.workers.reference import Reference
from hjax.workers.reward import FunctionReward, ModelReward

__all__ = [
    "Actor",
    "Critic",
    "FunctionReward",
    "ModelReward",
    "ModelWorker",
    "OptimizerConfig",
    "Reference",
    "TrainedWorker",
    "Updater",
    "Worker",
    "WorkerContext",
]
