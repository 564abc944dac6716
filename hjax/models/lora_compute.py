"""What adapters (``hjax.models.lora``) compute: beside a frozen matrix in a layer's product, and
added to it for whoever only reads."""

import string
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hjax.models.dropout import Dropout
from hjax.models.lora import Lora, adapted_halves, adapter_axes, layers_of, matrix_number
from hjax.models.parameter_spec import ParameterSpec
from hjax.models.quantized import dequantize, input_dimensions

Halves = tuple[int | None, ...]  # as of ``hjax.models.lora.adapted_halves``


class AdaptedMatrix(NamedTuple):
    """A layer's frozen matrix with its adapter.

    Attributes:
      name, parameter: of the matrix, its declaration.
      lora: of the adapter.
      weight, scale: of one layer; ``scale`` of a quantized matrix, else None.
      a, b: both parts of the adapter.
      magnitude: of ``dora``, else None.
    """

    name: str
    parameter: ParameterSpec
    lora: Lora
    weight: jax.Array
    scale: jax.Array | None
    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None

    @property
    def of(self) -> Halves:
        """Which halves of the matrix have an adapter."""
        return adapted_halves(self.lora, self.name, self.parameter)

    def added(
        self, spec: str, x: jax.Array, out: jax.Array, dropout: Dropout | None = None
    ) -> jax.Array:
        """A product with what the adapter makes of it.

        Args:
          spec: of the product with the weight, such as ``btd,dcke->btcke``.
          x: [batch, length, inputs...].
          out: ``einsum(spec, x, weight)``, [batch, length, outputs...].
          dropout: of the layer, where each matrix drops inputs of its own; None: nothing is.
        """
        dropout = dropout if self.lora.dropout else None
        norm_scale = self._norms() if self.lora.dora else None
        if norm_scale is not None and dropout is not None:
            return out + _fill_other_half(
                self._dropped_change(spec, x, norm_scale, dropout), self.of, 2
            )
        out = out + _fill_other_half(self._addition(spec, x, dropout), self.of, 2)
        return out if norm_scale is None else out * norm_scale.astype(out.dtype)

    def _addition(self, spec: str, x: jax.Array, dropout: Dropout | None) -> jax.Array:
        scaling = self.lora.scaling
        if dropout is None:
            return adapter_product(spec, x, self.a, self.b, scaling)

        def dropped(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            return adapter_product(spec, self._left(x, dropout), a, b, scaling)

        # Drawn again in the backward pass, which would keep other inputs for every matrix.
        return jax.checkpoint(dropped)(x, self.a, self.b)

    def _left(self, x: jax.Array, dropout: Dropout) -> jax.Array:
        """[batch, length, (halves,) inputs...]: of x what each matrix's adapter is left."""
        numbers = tuple(matrix_number(self.name, half) for half in self.of)
        return dropout.apply(x, self.lora.dropout, numbers, self.of[0] is not None)

    def _dropped_change(
        self, spec: str, x: jax.Array, norm_scale: jax.Array, dropout: Dropout
    ) -> jax.Array:
        """What DoRA with dropout adds to a product with a frozen weight, as PEFT has it:
        ``(norm_scale - 1) * x' W + norm_scale * x' scaling A B``. x' are the inputs after dropout;
        the product itself sees all of x."""
        rows, inner, pair, _ = _spec_letters(spec)
        of_weight, made = spec.split(",")[1].split("->")
        apart = f"{rows}{pair}{inner},{of_weight}->{made}"
        weight, scale = self.weight, self.scale
        if len(self.of) == 1 and (half := self.of[0]) is not None:
            weight = jax.lax.slice_in_dim(weight, half, half + 1, axis=of_weight.index(pair))
            norm_scale = norm_scale[half : half + 1]
            scale = None if scale is None else scale[half : half + 1]
        weight = jax.lax.stop_gradient(weight)

        def dropped(x: jax.Array, a: jax.Array, b: jax.Array, norm_scale: jax.Array) -> jax.Array:
            x = self._left(x, dropout)
            through = jnp.einsum(apart, x, weight.astype(x.dtype))
            if scale is not None:
                through = (through.astype(jnp.float32) * scale).astype(x.dtype)
            added = adapter_product(spec, x, a, b, self.lora.scaling)
            return (norm_scale - 1).astype(x.dtype) * through + norm_scale.astype(x.dtype) * added

        # As in ``_addition``; the matrix, perhaps quantized, is kept as it is given.
        return jax.checkpoint(dropped)(x, self.a, self.b, norm_scale)

    def _norms(self) -> jax.Array:
        """What a layer's outputs are multiplied by with ``dora``: float32 [(2,) outputs...].

        The norm is taken for a constant, as in section 4.3 of the paper and in PEFT.
        """
        weight, a, b = (jax.lax.stop_gradient(x)[None] for x in (self.weight, self.a, self.b))
        if self.scale is not None:
            weight = dequantize(weight, self.scale[None], self.parameter)
        whole = _merged_weight(weight, a, b, self.parameter, self.lora.scaling, self.of)
        assert self.magnitude is not None
        factor: jax.Array = _magnitude_scale(whole, self.magnitude[None], self.parameter, self.of)[
            0
        ]
        return factor


def adapter_product(
    spec: str, x: jax.Array, a: jax.Array, b: jax.Array, scaling: float
) -> jax.Array:
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
    rows, inner, pair, outer = _spec_letters(spec)
    apart = pair if x.ndim > len(rows + inner) else ""
    low = jnp.einsum(f"{rows}{apart}{inner},{pair}{inner}z->{rows}{pair}z", x, a.astype(x.dtype))
    both = f"{rows}{pair}z,{pair}z{outer}->{rows}{pair}{outer}"
    return jnp.einsum(both, low, scaling * b.astype(x.dtype))


def _spec_letters(spec: str) -> tuple[str, str, str, str]:
    """Of a product's spec: rows, what is summed, the pair axis (or nothing), what is made."""
    left, made = spec.split("->")
    x, weight = left.split(",")
    inner = "".join(letter for letter in weight if letter not in made)
    pair = "c" if "c" in weight else ""
    return x[:2], inner, pair, "".join(c for c in weight if c in made and c != "c")


def _fill_other_half(x: Any, of: Halves, axis: int, fill: float = 0.0) -> Any:
    """What is of one half of a pair with ``fill`` for the other, which has no adapter; all else as
    it is."""
    if len(of) > 1 or of[0] is None:
        return x
    xp = x.__array_namespace__()
    other = xp.full_like(x, fill)
    return xp.concatenate([x, other] if of[0] == 0 else [other, x], axis=axis)


def merge_adapters(params: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Parameters without adapters: these are added to their matrices.

    Args:
      params: nested dict of jax.Array or numpy arrays; only read.
      network: a ``hjax.models.parameters.Network`` with adapters.

    Returns:
      nested dict of the base's parameters, each in its dtype, summed in float32; those without
      adapters that are floats are the same arrays.
    """
    decoder = params.get("decoder", params)
    layers, base = decoder["layers"], layers_of(network.base.shapes)
    kept = {name: layers[name] for name in base} | merge_matrices(layers, network)
    decoder = {**decoder, "layers": kept}
    return {**params, "decoder": decoder} if "decoder" in params else decoder


def merge_matrices(layers: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Of layers the matrices that have an adapter, with it added, and those that are quantized as
    floats, by name.

    Args:
      layers: arrays by name; others than these matrices, their scales and adapters are not read.
      network: of the layers.
    """
    matrices = {}
    lora, base = network.config.lora, layers_of(network.base.shapes)
    for name, parameter in layers_of(network.declared).items():
        of = adapted_halves(lora, name, parameter)
        if not of and not parameter.quantized:
            continue
        weight = _as_floats(layers, name, parameter)
        if of:
            a, b = layers[f"{name}_a"], layers[f"{name}_b"]
            weight = _merged_weight(weight, a, b, parameter=parameter, scaling=lora.scaling, of=of)
            if lora.dora:
                scale = _magnitude_scale(weight, layers[f"{name}_m"], parameter, of)
                xp = scale.__array_namespace__()
                weight = weight * xp.expand_dims(scale, input_dimensions(parameter))
        matrices[name] = weight.astype(base[name].dtype)
    return matrices


def initial_magnitudes(layers: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Those that change nothing while adapters add nothing: the norms of the base, by name.

    Args:
      layers: the base's parameters by name.
      network: with adapters of ``dora``.
    """
    made = {}
    for name, parameter in layers_of(network.declared).items():
        if of := adapted_halves(network.config.lora, name, parameter):
            every = output_norms(_as_floats(layers, name, parameter), parameter)
            made[f"{name}_m"] = every if of[0] is None else every[:, jnp.array(of)]
    return made


def _as_floats(layers: Mapping[str, Any], name: str, parameter: ParameterSpec) -> Any:
    if not parameter.quantized:
        return layers[name]
    return dequantize(layers[name], layers[f"{name}_scale"], parameter)


def output_norms(weight: Any, parameter: ParameterSpec) -> Any:
    """float32 [layers, (2,) outputs...]: the norm of each output's weights."""
    xp = weight.__array_namespace__()
    return xp.sqrt(xp.sum(xp.square(weight.astype(np.float32)), axis=input_dimensions(parameter)))


def _magnitude_scale(weight: Any, magnitude: Any, parameter: ParameterSpec, of: Halves) -> Any:
    """By what to multiply each output's weights to give them a norm of their magnitude, 1 for a
    half that has none: float32 [layers, (2,) outputs...]."""
    scale = output_norms(weight, parameter)
    if len(of) == 1 and of[0] is not None:
        scale = scale[:, of[0] : of[0] + 1]
    return _fill_other_half(magnitude / scale, of, 1, fill=1.0)


def _merged_weight(
    weight: Any, a: Any, b: Any, parameter: ParameterSpec, scaling: float, of: Halves
) -> Any:
    xp = weight.__array_namespace__()
    letters = dict(zip(parameter.names, string.ascii_lowercase))
    inner, lead = (
        "".join(letters[axis] for axis in axes)
        for axes in (parameter.inputs, adapter_axes(parameter, of))
    )
    outer = "".join(letter for letter in letters.values() if letter not in lead + inner)
    spec = f"{lead}{inner}z,{lead}z{outer}->{''.join(letters.values())}"
    a, b = (xp.asarray(x, np.float32) for x in (a, b))
    sum_in = {} if xp is np else {"precision": jax.lax.Precision.HIGHEST}
    addition = scaling * xp.einsum(spec, a, b, **sum_in)
    if "pair" in parameter.names:
        addition = _fill_other_half(addition, of, parameter.names.index("pair"))
    return weight.astype(np.float32) + addition
