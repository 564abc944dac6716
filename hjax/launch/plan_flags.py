"""Flags of `hjax.launch.plan`, and the planning problem that they describe."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm, get_algorithm
from hjax.devices import device_of_kind
from hjax.errors import ConfigError
from hjax.launch.command import (
    ROOFLINE_MESSAGE,
    check_listed,
    define_flags,
    parse_flags,
    split_config_flag,
)
from hjax.models.cost_inputs import Workload
from hjax.planning import hardware
from hjax.planning.constants import Constants
from hjax.planning.plan_types import Cluster
from hjax.planning.problems import NUMERICS, build_problem, complete_models, find_algorithm
from hjax.planning.result import keys_of_config, keys_of_models
from hjax.planning.search import PlanProblem
from hjax.planning.strategies import STRATEGIES
from hjax.settings.config_loading import CONFIGS, check_config, config_names, load_config
from hjax.user_input import user_path

# Flags that --config replaces.
FROM_CONFIG = ("algorithm", "models", "numerics", "prompt_length", "response_length", "batch",
               "samples", "updates", "even", "offload")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """The parsed command line.

    Attributes:
      keys: dotted config keys of a run: of the config, or of one made for the models.
      remark: what one name for all roles adds.
    """

    problem: PlanProblem
    strategy: str
    candidates: int
    output: Path | None
    json: bool
    compile: bool
    config_name: str
    config: ConfigDict | None
    keys: dict[str, Any]
    remark: str = ""


def plan_flags() -> flags.FlagValues:
    """The command's flags."""
    args = define_flags(algorithm="ppo", models="", cluster="", strategy="auto", numerics="masters")
    define_flags(args, constants="", profile="", output="", offload="")
    define_flags(args, prompt_length=1024, response_length=1024, batch=1024, samples=0)
    define_flags(args, updates=8, candidates=5)
    return define_flags(
        args, json=False, calibrate=False, even=False, compile=False, roofline=False
    )


def parse(arguments: Sequence[str]) -> PlanCommand | None:
    """Read the command line; None for a calibration alone.

    Raises:
      ConfigError: a wrong flag or value.
    """
    args = plan_flags()
    config, name = None, ""
    if any(re.match(r"--?config\b", a) for a in arguments):
        name, rest = split_config_flag(arguments)
        config = check_config(load_config(name, rest, args))
    else:
        parse_flags(args, arguments)
    check_listed(args, "strategy", STRATEGIES)
    check_listed(args, "numerics", NUMERICS)
    if args.calibrate and not args.cluster:
        return None
    if args.compile and config is None:
        raise ConfigError("--compile needs --config=NAME.py: it compiles a run's own programs")
    if args.roofline:
        raise ConfigError(ROOFLINE_MESSAGE)
    problem = models_problem(args) if config is None else config_problem(args, config)
    return PlanCommand(
        problem,
        strategy=args.strategy,
        candidates=max(1, args.candidates),
        output=user_path(args.output, "--output=") if args.output else None,
        json=args.json,
        compile=args.compile,
        config_name=name,
        config=config,
        keys=models_keys(args, problem) if config is None else keys_of_config(config),
        remark=one_name_remark(args) if config is None else "",
    )


def config_problem(args: Any, config: ConfigDict) -> PlanProblem:
    """The planning problem of a config, on the cluster of the flags.

    Raises:
      ConfigError: a flag that the config replaces, or an invalid flag or config.
    """
    from hjax.dryrun.shape_inputs import read_shape, shape_inputs
    from hjax.planning.auto import run_problem
    from hjax.run.role_groups import is_float32, planned_models

    for name in FROM_CONFIG:
        if args[name].present:
            raise ConfigError(f"--{name}: the config sets it; leave it out with --config")
    algorithm = get_algorithm(config.algorithm.name)
    cluster, constants = _apply_profile(args, _cluster(args))
    platform = "tpu" if any(pool.shape for pool in cluster.pools) else "gpu"
    inputs = shape_inputs(config, algorithm.source)
    return run_problem(
        config,
        algorithm,
        planned_models(config, algorithm, inputs, read_shape),
        inputs.prompt_length,
        cluster,
        constants,
        is_float32(config, platform),
    )


def _cluster(args: Any) -> Cluster:
    if not args.cluster:
        raise ConfigError("--cluster is missing; such as 16x8:a100-80g or v5p:4x4x4")
    return hardware.parse_cluster(args.cluster)


def models_problem(args: Any) -> PlanProblem:
    """The planning problem of the models, cluster and workload of the flags.

    Raises:
      ConfigError: an unknown device, model or algorithm, a workload of zero, or batches that do
        not divide.
    """
    algorithm = find_algorithm(args.algorithm)
    settings = algorithm.default_config()
    algorithm.check(settings)
    if not args["samples"].present:
        args.samples = usual_samples(algorithm)
    for name in ("prompt_length", "response_length", "batch", "samples", "updates"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name}={getattr(args, name)}: a whole number of 1 or more")
    algorithm.check_samples(settings, args.samples)
    if args.batch % (args.samples * args.updates):
        raise ConfigError(
            f"--batch={args.batch} does not divide into {args.updates} updates (--updates) of "
            f"whole groups of {args.samples} (--samples)"
        )
    cluster, constants = _apply_profile(args, _cluster(args))
    return build_problem(
        algorithm,
        settings,
        read_models(args.models, algorithm.needed_roles(settings)),
        Workload(args.prompt_length, args.response_length, args.batch, args.samples),
        args.updates,
        cluster,
        constants,
        args.numerics,
        read_offload(args.offload) if args.offload else None,
        args.even,
    )


def usual_samples(algorithm: type[Algorithm]) -> int:
    """Responses per prompt of an algorithm's shipped config; of one without, of base.py."""
    names = {name.removesuffix(".py").replace("_", ""): name for name in config_names()}
    shipped = names.get(algorithm.__name__.lower(), "base.py")
    return load_config(CONFIGS / shipped).rollout.samples


def one_name_remark(args: Any) -> str:
    """What one name for all roles adds to those that need a model; "" if nothing."""
    if not args.models or "=" in args.models:
        return ""
    algorithm = find_algorithm(args.algorithm)
    table = algorithm.role_table(algorithm.default_config())
    added = [name for name, role in table.items() if role.function]
    needed = ",".join(f"{name}={args.models}" for name in table if name not in added)
    if not added:
        return ""
    return (
        f"--models={args.models} is a model for {' and '.join(added)} too; as a function on the "
        f"host: --models={needed}"
    )


def models_keys(args: Any, problem: PlanProblem) -> dict[str, Any]:
    """Dotted config keys of a run of ``models_problem``; none where hjax cannot run it."""
    if not problem.numerics.hjax_programs:
        return {}
    algorithm = find_algorithm(args.algorithm)
    settings = algorithm.default_config()
    table = algorithm.role_table(settings)
    models, _ = complete_models(read_models(args.models, algorithm.needed_roles(settings)), table)
    name = args.algorithm if ":" in args.algorithm else algorithm.__name__
    keys = keys_of_models(name, table, models, problem.work, args.updates, problem.numerics)
    # Some learn from a step's sequences in one piece (SPIN).
    return {k: v for k, v in keys.items() if k != "algorithm.minibatch" or "minibatch" in settings}


def read_models(text: str, roles: Sequence[str]) -> dict[str, str]:
    """Parse ``actor=NAME,critic=NAME,...``, or one name for all ``roles``, into names by role.

    Raises:
      ConfigError: it is empty, has another form, or names a role twice.
    """
    if not text:
        raise ConfigError("--models is missing; such as actor=llama-7b,critic=llama-7b,...")
    if "=" not in text:
        return dict.fromkeys(roles, text)
    names: dict[str, str] = {}
    for part in text.split(","):
        role, _, name = (x.strip() for x in part.partition("="))
        if not name or role in names:
            raise ConfigError(f"--models: {part!r}: one ROLE=MODEL for each role")
        names[role] = name
    return names


def read_offload(text: str) -> dict[str, str]:
    """Parse what is offloaded to host memory: ``reference=all,critic=optimizer``, or ``none``."""
    if text.strip() == "none":
        return {}
    parts = (part.partition("=") for part in filter(None, text.split(",")))
    return {role.strip(): what.strip() for role, _, what in parts}


def _apply_profile(args: Any, cluster: Cluster) -> tuple[Cluster, Constants]:
    """The cluster and the cost model's constants, with measured device rates from ``--profile``.

    Network rates are from the data sheet in either case.

    Raises:
      ConfigError: a profile of other devices, or unknown constants.
    """
    if not args.profile:
        return cluster, _override_constants(args, Constants())
    from hjax.planning.profile import CALIBRATE_COMMAND, CALIBRATION_VERSION, read_profile

    profile = read_profile(Path(args.profile))
    made_on, measured = profile.made_on, profile.device
    assert made_on is not None, "a stored profile says what was measured"
    listed = device_of_kind(made_on.kind, measured.memory)
    names = sorted({pool.device.name for pool in cluster.pools})
    if listed is None or names != [listed.name]:
        raise ConfigError(
            f"--profile={args.profile} was measured on {made_on.devices} x {made_on.kind} "
            f"({made_on.cpu}), not on {' and '.join(names)}; make one there with "
            f"{CALIBRATE_COMMAND}, or leave "
            "--profile out"
        )
    method = dict(made_on.versions).get("calibration", "none")
    if method != CALIBRATION_VERSION:
        raise ConfigError(
            f"--profile={args.profile} is of calibration {method}, not {CALIBRATION_VERSION}, "
            f"which this hjax reads; make it again with {CALIBRATE_COMMAND}"
        )
    device = dataclasses.replace(
        cluster.pools[0].device,
        memory=measured.memory,
        flops={**listed.flops, **measured.flops},
        bandwidth=measured.bandwidth,
        link=measured.link,
        source=f"measured on {made_on.summary}; network: data sheet",
    )
    pools = tuple(dataclasses.replace(pool, device=device) for pool in cluster.pools)
    return Cluster(pools), _override_constants(args, profile.constants)


def _override_constants(args: Any, constants: Constants) -> Constants:
    """The constants, overridden by ``--constants``."""
    values = {}
    for part in filter(None, args.constants.split(",")):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError as error:
            raise ConfigError(f"--constants: {part!r} is not NAME=NUMBER") from error
    return constants.with_user_values(values)
