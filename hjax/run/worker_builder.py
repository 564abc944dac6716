"""Makes the build message of each role's worker: model, loss, optimizer and sampling."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.algorithms.losses import SupervisedLoss, check_protocol
from hjax.config import AUTO, count_or_zero
from hjax.controller import BuildWorker
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.models.base_checkpoints import BaseCheckpoint, base_checkpoint
from hjax.models.compute import Compute
from hjax.models.lora import Lora
from hjax.models.model_config import ModelConfig
from hjax.models.quantized import FLOAT
from hjax.models.remat import NONE
from hjax.models.rope_override import with_rope_scaling
from hjax.models.rotary import DynamicNTKScaling, LongRopeScaling
from hjax.models.weights import is_workdir
from hjax.rewards.function import RewardFunction
from hjax.roles import ROLLOUT, Role, worker_class
from hjax.rollout.sampling_params import OPTIONS, SamplingParams
from hjax.run.config_validation import choose_attention, unrolls_layers
from hjax.run.dataflow import updates_per_step
from hjax.run.episode_rollout import environment_of
from hjax.run.inputs import Inputs
from hjax.run.placement import Plan, role_path, shared_worker_roles
from hjax.sandbox.sandbox_settings import SandboxSettings
from hjax.sharding.layout import RoleLayouts
from hjax.workers import OptimizerConfig, WorkerContext
from hjax.workers.optimizer import load_optimizer

# Keys of the section ``rollout`` and of a role's own that a worker takes unchanged.
_ROLLOUT_KEYS = (
    "max_response_length", "slots", "speculative_tokens", "cache_dtype", "extra_samples",
    "transition_bucket_bytes",
)  # fmt: skip
_SECTION_KEYS = (
    "learning_rate", "schedule", "min_lr_ratio", "frozen_updates", "weight_decay", "beta1", "beta2",
    "max_grad_norm",
)  # fmt: skip
# Roles that read the policy's sequences with the policy's positions (``model.rope_scaling``).
_SCALED_ROLES = ("actor", ROLLOUT, "reference", "critic", "cost_critic")


class WorkerBuilder:
    """Makes the build message and context of each role's worker."""

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
        forms: frozenset[str],
    ):
        self.config, self.algorithm, self.inputs = config, algorithm, inputs
        self.table, self.sizes, self.read = table, sizes, read
        self.layouts, self.platform = layouts, platform
        self.losses = algorithm.losses(config.algorithm, config.rollout.max_response_length)
        for role, loss in self.losses.items():
            if algorithm.sequences and role in table and table[role].model:
                check_protocol(loss, f"{algorithm.__name__}.losses: {role}")
        dtype = {"auto": auto_dtype, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
        self.compute = Compute(
            dtype=dtype[config.model.dtype],
            # ``auto`` is resolved later, when all models that share a role's devices are known.
            remat=NONE if config.model.remat == AUTO else config.model.remat,
            forms=forms,
        )
        self.sampling = SamplingParams()
        self.stop_strings: tuple[str, ...] = ()
        if algorithm.sequences:
            stop, self.stop_strings = stop_conditions(config, inputs)
            self.sampling = make_sampling_params(config, stop, inputs.model.vocab_size)
        self._functions: dict[str, RewardFunction] = {}
        self._bases: dict[str, BaseCheckpoint | None] = dict(bases)

    def build(self, role: str) -> BuildWorker:
        """The message that builds a role's worker."""
        entry, context = self.table[role], self.context(role)
        if not entry.function or context.path:
            return BuildWorker(role, worker_class(entry.worker), (context,))
        function, most = self._function(role), self.config.reward.max_unscored
        plays = environment_of(self.config, self.inputs.task)
        if role == "reward" and plays and not self.config.environment.tools:
            most = 1.0  # of episodes, not of their rows: EpisodeRollout has looked
        options = {"function": function, "max_unscored": most}
        return BuildWorker(role, worker_class(entry.function), (context,), options)

    def _function(self, role: str) -> RewardFunction:
        """The role's reward function; every caller gets the same object."""
        if role not in self._functions:
            section, function = self.config.reward, getattr(self.inputs, role)
            self._functions[role] = RewardFunction(
                function,
                timeout_seconds=section.timeout_seconds,
                runs_in=section.runs_in,
                sandbox=SandboxSettings.of_config(self.config.sandbox),
            )
        return self._functions[role]

    def _concurrent_rewards(self) -> dict[str, RewardFunction]:
        """Reward functions that are called during generation, by role."""
        if not self.config.reward.while_generating:
            return {}
        roles = (r for r, e in self.table.items() if e.function and not role_path(self.config, e))
        return {role: self._function(role) for role in roles}

    def context(self, role: str) -> WorkerContext:
        """The context that the role's worker is built from."""
        config, entry = self.config, self.table[role]
        section = config.get(entry.config_section)
        path = role_path(config, entry)
        model, tokenizer = self._model(role, path)
        if model is not None and with_lora(model, config, entry) is not model:
            model = with_lora(model, config, entry)
            # Frozen base weights are read again on resume, even if they are the actor's.
            path = path or config.actor.path
        generates_text = role == "actor" and entry.model and not entry.scalar
        retokenizes = self._retokenizes(role, tokenizer)
        packing = count_or_zero(config.data.packing)
        if (conflict := self._packing_conflict(role, model, retokenizes)) and packing:
            raise ConfigError(f"config.data.packing={packing}: {conflict}")
        return WorkerContext(
            role=role,
            sizes=self.sizes.get(role),
            seed=config.seed,
            tokenizer=tokenizer,
            model=model,
            path=path,
            base=self._base(path) if model is not None else None,
            compute=self._compute_options(role, model),
            samples=config.rollout.samples if self.algorithm.generates else 1,
            unit=self.algorithm.unit,
            sampling=self.sampling,
            stop_strings=self.stop_strings,
            loss=self.losses.get(role),
            optimizer=self._optimizer(role, entry.config_section) if entry.trained else None,
            supervised_loss=SupervisedLoss() if generates_text else None,
            pretraining_loss=self.algorithm.pretraining_loss(config.algorithm)
            if generates_text
            else None,
            warm_start=self._warm_start() if generates_text else None,
            reference_sync=role == "actor"
            and config.reference.sync_every > 0
            and "actor" in shared_worker_roles(config, self.algorithm).values(),
            router_loss=router_loss_weight(config, entry, model) if entry.trained else 0.0,
            micro_batch=(section if entry.trained else config.actor).micro_batch,
            partial_rollouts=config.rollout.partial_tokens > 0,
            reward_functions=self._concurrent_rewards() if entry.generates or entry.apart else {},
            packing=packing,
            choose_packing=config.data.packing == AUTO and not conflict,
            step_separator=config.reward.step_separator if role == "reward" else "",
            offload=section.get("offload", "none") if section is not None else "none",
            retokenize=retokenizes,
            **{name: config.rollout[name] for name in _ROLLOUT_KEYS},
            options=config,
        )

    def _compute_options(self, role: str, model: ModelConfig | None) -> Compute:
        """The compute options of a role's model."""
        if model is None:
            return self.compute
        config, platform = self.config, self.platform
        attention = choose_attention(
            config, role, model, self.layouts.get(role), platform=platform,
            dtype=self.compute.dtype, forms=self.compute.forms,
        )  # fmt: skip
        unroll = unrolls_layers(config, model, platform)
        return dataclasses.replace(self.compute, attention=attention, unroll_layers=unroll)

    def _base(self, path: str) -> BaseCheckpoint | None:
        """The checkpoint of another run that a path names; every role gets the same one."""
        if path not in self._bases:
            self._bases[path] = base_checkpoint(path) if path and is_workdir(path) else None
        return self._bases[path]

    def _model(self, role: str, path: str) -> tuple[ModelConfig | None, Tokenizer | None]:
        entry = self.table[role]
        if not entry.model or role not in self.sizes:
            return None, self.inputs.tokenizer
        if not path:
            return self._from_scratch(role), self.inputs.tokenizer
        model, tokenizer = self.read(path)
        if role in _SCALED_ROLES:
            model = with_rope_scaling(model, self.config.model.rope_scaling)
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
        """Model config of a role without a path: the actor's; a teacher may have more layers."""
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

    def _packing_conflict(self, role: str, model: ModelConfig | None, retokenizes: bool) -> str:
        """Why a role's sequences cannot be packed: rotary scaling by row length; empty if they can.

        Args:
          role, model: the role and its model.
          retokenizes: whether the role uses another tokenizer than the actor.
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
        warmup, total = section.warmup_updates, 0
        # A schedule ends with the updates that a run takes; a share of warm-up is one of them.
        if section.schedule != "constant" or section.warmup_ratio:
            updates = self.config.steps * self._updates_per_step[role]
            warmup = warmup or math.ceil(section.warmup_ratio * updates)
            total = 0 if section.schedule == "constant" else updates
        return OptimizerConfig(
            **{name: section[name] for name in _SECTION_KEYS},
            warmup_updates=warmup,
            total_updates=total,
            ema_decay=section.get("ema_decay", 0.0),
            optimizer=load_optimizer(section.optimizer, f"{section_name}.optimizer"),
        )

    @functools.cached_property
    def _updates_per_step(self) -> collections.Counter[str]:
        return updates_per_step(self.algorithm, self.config)

    def _warm_start(self) -> OptimizerConfig:
        return OptimizerConfig(
            learning_rate=self.config.warm_start.learning_rate,
            warmup_updates=min(10, self.config.warm_start.steps),
        )


def with_plan(build: BuildWorker, plan: Plan) -> BuildWorker:
    """Apply the plan's settings of a role to its build message."""
    settings = dict(plan.settings.get(build.role, {}))
    if not settings:
        return build
    if (policy := settings.pop("remat", None)) is not None:
        build = with_compute(build, remat=policy)
    return with_context(build, **settings)


def with_compute(build: BuildWorker, **changes: Any) -> BuildWorker:
    """A copy of a build message with changed compute options."""
    return with_context(build, compute=dataclasses.replace(build.arguments[0].compute, **changes))


def with_context(build: BuildWorker, **changes: Any) -> BuildWorker:
    """A copy of a build message with changes to the worker's context."""
    context, *more = build.arguments
    return dataclasses.replace(build, arguments=(dataclasses.replace(context, **changes), *more))


def stop_conditions(config: ConfigDict, inputs: Inputs) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Stop token ids (end-of-sequence ids, and texts of ``rollout.stop`` that are a single token)
    and stop strings (its other texts).

    Raises:
      ConfigError: a stop string without a tokenizer.
      DataError: a string that the tokenizer cannot encode.
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


def make_sampling_params(config: ConfigDict, stop: tuple[int, ...], size: int) -> SamplingParams:
    """Sampling parameters from the section ``rollout``.

    Raises:
      ConfigError: a bias for a token outside the vocabulary, or no token left to sample.
    """
    try:
        made = SamplingParams(**{name: config.rollout[name] for name in OPTIONS}, stop=stop)
        made.check_vocabulary(size)
    except ConfigError as error:
        raise ConfigError(f"config.rollout.{error}") from error
    return made


def with_lora(model: ModelConfig, config: ConfigDict, role: Role) -> ModelConfig:
    """A role's model config with its section's LoRA adapters; unchanged if it has none.

    Raises:
      ConfigError: targets that the model does not have, or a base that cannot be quantized.
    """
    if not role.trained or not role.model:
        return model
    settings, key = config[role.config_section].lora, f"config.{role.config_section}.lora"
    if (lora := Lora.from_settings(settings, bool(model.experts), key)) is None:
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


def router_loss_weight(config: ConfigDict, role: Role, model: ModelConfig | None) -> float:
    """Weight of the load-balancing loss of a trained role's experts.

    Raises:
      ConfigError: the weight is not 0, and the model has no experts.
    """
    name = role.config_section
    weight = config[name].get("router_loss", 0.0)
    if not weight:
        return 0.0
    if model is None or not model.experts:
        raise ConfigError(
            f"config.{name}.router_loss={weight:g} balances experts, and the {name}'s model has "
            "none; use 0"
        )
    return weight if weight > 0 else model.router_loss
