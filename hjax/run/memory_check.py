"""What has room in a device's memory, by the estimate of ``hjax.workers.memory``.

It needs neither devices nor a compiler, so a run and its dry run choose alike, and the programs'
own figures stand beside it there. It says three things: whether there is room for a run at all,
asked before anything is allocated; for ``model.remat=auto`` each trained role's first policy whose
update fits; and for ``rollout.slots=-1`` how many sequences are generated at a time (what has no
room waits for a slot; nothing is cut).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.errors import ConfigError
from hjax.kernels.int8_cache import AUTO as AUTO_DTYPE
from hjax.kernels.int8_cache import INT8
from hjax.machine import device_memory, free_bytes
from hjax.models import collective_matmul, remat
from hjax.models.cost_inputs import Workload
from hjax.roles import ROLLOUT
from hjax.settings.config_checks import on_cluster
from hjax.sharding.layout import fitted
from hjax.show.format import size
from hjax.workers import TrainableWorker
from hjax.workers.memory import USABLE_FRACTION, DecodeBatch, MemoryEstimate, MemoryPass, RoleMemory

AUTO, AUTO_SLOTS = "auto", -1
# Of groups that enter together many enough that fewer programs are worth it.
_ROUND = 8
# Of each token of a step's batch: its id and mask, log-probs, advantages, and those it starts from.
_TOKEN_BYTES = 4 + 1 + 3 * 4


@dataclasses.dataclass(frozen=True)
class RematChoice:
    """What ``model.remat=auto`` is for a role, and why.

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


def choose(needed: Mapping[str, float], usable: int) -> RematChoice:
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
    return RematChoice(policy, looked, usable)


@dataclasses.dataclass(frozen=True)
class SlotBudget:
    """How many sequences ``rollout.slots=-1`` generates at a time, and why.

    Attributes:
      slots: as the key takes them; 0: all.
      sequences: of a step.
      cache_bytes: of a device's memory for the keys and values of as many; 0: not estimated.
      reading_bytes: what reading prompts takes beside them meanwhile.
      usable_bytes: that generation may take beside what is kept.
      cache_dtype: what keys and values are kept in.
    """

    slots: int
    sequences: int
    cache_bytes: int = 0
    reading_bytes: int = 0
    usable_bytes: int = 0
    cache_dtype: str = AUTO_DTYPE

    @property
    def why(self) -> str:
        """In a line."""
        if not self.cache_bytes:
            return "all sequences of a step: the devices do not say how much memory they have"
        some = f"{self.slots} of the {self.sequences}" if self.slots else f"all {self.sequences}"
        kept = "" if self.cache_dtype == AUTO_DTYPE else f" in {self.cache_dtype}"
        taken = f"keys and values{kept} take {size(self.cache_bytes)} of a device"
        taken += f", prompts {size(self.reading_bytes)} while they are read"
        found = f"{some} sequences of a step at a time, by estimate: {taken}"
        if self.cache_bytes > self.usable_bytes:
            return f"{found}, more than the {size(self.usable_bytes)} that there are"
        return found

    def record(self) -> dict[str, Any]:
        """``slots``, ``why``, ``cache_bytes``, ``reading_bytes``, ``usable_bytes``."""
        names = ("slots", "why", "cache_bytes", "reading_bytes", "usable_bytes")
        return {name: getattr(self, name) for name in names}


class MemoryCheck:
    """The memory of a run's roles as they are described.

    Args:
      config: the run's.
      algorithm: its class.
      roles: described (``hjax.run.role_groups.RoleGroups``), not more is asked of them.
      prompt_length: tokens.
      platform: of the devices.
      memory: bytes of a device that programs may use; 0: it does not say.
    """

    def __init__(
        self,
        config: ConfigDict,
        algorithm: type[Algorithm],
        roles: Any,
        prompt_length: int,
        platform: str,
        memory: int = 0,
    ):
        self._config, self._algorithm = config, algorithm
        self._table, self._plan, self._layouts = roles.table, roles.plan, roles.layouts
        self._prompt_length, self._platform = prompt_length, platform
        self._usable = USABLE_FRACTION * memory
        self._workers = {role: build.worker for role, build in roles.builds.items()}
        contexts = {role: roles.builds[role].arguments[0] for role in roles.layouts}
        self._contexts: dict[str, Any] = {  # WorkerContext
            role: context for role, context in contexts.items() if context.model is not None
        }
        self._known: dict[str, RoleMemory] = {}
        self._generates = roles.generates

    def _role(self, role: str) -> RoleMemory:
        if role not in self._known:
            context, tpu = self._contexts[role], self._platform in collective_matmul.PLATFORMS
            layout, what = self._layouts[role].train, f"layout.{role}.train"
            train = fitted(layout, context.model.dimensions, what)
            scalar = self._table[role].scalar
            self._known[role] = RoleMemory.from_context(context, scalar, train, tpu)
        return self._known[role]

    def _kept(self, role: str) -> float:
        """Bytes of a device that a role keeps between its calls."""
        memory = self._role(role).memory
        if role == ROLLOUT:  # nothing but what it generates by, for a while in two versions
            return memory.generation_copy()
        return memory.resident(self._table[role].trained, self._contexts[role].offload)

    def _together(self, role: str) -> list[str]:
        """The roles with a model of a role's set, itself among them."""
        [members] = [members for members in self._plan.placement if role in members]
        return [member for member in members if member in self._contexts]

    # model.remat=auto

    def remat(self) -> dict[str, RematChoice]:
        """What each trained role recomputes, of those whose model hjax builds and of which the plan
        says nothing."""
        return {
            role: self._remat(role)
            for members in self._plan.placement
            for role in members
            if role in self._contexts and "remat" not in self._plan.settings.get(role, {})
            if trains(self._workers[role])
        }

    def _remat(self, role: str) -> RematChoice:
        if self._platform == "cpu" and self._contexts[role].compute.unroll_layers:
            return RematChoice(remat.NONE, reason="a CPU's compiler undoes it for unrolled layers")
        if not self._usable:
            return RematChoice(
                remat.NONE, reason="the devices do not say how much memory they have"
            )
        beside = sum(self._kept_in_updates(other, role) for other in self._together(role))
        memory, updates = self._role(role).memory, self._updates(role)
        # A CPU's memory is the host's.
        policies = remat.POLICIES if self._platform != "cpu" else remat.POLICIES[:-1]
        needed = {p: beside + max(memory.update(one, p) for one in updates) for p in policies}
        return choose(needed, int(self._usable))

    def _kept_in_updates(self, role: str, updated: str) -> float:
        """Bytes of parameters and moments while a role is updated: trained roles take turns and
        stay until all are done."""
        trained = self._table[role].trained
        if not trained and self._contexts[role].offload == "all" and role != updated:
            return 0.0
        return self._role(role).memory.resident(trained)

    def _updates(self, role: str) -> list[MemoryPass]:
        config, context, prompt = self._config, self._contexts[role], self._prompt_length
        one, samples = self._role(role), config.rollout.samples
        shown = one.update_pass(config.warm_start.batch, 1, prompt)
        if not self._algorithm.generates:
            return [shown]
        rows = config.algorithm.get("minibatch", 0) or config.rollout.prompts * samples
        warms = context.warm_start is not None and config.warm_start.steps and not context.path
        return [one.update_pass(rows, samples, prompt), *([shown] if warms else [])]

    # rollout.slots=-1

    def slots(self) -> SlotBudget:
        """How many sequences have room at a time where the run generates."""
        rollout, role = self._config.rollout, self._generates
        samples = rollout.samples + rollout.extra_samples
        work = Workload(
            self._prompt_length, rollout.max_response_length, rollout.prompts * samples, samples
        )
        if not self._usable:
            return SlotBudget(0, work.sequences)
        beside, memory = sum(map(self._kept, self._together(role))), self._role(role).memory
        if role != ROLLOUT:  # its parameters are back by then
            beside += memory.fetched_from_host(update=False, offload=self._contexts[role].offload)
        found = fitting(memory, work, beside, self._usable)
        kept_dtype = self._contexts[role].cache_dtype
        return dataclasses.replace(found, cache_dtype=INT8 if kept_dtype == INT8 else AUTO_DTYPE)

    # Before a run

    def check(self, devices: Sequence[Any]) -> None:
        """Raise ConfigError where a run's sizes need more memory than its devices have.

        A lower bound, of what stays: what it refuses cannot run. What passes may still not fit,
        since programs need memory of their own; the dry run tells theirs.

        Args:
          devices: all of the run's.
        """
        config, rollout, generates = self._config, self._config.rollout, self._algorithm.generates
        rows = rollout.prompts * rollout.samples if generates else config.warm_start.batch
        work = Workload(self._prompt_length, rollout.max_response_length, rows, rollout.samples)
        sets = self._plan.placement
        weights = [sum(self._kept(r) for r in members if r in self._contexts) for members in sets]
        caches = [
            self._cache(work) if generates and self._generates in members else 0.0
            for members in sets
        ]
        if self._platform != "cpu":
            has, have = "a device has {} for programs", min(map(device_memory, devices))
            for kept, cache in zip(weights, caches, strict=True):
                _compare(kept, cache, has, have, work)
            return
        if on_cluster(config) and config.cluster.address not in ("", "local"):
            return  # of hosts that are not this one
        counts, batch = self._plan.allocation, _TOKEN_BYTES * rows * work.length
        models = sum(n * kept for n, kept in zip(counts, weights, strict=True))
        sequences = batch + sum(n * cache for n, cache in zip(counts, caches, strict=True))
        _compare(models, sequences, "this machine has {} left", free_bytes(devices[0]), work)

    def _cache(self, work: Workload) -> float:
        """Bytes of a device for the keys and values of the sequences generated at a time."""
        if self._generates not in self._contexts:
            return 0.0
        memory, slots = self._role(self._generates).memory, self._contexts[self._generates].slots
        at_once = min(work.sequences, slots) if slots > 0 else work.sequences
        groups = at_once / work.samples / _parts(memory)
        return memory.cache(groups, work.prompt_length + work.samples * work.response_length)


def _parts(memory: MemoryEstimate) -> int:
    """Replicas that generate."""
    mesh = memory.mesh
    return mesh.devices // (mesh.generate_pipe * mesh.generate_tensor)


def fitting(memory: MemoryEstimate, work: Workload, beside: float, usable: float) -> SlotBudget:
    """As many sequences at a time as have room.

    Args:
      memory: of the model that generates.
      work: of a step.
      beside: bytes of a device that other things keep.
      usable: bytes of a device that programs may take.
    """
    each, parts = memory.mesh.generate_pipe, _parts(memory)
    most = work.sequences // work.samples // parts
    usable -= beside

    def entering(groups: int) -> DecodeBatch:
        return DecodeBatch(groups, work.samples, slots=True, refills=groups < most)

    # With stages as many for each of the micro-batches that take turns.
    step = math.lcm(_ROUND, each)
    fewer = [n for n in range(each, most, each) if n <= _ROUND * each or n % step == 0]
    tried = [most, *reversed(fewer)]
    fits = (n for n in tried if memory.generation(entering(n), work) <= usable)
    groups = next(fits, tried[-1])
    chosen = entering(groups)
    cache = memory.slot_cache(chosen, work)
    others = memory.generation(chosen, work) - cache
    slots = groups * work.samples * parts if groups < most else 0
    reading = round(memory.slot_prefill(chosen, work))
    return SlotBudget(slots, work.sequences, round(cache), reading, max(round(usable - others), 0))


def _compare(weights: float, sequences: float, has: str, have: int, work: Workload) -> None:
    if not have or weights + sequences <= have:
        return
    raise ConfigError(
        f"weights with their optimizers take {size(weights)} at the least, {work.sequences} "
        f"sequences of {work.length} tokens {size(sequences)}, and {has.format(size(have))}; use "
        "smaller models (model.hidden_size, model.layers), fewer or shorter sequences "
        "(rollout.prompts, rollout.samples, rollout.max_response_length), or more memory"
    )


def trains(worker: Any) -> bool:
    """Whether a role's worker has updates of a model that hjax builds."""
    return isinstance(worker, type) and issubclass(worker, TrainableWorker)
