"""The table of roles: the models of a dataflow, their worker classes and properties.

A role is an entry here, or one in an algorithm's ``workers`` for a role of its own. This module
also finds the methods of a worker class that the controller can call.
"""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.errors import ConfigError


def worker_class(worker: Any) -> Any:
    """A worker's class, imported if it is named ``module:Class``."""
    if not isinstance(worker, str):
        return worker
    module, _, name = worker.partition(":")
    return getattr(importlib.import_module(module), name)


def binding(worker: Any, name: str) -> Any:
    """The function of a worker class's method that has a transfer protocol, None without one.

    An override without its own protocol uses that of the method it overrides.

    Returns:
      a function with ``protocol``, ``phase``, and maybe ``reads`` and ``background``.
    """
    for base in getattr(worker, "__mro__", (worker,)):
        method = vars(base).get(name)
        if hasattr(method, "protocol"):
            return method
    return None


def bound_methods(worker: Any) -> dict[str, Any]:
    """All methods of a worker class that the controller can call, by name."""
    cls = worker_class(worker)
    names = (name for name in dir(cls) if not name.startswith("__"))
    return {name: found for name in names if (found := binding(cls, name)) is not None}


# The stages of a step, in order, as plans name them (HybridFlow, arXiv 2409.19256, figure 1).
STAGES = ("generation", "preparation", "learning")

# Names of a trained role's optimizer, as in optax (hjax.workers.optimizer).
OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "adafactor", "muon")


@dataclasses.dataclass(frozen=True)
class Role:
    """A model of the dataflow, or anything else that answers calls.

    Attributes:
      worker: the class of its worker, or its place: ``module:Class``.
      name: in the dataflow; empty: its key in a table.
      section: of the config with its path, optimizer and offload; empty: that of its name.
      trained: it has an optimizer and a loss.
      scalar: its model has a scalar head: one number per token, not one per word of the vocabulary.
      generates: it generates responses, so it has a generate layout beside the train layout.
      starts_from: the role whose weights it takes if its own path is empty. It answers for each of
        that role's tokens, so their tokenizers must agree.
      per_token: it answers for each of the actor's tokens but starts from weights of its own, so
        their tokenizers must agree as well.
      whole: it scores whole sequences, as text if its tokenizer differs from the actor's.
      function: the class of its worker if it has no path: a Python function on the host.
      apart: no algorithm calls it; it exists if the placement gives it devices.
      model: it has a model that hjax builds, with shapes and weights; a user's class for a new role
        mostly has none.
      host: its worker is one object in the host's pool, without devices, however many processes the
        other roles have: what it does happens once.

    Raises:
      ConfigError: a role on the host that has a model.
    """

    worker: Any
    name: str = ""
    section: str = ""
    trained: bool = False
    scalar: bool = False
    generates: bool = False
    starts_from: str = ""
    per_token: bool = False
    whole: bool = False
    function: Any = ""
    apart: bool = False
    model: bool = False
    host: bool = False

    def __post_init__(self) -> None:
        of_models = ("model", "trained", "scalar", "generates", "starts_from", "per_token", "whole")
        if self.host and (given := [name for name in of_models if getattr(self, name)]):
            raise ConfigError(
                f"Role(host=True, {given[0]}={getattr(self, given[0])!r}): a role on the host has "
                "no devices and so no model; leave one of the two out"
            )

    @property
    def config_section(self) -> str:
        """Name of its config section."""
        return self.section or self.name


_FUNCTION = "hjax.workers:FunctionReward"
_LEARNS: dict[str, Any] = {"section": "critic", "trained": True, "starts_from": "actor"}
# In display order.
ROLES: dict[str, Role] = {
    role.name: dataclasses.replace(role, model=True)
    for role in (
        Role("hjax.workers:Actor", "actor", trained=True, generates=True),
        Role("hjax.workers:Critic", "critic", trained=True, scalar=True, starts_from="actor"),
        Role("hjax.workers:Reference", "reference", starts_from="actor"),
        Role("hjax.workers:ModelReward", "reward", scalar=True, whole=True, function=_FUNCTION),
        Role("hjax.workers:ModelReward", "cost", scalar=True, whole=True, function=_FUNCTION),
        Role("hjax.workers:Critic", "cost_critic", scalar=True, **_LEARNS),
        Role("hjax.workers:ImplicitReward", "process_reward", **_LEARNS),
        Role("hjax.workers:Teacher", "teacher", per_token=True),
        Role("hjax.workers:Rollout", "rollout", section="actor", generates=True, apart=True),
    )
}
# The actor of a run that trains a reward model: it has a scalar head and generates nothing.
SCORER = Role("hjax.workers:RewardTrainer", trained=True, scalar=True, model=True)
# The role that generates instead of the actor, if a placement names it.
ROLLOUT = "rollout"


def role_table(names: Sequence[str], own: Mapping[str, Any], owner: str) -> dict[str, Role]:
    """The roles of an algorithm by name, in order.

    Args:
      names: the roles it calls.
      own: by name its own roles, or its own classes for standing roles: a worker class or a
        ``Role``.
      owner: the algorithm, for the error.

    Raises:
      ConfigError: a role that is defined nowhere.
    """
    table = {}
    for name in dict.fromkeys((*names, *own)):
        entry = own.get(name)
        if name in ROLES and ROLES[name].apart:
            raise ConfigError(
                f"{owner} has a role {name!r}, a name that is reserved: it generates instead of "
                "the actor if a placement gives it devices; choose another name"
            )
        if isinstance(entry, Role):
            table[name] = dataclasses.replace(entry, name=name)
        elif entry is not None:
            # Only a class: like the standing role of that name, but a function only if the class is
            # one that calls functions.
            known = ROLES.get(name, Role(entry, name))
            if known.function and issubclass(entry, worker_class(known.function)):
                table[name] = dataclasses.replace(known, function=entry)
            else:
                table[name] = dataclasses.replace(known, worker=entry, function="")
        elif name in ROLES:
            table[name] = ROLES[name]
        else:
            raise ConfigError(f"role {name!r} has no worker class: give it one in {owner}.workers")
    return table


def network_role(name: str, worker: Any) -> Role:
    """The role of a run without sequences: a class alone under a standing name is trained if that
    role is, and a reference starts from the actor; none of them has a language model."""
    if isinstance(worker, Role):
        return worker
    trained = name in ROLES and ROLES[name].trained
    return Role(worker, name, trained=trained, starts_from="actor" if name == "reference" else "")


def calls_of(worker: Any) -> dict[str, str]:
    """Phase by name of a worker class's methods that belong to the dataflow (hjax.protocol)."""
    return {name: method.phase for name, method in bound_methods(worker).items() if method.phase}
