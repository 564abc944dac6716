"""What of a config goes together: batches over devices, packs, generation apart or ahead."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.config import count_or_zero
from hjax.errors import ConfigError
from hjax.kernels import cudnn
from hjax.kernels.attention import WHOLE
from hjax.kernels.registry import AUTO, CUDNN, TRIED, choose
from hjax.models.model_config import ModelConfig
from hjax.models.weights import has_score_head
from hjax.roles import ROLLOUT, Role, worker_class
from hjax.run.inputs import Inputs
from hjax.run.placement import Plan, role_path
from hjax.settings.keys import SHALLOW
from hjax.sharding.layout import RoleLayouts, make_layouts
from hjax.sharding.offload import check_offload
from hjax.workers import GeneratingWorker


def check_together(
    config: ConfigDict,
    algorithm: type[Algorithm],
    inputs: Inputs,
    table: Mapping[str, Role],
    layouts: Mapping[str, RoleLayouts],
    plan: Plan,
) -> None:
    """Raise ConfigError where samples cannot be given up, steps are to be scored and no model does,
    an algorithm wants several rewards and gets one, or batches or packs do not fit the layouts.

    Of a user's function it is known how many rewards it gives once it has been called.
    """
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
    check_batches(config, algorithm, table, layouts, plan)
    after = int(table["actor"].scalar)
    check_packing(config, inputs, layouts, after=after, unit=algorithm.unit)


def check_judges(config: ConfigDict, table: Mapping[str, Role]) -> None:
    """Raise ConfigError where a model is to score that has no head for it, and learns none."""
    for entry in table.values():
        path = role_path(config, entry) if entry.scalar and not entry.trained else ""
        if path and not has_score_head(path):
            raise ConfigError(
                f"{entry.config_section}.path={path}: a language model, without the head that "
                "makes scores; give a run of hjax's reward_model.py, cost_model.py or "
                "process_reward_model.py, or a sequence classifier with one label"
            )


def check_rollout(table: Mapping[str, Role], algorithm: type[Algorithm]) -> None:
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


def check_ahead(config: ConfigDict, algorithm: type[Algorithm], plan: Plan) -> None:
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


def check_batches(
    config: ConfigDict,
    algorithm: type[Algorithm],
    table: Mapping[str, Role],
    layouts: Mapping[str, RoleLayouts],
    plan: Plan,
) -> None:
    """Batches must split evenly over each role's data-parallel parts."""
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
    warm_start = config.warm_start.steps and not config.actor.path
    if warm_start or config.algorithm.get("pretraining_coef"):
        _check_divides("warm_start.batch", config.warm_start.batch, layouts["actor"].train, "actor")


def _check_units(name: str, value: int, algorithm: type[Algorithm]) -> None:
    """Sequences of which none is cut off from those it belongs to."""
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
    """Raise ConfigError where rows are to be packed and cannot.

    Args:
      config, inputs, layouts: of the run.
      after: places behind a response's tokens, where scores are read.
      unit: rows that a pack holds together: 2 of a pair.
    """
    if not (packing := count_or_zero(config.data.packing)):
        return
    asked = f"config.data.packing={packing}"
    longest = unit * (inputs.prompt_length + config.rollout.max_response_length + after)
    behind = " and a place behind them" if after else ""
    if packing < longest:
        whole = "pairs, and of both sides" if unit > 1 else "sequences, and"
        raise ConfigError(
            f"{asked}: a pack holds whole {whole} prompts of {inputs.prompt_length} with "
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


def attention_of(
    config: ConfigDict,
    role: str,
    model: ModelConfig,
    layouts: RoleLayouts | None,
    platform: str,
    dtype: Any,
) -> str:
    """What ``model.attention`` is of a role, as of ``hjax.models.compute.Compute``.

    Args:
      config: of the run.
      role, model, layouts: whose.
      platform: of the devices.
      dtype: of compute.

    Raises:
      ConfigError: it is asked for, and devices, model or layout do not take it.
    """
    asked: str = config.model.attention
    long_packs = count_or_zero(config.data.packing) > WHOLE
    if asked == AUTO:
        if platform not in cudnn.PLATFORMS or long_packs:
            return AUTO
        return AUTO if _not_for_cudnn(model, layouts, dtype) else TRIED
    choose(platform, asked)
    if asked == CUDNN and long_packs:
        raise ConfigError(
            f"config.model.attention={CUDNN} has no mask of several sequences in a row, and "
            f"data.packing is {config.data.packing}; use packing=0, or {AUTO}"
        )
    if asked == CUDNN and (reason := _not_for_cudnn(model, layouts, dtype)):
        raise ConfigError(f"config.model.attention={CUDNN} is not for {role}'s model: {reason}")
    return asked


def unrolls(config: ConfigDict, model: ModelConfig, platform: str) -> bool:
    """Whether ``model.unroll_layers`` unrolls a role's model on the devices of a platform."""
    asked: str = config.model.unroll_layers
    if asked != AUTO:
        return asked == "true"
    return platform == "cpu" and model.layers <= SHALLOW


def _not_for_cudnn(model: ModelConfig, layouts: RoleLayouts | None, dtype: Any) -> str:
    """Why a role cannot have cuDNN's attention, and what to use; empty: it can."""
    reason = cudnn.refusal(dtype, model.head_dim, model.attention_softcap, model.sinks)
    if layouts is not None and layouts.train.ways("length") > 1:
        return "it does not split a row's length; use context=1, or auto"
    return reason and f"{reason}; use {AUTO}"


def can_generate(config: ConfigDict, sizes: Mapping[str, Any], devices: int) -> bool:
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
