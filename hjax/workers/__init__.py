"""The model classes of the roles; subclass ``Worker`` for one of your own."""

from hjax.workers.actor import Actor
from hjax.workers.base import Worker, WorkerContext
from hjax.workers.generation import GeneratingWorker
from hjax.workers.language import ImplicitReward, LearningTeacher, Reference, Teacher
from hjax.workers.model import ModelWorker
from hjax.workers.optimizer import OptimizerConfig, Updater
from hjax.workers.parameters import ParameterWorker
from hjax.workers.reward import FunctionReward, ModelReward
from hjax.workers.rollout import Rollout
from hjax.workers.scalar import Critic, Scorer
from hjax.workers.trained import TrainedWorker

__all__ = [
    "Actor",
    "Critic",
    "FunctionReward",
    "GeneratingWorker",
    "ImplicitReward",
    "LearningTeacher",
    "ModelReward",
    "ModelWorker",
    "OptimizerConfig",
    "ParameterWorker",
    "Reference",
    "Rollout",
    "Scorer",
    "Teacher",
    "TrainedWorker",
    "Updater",
    "Worker",
    "WorkerContext",
]
