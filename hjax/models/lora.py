"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685).

A matrix W of a layer, frozen, gets an addition ``scaling * A B`` of a low rank, which learns. Both
parts are parameters beside it, ``<name>_a`` and ``<name>_b``, declared from its declaration. A
product with W becomes one with W and two thin ones, so that no gradient as large as W is made
(``hjax.models.lora_compute``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.errors import ConfigError
from hjax.models.parameter_spec import ParameterKind, ParameterSpec, StoredTensor

# Parts of a layer's matrices, and which parameter has them; of a pair, which half.
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
    """Adapters of a decoder's layers.

    Attributes:
      rank: of the additions.
      alpha: an addition is scaled by ``alpha / rank``, or with ``rslora`` by ``alpha / sqrt(rank)``
        (Kalajdzievski 2023, arXiv 2312.03732).
      rslora: see ``alpha``.
      targets: which matrices have one, of ``TARGETS``; those that a model lacks are left out. An
        expert's gate and up have one together, as PEFT gives the array of both.
      dropout: share of an adapter's inputs that updates drop, see ``hjax.models.dropout``.
      dora: each output's weights, adapter included, are scaled to a norm that learns, its
        magnitude (DoRA; Liu et al. 2024, arXiv 2402.09353).
      key: of the config's section that asks for them, which errors name.
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
    def of(cls, settings: Mapping[str, Any], experts: bool, key: str = "lora") -> Lora | None:
        """What a config's section ``lora`` asks for; None: no adapters.

        Args:
          settings: the section.
          experts: the model's MLPs are experts.
          key: of the section.

        Raises:
          ConfigError: targets that there are not.
        """
        if not settings["rank"]:
            return None
        targets = targets_of(tuple(settings["targets"]), experts, key)
        return cls(
            rank=settings["rank"],
            alpha=settings["alpha"],
            targets=targets,
            rslora=settings["rslora"],
            dropout=settings.get("dropout", 0.0),  # an older workdir has no such key
            dora=settings.get("dora", False),
            key=key,
        )

    @property
    def scaling(self) -> float:
        """What the product of both parts is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def targets_of(names: tuple[str, ...], experts: bool, key: str = "lora") -> tuple[str, ...]:
    """Targets in their order, of names as people write them: ``all``, ``q`` or ``q_proj``.

    Args:
      names: see above; ``all`` is every matrix, but for those of experts.
      experts: the model's MLPs are experts; every one of them has adapters of its own, which are
        many, so that they are named.
      key: of the config's section that they are of.

    Raises:
      ConfigError: an unknown name.
    """
    attention = ("q", "k", "v", "o")
    # A command line gives several as one text.
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
    """Of a layer's matrix, which halves of its ``pair`` axis have an adapter each; (None,): the
    whole has one; empty: none has."""
    if parameter.kind is not ParameterKind.MATRIX:
        return ()
    places = [place for target in lora.targets for place in _TARGET_PLACES[target]]
    if "experts" in parameter.names:
        return (None,) if name in dict(places) else ()
    paired = "pair" in parameter.names
    return tuple(h for place, h in places if place == name and (h is not None) == paired)


def matrix_number(name: str, half: int | None) -> int:
    """The number of a matrix with an adapter among ``TARGETS``."""
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
        if of := adapted_halves(lora, name, parameter):
            if "experts" in parameter.names:
                _check_expert_targets(lora)
            a, b = _adapter_pair(parameter, lora, of)
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
    """Raise ConfigError where PEFT has no adapters of experts' matrices like these."""
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
    parameter: ParameterSpec, lora: Lora, of: tuple[int | None, ...]
) -> tuple[ParameterSpec, ParameterSpec]:
    sizes = dict(parameter.axes)
    lead = [(name, sizes[name]) for name in adapter_axes(parameter, of) if name != "pair"]
    lead += [("pair", len(of))] if of[0] is not None else []
    inner = [(name, sizes[name]) for name in parameter.inputs]
    beside = {*dict(lead), *parameter.inputs}
    outer = [axis for axis in parameter.axes if axis[0] not in beside]
    into, out = [], []
    if "experts" in sizes:
        a, b = _peft_expert_tensors(parameter, lora)
        into, out = [a], [b]
    else:
        for stored in parameter.stored:
            some, more = _peft_tensors(stored, parameter, of)
            into += some
            out += more
    scale = (3 * math.prod(size for _, size in inner)) ** -0.5
    low = ("rank", lora.rank)
    return (
        ParameterSpec((*lead, *inner, low), ParameterKind.ADAPTER, scale, stored=tuple(into)),
        ParameterSpec((*lead, low, *outer), ParameterKind.ADAPTER, stored=tuple(out)),
    )


def adapter_axes(parameter: ParameterSpec, of: tuple[int | None, ...]) -> list[str]:
    """The axes of a matrix that each have adapters of their own."""
    names = ["layers", "experts"] + (["pair"] if of[0] is not None else [])
    return [name for name in names if name in parameter.names]


def _peft_expert_tensors(parameter: ParameterSpec, lora: Lora) -> tuple[StoredTensor, StoredTensor]:
    """PEFT's tensors for an array of all experts of a layer: ``lora_A`` [experts rank, inputs],
    ``lora_B`` [outputs, rank experts]. Of two such arrays the later one's stand outside."""
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


# PEFT names adapters of several arrays of one module by how they are nested: around that of the
# first array (``INNER``) are those of the last.
INNER, NESTED = "gate_up_proj", ".base_layer"


def _magnitude_spec(parameter: ParameterSpec, b: ParameterSpec, lora: Lora) -> ParameterSpec:
    """Of what ``b`` is a part of."""
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
    stored: StoredTensor, parameter: ParameterSpec, of: tuple[int | None, ...]
) -> tuple[list[StoredTensor], list[StoredTensor]]:
    """PEFT's tensors for a stored matrix: ``lora_A`` [rank, inputs], ``lora_B`` [outputs, rank]."""
    module = stored.name.removesuffix(".weight")
    first, second = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
    groups = stored.groups()
    [inputs] = [group for group in groups if set(group) & set(parameter.inputs)]
    [outputs] = [group for group in groups if not set(group) & set(parameter.inputs)]
    a = StoredTensor(first, f"rank ({' '.join(inputs)})")
    if "pair" not in outputs:
        if stored.pair is not None and stored.pair not in of:
            return [], []
        half = None if stored.pair is None else of.index(stored.pair)
        part = None if stored.part is None else (0, *stored.part[1:])
        b = StoredTensor(second, f"({' '.join(outputs)}) rank", half, part)
        return [dataclasses.replace(a, pair=half)], [b]
    # Both halves one after another in one tensor, whose own part may be one of several.
    own = " ".join(axis for axis in outputs if axis != "pair")
    sizes = dict(parameter.axes)
    each = math.prod(sizes[axis] for axis in outputs if axis != "pair")
    start, whole = (0, 2 * each) if stored.part is None else stored.part[1:]
    into, out = [], []
    for index, half in enumerate(of):
        assert half is not None
        into.append(dataclasses.replace(a, pair=index))
        out.append(StoredTensor(second, f"({own}) rank", index, (0, start + half * each, whole)))
    return into, out


def layers_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The layers' part of a tree like a language or a scalar model's parameters."""
    found: Mapping[str, Any] = tree.get("decoder", tree)["layers"]
    return found


def with_layers(tree: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    """A tree like a language or a scalar model's parameters, these layers' parameters among its
    own."""
    if "decoder" in tree:
        return {**tree, "decoder": with_layers(tree["decoder"], layers)}
    return {**tree, "layers": {**tree["layers"], **layers}}
