"""From a config to worker groups: models, layouts, losses and optimizers of every role."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.algorithms.losses import SupervisedLoss
from hjax.binding import worker_class
from hjax.controller import Build, ResourcePool, WorkerGroup
from hjax.controller.executors import ExecutorFactory
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.models.config import ModelConfig
from hjax.models.lora import Lora
from hjax.models.quantized import FLOAT
from hjax.models.remat import NONE
from hjax.models.rotary import Dynamic, LongRope
from hjax.models.transformer import Compute
from hjax.models.weights import check_weights, read_config
from hjax.rewards.function import RewardFunction
from hjax.roles import ROLES, ROLLOUT, Role, calls_of
from hjax.rollout.sampling import Sampling
from hjax.run import slot_room
from hjax.run.inputs import Inputs, load_tokenizer
from hjax.run.placement import HOST_POOL, Plan, layout_sizes, make_plan, make_pools
from hjax.run.policy import Policy
from hjax.run.rematerialise import AUTO, Chooser, Chosen, trains
from hjax.sharding.layout import RoleLayouts, make_layouts
from hjax.sharding.offload import check_offload
from hjax.workers import GeneratingWorker, OptimizerConfig, WorkerContext


@dataclasses.dataclass
class Roles:
    """The roles of a run, described and, once started, as worker groups.

    Attributes:
      table: what each role is.
      builds: the message that makes each role's worker.
      plan: placement and allocation.
      layouts: by role with devices; they can be asked, but hold no arrays.
      models: shapes by role with a model.
      starts_from: by role that takes another's weights, whose.
      served: by role that another's worker answers for, whose.
      remat: with ``model.remat=auto`` what was chosen for each trained role, and why.
      slots: with ``rollout.slots=-1`` how many sequences are generated at a time, and why.
      fewer: numbers of devices, falling, on which a rollout apart can do what it does; the first
        is that of the plan.
      pools: resource pool by role, and the host's.
      groups: worker group by role; the actor's is a ``Policy`` where a rollout stands apart.
    """

    table: dict[str, Role]
    builds: dict[str, Build]
    plan: Plan
    layouts: dict[str, RoleLayouts]
    models: dict[str, ModelConfig]
    starts_from: dict[str, str]
    served: dict[str, str] = dataclasses.field(default_factory=dict)
    remat: dict[str, Chosen] = dataclasses.field(default_factory=dict)
    fewer: tuple[int, ...] = ()
    slots: slot_room.SlotRoom | None = None
    pools: dict[str, ResourcePool] = dataclasses.field(default_factory=dict)
    groups: dict[str, Any] = dataclasses.field(default_factory=dict)

    def start(self, devices: Sequence[jax.Device], executor: ExecutorFactory) -> None:
        """Make the pools and the workers; waits until these stand.

        Raises:
          ConfigError: a layout that does not fit its model.
        """
        self.pools = make_pools(self.plan, devices, executor)
        try:
            for role, build in self.builds.items():
                pool = self.pools[role] if role in self.layouts else self.pools[HOST_POOL]
                arguments, options = build.arguments, build.options
                group = WorkerGroup(pool, build.worker, *arguments, role=role, **options)
                self.groups[role] = group
            for group in self.groups.values():
                group.built.result()  # what does not fit is an error of the set-up
            if ROLLOUT in self.groups:
                calls = calls_of(self.table["actor"].worker)
                updates = [name for name, phase in calls.items() if phase == "update"]
                actor, rollout = self.groups["actor"], self.groups[ROLLOUT]
                ask = functools.partial(self.landing, ROLLOUT)
                self.groups["actor"] = Policy(actor, rollout, updates, ask)
        except BaseException:
            self.close()
            raise

    def landing(self, role: str, source: str = "actor") -> Any:
        """How a role has another's weights arrive; None where no other processes send them."""
        pool = self.pools[role]
        group = self.groups[role]
        if pool is self.pools[source] or not hasattr(pool.executor, "processes"):
            return None
        return group.landing().result() if group.has("landing") else None

    def restart(self, lost: Sequence[Any], fewer: bool = False) -> None:
        """Start the executors that lost their processes again, and make their workers anew.

        Args:
          lost: those executors.
          fewer: whether a rollout may do with fewer processes, if there is room for no more.
        """
        for executor in lost:
            smaller = fewer and executor is self.generating
            executor.restart(self._counts() if smaller else ())
        groups = [group for group in self.groups.values() if group.pool.executor in lost]
        for group in groups:
            group.rebuild()
        for group in groups:
            group.built.result()

    @property
    def generating(self) -> Any:
        """The executor of the pool that answers prompts; one of a cluster knows its processes."""
        return self.pools[self.generates].executor

    def _counts(self) -> tuple[int, ...]:
        """Processes with which the rollout can do what it does, falling."""
        executor = self.generating
        planned = range(executor.planned, 0, -1)
        return tuple(n for n in planned if n * executor.devices in self.fewer)

    def could_grow(self) -> bool:
        """Whether there is room for processes that the rollout lost, and it can use them."""
        executor = self.generating
        room = getattr(executor, "room", 0)
        return bool(room) and any(executor.processes < n <= room for n in self._counts())

    @property
    def generates(self) -> str:
        """The role that answers prompts: the rollout where it stands apart, else the actor."""
        return ROLLOUT if ROLLOUT in self.layouts else "actor"

    @property
    def judges(self) -> dict[str, RewardFunction]:
        """The functions that score, by role."""
        made = {role: build.options.get("function") for role, build in self.builds.items()}
        return {role: f for role, f in made.items() if isinstance(f, RewardFunction)}

    def set_of(self, role: str) -> int:
        """Number of the set of roles that a role with devices shares them with."""
        return next(i for i, roles in enumerate(self.plan.placement) if role in roles)

    def close(self) -> None:
        """Stop every pool."""
        with contextlib.ExitStack() as ends:  # all of them, whichever fails
            for function in self.judges.values():
                ends.callback(function.close)
            for pool in {id(p): p for p in self.pools.values()}.values():
                ends.callback(pool.close)


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


def describe_roles(
    config: ConfigDict,
    algorithm: type[Algorithm],
    inputs: Inputs,
    plan: Plan,
    platform: str,
    read: Callable[[str], tuple[ModelConfig, Tokenizer | None]] = read_model,
    memory: int = 0,
) -> Roles:
    """Check everything that can be checked without devices, and describe the workers.

    Args:
      config: the run's.
      algorithm: its class.
      inputs: what it reads.
      plan: where the roles stand.
      platform: of the devices; it decides what ``model.dtype=auto`` means.
      read: gives shapes and tokenizer of a role's path.
      memory: bytes of a device that programs may use, for ``model.remat=auto``; 0: not known.

    Raises:
      ConfigError: shapes, batches, layouts or paths that do not fit, by name.
    """
    served = served_roles(config, algorithm)
    table = algorithm.role_table(config.algorithm)
    table = {name: role for name, role in table.items() if name not in served}
    if any(ROLLOUT in roles for roles in plan.placement):
        _check_rollout(table, algorithm)
        table[ROLLOUT] = ROLES[ROLLOUT]
    _check_ahead(config, algorithm, plan)
    for name, entry in table.items():
        if entry.trained and config.get(entry.config_section) is None:
            raise ConfigError(
                f"role {name!r} is trained, but the config has no section "
                f"{entry.config_section!r} with its optimizer; say section='critic' in its Role"
            )
        if entry.starts_from and entry.starts_from not in table:
            raise ConfigError(
                f"role {name!r} starts from {entry.starts_from!r}, which this config has no use "
                f"for; it has {', '.join(table)}"
            )
    with_devices = roles_with_devices(config, algorithm)
    for name in set(table) - set(with_devices) - {ROLLOUT}:
        if table[name].function and getattr(inputs, name) is None:
            raise ConfigError(
                f"nothing gives a {name}: set {name}.function=path.py:name or {name}.path"
            )
    layouts: dict[str, RoleLayouts] = {}
    sizes: dict[str, dict[str, dict[str, int]]] = {}
    for roles, count in zip(plan.placement, plan.allocation, strict=True):
        for role in roles:
            sizes[role] = {"train": layout_sizes(plan, config.layout, role, "train")}
            if table[role].apart:
                sizes[role]["generate"] = {"tensor": -1, "pipe": -1}  # as its mesh says
            elif table[role].generates:
                sizes[role]["generate"] = layout_sizes(plan, config.layout, role, "generate")
            what = f"layout.{role}"
            train, generate = sizes[role]["train"], sizes[role].get("generate")
            layouts[role] = make_layouts(count, train, generate, what)
    _check_slots(config)
    _check_batches(config, algorithm, table, layouts, plan)
    _check_packing(config, inputs, layouts, after=int(table["actor"].scalar))
    fewer: tuple[int, ...] = ()
    if ROLLOUT in layouts:
        # What stands on fewer devices has fewer data-parallel parts.
        sizes[ROLLOUT]["train"] = sizes[ROLLOUT]["train"] | {"data": -1}
        most = plan.allocation[[ROLLOUT in s for s in plan.placement].index(True)]
        fewer = tuple(n for n in range(most, 0, -1) if _can_generate(config, sizes[ROLLOUT], n))
    builder = _Builder(config, algorithm, inputs, table, sizes, default_dtype(platform), read)
    builds = {role: _as_planned(builder.build(role), plan) for role in table}
    models = {role: b.arguments[0].model for role, b in builds.items() if b.arguments[0].model}
    starts_from = {
        role: entry.starts_from
        for role, entry in table.items()
        if entry.starts_from
        and not builds[role].arguments[0].path
        and hasattr(builds[role].worker, "take_weights")
    }
    remat: dict[str, Chosen] = {}
    if config.model.remat == AUTO:
        contexts = {role: builds[role].arguments[0] for role in models if role in layouts}
        trained = {role: layout.train for role, layout in layouts.items()}
        length = inputs.prompt_length
        chooser = Chooser(
            config, algorithm, table, contexts, trained, length, platform, memory
        )
        for members in plan.placement:
            for role in members:
                if "remat" in plan.settings.get(role, {}):
                    continue
                if role in contexts and trains(builds[role].worker):
                    remat[role] = chooser.of(role, members)
                    builds[role] = _recomputing(builds[role], remat[role].policy)
    slots = None
    fixed = any("slots" in settings for settings in plan.settings.values())
    if config.rollout.slots == slot_room.AUTO and not fixed:
        slots = slot_room.room(config, table, builds, layouts, plan, inputs.prompt_length, memory)
        for role in (r for r in builds if r in layouts):
            builds[role] = _changed(builds[role], slots=slots.slots)
    ordered = _in_order(starts_from)
    return Roles(table, builds, plan, layouts, models, ordered, served, remat, fewer, slots)


def _as_planned(build: Build, plan: Plan) -> Build:
    """The same worker, with what the plan fixes of its role."""
    settings = dict(plan.settings.get(build.role, {}))
    if not settings:
        return build
    if (policy := settings.pop("remat", None)) is not None:
        build = _recomputing(build, policy)
    return _changed(build, **settings)


def _recomputing(build: Build, policy: str) -> Build:
    """The same worker, its backward passes under a policy."""
    compute = dataclasses.replace(build.arguments[0].compute, remat=policy)
    return _changed(build, compute=compute)


def _changed(build: Build, **changes: Any) -> Build:
    """The same worker with changes to its context."""
    context, *more = build.arguments
    return dataclasses.replace(build, arguments=(dataclasses.replace(context, **changes), *more))


def _check_slots(config: ConfigDict) -> None:
    """Raise ConfigError where samples cannot be given up."""
    if (parts := config.rollout.partial_tokens) and config.rollout.surplus:
        raise ConfigError(
            f"config.rollout.surplus={config.rollout.surplus}: of responses in parts "
            f"(rollout.partial_tokens={parts}) all are drawn to their end; use rollout.surplus=0, "
            "or rollout.partial_tokens=0"
        )


def _check_rollout(table: Mapping[str, Role], algorithm: type[Algorithm]) -> None:
    """Raise ConfigError where a rollout apart would not do as the actor does."""
    if not algorithm.generates:
        raise ConfigError(
            f"{algorithm.__name__} generates nothing: use a placement without {ROLLOUT}, such as "
            "placement=colocate"
        )
    own = getattr(worker_class(table["actor"].worker), "generate_sequences", None)
    if own is not GeneratingWorker.generate_sequences:
        raise ConfigError(
            f"{algorithm.__name__}.workers: the actor generates in its own way, which a {ROLLOUT} "
            "apart would not; use a placement without it, such as placement=colocate"
        )


def _check_ahead(config: ConfigDict, algorithm: type[Algorithm], plan: Plan) -> None:
    """Raise ConfigError where generation is to run ahead of learning and cannot."""
    settings = config.rollout
    if not settings.max_staleness:
        for name in ("deterministic", "partial_tokens"):
            if settings[name]:
                raise ConfigError(
                    f"config.rollout.{name}={settings[name]} is for generation ahead of learning; "
                    "set rollout.max_staleness to 1 or more as well, or leave it out"
                )
        return
    asked = f"config.rollout.max_staleness={settings.max_staleness}"
    if (ROLLOUT,) not in plan.placement:
        raise ConfigError(
            f"{asked} needs a set with {ROLLOUT} alone, so that it can generate while others "
            "learn; use placement=disaggregate, or rollout.max_staleness=0"
        )
    if algorithm.source != "prompts":
        raise ConfigError(
            f"{asked}: {algorithm.__name__} answers the prompts of demonstrations, whose place in "
            "the data is not kept ahead of learning; use rollout.max_staleness=0"
        )
    if algorithm.step is not Algorithm.step:
        raise ConfigError(
            f"{asked}: {algorithm.__name__} defines step as a whole, of which nothing can run "
            "ahead; let it define collect and learn instead, or use rollout.max_staleness=0"
        )


def _in_order(starts_from: Mapping[str, str]) -> dict[str, str]:
    """Every role after the one whose weights it takes.

    Raises:
      ConfigError: roles that start from each other.
    """
    ordered: dict[str, str] = {}
    while len(ordered) < len(starts_from):
        ready = {
            role: source
            for role, source in starts_from.items()
            if role not in ordered and (source in ordered or source not in starts_from)
        }
        if not ready:
            circle = sorted(set(starts_from) - set(ordered))
            raise ConfigError(f"roles start from each other in a circle: {', '.join(circle)}")
        ordered |= ready
    return ordered


def check_offloads(
    config: ConfigDict,
    algorithm: type[Algorithm],
    devices: Sequence[jax.Device],
    plan: Plan,
) -> None:
    """Raise ConfigError where state is to wait in a memory that the devices do not have."""
    for role, settings in plan.settings.items():
        if settings.get("offload", "none") != "none":
            check_offload(devices, f"the plan's offload of the {role}")
    table = algorithm.role_table(config.algorithm)
    for name in sorted({role.config_section for role in table.values()} & set(config.keys())):
        if config[name].get("offload", "none") != "none":
            check_offload(devices, f"{name}.offload")


def served_roles(config: ConfigDict, algorithm: type[Algorithm]) -> dict[str, str]:
    """Roles without a worker of their own, and whose worker answers for them.

    A reference that would start as a copy of an actor with adapters is that actor with its adapters
    left off.
    """
    table = algorithm.role_table(config.algorithm)
    return {
        name: role.starts_from
        for name, role in table.items()
        if role == ROLES["reference"]
        and not role_path(config, role)
        and config[role.starts_from].lora.rank
    }


def roles_with_devices(config: ConfigDict, algorithm: type[Algorithm]) -> dict[str, Role]:
    """Roles with a model or a worker of a user's own; functions compute on the host."""
    served = served_roles(config, algorithm)
    return {
        name: role
        for name, role in algorithm.role_table(config.algorithm).items()
        if (not role.function or role_path(config, role)) and name not in served
    }


def placed(config: ConfigDict, algorithm: type[Algorithm], devices: int) -> Plan:
    """The plan that ``config.placement`` stands for on so many devices; ``auto`` is refused."""
    return make_plan(config.placement, roles_with_devices(config, algorithm), devices)


def role_path(config: ConfigDict, role: Role) -> str:
    """Where a role's model is loaded from; empty if it is another's or made from scratch."""
    section = config.get(role.config_section)
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
    models = {}
    for name, role in roles_with_devices(config, algorithm).items():
        if not role.model:
            raise ConfigError(
                f"placement=auto: {name} has a worker class of its own, whose model the planner "
                "does not know; use colocate, split, standalone or a plan.json"
            )
        path = role_path(config, role)
        model = read(path)[0] if path else inputs.model
        models[name] = adapted(model, config, role)
    return models


def is_float32(config: ConfigDict, platform: str) -> bool:
    """Whether a run computes in float32."""
    dtype = config.model.dtype
    return dtype == "float32" or (dtype == "auto" and default_dtype(platform) == jnp.float32)


class _Builder:
    """Describes each role's worker."""

    def __init__(
        self,
        config: ConfigDict,
        algorithm: type[Algorithm],
        inputs: Inputs,
        table: Mapping[str, Role],
        sizes: Mapping[str, Any],
        auto_dtype: Any,
        read: Callable[[str], tuple[ModelConfig, Tokenizer | None]],
    ):
        self.config, self.algorithm, self.inputs = config, algorithm, inputs
        self.table, self.sizes, self.read = table, sizes, read
        self.losses = algorithm.losses(config.algorithm, config.rollout.max_response_length)
        dtype = {"auto": auto_dtype, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
        self.compute = Compute(
            dtype=dtype[config.model.dtype],
            unroll_layers=config.model.unroll_layers,
            # What auto means for a role is known once all of its set are.
            remat=NONE if config.model.remat == AUTO else config.model.remat,
        )
        self.stop = stop_tokens(config, inputs)
        self._functions: dict[str, RewardFunction] = {}

    def build(self, role: str) -> Build:
        """The message that makes a role's worker."""
        entry, context = self.table[role], self.context(role)
        if not entry.function or context.path:
            return Build(role, worker_class(entry.worker), (context,))
        function, most = self._function(role), self.config.reward.max_unscored
        options = {"function": function, "max_unscored": most}
        return Build(role, worker_class(entry.function), (context,), options)

    def _function(self, role: str) -> RewardFunction:
        """One of a role, whoever calls it."""
        if role not in self._functions:
            section, function = self.config.reward, getattr(self.inputs, role)
            how = section.timeout_seconds, section.runs_in
            self._functions[role] = RewardFunction(function, *how)
        return self._functions[role]

    def _judges(self) -> dict[str, RewardFunction]:
        """The functions that judge answers while others are generated, by role."""
        if not self.config.reward.while_generating:
            return {}
        roles = (r for r, e in self.table.items() if e.function and not role_path(self.config, e))
        return {role: self._function(role) for role in roles}

    def context(self, role: str) -> WorkerContext:
        """What the role's worker is built from."""
        config, entry = self.config, self.table[role]
        section = config.get(entry.config_section)
        path = role_path(config, entry)
        model, tokenizer = self._model(role, path)
        if model is not None and adapted(model, config, entry) is not model:
            model = adapted(model, config, entry)
            # What is frozen is read again on resume, also where it is the actor's.
            path = path or config.actor.path
        speaks = role == "actor" and not entry.scalar
        retokenizes = self._retokenizes(role, tokenizer)
        if config.data.packing:
            self._check_rotary(role, model, retokenizes)
        return WorkerContext(
            role=role,
            sizes=self.sizes.get(role),
            seed=config.seed,
            tokenizer=tokenizer,
            model=model,
            path=path,
            compute=self.compute,
            samples=config.rollout.samples if self.algorithm.generates else 1,
            unit=self.algorithm.unit,
            sampling=Sampling(
                config.rollout.temperature, config.rollout.top_k, config.rollout.top_p
            ),
            stop=self.stop,
            max_response_length=config.rollout.max_response_length,
            loss=self.losses.get(role),
            optimizer=self._optimizer(section) if entry.trained else None,
            supervised_loss=SupervisedLoss() if speaks else None,
            warm_start=self._warm_start() if speaks else None,
            router_loss=router_loss(config, entry, model) if entry.trained else 0.0,
            micro_batch=(section if entry.trained else config.actor).micro_batch,
            slots=config.rollout.slots,
            lookup=config.rollout.lookup,
            cache_dtype=config.rollout.cache_dtype,
            surplus=config.rollout.surplus,
            in_parts=config.rollout.partial_tokens > 0,
            judges=self._judges() if entry.generates or entry.apart else {},
            packing=config.data.packing,
            offload=section.get("offload", "none") if section is not None else "none",
            retokenize=retokenizes,
            transition_bucket_bytes=config.rollout.transition_bucket_bytes,
            options=config,
        )

    def _model(self, role: str, path: str) -> tuple[ModelConfig | None, Tokenizer | None]:
        entry = self.table[role]
        if not entry.model or role not in self.sizes:
            return None, self.inputs.tokenizer
        if not path:
            return self._from_scratch(role), self.inputs.tokenizer
        model, tokenizer = self.read(path)
        ours = self.inputs.tokenizer
        differs = ours is not None and tokenizer is not None and not ours.same_as(tokenizer)
        fewer = model.vocab_size < self.inputs.model.vocab_size
        if (entry.starts_from or entry.per_token) and (differs or fewer):
            raise ConfigError(
                f"{entry.config_section}.path={path}: its tokenizer is not the actor's; a "
                f"{role} answers for each of the actor's tokens and needs the same one"
            )
        if not entry.whole:
            self._check_length(role, model)
        return model, tokenizer or ours

    def _from_scratch(self, role: str) -> ModelConfig:
        """Shapes of a role without a path: the actor's, but for the layers of a teacher."""
        entry = self.table[role]
        if not entry.per_token:
            return self.inputs.model
        section = self.config[entry.config_section]
        if not entry.trained:
            raise ConfigError(
                f"{entry.config_section}.path is empty: {self.algorithm.__name__} asks a {role} "
                f"that knows something; set {entry.config_section}.path, or "
                f"algorithm.{role}_updates to teach it by demonstrations"
            )
        layers = section.layers or self.inputs.model.layers
        return dataclasses.replace(self.inputs.model, layers=layers)

    def _check_rotary(self, role: str, model: ModelConfig | None, retokenizes: bool) -> None:
        """Raise ConfigError where rotary positions depend on a sequence's length in packs."""
        longest = self.inputs.prompt_length + self.config.rollout.max_response_length
        if retokenizes and model is not None:
            longest = model.max_length
        for scaling in (rope.scaling for rope in model.ropes) if model is not None else ():
            if isinstance(scaling, Dynamic | LongRope) and longest > scaling.original_max_length:
                raise ConfigError(
                    f"config.data.packing={self.config.data.packing}: the rotary positions "
                    f"({scaling.kind}) of {role}'s model change for sequences longer than "
                    f"{scaling.original_max_length} tokens, which in a pack would change its "
                    f"neighbours'; prompts and responses here are up to {longest}: use packing=0, "
                    "or shorter ones"
                )

    def _check_length(self, role: str, model: ModelConfig) -> None:
        needed = self.inputs.prompt_length + self.config.rollout.max_response_length
        if model.max_length < needed:
            raise ConfigError(
                f"{role}.path: {model.max_length} positions are fewer than the {needed} of "
                "prompt and response"
            )

    def _retokenizes(self, role: str, tokenizer: Tokenizer | None) -> bool:
        ours = self.inputs.tokenizer
        if not self.table[role].whole or ours is None or tokenizer is None:
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
            frozen_updates=section.frozen_steps,
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
        if tokenizer is None:
            raise ConfigError(f"rollout.stop: {text!r} is text, and there is no tokenizer")
        stop.append(tokenizer.one_token(text, "rollout.stop"))
    return tuple(dict.fromkeys(stop))


def adapted(model: ModelConfig, config: ConfigDict, role: Role) -> ModelConfig:
    """A role's model with the adapters that its section asks for; the model itself without any.

    Raises:
      ConfigError: targets that the model does not have, or a base that cannot be quantized.
    """
    if not role.trained or not role.model:
        return model
    settings = config[role.config_section].lora
    lora = Lora.of(settings, bool(model.experts))
    quantized = "" if settings.base == FLOAT else settings.base
    if quantized:
        asked = f"config.{role.config_section}.lora.base={quantized}"
        if lora is None:
            raise ConfigError(
                f"{asked} is for weights that are frozen beside adapters; set "
                f"{role.config_section}.lora.rank to 1 or more as well, or leave it out"
            )
        if model.experts:
            raise ConfigError(
                f"{asked}: this model's MLPs are experts, whose matrices are kept as they are "
                f"computed with; use {FLOAT}"
            )
        if not (role_path(config, role) or config.actor.path):
            raise ConfigError(
                f"{asked} quantizes weights as they are read; give {role.config_section}.path, or "
                f"use {FLOAT}"
            )
    if lora is None:
        return model
    if lora.dora and not (role_path(config, role) or config.actor.path):
        raise ConfigError(
            f"config.{role.config_section}.lora.dora=True starts from the norms of weights that "
            f"are read; give {role.config_section}.path, or use dora=false"
        )
    return dataclasses.replace(model, lora=lora, quantized=quantized)


def router_loss(config: ConfigDict, role: Role, model: ModelConfig | None) -> float:
    """Weight of the loss that balances a trained role's experts.

    Raises:
      ConfigError: one is asked for, and the model has no experts.
    """
    name = role.config_section
    asked = config[name].get("router_loss", 0.0)
    if not asked:
        return 0.0
    if model is None or not model.experts:
        raise ConfigError(
            f"config.{name}.router_loss={asked:g} balances experts, and the {name}'s model has "
            "none; use 0"
        )
    return asked if asked > 0 else model.router_loss


def _check_batches(
    config: ConfigDict,
    algorithm: type[Algorithm],
    table: Mapping[str, Role],
    layouts: Mapping[str, RoleLayouts],
    plan: Plan,
) -> None:
    """Batches must split evenly over each role's data-parallel parts."""
    if algorithm.unit > 1 and config.data.packing:
        raise ConfigError(
            f"config.data.packing={config.data.packing}: packs may cut a pair's rows apart, "
            f"which {algorithm.__name__} compares; use 0"
        )
    if not algorithm.generates:
        if table["actor"].scalar and config.warm_start.steps and not config.actor.path:
            raise ConfigError(
                f"config.warm_start.steps={config.warm_start.steps}: a model with a scalar head "
                "imitates no demonstrations; set it to 0, or start from actor.path"
            )
        train, unit = layouts["actor"].train, algorithm.unit
        for name, value in (
            ("warm_start.batch", config.warm_start.batch),
            ("actor.micro_batch", config.actor.micro_batch if unit > 1 else 0),
        ):
            _check_units(name, value, algorithm)
            _check_divides(name, value, train, "actor", unit=unit)
        return
    rows = config.rollout.prompts * config.rollout.samples
    generator = ROLLOUT if ROLLOUT in layouts else "actor"
    generate = layouts[generator].generate
    stages = generate.ways("layers")
    _check_divides("rollout.prompts", config.rollout.prompts, generate, generator, stages)
    for role, layout in layouts.items():
        if table[role].apart:
            continue  # it has no rows but those above
        # Where answers are paired with something else, an update has two rows of each.
        unit = algorithm.unit if algorithm.source == "prompts" else 1
        _check_divides("rollout.prompts * rollout.samples", rows, layout.train, role, unit=unit)
        if not table[role].trained:
            continue
        if minibatch := config.algorithm.get("minibatch", 0):
            _check_units("algorithm.minibatch", minibatch, algorithm)
            _check_divides("algorithm.minibatch", minibatch, layout.train, role, unit=unit)
        section = table[role].config_section
        micro = plan.settings.get(role, {}).get("micro_batch", config[section].micro_batch)
        if micro:
            _check_units(f"{section}.micro_batch", micro, algorithm)
            _check_divides(f"{section}.micro_batch", micro, layout.train, role, unit=unit)
    if config.warm_start.steps and not config.actor.path:
        _check_divides("warm_start.batch", config.warm_start.batch, layouts["actor"].train, "actor")


def _check_units(name: str, value: int, algorithm: type[Algorithm]) -> None:
    """Sequences of which none is cut off from those it belongs to."""
    if value % algorithm.unit:
        raise ConfigError(
            f"{name}={value}: sequences of pairs; use an even number, such as {value + 1}"
        )


def _check_packing(
    config: ConfigDict, inputs: Inputs, layouts: Mapping[str, RoleLayouts], after: int = 0
) -> None:
    """Raise ConfigError where rows are to be packed and cannot.

    Args:
      config, inputs, layouts: of the run.
      after: places behind a response's tokens, where scores are read.
    """
    if not config.data.packing:
        return
    asked = f"config.data.packing={config.data.packing}"
    longest = inputs.prompt_length + config.rollout.max_response_length + after
    behind = " and a place behind them" if after else ""
    if config.data.packing < longest:
        raise ConfigError(
            f"{asked}: a pack holds whole sequences, and prompts of {inputs.prompt_length} with "
            f"responses of {config.rollout.max_response_length}{behind} are {longest} tokens; use "
            f"{longest} or more, or 0 for none"
        )
    for role, layout in layouts.items():
        for name, axis in (("layers", "pipe"), ("length", "context")):
            if role != ROLLOUT and layout.train.ways(name) > 1:
                raise ConfigError(
                    f"{asked}: packs do not go with layout.{role}.train.{axis}="
                    f"{layout.train.ways(name)}; use {axis}=1 there, or data.packing=0"
                )


def _can_generate(config: ConfigDict, sizes: Mapping[str, Any], devices: int) -> bool:
    """Whether a rollout apart takes a step's prompts on so many devices."""
    try:
        generate = make_layouts(devices, sizes["train"], sizes["generate"], "layout").generate
        stages = generate.ways("layers")
        _check_divides("rollout.prompts", config.rollout.prompts, generate, ROLLOUT, stages)
    except ConfigError:
        return False
    return True


def _check_divides(
    name: str, value: int, layout: Any, role: str, stages: int = 1, unit: int = 1
) -> None:
    ways = layout.ways("batch") * stages * unit
    if value % ways:
        parts = f"{layout.ways('batch')} data-parallel parts"
        parts += f" times {stages} pipeline stages" if stages > 1 else ""
        parts += f", {unit} rows of a pair together," if unit > 1 else ""
        raise ConfigError(
            f"{name}={value} does not divide over the {parts} of {role} "
            f"({layout.describe()}); use a multiple of {ways}, such as {-(-value // ways) * ways}"
        )
