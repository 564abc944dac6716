"""``model.remat=auto``: for each trained role the first policy whose update fits, by an estimate.

The estimate (hjax.workers.memory) needs neither devices nor a compiler, so a run and its dry
run choose alike, and nothing is compiled to choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.models import remat, weight_ring
from hjax.roles import Role
from hjax.sharding.layout import Layout, fitted
from hjax.show.format import size
from hjax.workers import TrainedWorker, WorkerContext
from hjax.workers.memory import USABLE, Pass, RoleMemory

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What was chosen for a role, and why.

    Attributes:
      policy: of ``hjax.models.remat``.
      estimated_bytes: of a device's memory while the role is updated, by policy, of those that were
        looked at; with what else the role's set keeps.
      usable_bytes: that they may take; 0: not known.
      reason: where nothing was estimated; else empty.
    """

    policy: str
    estimated_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    usable_bytes: int = 0
    reason: str = ""

    @property
    def why(self) -> str:
        """In a line."""
        if self.reason:
            return f"{self.policy}: {self.reason}"
        (*before, (policy, needed)) = self.estimated_bytes.items()
        if needed > self.usable_bytes:
            found = f"none fits, by estimate: an update needs {size(needed)} at the least"
            return f"{policy}: {found}, of {size(self.usable_bytes)} that it may take"
        found = f"an update needs {size(needed)} of {size(self.usable_bytes)} that it may take"
        too_much = ", ".join(f"{name} {size(n)}" for name, n in before)
        end = f"; more than that: {too_much}" if before else ""
        return f"{policy}: {found}, by estimate{end}"

    def record(self) -> dict[str, Any]:
        """``policy``, ``why``, and where it was estimated ``estimated_bytes``, ``usable_bytes``."""
        found = {"policy": self.policy, "why": self.why.removeprefix(f"{self.policy}: ")}
        if self.reason:
            return found
        needed = self.estimated_bytes[self.policy]
        return {**found, "estimated_bytes": needed, "usable_bytes": self.usable_bytes}


def choose(needed: Mapping[str, float], usable: int) -> Chosen:
    """The first policy that fits, or the last.

    Args:
      needed: bytes by policy, in the order of preference.
      usable: bytes.
    """
    looked: dict[str, int] = {}
    for policy, bytes_ in needed.items():
        looked[policy] = round(bytes_)
        if bytes_ <= usable:
            break
    return Chosen(policy, looked, usable)


class Chooser:
    """Chooses for the trained roles of a run.

    Args:
      config: the run's.
      algorithm: its class.
      table: what each role is.
      contexts: of the roles with devices and a model that hjax builds.
      layouts: train layouts of these.
      prompt_length: tokens.
      platform: of the devices.
      memory: bytes of a device that programs may use; 0: it does not say.
    """

    def __init__(
        self,
        config: ConfigDict,
        algorithm: type[Algorithm],
        table: Mapping[str, Role],
        contexts: Mapping[str, WorkerContext],
        layouts: Mapping[str, Layout],
        prompt_length: int,
        platform: str,
        memory: int,
    ):
        self.config, self.algorithm, self.table = config, algorithm, table
        self.contexts, self.prompt_length = contexts, prompt_length
        self.platform, self.usable = platform, int(USABLE * memory)
        self.layouts = {
            role: fitted(layouts[role], context.model.dimensions, f"layout.{role}.train")
            for role, context in contexts.items()
            if context.model is not None
        }

    def of(self, role: str, together: Sequence[str]) -> Chosen:
        """For a trained role, in a set with others.

        Args:
          role: which.
          together: roles of its set, itself among them.
        """
        if self.platform == "cpu" and self.contexts[role].compute.unroll_layers:
            return Chosen(remat.NONE, reason="a CPU's compiler undoes it for unrolled layers")
        if not self.usable:
            return Chosen(remat.NONE, reason="the devices do not say how much memory they have")
        beside = sum(self._kept(other, role) for other in together if other in self.contexts)
        memory, updates = self._role(role).memory, self._updates(role)
        # A CPU's memory is the host's.
        policies = remat.POLICIES if self.platform != "cpu" else remat.POLICIES[:-1]
        needed = {p: beside + max(memory.update(one, p) for one in updates) for p in policies}
        return choose(needed, self.usable)

    def _kept(self, role: str, updated: str) -> float:
        """Bytes of parameters and moments while a role is updated: trained roles take turns and
        stay until all are done."""
        trained, offload = self.table[role].trained, self.contexts[role].offload
        if not trained and offload == "all" and role != updated:
            return 0.0
        return self._role(role).memory.resident(trained)

    def _updates(self, role: str) -> list[Pass]:
        config, samples, one = self.config, self.config.rollout.samples, self._role(role)
        batch = config.warm_start.batch
        if not self.algorithm.generates:
            return [one.update_pass(batch, 1, self.prompt_length)]
        rows = config.algorithm.get("minibatch", 0) or config.rollout.prompts * samples
        found = [one.update_pass(rows, samples, self.prompt_length)]
        context = self.contexts[role]
        if context.warm_start is not None and config.warm_start.steps and not context.path:
            found.append(one.update_pass(batch, 1, self.prompt_length))
        return found

    def _role(self, role: str) -> RoleMemory:
        tpu = self.platform in weight_ring.PLATFORMS
        given = self.contexts[role], self.table[role].scalar, self.layouts[role]
        return RoleMemory.described(*given, tpu)


def trains(worker: Any) -> bool:
    """Whether a role's worker has updates of a model that hjax builds."""
    return isinstance(worker, type) and issubclass(worker, TrainedWorker)
