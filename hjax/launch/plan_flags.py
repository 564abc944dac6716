"""What `hjax.launch.plan` is asked: its flags read, and the problem that they pose."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from hjax.algorithms import get_algorithm
from hjax.devices import device_of_kind
from hjax.errors import ConfigError
from hjax.launch.command import ROOFLINE, define, parse_flags, take_config
from hjax.models.cost_inputs import Workload
from hjax.planning import hardware
from hjax.planning.constants import Constants
from hjax.planning.plan_types import Cluster
from hjax.planning.problems import NUMERICS, build_problem, complete_models, find_algorithm
from hjax.planning.result import keys_of_config, keys_of_models
from hjax.planning.search import PlanProblem
from hjax.planning.strategies import STRATEGIES
from hjax.settings.config_loading import check_config, load_config
from hjax.user_input import user_path

# What a config says itself.
FROM_CONFIG = ("algorithm", "models", "numerics", "prompt_length", "response_length", "batch",
               "samples", "updates", "even", "offload")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """The parsed command line.

    Attributes:
      keys: of a run's config, dotted: that which was named, or one for the models.
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


def plan_flags() -> flags.FlagValues:
    """The command's flags."""
    own = define(algorithm="ppo", models="", cluster="", strategy="auto", numerics="masters")
    define(own, constants="", profile="", output="", offload="")
    define(own, prompt_length=1024, response_length=1024, batch=1024, samples=1)
    define(own, updates=8, candidates=5)
    return define(own, json=False, calibrate=False, even=False, compile=False, roofline=False)


def parse(arguments: Sequence[str]) -> PlanCommand | None:
    """Read the command line; None where only a calibration is asked for.

    Raises:
      ConfigError: a wrong flag or value.
    """
    own = plan_flags()
    config, name = None, ""
    if any(re.match(r"--?config\b", a) for a in arguments):
        name, rest = take_config(arguments)
        config = check_config(load_config(name, rest, own))
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
    if own.roofline:
        raise ConfigError(ROOFLINE)
    problem = models_problem(own) if config is None else config_problem(own, config)
    return PlanCommand(
        problem,
        strategy=own.strategy,
        candidates=max(1, own.candidates),
        output=user_path(own.output, "--output=") if own.output else None,
        json=own.json,
        compile=own.compile,
        config_name=name,
        config=config,
        keys=models_keys(own, problem) if config is None else keys_of_config(config),
    )


def config_problem(own: Any, config: ConfigDict) -> PlanProblem:
    """A run's own problem on the cluster that the flags name.

    Raises:
      ConfigError: a flag that says what the config says, or whatever is wrong with either.
    """
    from hjax.dryrun.shape_inputs import read_shape, shape_inputs
    from hjax.planning.auto import run_problem
    from hjax.run.role_groups import is_float32, planned_models

    for name in FROM_CONFIG:
        if own[name].present:
            raise ConfigError(f"--{name}: with --config it comes from there; leave it out")
    algorithm = get_algorithm(config.algorithm.name)
    cluster, constants = _measured(own, _cluster(own))
    platform = "tpu" if any(pool.shape for pool in cluster.pools) else "gpu"
    inputs = shape_inputs(config, algorithm.source)
    models = planned_models(config, algorithm, inputs, read_shape)
    return run_problem(
        config,
        algorithm,
        models,
        inputs.prompt_length,
        cluster,
        constants,
        is_float32(config, platform),
    )


def _cluster(own: Any) -> Cluster:
    if not own.cluster:
        raise ConfigError("--cluster is missing; such as 16x8:a100-80g or v5p:4x4x4")
    return hardware.parse_cluster(own.cluster)


def models_problem(own: Any) -> PlanProblem:
    """The problem of the models, cluster and work that the flags name.

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
    cluster, constants = _measured(own, _cluster(own))
    algorithm = find_algorithm(own.algorithm)
    settings = algorithm.default_config()
    return build_problem(
        algorithm,
        settings,
        read_models(own.models, algorithm.needed_roles(settings)),
        Workload(own.prompt_length, own.response_length, own.batch, own.samples),
        own.updates,
        cluster,
        constants,
        own.numerics,
        read_offload(own.offload) if own.offload else None,
        own.even,
    )


def models_keys(own: Any, problem: PlanProblem) -> dict[str, Any]:
    """The config's keys, dotted, of a run of what ``models_problem`` poses; none where hjax does
    not do what is asked."""
    if not problem.numerics.own:
        return {}
    algorithm = find_algorithm(own.algorithm)
    settings = algorithm.default_config()
    table = algorithm.role_table(settings)
    models, _ = complete_models(read_models(own.models, algorithm.needed_roles(settings)), table)
    name = own.algorithm if ":" in own.algorithm else algorithm.__name__
    work = problem.work
    return keys_of_models(name, table, models, work, own.updates, problem.numerics)


def read_models(text: str, roles: Sequence[str]) -> dict[str, str]:
    """Model name by role: of ``actor=NAME,critic=NAME,...``, or of one name for all ``roles``.

    Raises:
      ConfigError: nothing, another form, or a role twice.
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
    """What waits in the host's memory, by role: ``reference=all,critic=optimizer``; ``none``."""
    if text.strip() == "none":
        return {}
    parts = (part.partition("=") for part in filter(None, text.split(",")))
    return {role.strip(): what.strip() for role, _, what in parts}


def _measured(own: Any, cluster: Cluster) -> tuple[Cluster, Constants]:
    """The cluster and the cost model's constants: with ``--profile`` its devices do what was
    measured, by which the constants are counted; the network is the catalogue's.

    Raises:
      ConfigError: a profile of other devices, or constants that there are not.
    """
    if not own.profile:
        return cluster, _asked(own, Constants())
    from hjax.planning.profile import CALIBRATE_COMMAND, CALIBRATION_VERSION, read_profile

    profile = read_profile(Path(own.profile))
    made_on, measured = profile.made_on, profile.device
    assert made_on is not None, "a stored profile says what was measured"
    listed = device_of_kind(made_on.kind, measured.memory)
    names = sorted({pool.device.name for pool in cluster.pools})
    if listed is None or names != [listed.name]:
        raise ConfigError(
            f"--profile={own.profile} was measured on {made_on.devices} x {made_on.kind} "
            f"({made_on.cpu}), not on {' and '.join(names)}; make one there with "
            f"{CALIBRATE_COMMAND}, or leave "
            "--profile out"
        )
    method = dict(made_on.versions).get("calibration", "none")
    if method != CALIBRATION_VERSION:
        raise ConfigError(
            f"--profile={own.profile} is of calibration {method}, not {CALIBRATION_VERSION}, which "
            f"this hjax counts by; make it again with {CALIBRATE_COMMAND}"
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
    return Cluster(pools), _asked(own, profile.constants)


def _asked(own: Any, constants: Constants) -> Constants:
    """Constants with those of ``--constants``."""
    values = {}
    for part in filter(None, own.constants.split(",")):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError as error:
            raise ConfigError(f"--constants: {part!r} is not NAME=NUMBER") from error
    return constants.with_user_values(values)
