"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685).

A matrix W of a layer, frozen, gets an addition ``scaling * A B`` of a low rank, which learns. Both
parts are parameters beside it, ``<name>_a`` and ``<name>_b``, declared from its declaration. A
product with W becomes one with W and two thin ones, so that no gradient as large as W is made;
``merged`` adds them to W for whoever only reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError
from hjax.models.declaration import Kind, Parameter, Stored
from hjax.models.dropout import Dropout
from hjax.models.quantized import dequantized, inputs_of

# Parts of a layer's matrices, and which parameter has them; of a pair, which half.
_PLACES: dict[str, tuple[tuple[str, int | None], ...]] = {
    "q": (("q", None),),
    "k": (("kv", 0),),
    "v": (("kv", 1),),
    "o": (("o", None),),
    "gate": (("gate_up", 0),),
    "up": (("gate_up", 1), ("up", None)),
    "down": (("down", None),),
}
TARGETS = tuple(_PLACES)
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


def halves(lora: Lora, name: str, parameter: Parameter) -> tuple[int | None, ...]:
    """Of a layer's matrix, which halves of its ``pair`` axis have an adapter each; (None,): the
    whole has one; empty: none has."""
    if parameter.kind is not Kind.MATRIX:
        return ()
    places = [place for target in lora.targets for place in _PLACES[target]]
    if "experts" in parameter.names:
        return (None,) if name in dict(places) else ()
    paired = "pair" in parameter.names
    return tuple(h for place, h in places if place == name and (h is not None) == paired)


def adapter_parameters(layers: Mapping[str, Parameter], lora: Lora) -> dict[str, Parameter]:
    """Both parts of the adapters of a layer's parameters, by name.

    ``<name>_a``: [layers, (halves,) inputs..., rank], drawn with PEFT's variance, 1 / (3 inputs);
    ``<name>_b``: [layers, (halves,) rank, outputs...], zero. With ``dora`` there is ``<name>_m``
    too, the magnitudes [layers, (halves,) outputs...], for which ``magnitudes`` has the values to
    start from. Those of experts are [layers, experts, inputs, rank] and [layers, experts, rank,
    outputs...]. Tensors are named as PEFT's.

    Raises:
      ConfigError: no such matrix, with ``dora`` several in one tensor of the family's files, or
        what PEFT has no adapters of experts with.
    """
    declared = {}
    for name, parameter in layers.items():
        if of := halves(lora, name, parameter):
            if "experts" in parameter.names:
                _check_of_experts(lora)
            a, b = _both(parameter, lora, of)
            declared[f"{name}_a"], declared[f"{name}_b"] = a, b
            if lora.dora:
                declared[f"{name}_m"] = _magnitude(parameter, b, lora)
    if not declared:
        raise ConfigError(
            f"{lora.key}.targets={','.join(lora.targets)}: this model has no such matrix in a "
            f"layer of {', '.join(layers)}"
        )
    return declared


def _check_of_experts(lora: Lora) -> None:
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


def _both(
    parameter: Parameter, lora: Lora, of: tuple[int | None, ...]
) -> tuple[Parameter, Parameter]:
    sizes = dict(parameter.axes)
    lead = [(name, sizes[name]) for name in _lead(parameter, of) if name != "pair"]
    lead += [("pair", len(of))] if of[0] is not None else []
    inner = [(name, sizes[name]) for name in parameter.inputs]
    beside = {*dict(lead), *parameter.inputs}
    outer = [axis for axis in parameter.axes if axis[0] not in beside]
    into, out = [], []
    if "experts" in sizes:
        a, b = _stored_of_experts(parameter, lora)
        into, out = [a], [b]
    else:
        for stored in parameter.stored:
            some, more = _stored(stored, parameter, of)
            into += some
            out += more
    scale = (3 * math.prod(size for _, size in inner)) ** -0.5
    low = ("rank", lora.rank)
    return (
        Parameter((*lead, *inner, low), Kind.ADAPTER, scale, stored=tuple(into)),
        Parameter((*lead, low, *outer), Kind.ADAPTER, stored=tuple(out)),
    )


def _lead(parameter: Parameter, of: tuple[int | None, ...]) -> list[str]:
    """The axes of a matrix that each have adapters of their own."""
    names = ["layers", "experts"] + (["pair"] if of[0] is not None else [])
    return [name for name in names if name in parameter.names]


def _stored_of_experts(parameter: Parameter, lora: Lora) -> tuple[Stored, Stored]:
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
    a = Stored(f"{module}.lora_A.weight", f"(experts rank) {inputs}", stacked=first.stacked)
    b = Stored(f"{module}.lora_B.weight", f"({made}) (rank experts)", stacked=first.stacked)
    return a, b


# PEFT names adapters of several arrays of one module by how they are nested: around that of the
# first array (``INNER``) are those of the last.
INNER, NESTED = "gate_up_proj", ".base_layer"


def _magnitude(parameter: Parameter, b: Parameter, lora: Lora) -> Parameter:
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
    return Parameter(axes, Kind.ADAPTER, fill=1.0, stored=kept)


def _stored(
    stored: Stored, parameter: Parameter, of: tuple[int | None, ...]
) -> tuple[list[Stored], list[Stored]]:
    """PEFT's tensors for a stored matrix: ``lora_A`` [rank, inputs], ``lora_B`` [outputs, rank]."""
    module = stored.name.removesuffix(".weight")
    first, second = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
    groups = stored.groups()
    [inputs] = [group for group in groups if set(group) & set(parameter.inputs)]
    [outputs] = [group for group in groups if not set(group) & set(parameter.inputs)]
    a = Stored(first, f"rank ({' '.join(inputs)})")
    if "pair" not in outputs:
        if stored.pair is not None and stored.pair not in of:
            return [], []
        half = None if stored.pair is None else of.index(stored.pair)
        part = None if stored.part is None else (0, *stored.part[1:])
        b = Stored(second, f"({' '.join(outputs)}) rank", half, part)
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
        out.append(Stored(second, f"({own}) rank", index, (0, start + half * each, whole)))
    return into, out


def addition(
    spec: str,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    lora: Lora,
    places: tuple[tuple[str, int | None], ...],
    dropout: Dropout | None = None,
) -> jax.Array:
    """``product``, where ``dropout`` is given of inputs of which each matrix drops its own.

    Args:
      spec, x, a, b: as there.
      lora: of the adapters.
      places: name of the parameter and half of each matrix that has one.
      dropout: of the layer.
    """
    if dropout is None or not lora.dropout:
        return product(spec, x, a, b, lora.scaling)

    def dropped(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        x = _dropped(x, dropout, lora, places)
        return product(spec, x, a, b, lora.scaling)

    # Drawn again in the backward pass, which would keep other inputs for every matrix.
    return jax.checkpoint(dropped)(x, a, b)


def _dropped(
    x: jax.Array, dropout: Dropout, lora: Lora, places: tuple[tuple[str, int | None], ...]
) -> jax.Array:
    """[batch, length, (halves,) inputs...]: of x what each matrix's adapter is left."""
    numbers = tuple(
        next(i for i, target in enumerate(TARGETS) if place in _PLACES[target]) for place in places
    )
    return dropout.dropped(x, lora.dropout, numbers, places[0][1] is not None)


def dropped_change(
    spec: str,
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    a: jax.Array,
    b: jax.Array,
    norms: jax.Array,
    lora: Lora,
    places: tuple[tuple[str, int | None], ...],
    dropout: Dropout,
) -> jax.Array:
    """What ``dora`` adds to a product with a frozen weight where inputs are dropped, as PEFT has
    it: ``(norms - 1) * x' W + norms * x' scaling A B`` of the inputs x' that are left, while the
    product itself sees all of x.

    Args:
      spec, x, a, b, lora, places, dropout: as of ``addition``.
      weight, scale: frozen, of one layer; ``scale`` of a quantized matrix.
      norms: of ``layer_scale``.

    Returns:
      as ``addition``, in the dtype of x.
    """
    rows, inner, pair, _ = _letters(spec)
    of_weight, made = spec.split(",")[1].split("->")
    apart = f"{rows}{pair}{inner},{of_weight}->{made}"
    if len(places) == 1 and (half := places[0][1]) is not None:
        weight = jax.lax.slice_in_dim(weight, half, half + 1, axis=of_weight.index(pair))
        norms = norms[half : half + 1]
        scale = None if scale is None else scale[half : half + 1]
    weight = jax.lax.stop_gradient(weight)

    def dropped(x: jax.Array, a: jax.Array, b: jax.Array, norms: jax.Array) -> jax.Array:
        x = _dropped(x, dropout, lora, places)
        through = jnp.einsum(apart, x, weight.astype(x.dtype))
        if scale is not None:
            through = (through.astype(jnp.float32) * scale).astype(x.dtype)
        added = product(spec, x, a, b, lora.scaling)
        return (norms - 1).astype(x.dtype) * through + norms.astype(x.dtype) * added

    # As in ``addition``; the matrix, perhaps quantized, is kept as it is given.
    return jax.checkpoint(dropped)(x, a, b, norms)


def product(spec: str, x: jax.Array, a: jax.Array, b: jax.Array, scaling: float) -> jax.Array:
    """What an adapter adds to ``einsum(spec, x, weight)``, in the dtype of x.

    Args:
      spec: of the product with the weight, such as ``btd,dcke->btcke``.
      x: [batch, length, inputs...]; of a pair it may be [batch, length, halves, inputs...], an
        input for each.
      a, b: of one layer.
      scaling: of ``Lora``.

    Returns:
      [batch, length, outputs...], of a pair with the size of ``a``'s.
    """
    rows, inner, pair, outer = _letters(spec)
    apart = pair if x.ndim > len(rows + inner) else ""
    low = jnp.einsum(f"{rows}{apart}{inner},{pair}{inner}z->{rows}{pair}z", x, a.astype(x.dtype))
    both = f"{rows}{pair}z,{pair}z{outer}->{rows}{pair}{outer}"
    return jnp.einsum(both, low, scaling * b.astype(x.dtype))


def _letters(spec: str) -> tuple[str, str, str, str]:
    """Of a product's spec: rows, what is summed, the pair axis (or nothing), what is made."""
    left, made = spec.split("->")
    x, weight = left.split(",")
    rows = x[:2]
    inner = "".join(letter for letter in weight if letter not in made)
    pair = "c" if "c" in weight else ""
    return rows, inner, pair, "".join(c for c in weight if c in made and c != "c")


def spread(addition: jax.Array, of: tuple[int | None, ...]) -> jax.Array:
    """An addition [batch, length, halves, ...] with zeros for the half that has no adapter."""
    if len(of) == 1 and of[0] is not None:
        other = jnp.zeros_like(addition)
        return jnp.concatenate([addition, other] if of[0] == 0 else [other, addition], axis=2)
    return addition


def merged(params: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Parameters without adapters: these are added to their matrices.

    Args:
      params: nested dict of jax.Array or numpy arrays; only read.
      network: a ``hjax.models.parameters.Network`` with adapters.

    Returns:
      nested dict of the base's parameters, each in its dtype, summed in float32; those without
      adapters that are floats are the same arrays.
    """
    if "decoder" in params:
        return {**params, "decoder": _merged(params["decoder"], network)}
    return _merged(params, network)


def _merged(params: Mapping[str, Any], network: Any) -> dict[str, Any]:
    layers, base = params["layers"], layers_of(network.base.shapes)
    matrices = merged_matrices(layers, network)
    return {**params, "layers": {name: layers[name] for name in base} | matrices}


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


def merged_matrices(layers: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Of layers the matrices that have an adapter, with it added, and those that are quantized as
    floats, by name.

    Args:
      layers: arrays by name; others than these matrices, their scales and adapters are not read.
      network: of the layers.
    """
    matrices = {}
    lora, base = network.config.lora, layers_of(network.base.shapes)
    for name, parameter in layers_of(network.declared).items():
        weight: Any = layers.get(name)
        if parameter.quantized:
            weight = dequantized(weight, layers[f"{name}_scale"], parameter)
        if of := halves(lora, name, parameter):
            a, b = layers[f"{name}_a"], layers[f"{name}_b"]
            weight = _added(weight, a, b, parameter=parameter, scaling=lora.scaling, of=of)
            if lora.dora:
                scale = _to_norm(weight, layers[f"{name}_m"], parameter, of)
                expand: Any = np.expand_dims if isinstance(scale, np.ndarray) else jnp.expand_dims
                weight = weight * expand(scale, inputs_of(parameter))
        if of or parameter.quantized:
            matrices[name] = weight.astype(base[name].dtype)
    return matrices


def norms(weight: Any, parameter: Parameter) -> Any:
    """float32 [layers, (2,) outputs...]: the norm of each output's weights."""
    xp: Any = np if isinstance(weight, np.ndarray) else jnp
    return xp.sqrt(xp.sum(xp.square(weight.astype(np.float32)), axis=inputs_of(parameter)))


def _to_norm(weight: Any, magnitude: Any, parameter: Parameter, of: tuple[int | None, ...]) -> Any:
    """By what to multiply each output's weights to give them a norm of their magnitude, 1 for a
    half that has none: float32 [layers, (2,) outputs...]."""
    scale = norms(weight, parameter)
    if len(of) == 1 and of[0] is not None:
        xp: Any = np if isinstance(weight, np.ndarray) else jnp
        own, ones = magnitude / scale[:, of[0] : of[0] + 1], xp.ones_like(magnitude)
        return xp.concatenate([own, ones] if of[0] == 0 else [ones, own], axis=1)
    return magnitude / scale


def layer_scale(
    weight: jax.Array,
    scale: jax.Array | None,
    a: jax.Array,
    b: jax.Array,
    magnitude: jax.Array,
    parameter: Parameter,
    lora: Lora,
    of: tuple[int | None, ...],
) -> jax.Array:
    """What a layer's outputs are multiplied by with ``dora``: float32 [(2,) outputs...].

    The norm is taken for a constant, as in section 4.3 of the paper and in PEFT.

    Args:
      weight, scale, a, b, magnitude: of one layer; ``scale`` of a quantized matrix.
      parameter: the matrix's declaration.
      lora, of: of its adapters, and their ``halves``.
    """
    weight, a, b = (jax.lax.stop_gradient(x)[None] for x in (weight, a, b))
    if scale is not None:
        weight = dequantized(weight, scale[None], parameter)
    whole = _added(weight, a, b, parameter, lora.scaling, of)
    return _to_norm(whole, magnitude[None], parameter, of)[0]


def magnitudes(layers: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Those that change nothing while adapters add nothing: the norms of the base, by name.

    Args:
      layers: the base's parameters by name.
      network: with adapters of ``dora``.
    """
    made = {}
    for name, parameter in layers_of(network.declared).items():
        if of := halves(network.config.lora, name, parameter):
            weight = layers[name]
            if parameter.quantized:
                weight = dequantized(weight, layers[f"{name}_scale"], parameter)
            every = norms(weight, parameter)
            chosen = every if of[0] is None else every[:, jnp.array(of)]
            made[f"{name}_m"] = chosen
    return made


_LETTER = {"layers": "l", "pair": "c", "embed": "d", "heads": "h", "kv_heads": "k"} | {
    "head_dim": "e",
    "mlp": "m",
    "experts": "x",
}


def _added(
    weight: Any, a: Any, b: Any, parameter: Parameter, scaling: float, of: tuple[int | None, ...]
) -> Any:
    xp: Any = np if isinstance(weight, np.ndarray) else jnp
    names = [_LETTER[axis] for axis in parameter.names]
    inner = "".join(_LETTER[axis] for axis in parameter.inputs)
    lead = "".join(_LETTER[axis] for axis in _lead(parameter, of))
    outer = "".join(letter for letter in names if letter not in lead + inner)
    spec = f"{lead}{inner}z,{lead}z{outer}->{''.join(names)}"
    a, b = (xp.asarray(x, np.float32) for x in (a, b))
    sum_in = {} if xp is np else {"precision": jax.lax.Precision.HIGHEST}
    addition = scaling * xp.einsum(spec, a, b, **sum_in)
    if len(of) == 1 and of[0] is not None:
        at = parameter.names.index("pair")
        empty = xp.zeros_like(addition)
        both = [addition, empty] if of[0] == 0 else [empty, addition]
        addition = xp.concatenate(both, axis=at)
    return weight.astype(np.float32) + addition
