"""The message that makes a role's worker: its model, losses, optimizer and way of generating."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.algorithms.losses import SupervisedLoss
from hjax.config import AUTO, count_or_zero
from hjax.controller import BuildWorker
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.models.base_checkpoints import BaseCheckpoint, newest_base
from hjax.models.compute import Compute
from hjax.models.lora import Lora
from hjax.models.model_config import ModelConfig
from hjax.models.quantized import FLOAT
from hjax.models.remat import NONE
from hjax.models.rotary import DynamicNTKScaling, LongRopeScaling
from hjax.models.weights import is_workdir
from hjax.rewards.function import RewardFunction
from hjax.roles import Role, worker_class
from hjax.rollout.sampling_params import OPTIONS, SamplingParams
from hjax.run.config_validation import attention_of, unrolls
from hjax.run.dataflow import step_calls
from hjax.run.inputs import Inputs
from hjax.run.placement import Plan, role_path
from hjax.sharding.layout import RoleLayouts
from hjax.workers import OptimizerConfig, WorkerContext
from hjax.workers.optimizer import load_optimizer

# What a worker takes from the sections ``rollout`` and its own as it is.
_OF_ROLLOUT = (
    "max_response_length", "slots", "speculative_tokens", "cache_dtype", "extra_samples",
    "transition_bucket_bytes",
)  # fmt: skip
_OF_SECTION = ("learning_rate", "schedule", "weight_decay", "beta1", "beta2", "max_grad_norm")


class WorkerBuilder:
    """Describes each role's worker."""

    def __init__(
        self,
        config: ConfigDict,
        algorithm: type[Algorithm],
        inputs: Inputs,
        table: Mapping[str, Role],
        sizes: Mapping[str, Any],
        layouts: Mapping[str, RoleLayouts],
        platform: str,
        auto_dtype: Any,
        read: Callable[[str], tuple[ModelConfig, Tokenizer | None]],
        bases: Mapping[str, BaseCheckpoint],
    ):
        self.config, self.algorithm, self.inputs = config, algorithm, inputs
        self.table, self.sizes, self.read = table, sizes, read
        self.layouts, self.platform = layouts, platform
        self.losses = algorithm.losses(config.algorithm, config.rollout.max_response_length)
        dtype = {"auto": auto_dtype, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
        self.compute = Compute(
            dtype=dtype[config.model.dtype],
            # What auto means is known once all models of a role's set are.
            remat=NONE if config.model.remat == AUTO else config.model.remat,
        )
        stop, self.stop_strings = stops_of(config, inputs)
        self.sampling = sampling_of(config, stop, inputs.model.vocab_size)
        self._functions: dict[str, RewardFunction] = {}
        self._bases: dict[str, BaseCheckpoint | None] = dict(bases)

    def build(self, role: str) -> BuildWorker:
        """The message that makes a role's worker."""
        entry, context = self.table[role], self.context(role)
        if not entry.function or context.path:
            return BuildWorker(role, worker_class(entry.worker), (context,))
        function, most = self._function(role), self.config.reward.max_unscored
        options = {"function": function, "max_unscored": most}
        return BuildWorker(role, worker_class(entry.function), (context,), options)

    def _function(self, role: str) -> RewardFunction:
        """One of a role, whoever calls it."""
        if role not in self._functions:
            section, function = self.config.reward, getattr(self.inputs, role)
            self._functions[role] = RewardFunction(
                function, timeout_seconds=section.timeout_seconds, runs_in=section.runs_in
            )
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
        packing = count_or_zero(config.data.packing)
        if (follows := self._following(role, model, retokenizes)) and packing:
            raise ConfigError(f"config.data.packing={packing}: {follows}")
        return WorkerContext(
            role=role,
            sizes=self.sizes.get(role),
            seed=config.seed,
            tokenizer=tokenizer,
            model=model,
            path=path,
            base=self._base(path) if model is not None else None,
            compute=self._computing(role, model),
            samples=config.rollout.samples if self.algorithm.generates else 1,
            unit=self.algorithm.unit,
            sampling=self.sampling,
            stop_strings=self.stop_strings,
            loss=self.losses.get(role),
            optimizer=self._optimizer(role, entry.config_section) if entry.trained else None,
            supervised_loss=SupervisedLoss() if speaks else None,
            warm_start=self._warm_start() if speaks else None,
            router_loss=router_loss(config, entry, model) if entry.trained else 0.0,
            micro_batch=(section if entry.trained else config.actor).micro_batch,
            partial_rollouts=config.rollout.partial_tokens > 0,
            reward_functions=self._judges() if entry.generates or entry.apart else {},
            packing=packing,
            choose_packing=config.data.packing == AUTO and not follows,
            step_separator=config.reward.step_separator if role == "reward" else "",
            offload=section.get("offload", "none") if section is not None else "none",
            retokenize=retokenizes,
            **{name: config.rollout[name] for name in _OF_ROLLOUT},
            options=config,
        )

    def _computing(self, role: str, model: ModelConfig | None) -> Compute:
        """How the role's model is computed."""
        if model is None:
            return self.compute
        config, platform = self.config, self.platform
        attention = attention_of(
            config, role, model, self.layouts.get(role), platform=platform, dtype=self.compute.dtype
        )
        unroll = unrolls(config, model, platform)
        return dataclasses.replace(self.compute, attention=attention, unroll_layers=unroll)

    def _base(self, path: str) -> BaseCheckpoint | None:
        """The checkpoint of another run that a path means, the same one to every role."""
        if path not in self._bases:
            self._bases[path] = newest_base(path) if path and is_workdir(path) else None
        return self._bases[path]

    def _model(self, role: str, path: str) -> tuple[ModelConfig | None, Tokenizer | None]:
        entry = self.table[role]
        if not entry.model or role not in self.sizes:
            return None, self.inputs.tokenizer
        if not path:
            return self._from_scratch(role), self.inputs.tokenizer
        model, tokenizer = self.read(path)
        ours = self.inputs.tokenizer
        differs = ours is not None and tokenizer is not None and not ours.same_vocabulary(tokenizer)
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

    def _following(self, role: str, model: ModelConfig | None, retokenizes: bool) -> str:
        """Why a role's sequences cannot be packed: their rotary positions follow a row's length;
        empty: they can.

        Args:
          role, model: whose.
          retokenizes: the role reads other tokens than the actor's.
        """
        longest = self.inputs.prompt_length + self.config.rollout.max_response_length
        if retokenizes and model is not None:
            longest = model.max_length
        for scaling in (rope.scaling for rope in model.ropes) if model is not None else ():
            if (
                isinstance(scaling, DynamicNTKScaling | LongRopeScaling)
                and longest > scaling.original_max_length
            ):
                return (
                    f"the rotary positions ({scaling.kind}) of {role}'s model change for sequences "
                    f"longer than {scaling.original_max_length} tokens, which in a pack would "
                    f"change its neighbours'; prompts and responses here are up to {longest}: use "
                    "packing=0, or shorter ones"
                )
        return ""

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
        return not ours.same_vocabulary(tokenizer)

    def _optimizer(self, role: str, section_name: str) -> OptimizerConfig:
        section = self.config[section_name]
        # Where the rate follows a schedule, its end is that of the updates that a run takes.
        constant = section.schedule == "constant"
        return OptimizerConfig(
            **{name: section[name] for name in _OF_SECTION},
            frozen_updates=section.frozen_updates,
            warmup_updates=section.warmup_updates,
            total_updates=0 if constant else self.config.steps * self._updates_per_step[role],
            optimizer=load_optimizer(section.optimizer, f"{section_name}.optimizer"),
        )

    @functools.cached_property
    def _updates_per_step(self) -> collections.Counter[str]:
        """By role, the updates that the algorithm's own ``step`` calls."""
        config = self.config
        rows = config.rollout.prompts * config.rollout.samples
        minibatches = rows // (config.algorithm.get("minibatch", 0) or rows)
        calls = step_calls(self.algorithm, config.algorithm, minibatches, config.rollout.samples)
        return collections.Counter(call.role for call in calls if call.phase == "update")

    def _warm_start(self) -> OptimizerConfig:
        return OptimizerConfig(
            learning_rate=self.config.warm_start.learning_rate,
            warmup_updates=min(10, self.config.warm_start.steps),
        )


def as_planned(build: BuildWorker, plan: Plan) -> BuildWorker:
    """The same worker, with what the plan fixes of its role."""
    settings = dict(plan.settings.get(build.role, {}))
    if not settings:
        return build
    if (policy := settings.pop("remat", None)) is not None:
        build = computing(build, remat=policy)
    return changed(build, **settings)


def computing(build: BuildWorker, **changes: Any) -> BuildWorker:
    """The same worker with changes to how it computes."""
    return changed(build, compute=dataclasses.replace(build.arguments[0].compute, **changes))


def changed(build: BuildWorker, **changes: Any) -> BuildWorker:
    """The same worker with changes to its context."""
    context, *more = build.arguments
    return dataclasses.replace(build, arguments=(dataclasses.replace(context, **changes), *more))


def stops_of(config: ConfigDict, inputs: Inputs) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What ends a response: ids, the model's end-of-sequence ids and those of ``rollout.stop``'s
    texts that are a token; and its other texts.

    Raises:
      ConfigError: a text where there is no tokenizer.
      DataError: one that the tokenizer cannot write.
    """
    ends = [i for i in inputs.eos_ids if i < inputs.model.vocab_size]
    longer: list[str] = []
    for text in config.rollout.stop:
        if inputs.tokenizer is None:
            raise ConfigError(f"rollout.stop: {text!r} is text, and there is no tokenizer")
        ids = inputs.tokenizer.encode(text, add_special=False)
        if len(ids) == 1:
            ends += ids
        else:
            longer.append(text)
    return tuple(dict.fromkeys(ends)), tuple(longer)


def sampling_of(config: ConfigDict, stop: tuple[int, ...], vocab_size: int) -> SamplingParams:
    """How responses are drawn, by the keys of ``rollout``.

    Raises:
      ConfigError: a bias of a token that the model does not have, or none left to draw.
    """
    try:
        made = SamplingParams(**{name: config.rollout[name] for name in OPTIONS}, stop=stop)
        made.check_vocabulary(vocab_size)
    except ConfigError as error:
        raise ConfigError(f"config.rollout.{error}") from error
    return made


def adapted(model: ModelConfig, config: ConfigDict, role: Role) -> ModelConfig:
    """A role's model with the adapters that its section asks for; the model itself without any.

    Raises:
      ConfigError: targets that the model does not have, or a base that cannot be quantized.
    """
    if not role.trained or not role.model:
        return model
    settings, key = config[role.config_section].lora, f"config.{role.config_section}.lora"
    if (lora := Lora.of(settings, bool(model.experts), key)) is None:
        return model
    quantized = "" if settings.base == FLOAT else settings.base
    from_path = role_path(config, role) or config.actor.path
    if quantized and not from_path:
        raise ConfigError(
            f"{key}.base={quantized} quantizes weights as they are read; give "
            f"{role.config_section}.path, or use {FLOAT}"
        )
    if lora.dora and not from_path:
        raise ConfigError(
            f"{key}.dora=True starts from the norms of weights that are read; give "
            f"{role.config_section}.path, or use dora=false"
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
