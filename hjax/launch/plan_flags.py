"""What `hjax.launch.plan` is asked: flags into a problem for the search."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from hjax.algorithms import get_algorithm
from hjax.errors import ConfigError
from hjax.launch.command import parse_flags, take_config
from hjax.models.published import planning_shape
from hjax.planning import hardware
from hjax.planning.constants import Constants
from hjax.planning.counting import counts
from hjax.planning.dataflow import find_algorithm, trace
from hjax.planning.options import Space
from hjax.planning.records import FLOAT32, MASTERS, MIXED, Cluster, Workload
from hjax.planning.search import Problem
from hjax.planning.strategies import STRATEGIES
from hjax.settings.reading import load_config

NUMERICS = {"mixed": MIXED, "masters": MASTERS, "float32": FLOAT32}
# Roles whose model has a scalar head, and those that may be functions on the host.
SCALAR = ("critic", "cost_critic", "reward", "cost")
FUNCTIONS = ("reward", "cost")
# What a config says itself.
FROM_CONFIG = ("algorithm", "models", "numerics", "prompt_length", "response_length", "batch",
               "samples", "updates", "even", "offload")  # fmt: skip
OFFLOADS = ("none", "optimizer", "all")


@dataclasses.dataclass(frozen=True)
class Request:
    """The parsed command line."""

    problem: Problem
    strategy: str
    candidates: int
    output: Path | None
    json: bool
    calibrate: bool
    compile: bool = False
    config_name: str = ""
    config: ConfigDict | None = None


def define() -> flags.FlagValues:
    """The command's flags."""
    own = flags.FlagValues()
    for name, default in (
        ("algorithm", "ppo"), ("models", ""), ("cluster", ""), ("strategy", "auto"),
        ("numerics", "mixed"), ("constants", ""), ("profile", ""), ("output", ""),
        ("offload", ""),
    ):  # fmt: skip
        flags.DEFINE_string(name, default, "see --help", flag_values=own)
    for name, number in (
        ("prompt_length", 1024), ("response_length", 1024), ("batch", 1024), ("samples", 1),
        ("updates", 8), ("candidates", 5),
    ):  # fmt: skip
        flags.DEFINE_integer(name, number, "see --help", flag_values=own)
    for name in ("json", "calibrate", "even", "compile"):
        flags.DEFINE_bool(name, False, "see --help", flag_values=own)
    return own


def parse(arguments: Sequence[str]) -> Request | None:
    """Read the command line; None where only a calibration is asked for.

    Raises:
      ConfigError: a wrong flag or value.
    """
    own = define()
    config, name = None, ""
    if any(re.match(r"--?config\b", a) for a in arguments):
        name, rest = take_config(arguments)
        config = load_config(name, rest, own)
    else:
        parse_flags(own, arguments)
    if own.strategy not in STRATEGIES:
        raise ConfigError(f"--strategy={own.strategy}: one of {', '.join(STRATEGIES)}")
    if own.numerics not in NUMERICS:
        raise ConfigError(f"--numerics={own.numerics}: one of {', '.join(NUMERICS)}")
    if own.calibrate and not own.cluster:
        return None
    if own.compile and config is None:
        raise ConfigError("--compile needs --config=NAME.py: it compiles a run's own programs")
    return Request(
        problem(own) if config is None else config_problem(own, config),
        own.strategy,
        max(1, own.candidates),
        Path(own.output).expanduser() if own.output else None,
        own.json,
        own.calibrate,
        own.compile,
        name,
        config,
    )


def config_problem(own: Any, config: ConfigDict) -> Problem:
    """A run's own problem on the cluster that the flags name.

    Raises:
      ConfigError: a flag that says what the config says, or whatever is wrong with either.
    """
    from hjax.dryrun.shape_inputs import read_shape, shape_inputs
    from hjax.planning.auto import run_problem
    from hjax.run.roles import is_float32, planned_models

    for name in FROM_CONFIG:
        if own[name].present:
            raise ConfigError(f"--{name}: with --config it comes from there; leave it out")
    algorithm = get_algorithm(config.algorithm.name)
    cluster = _cluster(own)
    platform = "tpu" if any(pool.shape for pool in cluster.pools) else "gpu"
    inputs = shape_inputs(config, supervised=not algorithm.generates)
    models = planned_models(config, algorithm, inputs, read_shape)
    return run_problem(
        config,
        algorithm,
        models,
        inputs.prompt_length,
        cluster,
        _constants(own),
        is_float32(config, platform),
    )


def _cluster(own: Any) -> Cluster:
    if not own.cluster:
        raise ConfigError("--cluster is missing; such as 16x8:a100-80g or v5p:4x4x4")
    return hardware.cluster(own.cluster)


def problem(own: Any) -> Problem:
    """The problem that the flags pose.

    Raises:
      ConfigError: an unknown device, model or algorithm, a workload of zero, batches that do not
        divide.
    """
    for name in ("prompt_length", "response_length", "batch", "samples", "updates"):
        if getattr(own, name) < 1:
            raise ConfigError(f"--{name}={getattr(own, name)}: a whole number of 1 or more")
    if own.batch % (own.samples * own.updates):
        raise ConfigError(
            f"--batch={own.batch} does not divide into {own.updates} updates (--updates) of whole "
            f"groups of {own.samples} (--samples)"
        )
    cluster = _cluster(own)
    algorithm = find_algorithm(own.algorithm)
    config = algorithm.default_config()
    names, absent = parse_models(own.models, algorithm.needed_roles(config))
    flow = trace(algorithm, config, own.updates, own.samples, names, absent)
    shapes = {role: planning_shape(name) for role, name in names.items()}
    longest = own.prompt_length + own.response_length
    for role, shape in shapes.items():
        if shape.max_length < longest and role not in FUNCTIONS:
            raise ConfigError(
                f"--models: {role}={names[role]} has {shape.max_length} positions, fewer than the "
                f"{longest} of prompt and response"
            )
    return Problem(
        flow,
        {
            role: counts(shape, names[role], scalar=role in SCALAR)
            for role, shape in shapes.items()
        },
        Workload(own.prompt_length, own.response_length, own.batch, own.samples),
        cluster,
        _constants(own),
        NUMERICS[own.numerics],
        Space(even=own.even),
        parse_offload(own.offload, list(shapes)),
    )


def parse_offload(text: str, roles: Sequence[str]) -> dict[str, Any]:
    """What waits in the host's memory, by role: ``reference=all,critic=optimizer``.

    Raises:
      ConfigError: another form, role or word.
    """
    found = {}
    for part in filter(None, text.split(",")):
        role, _, what = (x.strip() for x in part.partition("="))
        if role not in roles or what not in OFFLOADS:
            raise ConfigError(
                f"--offload: {part!r} is not ROLE=WHAT, with a role of {', '.join(roles)} and one "
                f"of {', '.join(OFFLOADS)}"
            )
        found[role] = what
    return found


def _constants(own: Any) -> Constants:
    constants = Constants()
    if own.profile:
        from hjax.planning.profile import read_profile

        constants = read_profile(Path(own.profile)).constants
    values = {}
    for part in filter(None, own.constants.split(",")):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError as error:
            raise ConfigError(f"--constants: {part!r} is not NAME=NUMBER") from error
    return constants.with_values(values)


def parse_models(text: str, roles: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Model name by role, and the roles left out: ``actor=NAME,critic=NAME,...``, or one name for
    all. A reward or cost that is not named is a function on the host; a cost critic that is not
    named is like the critic, and ``cost_critic=none`` leaves it out.

    Raises:
      ConfigError: a role that the algorithm does not have, or one of its roles without a model.
    """
    if not text:
        raise ConfigError("--models is missing; such as actor=llama-7b,critic=llama-7b,...")
    if "=" not in text:
        return dict.fromkeys(roles, text), []
    names: dict[str, str] = {}
    for part in text.split(","):
        role, _, name = (x.strip() for x in part.partition("="))
        if role not in roles:
            raise ConfigError(f"--models: no role {role!r}; this algorithm has {', '.join(roles)}")
        if not name or role in names:
            raise ConfigError(f"--models: {part!r}: one ROLE=MODEL for each role")
        names[role] = name
    absent = [role for role, name in names.items() if name == "none"]
    if "cost_critic" in roles and "critic" in names:
        names.setdefault("cost_critic", names["critic"])
    missing = [r for r in roles if r not in names and r not in FUNCTIONS]
    if missing or "actor" in absent:
        raise ConfigError(
            f"--models lacks {', '.join(missing or ['actor'])}; this algorithm has "
            f"{', '.join(roles)} (reward and cost may be left out: functions on the host)"
        )
    return {role: names[role] for role in roles if role in names and role not in absent}, absent
