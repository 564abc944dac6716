"""From a config to worker groups: models, layouts, losses and optimizers of every role."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.algorithms.losses import SupervisedLoss
from hjax.controller import ResourcePool, WorkerGroup
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.models.config import ModelConfig
from hjax.models.transformer import Compute
from hjax.models.weights import check_weights, read_config
from hjax.rewards.function import RewardFunction
from hjax.rollout.sampling import Sampling
from hjax.run.inputs import Inputs, load_tokenizer
from hjax.run.placement import HOST_POOL, Plan, layout_sizes, make_plan, make_pools
from hjax.sharding.layout import RoleLayouts, make_layouts
from hjax.sharding.offload import check_offload
from hjax.workers import (
    Actor,
    Critic,
    FunctionReward,
    ModelReward,
    OptimizerConfig,
    Reference,
    WorkerContext,
)

# Which config section describes a role's model and optimizer, where it is not its own.
SECTION = {"cost_critic": "critic"}
TRAINED = ("actor", "critic", "cost_critic")
PER_TOKEN = ("critic", "cost_critic", "reference")
WORKERS = {"actor": Actor, "critic": Critic, "cost_critic": Critic, "reference": Reference}


@dataclasses.dataclass
class Roles:
    """The worker groups of a run and where they stand.

    Attributes:
      groups: worker group by role.
      pools: resource pool by role, and the host's.
      plan: placement and allocation.
      layouts: by role with devices.
      models: shapes by role with a model.
      copies_actor: roles that start from the actor's parameters.
    """

    groups: dict[str, WorkerGroup]
    pools: dict[str, ResourcePool]
    plan: Plan
    layouts: dict[str, RoleLayouts]
    models: dict[str, ModelConfig]
    copies_actor: tuple[str, ...]

    def close(self) -> None:
        """Stop every pool's thread."""
        for pool in {id(p): p for p in self.pools.values()}.values():
            pool.close()


def default_dtype(platform: str) -> Any:
    """Compute dtype of ``model.dtype=auto``: bfloat16 on accelerators, float32 on a CPU."""
    return jnp.float32 if platform == "cpu" else jnp.bfloat16


def read_model(path: str) -> tuple[ModelConfig, Tokenizer | None]:
    """Shapes and tokenizer of the model at a path, whose weights are there to be loaded.

    Raises:
      ConfigError: missing or damaged files, by name.
    """
    check_weights(path)
    return read_config(path), load_tokenizer(path)


def build_roles(
    config: ConfigDict,
    algorithm: type[Algorithm],
    inputs: Inputs,
    devices: Sequence[jax.Device] | None = None,
    read: Callable[[str], tuple[ModelConfig, Tokenizer | None]] = read_model,
    plan: Plan | None = None,
) -> Roles:
    """Check everything that can be checked, then make the worker groups.

    Args:
      config: the run's.
      algorithm: its class.
      inputs: what it reads.
      devices: to build for; None: those of this process. Nothing is placed on them here.
      read: gives shapes and tokenizer of a role's path.
      plan: where the roles stand, instead of what ``config.placement`` says.

    Raises:
      ConfigError: shapes, batches, layouts or paths that do not fit, by name.
    """
    roles = algorithm.needed_roles(config.algorithm)
    if devices is None:
        devices = local_devices(config)
        for name in sorted({SECTION.get(role, role) for role in roles} & set(config.keys())):
            if config[name].get("offload", "none") != "none":
                check_offload(devices, f"{name}.offload")
    with_devices = roles_with_devices(config, algorithm)
    for name in set(roles) - set(with_devices):
        if getattr(inputs, name) is None:
            raise ConfigError(
                f"nothing gives a {name}: set {name}.function=path.py:name or {name}.path"
            )
    if plan is None:
        plan = make_plan(config.placement, with_devices, len(devices))
    pools = make_pools(plan, devices)
    layouts = {
        role: make_layouts(
            pools[role].devices,
            layout_sizes(plan, config.layout, role, "train"),
            layout_sizes(plan, config.layout, role, "generate") if role == "actor" else None,
            f"layout.{role}",
        )
        for role in with_devices
    }
    _check_batches(config, algorithm, layouts, inputs)
    dtype = default_dtype(devices[0].platform)
    builder = _Builder(config, algorithm, inputs, layouts, dtype, read)
    contexts = {role: builder.context(role) for role in roles}
    groups: dict[str, WorkerGroup] = {}
    for role, context in contexts.items():
        worker, options = builder.worker(role)
        pool = pools[role] if role in with_devices else pools[HOST_POOL]
        groups[role] = WorkerGroup(pool, worker, context, role=role, **options)
    models = {role: c.model for role, c in contexts.items() if c.model is not None}
    for group in groups.values():
        _ = group.worker  # a layout that does not fit its model is an error of the set-up
    copies = tuple(
        role
        for role in roles
        if role in PER_TOKEN
        and not config[SECTION.get(role, role)].path
        and hasattr(groups[role].worker, "copy_from")
    )
    return Roles(groups, pools, plan, layouts, models, copies)


def roles_with_devices(config: ConfigDict, algorithm: type[Algorithm]) -> tuple[str, ...]:
    """Roles with a model; rewards and costs that are functions compute on the host."""
    return tuple(
        role
        for role in algorithm.needed_roles(config.algorithm)
        if role not in ("reward", "cost") or role in algorithm.workers or config[role].path
    )


def role_path(config: ConfigDict, role: str) -> str:
    """Where a role's model is loaded from; empty if it is the actor's or made from scratch."""
    section = config.get(SECTION.get(role, role))
    return section.get("path", "") if section is not None else ""


def planned_models(
    config: ConfigDict,
    algorithm: type[Algorithm],
    inputs: Inputs,
    read: Callable[[str], tuple[ModelConfig, Tokenizer | None]] = read_model,
) -> dict[str, ModelConfig]:
    """Shapes of the roles with devices, for a planner.

    Raises:
      ConfigError: a worker class of a user's own, whose model nobody here knows.
    """
    with_devices = roles_with_devices(config, algorithm)
    own = [r for r in with_devices if r in algorithm.workers and r not in (*WORKERS, "reward")]
    if own:
        raise ConfigError(
            f"placement=auto: {own[0]} has a worker class of its own, whose model the planner does "
            "not know; use colocate, split, standalone or a plan.json"
        )
    paths = {role: role_path(config, role) for role in with_devices}
    return {role: read(path)[0] if path else inputs.model for role, path in paths.items()}


def is_float32(config: ConfigDict, platform: str) -> bool:
    """Whether a run computes in float32."""
    dtype = config.model.dtype
    return dtype == "float32" or (dtype == "auto" and default_dtype(platform) == jnp.float32)


def local_devices(config: ConfigDict) -> list[jax.Device]:
    """This process's devices, as many of them as the config wants."""
    devices = jax.devices()
    limit = config.cluster.devices_per_process
    if limit > len(devices):
        raise ConfigError(
            f"cluster.devices_per_process={limit}, but this process sees {len(devices)} devices"
        )
    return devices[: limit or None]


class _Builder:
    """Makes each role's context and worker class."""

    def __init__(
        self,
        config: ConfigDict,
        algorithm: type[Algorithm],
        inputs: Inputs,
        layouts: dict[str, RoleLayouts],
        auto_dtype: Any,
        read: Callable[[str], tuple[ModelConfig, Tokenizer | None]],
    ):
        self.config, self.algorithm, self.inputs = config, algorithm, inputs
        self.layouts, self.read = layouts, read
        self.losses = algorithm.losses(config.algorithm, config.rollout.max_response_length)
        dtype = {"auto": auto_dtype, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
        self.compute = Compute(
            dtype=dtype[config.model.dtype],
            unroll_layers=config.model.unroll_layers,
            remat=config.model.remat,
        )
        self.stop = stop_tokens(config, inputs)

    def worker(self, role: str) -> tuple[Any, dict[str, Any]]:
        """The class of a role's worker, and what it is built with beside its context."""
        if role in self.algorithm.workers:
            return self.algorithm.workers[role], {}
        if role in ("reward", "cost"):
            if self.config[role].path:
                return ModelReward, {}
            settings = self.config.reward
            function = RewardFunction(
                getattr(self.inputs, role), timeout_seconds=settings.timeout_seconds
            )
            return FunctionReward, {"function": function, "max_unscored": settings.max_unscored}
        if role not in WORKERS:
            raise ConfigError(
                f"role {role!r} has no worker class: give it one in "
                f"{self.algorithm.__name__}.workers"
            )
        return WORKERS[role], {}

    def context(self, role: str) -> WorkerContext:
        """What the role's worker is built from."""
        config, section = self.config, self.config.get(SECTION.get(role, role))
        path = role_path(config, role)
        model, tokenizer = self._model(role, path)
        trained = role in TRAINED
        return WorkerContext(
            role=role,
            layouts=self.layouts.get(role),
            seed=config.seed,
            tokenizer=tokenizer,
            model=model,
            path=path,
            compute=self.compute,
            samples=config.rollout.samples if self.algorithm.generates else 1,
            sampling=Sampling(
                config.rollout.temperature, config.rollout.top_k, config.rollout.top_p
            ),
            stop=self.stop,
            max_response_length=config.rollout.max_response_length,
            loss=self.losses.get(role),
            warm_start_loss=SupervisedLoss() if role == "actor" else None,
            warm_start=self._warm_start() if role == "actor" else None,
            optimizer=self._optimizer(section) if trained else None,
            micro_batch=section.micro_batch if trained else 0,
            offload=section.get("offload", "none") if section is not None else "none",
            retokenize=self._retokenizes(role, tokenizer),
            transition_bucket_bytes=config.rollout.transition_bucket_bytes,
            options=config,
        )

    def _model(self, role: str, path: str) -> tuple[ModelConfig | None, Tokenizer | None]:
        own = role in self.algorithm.workers and role not in (*WORKERS, "reward", "cost")
        if own or role not in self.layouts:
            return None, self.inputs.tokenizer
        if not path:
            return self.inputs.model, self.inputs.tokenizer
        model, tokenizer = self.read(path)
        ours = self.inputs.tokenizer
        differs = ours is not None and tokenizer is not None and not ours.same_as(tokenizer)
        if role in PER_TOKEN and (differs or model.vocab_size < self.inputs.model.vocab_size):
            raise ConfigError(
                f"{SECTION.get(role, role)}.path={path}: its tokenizer is not the actor's; a "
                f"{role} answers for each of the actor's tokens and needs the same one"
            )
        if role == "cost_critic" or role not in ("reward", "cost"):
            self._check_length(role, model)
        return model, tokenizer or ours

    def _check_length(self, role: str, model: ModelConfig) -> None:
        needed = self.inputs.prompt_length + self.config.rollout.max_response_length
        if model.max_length < needed:
            raise ConfigError(
                f"{role}.path: {model.max_length} positions are fewer than the {needed} of "
                "prompt and response"
            )

    def _retokenizes(self, role: str, tokenizer: Tokenizer | None) -> bool:
        ours = self.inputs.tokenizer
        if role not in ("reward", "cost") or ours is None or tokenizer is None:
            return False
        return not ours.same_as(tokenizer)

    def _optimizer(self, section: ConfigDict) -> OptimizerConfig:
        config = self.config
        rows = config.rollout.prompts * config.rollout.samples
        minibatch = config.algorithm.get("minibatch", 0) or rows
        per_step = config.algorithm.get("epochs", 1) * max(rows // minibatch, 1)
        return OptimizerConfig(
            learning_rate=section.learning_rate,
            schedule=section.schedule,
            warmup_updates=section.warmup_steps,
            total_updates=config.steps * (per_step if self.algorithm.generates else 1),
            weight_decay=section.weight_decay,
            beta1=section.beta1,
            beta2=section.beta2,
            max_grad_norm=section.max_grad_norm,
        )

    def _warm_start(self) -> OptimizerConfig:
        return OptimizerConfig(
            learning_rate=self.config.warm_start.learning_rate,
            warmup_updates=min(10, self.config.warm_start.steps),
        )


def stop_tokens(config: ConfigDict, inputs: Inputs) -> tuple[int, ...]:
    """Ids that end a response: the model's end-of-sequence ids and ``rollout.stop``.

    Raises:
      ConfigError: a stop string that is not one token.
    """
    tokenizer = inputs.tokenizer
    stop = [i for i in inputs.eos_ids if i < inputs.model.vocab_size]
    for text in config.rollout.stop:
        ids = tokenizer.encode(text, add_special=False) if tokenizer else []
        if len(ids) != 1:
            raise ConfigError(
                f"rollout.stop: {text!r} is {len(ids)} tokens; this version stops at single tokens"
            )
        stop.append(ids[0])
    return tuple(dict.fromkeys(stop))


def _check_batches(
    config: ConfigDict,
    algorithm: type[Algorithm],
    layouts: dict[str, RoleLayouts],
    inputs: Inputs,
) -> None:
    """Batches must split evenly over each role's data-parallel parts."""
    if not algorithm.generates:
        _check_divides("warm_start.batch", config.warm_start.batch, layouts["actor"].train, "actor")
        return
    rows = config.rollout.prompts * config.rollout.samples
    generate = layouts["actor"].generate
    stages = generate.ways("layers")
    _check_divides("rollout.prompts", config.rollout.prompts, generate, "actor", stages)
    for role, layout in layouts.items():
        _check_divides("rollout.prompts * rollout.samples", rows, layout.train, role)
        if role in TRAINED and config.algorithm.get("minibatch", 0):
            _check_divides("algorithm.minibatch", config.algorithm.minibatch, layout.train, role)
        section = config.get(SECTION.get(role, role))
        if role in TRAINED and section.micro_batch:
            _check_divides(
                f"{SECTION.get(role, role)}.micro_batch", section.micro_batch, layout.train, role
            )
    if config.warm_start.steps and not config.actor.path:
        _check_divides("warm_start.batch", config.warm_start.batch, layouts["actor"].train, "actor")


def _check_divides(name: str, value: int, layout: Any, role: str, stages: int = 1) -> None:
    ways = layout.ways("batch") * stages
    if value % ways:
        parts = f"{layout.ways('batch')} data-parallel parts"
        parts += f" times {stages} pipeline stages" if stages > 1 else ""
        raise ConfigError(
            f"{name}={value} does not divide over the {parts} of {role} "
            f"({layout.describe()}); use a multiple of {ways}, such as {-(-value // ways) * ways}"
        )
