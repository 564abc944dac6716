"""Networks of a finished or running run, loaded again to look at them and to call them."""

from pathlib import Path
from typing import Any

import jax

from hjax.algorithms import get_algorithm
from hjax.config_aliases import with_current_names
from hjax.errors import ConfigError
from hjax.files import StrPath, read_json
from hjax.run.inputs import run_inputs
from hjax.run.placement import make_plan, roles_with_devices
from hjax.run.role_groups import describe_roles
from hjax.settings.config_checks import check_config
from hjax.workers.network import NetworkWorker, read_params


def load_worker(workdir: StrPath, role: str = "actor") -> NetworkWorker:
    """The worker of a role of a run without language models, with its newest parameters.

    It is on the first local device. ``worker.model`` is its network with these parameters, and
    ``worker.run(name, *values)`` calls a method of its class.

    Args:
      workdir: of the run.
      role: whose worker.

    Raises:
      ConfigError: no run there, no such role, or one without a network.
    """
    recorded = read_json(Path(workdir) / "config.json")
    if recorded is None:
        raise ConfigError(f"{workdir}: no config.json; name the workdir of a run")
    config = check_config(with_current_names(recorded))
    algorithm = get_algorithm(config.algorithm.name)
    if algorithm.sequences:
        raise ConfigError(f"{workdir}: a run of a language model; hjax.load_model reads it")
    placed = roles_with_devices(config, algorithm)
    devices = jax.devices()[:1]
    plan = make_plan("colocate", placed, 1)
    platform = devices[0].platform
    roles = describe_roles(config, algorithm, run_inputs(config, algorithm), plan, platform)
    workers: dict[str, Any] = {name: roles.builds[name].worker for name in placed}
    networks = [name for name, cls in workers.items() if issubclass(cls, NetworkWorker)]
    if role not in networks:
        raise ConfigError(f"role={role!r}: no network of this run; it has {', '.join(networks)}")
    build = roles.builds[role]
    arguments: list[Any] = [a.on(devices) if hasattr(a, "on") else a for a in build.arguments]
    worker: NetworkWorker = build.worker(*arguments, **build.options)
    worker.params = worker.network.place(read_params(workdir, role), worker.layouts.train)
    return worker
