"""The model classes of the roles; subclass ``Worker`` for one of your own."""

from hjax.workers.actor import Actor
from hjax.workers.base import Worker, WorkerContext
from hjax.workers.critic import Critic
from hjax.workers.generation import GeneratingWorker
from hjax.workers.model import ModelWorker
from hjax.workers.optimizer import OptimizerConfig, Updater
from hjax.workers.process_reward import ImplicitReward
from hjax.workers.reference import Reference
from hjax.workers.reward import FunctionReward, ModelReward
from hjax.workers.rollout import Rollout
from hjax.workers.scorer import Scorer
from hjax.workers.teacher import LearningTeacher, Teacher
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
    "Reference",
    "Rollout",
    "Scorer",
    "Teacher",
    "TrainedWorker",
    "Updater",
    "Worker",
    "WorkerContext",
]
