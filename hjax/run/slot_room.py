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

import numpy as np
from ml_collections import ConfigDict

from hjax.controller import Build
from hjax.kernels.int8_cache import AUTO as AUTO_DTYPE
from hjax.kernels.int8_cache import INT8, element_bytes
from hjax.models import arithmetic
from hjax.models.config import ModelConfig
from hjax.models.parameters import decoder_network, scalar_network
from hjax.roles import ROLLOUT, Role
from hjax.rollout.beginnings import READING, SHARED, SHORT
from hjax.rollout.engine import STEPS
from hjax.run.placement import Plan
from hjax.run.rematerialise import USABLE
from hjax.sharding.layout import Layout, RoleLayouts, fitted
from hjax.show.format import size
from hjax.workers import WorkerContext
from hjax.workers.update_memory import Updates

AUTO = -1
# Of groups that enter together many enough that fewer programs are worth it.
_ROUND = 8
# float32 arrays of the vocabulary's size that a row's draw makes.
_DRAWN = 4


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


def kept(
    context: WorkerContext, scalar: bool, trained: bool, layout: Layout, away: bool
) -> float:
    """Bytes of a device that a role keeps while another, or it itself, generates.

    Args:
      context, scalar, trained, layout: of the role, the layout its train layout, as the worker has
        it.
      away: whether what is offloaded while it is idle is gone: it is another that generates.
    """
    assert context.model is not None
    if context.offload == "all" and away:
        return 0.0
    network = (scalar_network if scalar else decoder_network)(context.model)
    dtype = np.dtype(context.compute.dtype)
    network = network.frozen_in(dtype) if context.path else network
    held = Updates(
        network, scalar, layout, dtype, 1, 1, 1, 1, optimizer=context.optimizer
    )
    return held.kept(trained and context.offload == "none")


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What is generated in a step.

    Attributes:
      model, dtype: of which, and in which it computes.
      kept: dtype of keys and values; None: int8.
      layout: the generate layout, as the worker has it.
      prompts, samples: how many, and answers to each.
      prompt, response: tokens of each, at most.
    """

    model: ModelConfig
    dtype: np.dtype
    kept: np.dtype | None
    layout: Layout
    prompts: int
    samples: int
    prompt: int
    response: int

    @property
    def weights(self) -> float:
        """Bytes of a device's parameters as generation reads them."""
        model, element = self.model, self.dtype.itemsize
        layer, experts = arithmetic.layer_parameters(model), arithmetic.expert_parameters(model)
        others = arithmetic.parameters(model) - model.layers * layer
        held = layer - experts + experts / self.layout.ways("experts")
        of_layers = held * model.layers / self.layout.ways("layers")
        return (others + of_layers) * element / self.layout.ways("heads")

    def cache_bytes(self, groups: int, refills: bool) -> int:
        """Keys and values of so many prompts of a device and their answers.

        Args:
          groups: prompts of a data-parallel part.
          refills: whether others follow them.
        """
        own = self.response + (4 * STEPS if refills else 0)
        return groups * (self.prompt + self.samples * own) * self._token

    @property
    def blocks(self) -> int:
        """Keys and values that a device keeps of what prompts share, and of one that is read."""
        whole = self.prompt <= SHORT or self.layout.ways("layers") > 1
        return 0 if whole else (SHARED + 1) * self.prompt * self._token

    @property
    def reading(self) -> float:
        """What reads as many tokens of prompts as are read at a time takes of a device: a layer's
        activations, and their keys and values before they are put beside the others."""
        model, split = self.model, self.layout.ways("heads")
        every, whole = arithmetic.activation_elements(model)
        most = self.prompts // self.layout.ways("batch")
        tokens = min(max(READING, self.prompt), most * self.prompt)
        each = self.dtype.itemsize * ((every - whole) / split + whole)
        return tokens * (each + self._token)

    @property
    def _token(self) -> int:
        """Bytes of a device for a token's keys and values."""
        model = self.model
        heads = model.kv_heads // self.layout.ways("kv_heads")
        layers = model.layers // self.layout.ways("layers")
        element = element_bytes(self.kept, model.head_dim)
        return round(2 * layers * heads * model.head_dim * element)

    def room(self, beside: float, memory: int) -> SlotRoom:
        """How many sequences at a time.

        Args:
          beside: bytes of a device that other things keep.
          memory: bytes of a device that programs may use; 0: not known.
        """
        parts, rows = self.layout.ways("batch"), self.prompts * self.samples
        if not memory:
            return SlotRoom(0, rows)
        most = self.prompts // parts
        usable = USABLE * memory - beside - self.weights - self.reading - self.blocks
        drawn = self.samples * _DRAWN * 4 * self.model.vocab_size / self.layout.ways("vocab")
        groups = most
        if self.cache_bytes(most, False) + most * drawn > usable:
            # With stages as many for each of the micro-batches that take turns.
            each = self.layout.ways("layers")
            groups = max(int(usable // (self.cache_bytes(1, True) + drawn)), each)
            groups -= groups % (math.lcm(_ROUND, each) if groups > _ROUND * each else each)
        taken = self.cache_bytes(groups, groups < most)
        slots = groups * self.samples * parts if groups < most else 0
        kept = AUTO_DTYPE if self.kept is not None else INT8
        return SlotRoom(slots, rows, taken, round(self.reading), max(round(usable), 0), kept)


def room(
    config: ConfigDict,
    table: Mapping[str, Role],
    builds: Mapping[str, Build],
    layouts: Mapping[str, RoleLayouts],
    plan: Plan,
    prompt_length: int,
    memory: int,
) -> SlotRoom:
    """How many sequences have room at a time where a run generates.

    Args:
      config: the run's.
      table, builds, layouts, plan: as of ``hjax.run.roles.Roles``.
      prompt_length: tokens.
      memory: bytes of a device that programs may use; 0: not known.
    """
    generates = ROLLOUT if ROLLOUT in layouts else "actor"
    (members,) = [members for members in plan.placement if generates in members]
    context = builds[generates].arguments[0]
    dtype = np.dtype(context.compute.dtype)
    what = f"layout.{generates}.generate"
    layout = fitted(layouts[generates].generate, context.model.dimensions, what)
    rollouts = Rollouts(
        context.model,
        dtype,
        None if context.cache_dtype == INT8 else dtype,
        layout,
        config.rollout.prompts,
        config.rollout.samples + config.rollout.surplus,
        prompt_length,
        config.rollout.max_response_length,
    )
    # A rollout apart has nothing but what it generates by, for a while in two versions.
    beside = rollouts.weights if generates == ROLLOUT else 0.0
    for role in members:
        held = builds[role].arguments[0]
        if role != ROLLOUT and held.model is not None:
            entry, what = table[role], f"layout.{role}.train"
            train = fitted(layouts[role].train, held.model.dimensions, what)
            away = role != generates
            beside += kept(held, entry.scalar, entry.trained, train, away)
    return rollouts.room(beside, memory)
