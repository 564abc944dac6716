"""Memory budget: device memory checks from estimates (``hjax.workers.memory``), to avoid OOM.

The estimates need neither devices nor a compiler, so a run and its dry run decide alike. They
decide three things: whether a run fits at all, before anything is allocated; with
``model.remat=auto`` each trained role's remat policy; and with ``rollout.slots=-1`` how many
sequences are generated at a time (further ones queue for a slot).
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
from hjax.sharding.layout import fit_layout
from hjax.show.format import size
from hjax.workers import TrainableWorker
from hjax.workers.memory import USABLE_FRACTION, DecodeBatch, MemoryEstimate, MemoryPass, RoleMemory

AUTO, AUTO_SLOTS = "auto", -1
# Slot counts are rounded to this many groups, so that fewer programs are compiled.
_GROUP_MULTIPLE = 8
# Per token of a step's batch: id, mask, log-probs, advantages and old log-probs.
_TOKEN_BYTES = 4 + 1 + 3 * 4


@dataclasses.dataclass(frozen=True)
class RematChoice:
    """The remat policy that ``model.remat=auto`` chose for a role, and why.

    Attributes:
      policy: of ``hjax.models.remat``.
      estimated_bytes: by policy that was tried, a device's memory while the role is updated,
        including what other roles of its set keep there.
      usable_bytes: budget of the device; 0: unknown.
      reason: why nothing was estimated; empty if it was.
    """

    policy: str
    estimated_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    usable_bytes: int = 0
    reason: str = ""

    @property
    def why(self) -> str:
        """The explanation, in a line."""
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
        """``policy``, ``why`` and, if estimated, ``estimated_bytes`` and ``usable_bytes``."""
        found = {"policy": self.policy, "why": self.why.removeprefix(f"{self.policy}: ")}
        if self.reason:
            return found
        needed = self.estimated_bytes[self.policy]
        return {**found, "estimated_bytes": needed, "usable_bytes": self.usable_bytes}


def choose_remat(needed: Mapping[str, float], usable: int) -> RematChoice:
    """Choose the first remat policy that fits, or else the last.

    Args:
      needed: bytes by policy, in order of preference.
      usable: budget in bytes.
    """
    tried: dict[str, int] = {}
    for policy, bytes_ in needed.items():
        tried[policy] = round(bytes_)
        if bytes_ <= usable:
            break
    return RematChoice(policy, tried, usable)


@dataclasses.dataclass(frozen=True)
class SlotBudget:
    """The number of slots that ``rollout.slots=-1`` chose from the KV-cache budget, and why.

    Attributes:
      slots: value of the key; 0: all sequences of a step at once.
      sequences: of a step.
      cache_bytes: KV cache per device; 0: not estimated.
      reading_bytes: further bytes per device during prefill.
      usable_bytes: budget of generation per device, besides what stays in memory.
      cache_dtype: of the KV cache.
    """

    slots: int
    sequences: int
    cache_bytes: int = 0
    reading_bytes: int = 0
    usable_bytes: int = 0
    cache_dtype: str = AUTO_DTYPE

    @property
    def why(self) -> str:
        """The explanation, in a line."""
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
    """Memory estimates of a run's roles.

    Args:
      config: of the run.
      algorithm: its class.
      roles: described ``hjax.run.role_groups.RoleGroups``; they need not be started.
      prompt_length: tokens.
      platform: of the devices.
      memory: bytes of a device that programs may use; 0: unknown.
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
        self._generates = roles.generating_role

    def _role(self, role: str) -> RoleMemory:
        if role not in self._known:
            context, tpu = self._contexts[role], self._platform in collective_matmul.PLATFORMS
            layout, what = self._layouts[role].train, f"layout.{role}.train"
            train = fit_layout(layout, context.model.dimensions, what)
            scalar = self._table[role].scalar
            self._known[role] = RoleMemory.from_context(context, scalar, train, tpu)
        return self._known[role]

    def _resident_bytes(self, role: str) -> float:
        """Bytes per device that a role keeps between its calls."""
        memory = self._role(role).memory
        if role == ROLLOUT:  # only generation weights, of two versions during a weight sync
            return memory.generation_copy()
        return memory.resident(self._table[role].trained, self._contexts[role].offload)

    def _colocated_roles(self, role: str) -> list[str]:
        """All roles with a model that share a role's devices, itself included."""
        [members] = [members for members in self._plan.placement if role in members]
        return [member for member in members if member in self._contexts]

    def remat(self) -> dict[str, RematChoice]:
        """Remat choices of trained roles whose model hjax builds, unless the plan fixes them."""
        return {
            role: self._remat(role)
            for members in self._plan.placement
            for role in members
            if role in self._contexts and "remat" not in self._plan.settings.get(role, {})
            if is_trainable(self._workers[role])
        }

    def _remat(self, role: str) -> RematChoice:
        if self._platform == "cpu" and self._contexts[role].compute.unroll_layers:
            return RematChoice(remat.NONE, reason="a CPU's compiler undoes it for unrolled layers")
        if not self._usable:
            why = "the devices do not say how much memory they have"
            return RematChoice(remat.NONE, reason=why)
        roles, memory = self._colocated_roles(role), self._role(role).memory
        in_use = sum(self._resident_during_update(other, role) for other in roles)
        updates = self._updates(role)
        # On a CPU there is no other memory to offload to.
        policies = remat.POLICIES if self._platform != "cpu" else remat.POLICIES[:-1]
        needed = {p: in_use + max(memory.update(one, p) for one in updates) for p in policies}
        return choose_remat(needed, int(self._usable))

    def _resident_during_update(self, role: str, updated: str) -> float:
        """Bytes per device that ``role`` keeps during updates of ``updated``.

        Trained roles alternate, so their parameters and moments stay until all are done.
        """
        trained = self._table[role].trained
        if not trained and self._contexts[role].offload == "all" and role != updated:
            return 0.0
        return self._role(role).memory.resident(trained)

    def _updates(self, role: str) -> list[MemoryPass]:
        config, context, prompt = self._config, self._contexts[role], self._prompt_length
        role_memory, samples = self._role(role), config.rollout.samples
        warm_start_pass = role_memory.update_pass(config.warm_start.batch, 1, prompt)
        if not self._algorithm.generates:
            return [warm_start_pass]
        rows = config.algorithm.get("minibatch", 0) or config.rollout.prompts * samples
        warms = context.warm_start is not None and config.warm_start.steps and not context.path
        update_pass = role_memory.update_pass(rows, samples, prompt)
        return [update_pass, warm_start_pass] if warms else [update_pass]

    def slots(self) -> SlotBudget:
        """The number of slots that fit where the run generates."""
        rollout, role = self._config.rollout, self._generates
        samples = rollout.samples + rollout.extra_samples
        work = Workload(
            self._prompt_length, rollout.max_response_length, rollout.prompts * samples, samples
        )
        if not self._usable:
            return SlotBudget(0, work.sequences)
        in_use = sum(map(self._resident_bytes, self._colocated_roles(role)))
        memory = self._role(role).memory
        if role != ROLLOUT:  # offloaded parameters of the actor are on the device by then
            in_use += memory.fetched_from_host(update=False, offload=self._contexts[role].offload)
        found = fit_slots(memory, work, in_use, self._usable)
        kept_dtype = self._contexts[role].cache_dtype
        return dataclasses.replace(found, cache_dtype=INT8 if kept_dtype == INT8 else AUTO_DTYPE)

    def check(self, devices: Sequence[Any]) -> None:
        """Raise ConfigError if a run needs more memory than its devices have.

        It is a lower bound of what stays in memory: what it rejects cannot run. What passes may
        still be out of memory, because programs need memory too; the dry run reports theirs.

        Args:
          devices: all of the run's.
        """
        config, rollout, generates = self._config, self._config.rollout, self._algorithm.generates
        rows = rollout.prompts * rollout.samples if generates else config.warm_start.batch
        work = Workload(self._prompt_length, rollout.max_response_length, rows, rollout.samples)
        sets = self._plan.placement
        modelled = [[role for role in members if role in self._contexts] for members in sets]
        weights = [sum(map(self._resident_bytes, members)) for members in modelled]
        caches = [
            self._cache(work) if generates and self._generates in members else 0.0
            for members in sets
        ]
        if self._platform != "cpu":
            has, have = "a device has {} for programs", min(map(device_memory, devices))
            for kept, cache in zip(weights, caches, strict=True):
                _check_fits(kept, cache, has, have, work)
            return
        if on_cluster(config) and config.cluster.address not in ("", "local"):
            return  # the memory of other hosts is unknown here
        counts, batch = self._plan.allocation, _TOKEN_BYTES * rows * work.length
        models = sum(n * kept for n, kept in zip(counts, weights, strict=True))
        sequences = batch + sum(n * cache for n, cache in zip(counts, caches, strict=True))
        _check_fits(models, sequences, "this machine has {} left", free_bytes(devices[0]), work)

    def _cache(self, work: Workload) -> float:
        """KV-cache bytes per device of the sequences that are generated at a time."""
        if self._generates not in self._contexts:
            return 0.0
        memory, slots = self._role(self._generates).memory, self._contexts[self._generates].slots
        at_once = min(work.sequences, slots) if slots > 0 else work.sequences
        groups = at_once / work.samples / memory.mesh.generation_replicas
        return memory.cache(groups, work.prompt_length + work.samples * work.response_length)


def fit_slots(memory: MemoryEstimate, work: Workload, in_use: float, usable: float) -> SlotBudget:
    """The largest number of slots whose KV cache and decoding fit into memory.

    Args:
      memory: estimate of the model that generates.
      work: of a step.
      in_use: bytes per device that are in use already.
      usable: bytes per device that programs may use.
    """
    each, parts = memory.mesh.generate_pipe, memory.mesh.generation_replicas
    most = work.sequences // work.samples // parts
    usable -= in_use

    def entering(groups: int) -> DecodeBatch:
        return DecodeBatch(groups, work.samples, slots=True, refills=groups < most)

    # With pipeline stages a multiple of the stages, for equal micro-batches.
    step = math.lcm(_GROUP_MULTIPLE, each)
    fewer = [n for n in range(each, most, each) if n <= _GROUP_MULTIPLE * each or n % step == 0]
    tried = [most, *reversed(fewer)]
    fits = (n for n in tried if memory.generation(entering(n), work) <= usable)
    groups = next(fits, tried[-1])
    chosen = entering(groups)
    cache = memory.slot_cache(chosen, work)
    others = memory.generation(chosen, work) - cache
    slots = groups * work.samples * parts if groups < most else 0
    reading = round(memory.slot_prefill(chosen, work))
    return SlotBudget(slots, work.sequences, round(cache), reading, max(round(usable - others), 0))


def _check_fits(weights: float, sequences: float, has: str, have: int, work: Workload) -> None:
    if not have or weights + sequences <= have:
        return
    raise ConfigError(
        f"weights with their optimizers take {size(weights)} at the least, {work.sequences} "
        f"sequences of {work.length} tokens {size(sequences)}, and {has.format(size(have))}; use "
        "smaller models (model.hidden_size, model.layers), fewer or shorter sequences "
        "(rollout.prompts, rollout.samples, rollout.max_response_length), or more memory"
    )


def is_trainable(worker: Any) -> bool:
    """Whether a role's worker trains a model that hjax builds."""
    return isinstance(worker, type) and issubclass(worker, TrainableWorker)
