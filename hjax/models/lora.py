"""LoRA, low-rank adapters (Hu et al. 2021, arXiv 2106.09685): settings and parameter specs.

A frozen matrix W of a layer gets a trainable addition ``scaling * A B`` of low rank. A and B are
parameters ``<name>_a`` and ``<name>_b``, whose specs are derived from W's. A product with W becomes
one with W plus two thin ones, so that no gradient of W's size is computed
(``hjax.models.lora_compute``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.errors import ConfigError
from hjax.models.parameter_spec import ParameterKind, ParameterSpec, StoredTensor

# LoRA targets: the parameters that hold each, and which half of a pair.
_TARGET_PLACES: dict[str, tuple[tuple[str, int | None], ...]] = {
    "q": (("q", None),),
    "k": (("kv", 0),),
    "v": (("kv", 1),),
    "o": (("o", None),),
    "gate": (("gate_up", 0),),
    "up": (("gate_up", 1), ("up", None)),
    "down": (("down", None),),
}
TARGETS = tuple(_TARGET_PLACES)
ALL = "all"


@dataclasses.dataclass(frozen=True)
class Lora:
    """LoRA settings of a decoder.

    Attributes:
      rank: of the adapters.
      alpha: adapters are scaled by ``alpha / rank``, or with ``rslora`` by ``alpha / sqrt(rank)``
        (Kalajdzievski 2023, arXiv 2312.03732).
      rslora: see ``alpha``.
      targets: matrices with adapters, of ``TARGETS``; those that a model lacks are ignored. An
        expert's gate and up share one adapter, as in PEFT.
      dropout: probability with which updates drop an adapter's inputs, see ``hjax.models.dropout``.
      dora: scale each output's weights, adapter included, to a trainable norm, its magnitude (DoRA;
        Liu et al. 2024, arXiv 2402.09353).
      key: name of the config section, for errors.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    rslora: bool = False
    dropout: float = 0.0
    dora: bool = False
    key: str = dataclasses.field(default="lora", compare=False)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(
                f"{self.key}.rank={self.rank}: 1 or more (0 in a config: no adapters)"
            )
        unknown = sorted(set(self.targets) - set(TARGETS))
        if unknown or not self.targets:
            raise _no_targets(self.key, unknown)

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], experts: bool, key: str = "lora"
    ) -> Lora | None:
        """From a config's section ``lora``; None: no adapters.

        Args:
          settings: the section.
          experts: whether the model has experts.
          key: name of the section.

        Raises:
          ConfigError: unknown targets.
        """
        if not settings["rank"]:
            return None
        return cls(
            rank=settings["rank"],
            alpha=settings["alpha"],
            targets=targets_of(tuple(settings["targets"]), experts, key),
            rslora=settings["rslora"],
            dropout=settings.get("dropout", 0.0),  # an older workdir has no such key
            dora=settings.get("dora", False),
            key=key,
        )

    @property
    def scaling(self) -> float:
        """The factor of ``A B``."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def targets_of(names: tuple[str, ...], experts: bool, key: str = "lora") -> tuple[str, ...]:
    """Targets in the order of ``TARGETS``, from names such as ``all``, ``q`` or ``q_proj``.

    Args:
      names: as in the config; ``all`` is every matrix except experts'.
      experts: whether the model has experts. Each has its own adapters, so they must be named.
      key: name of the config section.

    Raises:
      ConfigError: an unknown name.
    """
    attention = ("q", "k", "v", "o")
    # A command line gives several names in one string.
    short = {part.strip().removesuffix("_proj") for name in names for part in name.split(",")}
    if ALL in short:
        short |= set(attention if experts else TARGETS)
        short.discard(ALL)
    unknown = sorted(short - set(TARGETS))
    if unknown or not short:
        raise _no_targets(key, unknown)
    return tuple(name for name in TARGETS if name in short)


def _no_targets(key: str, unknown: Sequence[str]) -> ConfigError:
    said = ",".join(unknown) or "()"
    return ConfigError(f"{key}.targets={said}: {ALL}, or some of {', '.join(TARGETS)}")


def adapted_halves(lora: Lora, name: str, parameter: ParameterSpec) -> tuple[int | None, ...]:
    """The halves of a matrix's ``pair`` axis that have an adapter each; (None,): the matrix has one
    adapter; empty: none."""
    if parameter.kind is not ParameterKind.MATRIX:
        return ()
    places = [place for target in lora.targets for place in _TARGET_PLACES[target]]
    if "experts" in parameter.names:
        return (None,) if name in dict(places) else ()
    paired = "pair" in parameter.names
    return tuple(h for place, h in places if place == name and (h is not None) == paired)


def matrix_number(name: str, half: int | None) -> int:
    """The index in ``TARGETS`` of a matrix with an adapter."""
    return next(i for i, places in enumerate(_TARGET_PLACES.values()) if (name, half) in places)


def adapter_parameters(layers: Mapping[str, ParameterSpec], lora: Lora) -> dict[str, ParameterSpec]:
    """The LoRA parameters A and B of a layer's matrices, by name.

    ``<name>_a``: [layers, (halves,) inputs..., rank], drawn with PEFT's variance, 1 / (3 inputs).
    ``<name>_b``: [layers, (halves,) rank, outputs...], zero. Experts' are [layers, experts, inputs,
    rank] and [layers, experts, rank, outputs...]. DoRA adds ``<name>_m``, the magnitudes [layers,
    (halves,) outputs...], which start as ``initial_magnitudes``. Tensors have PEFT's names.

    Raises:
      ConfigError: no such matrix, with ``dora`` several in one tensor of the family's files, or
        what PEFT has no adapters of experts with.
    """
    declared = {}
    for name, parameter in layers.items():
        if halves := adapted_halves(lora, name, parameter):
            if "experts" in parameter.names:
                _check_expert_targets(lora)
            a, b = _adapter_pair(parameter, lora, halves)
            declared[f"{name}_a"], declared[f"{name}_b"] = a, b
            if lora.dora:
                declared[f"{name}_m"] = _magnitude_spec(parameter, b, lora)
    if not declared:
        raise ConfigError(
            f"{lora.key}.targets={','.join(lora.targets)}: this model has no such matrix in a "
            f"layer of {', '.join(layers)}"
        )
    return declared


def _check_expert_targets(lora: Lora) -> None:
    """Raise ConfigError for adapters of experts that PEFT does not support."""
    if len({"gate", "up"} & set(lora.targets)) == 1:
        raise ConfigError(
            f"{lora.key}.targets={','.join(lora.targets)}: an expert's gate and up have one "
            "adapter, as PEFT gives the array of both; name both or neither"
        )
    for name, value in (("dropout", lora.dropout), ("dora", lora.dora)):
        if value:
            raise ConfigError(
                f"{lora.key}.{name}={value}: adapters of experts' matrices have no {name}, in PEFT "
                f"neither; leave gate, up and down out of {lora.key}.targets, or leave it off"
            )


def _adapter_pair(
    parameter: ParameterSpec, lora: Lora, halves: tuple[int | None, ...]
) -> tuple[ParameterSpec, ParameterSpec]:
    sizes = dict(parameter.axes)
    lead = [(name, sizes[name]) for name in adapter_axes(parameter, halves) if name != "pair"]
    lead += [("pair", len(halves))] if halves[0] is not None else []
    inner = [(name, sizes[name]) for name in parameter.inputs]
    taken = {*dict(lead), *parameter.inputs}
    outer = [axis for axis in parameter.axes if axis[0] not in taken]
    a_tensors, b_tensors = [], []
    if "experts" in sizes:
        a, b = _peft_expert_tensors(parameter, lora)
        a_tensors, b_tensors = [a], [b]
    else:
        for stored in parameter.stored:
            a_parts, b_parts = _peft_tensors(stored, parameter, halves)
            a_tensors += a_parts
            b_tensors += b_parts
    scale = (3 * math.prod(size for _, size in inner)) ** -0.5
    rank = ("rank", lora.rank)
    return (
        ParameterSpec((*lead, *inner, rank), ParameterKind.ADAPTER, scale, stored=tuple(a_tensors)),
        ParameterSpec((*lead, rank, *outer), ParameterKind.ADAPTER, stored=tuple(b_tensors)),
    )


def adapter_axes(parameter: ParameterSpec, halves: tuple[int | None, ...]) -> list[str]:
    """The batch axes of a matrix's adapters: each index along them has its own adapter."""
    names = ["layers", "experts"] + (["pair"] if halves[0] is not None else [])
    return [name for name in names if name in parameter.names]


def _peft_expert_tensors(parameter: ParameterSpec, lora: Lora) -> tuple[StoredTensor, StoredTensor]:
    """PEFT's tensors for the array of all experts of a layer: ``lora_A`` [experts rank, inputs],
    ``lora_B`` [outputs, rank experts]."""
    first = parameter.stored[0]
    module, _, name = first.stacked.rpartition(".")
    if name == INNER and "down" in lora.targets:
        module += NESTED
    axes = [group for group in first.groups() if group != ["experts"]]
    [outputs] = [group for group in axes if not set(group) & set(parameter.inputs)]
    both = ["pair"] if first.pair is not None else []
    inputs, made = " ".join(parameter.inputs), " ".join(both + outputs)
    a = StoredTensor(f"{module}.lora_A.weight", f"(experts rank) {inputs}", stacked=first.stacked)
    b = StoredTensor(f"{module}.lora_B.weight", f"({made}) (rank experts)", stacked=first.stacked)
    return a, b


# PEFT nests the adapters of several arrays of one module: the last array's is outermost, the first
# one's (``INNER``) innermost.
INNER, NESTED = "gate_up_proj", ".base_layer"


def _magnitude_spec(parameter: ParameterSpec, b: ParameterSpec, lora: Lora) -> ParameterSpec:
    """The spec of DoRA's magnitudes for a matrix with adapter ``b``."""
    for stored in parameter.stored:
        if stored.part is not None or (stored.pair is None and "pair" in parameter.names):
            raise ConfigError(
                f"{lora.key}.dora: files of this family have several matrices in {stored.name!r}, "
                "of which PEFT keeps one vector of magnitudes; use dora=false"
            )
    axes = tuple(axis for axis in b.axes if axis[0] != "rank")
    kept = tuple(
        dataclasses.replace(
            stored,
            name=stored.name.replace(".lora_B.weight", ".lora_magnitude_vector"),
            form=stored.form.removesuffix(" rank"),
        )
        for stored in b.stored
    )
    return ParameterSpec(axes, ParameterKind.ADAPTER, fill=1.0, stored=kept)


def _peft_tensors(
    stored: StoredTensor, parameter: ParameterSpec, halves: tuple[int | None, ...]
) -> tuple[list[StoredTensor], list[StoredTensor]]:
    """PEFT's tensors for a stored matrix: ``lora_A`` [rank, inputs], ``lora_B`` [outputs, rank]."""
    module = stored.name.removesuffix(".weight")
    first, second = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
    groups = stored.groups()
    [inputs] = [group for group in groups if set(group) & set(parameter.inputs)]
    [outputs] = [group for group in groups if not set(group) & set(parameter.inputs)]
    a = StoredTensor(first, f"rank ({' '.join(inputs)})")
    if "pair" not in outputs:
        if stored.pair is not None and stored.pair not in halves:
            return [], []
        half = None if stored.pair is None else halves.index(stored.pair)
        part = None if stored.part is None else (0, *stored.part[1:])
        b = StoredTensor(second, f"({' '.join(outputs)}) rank", half, part)
        return [dataclasses.replace(a, pair=half)], [b]
    # Both halves are in one tensor, which may hold other parameters too.
    own = " ".join(axis for axis in outputs if axis != "pair")
    sizes = dict(parameter.axes)
    each = math.prod(sizes[axis] for axis in outputs if axis != "pair")
    start, whole = (0, 2 * each) if stored.part is None else stored.part[1:]
    a_tensors, b_tensors = [], []
    for index, half in enumerate(halves):
        assert half is not None
        a_tensors.append(dataclasses.replace(a, pair=index))
        part = 0, start + half * each, whole
        b_tensors.append(StoredTensor(second, f"({own}) rank", index, part))
    return a_tensors, b_tensors


def layers_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The subtree ``layers`` of a tree like the parameters of a language or a scalar model."""
    found: Mapping[str, Any] = tree.get("decoder", tree)["layers"]
    return found


def with_layers(tree: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    """A tree like the parameters of a language or a scalar model with ``layers`` updated."""
    if "decoder" in tree:
        return {**tree, "decoder": with_layers(tree["decoder"], layers)}
    return {**tree, "layers": {**tree["layers"], **layers}}
