"""What the search is given and what it returns: plain frozen records, no model and no device.

Sizes are elements or bytes as named, times seconds, rates per second. Callers above (models,
launch) fill them in; nothing here knows how.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from hjax.devices import Device
from hjax.roles import STAGES

# What of a role waits in the host's memory between its calls.
Offload = Literal["none", "optimizer", "all"]


def between(points: Sequence[tuple[int, float]], at: int) -> float:
    """Of values above 0 at growing numbers the one at another, on logarithmic scales; before and
    after all of them the first and the last; of none 0."""
    below = [(n, value) for n, value in points if n <= at]
    above = [(n, value) for n, value in points if n >= at]
    if not (below and above):
        return below[-1][1] if below else above[0][1] if above else 0.0
    (low, first), (high, last) = below[-1], above[0]
    if low == high or not first:
        return last
    return first * (last / first) ** (math.log(at / low) / math.log(high / low))


@dataclasses.dataclass(frozen=True)
class Pool:
    """Equal machines: ``hosts`` of ``per_host`` devices, or slices of one torus shape.

    Attributes:
      hosts: in all.
      shape: sides of a slice, and devices of a chip where they are several; empty for machines
        of GPUs.
      counts: numbers of devices that a set may take; empty: all that the hardware allows.
      where: labels that its hosts have on a cluster that is there.
      slices: of that shape, which the network joins; of machines of GPUs 1.
    """

    device: Device
    hosts: int
    per_host: int
    shape: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    where: tuple[tuple[str, str], ...] = ()
    slices: int = 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.hosts * self.per_host

    @property
    def shares_cores(self) -> bool:
        """Whether the devices are simulated and compete for the cores of one machine."""
        return bool(self.device.alone)

    def faster(self, devices: int) -> float:
        """How many times faster each of so many devices is than with all of them busy.

        Of numbers between those measured, all together do what lies between, on logarithmic scales:
        as many as there are cores keep these busy, and more of them share what they do.
        """
        together = [(n, n * f) for n, f, _ in self.device.alone]
        least = min((n for n, _ in together), default=devices)
        return between(together, devices) / max(devices, least) if together else 1.0

    def load(self, devices: int) -> float:
        """Share of the cores' time that so many busy devices take; 0 where none are shared."""
        return between([(n, c) for n, _, c in self.device.alone], devices)

    @property
    def domain(self) -> int:
        """Devices that reach each other over ``device.link``: a host's, or a slice's."""
        return self.size // self.slices if self.shape else self.per_host

    @property
    def name(self) -> str:
        """As ``--cluster`` takes it."""
        if self.shape:
            chips = self.shape[: self.device.torus]
            many = f"{self.slices}x" if self.slices > 1 else ""
            return f"{many}{self.device.name}:{'x'.join(map(str, chips))}"
        return f"{self.hosts}x{self.per_host}:{self.device.name}"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The devices at hand; a set of models lies within one pool."""

    pools: tuple[Pool, ...]

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(pool.size for pool in self.pools)

    @property
    def name(self) -> str:
        """As ``--cluster`` takes it."""
        return "+".join(pool.name for pool in self.pools)


@dataclasses.dataclass(frozen=True)
class ModelCounts:
    """What a model's shape says about its costs (hjax.models.arithmetic makes it).

    Attributes:
      parameters: of the whole model, a scalar head's bias left out.
      layer_parameters: of one layer; ``layer_active``: those that one token uses (fewer with
        experts); ``layer_expert``: those in experts.
      head_parameters: those that the head multiplies a token with: hidden x vocab, or hidden for a
        scalar head.
      attention_width: heads x head_dim: scores and their values cost 4 x width FLOPs per pair of
        token and context token.
      cache_elements: keys and values per token and layer.
      layer_activations: elements per token and layer that a backward pass reads if nothing is
        rematerialised; ``layer_activations_whole``: of them those that no tensor axis splits.
      frozen: of ``parameters`` those that no update changes, because adapters learn beside them;
        ``bytes_each``: those of them that are kept in one byte.
      remade: of ``layer_activations`` those that a backward pass makes again although nothing is
        rematerialised.
      layer_gates: of them those that an MLP's first products give.
      layer_products, layer_products_whole: those of a layer's other products, of them those that
        are not split over tensor.
      by_cudnn: whether cuDNN's attention takes its layers, in 16 bits.
      layer_gradients: elements per token beside the activations of the layer that a backward pass
        is at; ``layer_gradients_whole``: of them those that no tensor axis splits.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    experts: int
    experts_per_token: int
    parameters: int
    layer_parameters: int
    layer_active: int
    layer_expert: int
    head_parameters: int
    attention_width: int
    cache_elements: int
    layer_activations: int
    layer_activations_whole: int
    frozen: int = 0
    bytes_each: int = 0
    remade: int = 0
    layer_gates: int = 0
    layer_products: int = 0
    layer_products_whole: int = 0
    layer_gradients: int = 0
    layer_gradients_whole: int = 0
    by_cudnn: bool = False

    @property
    def scalar(self) -> bool:
        """Whether its head gives one number."""
        return self.head_parameters == self.hidden

    @property
    def learning(self) -> float:
        """Share of the parameters that updates change."""
        return 1 - self.frozen / self.parameters

    @property
    def active(self) -> int:
        """Those that multiply a token in a forward pass, its head included."""
        return self.layers * self.layer_active + self.head_parameters


@dataclasses.dataclass(frozen=True)
class PlannedCall:
    """One call of a step, as the algorithm makes it.

    Attributes:
      role, method: whose and which.
      kind: ``generate``, ``forward`` or ``update``.
      rows: sequences, as a share of the step's.
    """

    role: str
    method: str
    kind: Literal["generate", "forward", "update"]
    rows: float


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """An algorithm's step: its roles with devices and the calls on them, in order."""

    name: str
    roles: tuple[str, ...]
    calls: tuple[PlannedCall, ...]

    def of(self, role: str, kind: str) -> tuple[PlannedCall, ...]:
        """A role's calls of one kind."""
        return tuple(c for c in self.calls if c.role == role and c.kind == kind)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a step processes.

    Attributes:
      prompt_length, response_length: tokens; every response has the full length.
      sequences: prompts x samples of a step.
      samples: responses per prompt.
    """

    prompt_length: int
    response_length: int
    sequences: int
    samples: int = 1

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_length + self.response_length

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of a step."""
        return self.sequences * self.length

    def row_tokens(self, shared_prompt: bool, rows: int = 0) -> float:
        """Tokens per sequence that a pass computes: a shared prompt's once per group, of which
        ``rows`` of a pass may hold a part (0: groups are whole)."""
        return self.prompt_length / self.share(shared_prompt, rows) + self.response_length

    def share(self, shared_prompt: bool, rows: int = 0) -> int:
        """Rows per copy of a prompt in passes of so many rows (0: groups are whole)."""
        return math.gcd(rows, self.samples) if shared_prompt else 1


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Bytes per element of what a run keeps.

    Attributes:
      weights: resident, of every model.
      optimizer: per parameter of a trained model, beside the weights (moments, masters).
      gradients: while an update runs.
      compute: what forward, generation and their collectives use.
      cache: of the KV cache.
      shared_prompt: the prompt is computed and cached once per group of samples.
      whole_scores: places of a row up to which attention scores stand in memory, float32, while a
        layer computes; longer rows' stay on the chip. 0: they always do.
      adds_gradients: those of a micro-batch stand beside their sum.
      forward_tokens: most tokens per device and forward pass; 0: a forward's passes have as many
        rows as an update's.
      prompt_copies: of the prompts' KV cache, prefill's and the decode loop's own.
      bucket: of a transition, bytes received at a time.
      in_place: the generation copy takes the weights' place (same dtype), else it stands beside.
      own: as hjax's own programs do: sequences that have no room wait for a slot of the rollout
        engine, a pipeline's stages run forward again in a backward pass, a TPU's weights may travel
        along the tensor axis.
    """

    weights: float = 2
    optimizer: float = 12
    gradients: float = 4
    compute: float = 2
    cache: float = 2
    dtype: str = "bfloat16"
    shared_prompt: bool = False
    whole_scores: int = 0
    adds_gradients: bool = False
    forward_tokens: int = 16384
    prompt_copies: int = 1
    bucket: float = 2**24
    in_place: bool = True
    own: bool = False


# The paper's: BF16 weights, FP32 gradients, Adam's moments and masters (section 8.1).
MIXED = Numerics()
# hjax's on accelerators: FP32 weights and moments, a BF16 generation copy.
MASTERS = Numerics(
    weights=4,
    optimizer=8,
    shared_prompt=True,
    whole_scores=512,
    adds_gradients=True,
    prompt_copies=2,
    forward_tokens=0,
    in_place=False,
    own=True,
)
# hjax's on CPUs.
FLOAT32 = dataclasses.replace(MASTERS, compute=4, cache=4, dtype="float32", in_place=True)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Sizes of a role's mesh axes; ``data`` follows from the devices.

    ``generate_pipe`` and ``generate_tensor`` are the paper's p_g and t_g; 0 for roles that do not
    generate.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    pipe: int = 1
    tensor: int = 1
    generate_pipe: int = 0
    generate_tensor: int = 0

    @property
    def devices(self) -> int:
        """Their product."""
        return self.replicas * self.context * self.pipe * self.tensor

    @property
    def replicas(self) -> int:
        """Over how many parts a training batch is split."""
        return self.data * self.fsdp * self.expert

    def stride(self, axis: str) -> int:
        """Distance in ranks of neighbours along an axis (hjax.sharding.layout.MESH_AXES)."""
        order = ("data", "fsdp", "expert", "context", "pipe", "tensor")
        return math.prod(getattr(self, a) for a in order[order.index(axis) + 1 :])

    def train_axes(self) -> dict[str, int]:
        """Mesh axes above 1 as ``layout.<role>.train`` takes them."""
        axes = ("data", "fsdp", "expert", "context", "pipe", "tensor")
        sizes = {a: getattr(self, a) for a in axes if getattr(self, a) > 1}
        return sizes or {"data": 1}

    def generate_axes(self) -> dict[str, int]:
        """As ``layout.<role>.generate`` takes them."""
        return {"pipe": self.generate_pipe, "tensor": self.generate_tensor}


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to run a role on some devices.

    Attributes:
      seconds: of each of ``STAGES``, the transition in the first.
      transition: seconds of it.
      resident: bytes per device for as long as the run lasts.
      transients: most bytes per device beside them while the role computes, of each stage.
      micro_rows: rows per replica and pass of an update or, in hjax, a forward; an update's
        gradients accumulate. 0: the role has neither.
      remat: which activations are computed again in the backward pass (hjax.models.remat).
      waves: parts in which a replica decodes its sequences, one after another; 0 for roles that
        do not generate.
      offload: what waits in the host's memory between the role's calls.
      learning: bytes per device beside the resident ones that stay for as long as roles of its set
        learn, whichever: what an update brings back from the host.
    """

    mesh: Mesh
    seconds: tuple[float, float, float]
    transition: float
    resident: float
    transients: tuple[float, float, float]
    micro_rows: int = 0
    remat: str = "none"
    waves: int = 0
    offload: Offload = "none"
    learning: float = 0.0

    @property
    def transient(self) -> float:
        """Most bytes per device beside the resident ones while only this role computes."""
        *before, update = self.transients
        return max(*before, update + self.learning)


@dataclasses.dataclass(frozen=True)
class PlannedSet:
    """Roles that take turns on some devices of a pool, each by its option."""

    roles: tuple[str, ...]
    pool: Pool
    devices: int
    options: tuple[Option, ...]

    @property
    def seconds(self) -> tuple[float, ...]:
        """Per stage: the models of a set add up."""
        return tuple(sum(o.seconds[s] for o in self.options) for s in range(len(STAGES)))

    @property
    def peak_bytes(self) -> float:
        """Most bytes per device: all that is resident, and the largest transient; while roles learn
        what all of them brought back as well."""
        return sum(o.resident for o in self.options) + max(
            *(max(o.transients[:2]) for o in self.options),
            self.learning_bytes + max(o.transients[2] for o in self.options),
        )

    @property
    def learning_bytes(self) -> float:
        """Bytes per device that roles which learn bring back from the host and keep until all of
        them are done."""
        return sum(o.learning for o in self.options)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that the search weighs: placement, allocation, an option per role, and what a step of
    it costs. What a run takes of it is ``hjax.run.placement.Plan``."""

    sets: tuple[PlannedSet, ...]

    @property
    def stages(self) -> tuple[float, ...]:
        """Seconds per stage: sets run at the same time, as long as the slowest takes; where they
        share cores, at least as long as these take for all of them."""
        found = []
        for stage in range(len(STAGES)):
            cores: dict[Pool, float] = {}
            for s in self.sets:
                work = s.seconds[stage] * s.pool.load(s.devices)
                cores[s.pool] = cores.get(s.pool, 0.0) + work
            found.append(max(*(s.seconds[stage] for s in self.sets), *cores.values()))
        return tuple(found)

    @property
    def total(self) -> float:
        """Seconds of a step: stages add up."""
        return sum(self.stages)

    @property
    def devices(self) -> int:
        """How many it uses."""
        return sum(s.devices for s in self.sets)

    def option(self, role: str) -> Option:
        """A role's."""
        return next(o for s in self.sets for r, o in zip(s.roles, s.options) if r == role)
