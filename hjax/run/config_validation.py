"""Validation across config keys: batch sizes over devices, packing, separate or async rollout."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.config import count_or_zero
from hjax.errors import ConfigError
from hjax.kernels import cudnn
from hjax.kernels.attention import DENSE_LENGTH
from hjax.kernels.registry import AUTO, CUDNN, choose_kernel_set
from hjax.kernels.verdict import CUDNN_ATTENTION, CUDNN_WIDE_HEADS
from hjax.models.model_config import ModelConfig
from hjax.models.weights import has_score_head
from hjax.roles import ROLLOUT, Role, worker_class
from hjax.run.episode_validation import check_episodes
from hjax.run.inputs import Inputs
from hjax.run.placement import Plan, role_path
from hjax.settings.keys import MAX_UNROLLED_LAYERS
from hjax.sharding.layout import RoleLayouts, make_layouts
from hjax.sharding.offload import check_offload
from hjax.workers import GeneratingWorker


def check_compatibility(
    config: ConfigDict,
    algorithm: type[Algorithm],
    inputs: Inputs,
    table: Mapping[str, Role],
    layouts: Mapping[str, RoleLayouts],
    plan: Plan,
) -> None:
    """Raise ConfigError for keys that exclude each other, or batches that do not fit the layouts.

    The number of rewards that a user's function returns is checked later, at its first call.
    """
    if not algorithm.sequences:
        return
    if "actor" not in table:
        raise ConfigError(
            f"{algorithm.__name__} has the roles {', '.join(table)}, and no actor, which runs on "
            "prompts need; name one, or say sequences = False in the class"
        )
    if (parts := config.rollout.partial_tokens) and config.rollout.extra_samples:
        raise ConfigError(
            f"config.rollout.extra_samples={config.rollout.extra_samples}: of responses in parts "
            f"(rollout.partial_tokens={parts}) all are drawn to their end; use "
            "rollout.extra_samples=0, or rollout.partial_tokens=0"
        )
    if config.reward.step_separator and not config.reward.path:
        raise ConfigError(
            f"config.reward.step_separator={config.reward.step_separator!r}: what scores each step "
            "is a process reward model; name it by config.reward.path (a function "
            "returns a list instead)"
        )
    if algorithm.generates and (config.reward.path or not config.reward.function):
        algorithm.check_rewards(config.algorithm, ())
    check_episodes(config, algorithm, inputs.task, layouts)
    check_batches(config, algorithm, table, layouts, plan)
    check_packing(config, inputs, layouts, after=int(table["actor"].scalar), unit=algorithm.unit)


def check_scalar_heads(config: ConfigDict, table: Mapping[str, Role]) -> None:
    """Raise ConfigError if a scoring model has no scalar head and is not trained."""
    for entry in table.values():
        path = role_path(config, entry) if entry.scalar and not entry.trained else ""
        if path and not has_score_head(path):
            raise ConfigError(
                f"{entry.config_section}.path={path}: a language model, without the head that "
                "makes scores; give a run of hjax's reward_model.py, cost_model.py or "
                "process_reward_model.py, or a sequence classifier with one label"
            )


def check_separate_rollout(table: Mapping[str, Role], algorithm: type[Algorithm]) -> None:
    """Raise ConfigError if a separate rollout could not generate as the actor does."""
    if not algorithm.generates or "actor" not in table:
        raise ConfigError(
            f"{algorithm.__name__} generates nothing: use a placement without {ROLLOUT}, such as "
            "placement=colocate"
        )
    own = getattr(worker_class(table["actor"].worker), "generate_sequences", None)
    if own is not GeneratingWorker.generate_sequences:
        raise ConfigError(
            f"{algorithm.__name__}.workers: the actor overrides generate_sequences, which a "
            f"separate {ROLLOUT} would not use; use a placement without it, such as "
            "placement=colocate"
        )


def check_async_rollout(config: ConfigDict, algorithm: type[Algorithm], plan: Plan) -> None:
    """Raise ConfigError where an asynchronous rollout is requested and impossible."""
    settings = config.rollout
    if not settings.max_staleness:
        for name in ("deterministic", "partial_tokens"):
            if settings[name]:
                raise ConfigError(
                    f"config.rollout.{name}={settings[name]} is for generation ahead of learning; "
                    "set rollout.max_staleness to 1 or more as well, or leave it out"
                )
        return
    requested = f"config.rollout.max_staleness={settings.max_staleness}"
    if (ROLLOUT,) not in plan.placement:
        raise ConfigError(
            f"{requested} needs a {ROLLOUT} with devices of its own, so that it can generate while "
            "others learn; use placement=disaggregate, or rollout.max_staleness=0"
        )
    if algorithm.source != "prompts":
        raise ConfigError(
            f"{requested}: {algorithm.__name__} answers the prompts of demonstrations, whose place "
            "in the data is not kept ahead of learning; use rollout.max_staleness=0"
        )
    if algorithm.step is not Algorithm.step:
        raise ConfigError(
            f"{requested}: {algorithm.__name__} defines step as a whole, of which nothing can run "
            "ahead; let it define collect and learn instead, or use rollout.max_staleness=0"
        )


def check_offloads(
    config: ConfigDict, algorithm: type[Algorithm], devices: Sequence[jax.Device], plan: Plan
) -> None:
    """Raise ConfigError if offload is requested and the devices have no pinned host memory."""
    for role, settings in plan.settings.items():
        if settings.get("offload", "none") != "none":
            check_offload(devices, f"the plan's offload of the {role}")
    table = algorithm.role_table(config.algorithm)
    for name in sorted({role.config_section for role in table.values()} & set(config.keys())):
        if config[name].get("offload", "none") != "none":
            check_offload(devices, f"{name}.offload")


def check_batches(
    config: ConfigDict,
    algorithm: type[Algorithm],
    table: Mapping[str, Role],
    layouts: Mapping[str, RoleLayouts],
    plan: Plan,
) -> None:
    """Raise ConfigError if a batch does not split evenly over a role's data-parallel parts."""
    if not algorithm.generates:
        if table["actor"].scalar and config.warm_start.steps and not config.actor.path:
            raise ConfigError(
                f"config.warm_start.steps={config.warm_start.steps}: a model with a scalar head "
                "imitates no demonstrations; set it to 0, or start from actor.path"
            )
        if config.warm_start.batch < algorithm.fewest_examples:
            raise ConfigError(
                f"config.warm_start.batch={config.warm_start.batch}: {algorithm.__name__} compares "
                f"the examples of a batch; use at least {algorithm.fewest_examples}"
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
    stages = generate.shard_count("layers")
    _check_divides("rollout.prompts", config.rollout.prompts, generate, generator, stages)
    for role, layout in layouts.items():
        if table[role].apart:
            continue  # a rollout has no other rows than those checked above
        # An update on pairs of responses has two rows for each response.
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
    warm_start = config.warm_start.steps and not config.actor.path
    if warm_start or config.algorithm.get("pretraining_coef"):
        _check_divides("warm_start.batch", config.warm_start.batch, layouts["actor"].train, "actor")


def _check_units(name: str, value: int, algorithm: type[Algorithm]) -> None:
    """Raise ConfigError if a batch would cut a pair in two."""
    if value % algorithm.unit:
        raise ConfigError(
            f"{name}={value}: sequences of pairs; use an even number, such as {value + 1}"
        )


def check_packing(
    config: ConfigDict,
    inputs: Inputs,
    layouts: Mapping[str, RoleLayouts],
    after: int = 0,
    unit: int = 1,
) -> None:
    """Raise ConfigError where sequence packing is requested and impossible.

    Args:
      config, inputs, layouts: of the run.
      after: positions after a response's tokens at which scores are read.
      unit: rows that must share a pack: 2 for pairs.
    """
    if not (packing := count_or_zero(config.data.packing)):
        return
    requested = f"config.data.packing={packing}"
    longest = unit * (inputs.prompt_length + config.rollout.max_response_length + after)
    behind = " and a place behind them" if after else ""
    if packing < longest:
        whole = "pairs, and of both sides" if unit > 1 else "sequences, and"
        raise ConfigError(
            f"{requested}: a pack holds whole {whole} prompts of {inputs.prompt_length} with "
            f"responses of {config.rollout.max_response_length}{behind} are {longest} tokens; use "
            f"{longest} or more, or 0 for none"
        )
    for role, layout in layouts.items():
        for name, axis in (("layers", "pipe"), ("length", "context")):
            if role != ROLLOUT and layout.train.shard_count(name) > 1:
                raise ConfigError(
                    f"{requested}: packs do not go with layout.{role}.train.{axis}="
                    f"{layout.train.shard_count(name)}; use {axis}=1 there, or data.packing=0"
                )


def choose_attention(
    config: ConfigDict,
    role: str,
    model: ModelConfig,
    layouts: RoleLayouts | None,
    platform: str,
    dtype: Any,
    forms: frozenset[str],
) -> str:
    """Choose a role's attention kernel (``Compute.attention``), resolving ``auto``.

    Args:
      config: of the run.
      role, model, layouts: the role, and its model and layouts.
      platform: of the devices.
      dtype: of compute.
      forms: that ``auto`` may take, see ``hjax.kernels.verdict``.

    Raises:
      ConfigError: the requested kernel does not support the devices, model or layout.
    """
    requested: str = config.model.attention
    long_packs = count_or_zero(config.data.packing) > DENSE_LENGTH
    if requested == AUTO:
        form = CUDNN_WIDE_HEADS if model.head_dim > cudnn.WIDE_HEAD_DIM else CUDNN_ATTENTION
        if platform not in cudnn.PLATFORMS or long_packs or form not in forms:
            return AUTO
        return AUTO if _cudnn_refusal(model, layouts, dtype) else CUDNN
    choose_kernel_set(platform, requested)
    if requested == CUDNN and long_packs:
        raise ConfigError(
            f"config.model.attention={CUDNN} has no mask of several sequences in a row, and "
            f"data.packing is {config.data.packing}; use packing=0, or {AUTO}"
        )
    if requested == CUDNN and (reason := _cudnn_refusal(model, layouts, dtype)):
        raise ConfigError(f"config.model.attention={CUDNN} is not for {role}'s model: {reason}")
    return requested


def unrolls_layers(config: ConfigDict, model: ModelConfig, platform: str) -> bool:
    """Whether ``model.unroll_layers`` unrolls a model's layers on this platform."""
    requested: str = config.model.unroll_layers
    if requested != AUTO:
        return requested == "true"
    return platform == "cpu" and model.layers <= MAX_UNROLLED_LAYERS


def _cudnn_refusal(model: ModelConfig, layouts: RoleLayouts | None, dtype: Any) -> str:
    """Why cuDNN's attention cannot serve a role, and what to use instead; empty if it can."""
    reason = cudnn.unsupported_reason(dtype, model.head_dim, model.attention_softcap, model.sinks)
    if layouts is not None and layouts.train.shard_count("length") > 1:
        return "it does not split a row's length; use context=1, or auto"
    return reason and f"{reason}; use {AUTO}"


def can_generate(config: ConfigDict, sizes: Mapping[str, Any], devices: int) -> bool:
    """Whether a separate rollout on so many devices can split a step's prompts evenly."""
    try:
        generate = make_layouts(devices, sizes["train"], sizes["generate"], "layout").generate
        stages = generate.shard_count("layers")
        _check_divides("rollout.prompts", config.rollout.prompts, generate, ROLLOUT, stages)
    except ConfigError:
        return False
    return True


def _check_divides(
    name: str, value: int, layout: Any, role: str, stages: int = 1, unit: int = 1
) -> None:
    ways = layout.shard_count("batch") * stages * unit
    if value % ways:
        parts = f"{layout.shard_count('batch')} data-parallel parts"
        parts += f" times {stages} pipeline stages" if stages > 1 else ""
        parts += f", {unit} rows of a pair together," if unit > 1 else ""
        raise ConfigError(
            f"{name}={value} does not divide over the {parts} of {role} "
            f"({layout.describe()}); use a multiple of {ways}, such as {-(-value // ways) * ways}"
        )
