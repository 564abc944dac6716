"""The model classes of the roles; subclass ``Worker`` for one of your own."""

from hjax.workers.actor import Actor
from hjax.workers.flow_buffer import BestPaths
from hjax.workers.flow_model import FlowModel, MLPFlow
from hjax.workers.generating_worker import GeneratingWorker
from hjax.workers.language import ImplicitReward, LearningTeacher, Reference, Teacher
from hjax.workers.mlp import MLPPolicy, MLPQFunction, MLPValue
from hjax.workers.model import ModelWorker
from hjax.workers.network import NetworkWorker
from hjax.workers.optimizer import OptimizerConfig, Updater
from hjax.workers.parameter_worker import ParameterWorker
from hjax.workers.player import PlayingWorker
from hjax.workers.replay import ReplayBuffer
from hjax.workers.reward import FunctionReward, ModelReward
from hjax.workers.rollout import Rollout
from hjax.workers.scalar import Critic, RewardTrainer
from hjax.workers.trainable_worker import TrainableWorker
from hjax.workers.worker import Worker, WorkerContext

__all__ = [
    "Actor",
    "BestPaths",
    "Critic",
    "FlowModel",
    "FunctionReward",
    "GeneratingWorker",
    "ImplicitReward",
    "LearningTeacher",
    "MLPFlow",
    "MLPPolicy",
    "MLPQFunction",
    "MLPValue",
    "ModelReward",
    "ModelWorker",
    "NetworkWorker",
    "OptimizerConfig",
    "ParameterWorker",
    "PlayingWorker",
    "Reference",
    "ReplayBuffer",
    "Rollout",
    "RewardTrainer",
    "Teacher",
    "TrainableWorker",
    "Updater",
    "Worker",
    "WorkerContext",
]
