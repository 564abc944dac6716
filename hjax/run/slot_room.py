"""``rollout.slots=-1``: as many sequences at a time as a device's memory has room for.

By an estimate, as ``model.remat=auto`` is chosen (``hjax.run.rematerialise``): it needs neither
devices nor a compiler, so that a run and its dry run choose alike, and the programs' own figures
stand beside it there. What has no room waits for a slot; nothing is cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from hjax.controller import Build
from hjax.kernels.int8_cache import AUTO as AUTO_DTYPE
from hjax.kernels.int8_cache import INT8
from hjax.models.counts import Workload
from hjax.roles import ROLLOUT, Role
from hjax.run.placement import Plan
from hjax.sharding.layout import RoleLayouts, fitted
from hjax.show.format import size
from hjax.workers.memory import USABLE, Decoded, Memory, RoleMemory

AUTO = -1
# Of groups that enter together many enough that fewer programs are worth it.
_ROUND = 8


@dataclasses.dataclass(frozen=True)
class SlotRoom:
    """How many sequences are generated at a time, and why.

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
        return {
            "slots": self.slots,
            "why": self.why,
            "cache_bytes": self.cache_bytes,
            "reading_bytes": self.reading_bytes,
            "usable_bytes": self.usable_bytes,
        }


def fitting(memory: Memory, work: Workload, beside: float, usable: float) -> SlotRoom:
    """As many sequences at a time as have room.

    Args:
      memory: of the model that generates.
      work: of a step.
      beside: bytes of a device that other things keep.
      usable: bytes of a device that programs may take.
    """
    mesh = memory.mesh
    each = mesh.generate_pipe
    parts = mesh.devices // (each * mesh.generate_tensor)
    most = work.sequences // work.samples // parts
    usable -= beside

    def entering(groups: int) -> Decoded:
        return Decoded(groups, work.samples, slots=True, refills=groups < most)

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
    reading = round(memory.slot_reading(chosen, work))
    return SlotRoom(slots, work.sequences, round(cache), reading, max(round(usable - others), 0))


def role_memory(
    role: str, build: Build, entry: Role, layouts: RoleLayouts, tpu: bool
) -> Memory:
    """Of a role with a model that is described.

    Args:
      role: its name.
      build, entry, layouts: as of ``hjax.run.roles.Roles``.
      tpu: the devices are TPUs.
    """
    context = build.arguments[0]
    train = fitted(layouts.train, context.model.dimensions, f"layout.{role}.train")
    return RoleMemory.described(context, entry.scalar, train, tpu).memory


def room(
    config: ConfigDict,
    table: Mapping[str, Role],
    builds: Mapping[str, Build],
    layouts: Mapping[str, RoleLayouts],
    plan: Plan,
    prompt_length: int,
    tpu: bool,
    device_bytes: int,
) -> SlotRoom:
    """How many sequences have room at a time where a run generates.

    Args:
      config: the run's.
      table, builds, layouts, plan: as of ``hjax.run.roles.Roles``.
      prompt_length: tokens.
      tpu: the devices are TPUs.
      device_bytes: of memory that programs may use; 0: not known.
    """
    rollout = config.rollout
    samples = rollout.samples + rollout.surplus
    work = Workload(
        prompt_length, rollout.max_response_length, rollout.prompts * samples, samples
    )
    if not device_bytes:
        return SlotRoom(0, work.sequences)
    generates = ROLLOUT if ROLLOUT in layouts else "actor"
    (members,) = [members for members in plan.placement if generates in members]

    kept = {
        role: role_memory(role, builds[role], table[role], layouts[role], tpu)
        for role in members
        if builds[role].arguments[0].model is not None
    }
    beside, generating = 0.0, kept[generates]
    for role, memory in kept.items():
        offload = builds[role].arguments[0].offload
        if role == ROLLOUT:
            # It has nothing but what it generates by, for a while in two versions.
            beside += memory.generation_copy()
            continue
        beside += memory.resident(table[role].trained, offload)
        if role == generates:  # its parameters are back by then
            beside += memory.fetched(update=False, offload=offload)
    found = fitting(generating, work, beside, USABLE * device_bytes)
    kept_dtype = builds[generates].arguments[0].cache_dtype
    return dataclasses.replace(found, cache_dtype=INT8 if kept_dtype == INT8 else AUTO_DTYPE)
