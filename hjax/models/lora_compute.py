"""LoRA and DoRA computations: adapters applied beside a frozen matrix, or merged into it."""

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
      name, parameter: the matrix's name and spec.
      lora: settings of the adapter.
      weight, scale: of one layer; ``scale`` of a quantized matrix, else None.
      a, b: the adapter.
      magnitude: DoRA's, else None.
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
    def halves(self) -> Halves:
        """The halves of the matrix that have an adapter."""
        return adapted_halves(self.lora, self.name, self.parameter)

    def with_adapter(
        self, spec: str, x: jax.Array, out: jax.Array, dropout: Dropout | None = None
    ) -> jax.Array:
        """A product with the frozen weight, plus the adapter's.

        Args:
          spec: of the product with the weight, such as ``btd,dcke->btcke``.
          x: [batch, length, inputs...].
          out: ``einsum(spec, x, weight)``, [batch, length, outputs...].
          dropout: of the layer, with another mask for each matrix; None: off.
        """
        dropout = dropout if self.lora.dropout else None
        norm_scale = self._dora_scale() if self.lora.dora else None
        if norm_scale is not None and dropout is not None:
            return out + _fill_other_half(
                self._dora_with_dropout(spec, x, norm_scale, dropout), self.halves, 2
            )
        out = out + _fill_other_half(self._addition(spec, x, dropout), self.halves, 2)
        return out if norm_scale is None else out * norm_scale.astype(out.dtype)

    def _addition(self, spec: str, x: jax.Array, dropout: Dropout | None) -> jax.Array:
        scaling = self.lora.scaling
        if dropout is None:
            return adapter_product(spec, x, self.a, self.b, scaling)

        def dropped(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            return adapter_product(spec, self._dropped_inputs(x, dropout), a, b, scaling)

        # Remat: else the backward pass would keep dropped inputs for every matrix.
        return jax.checkpoint(dropped)(x, self.a, self.b)

    def _dropped_inputs(self, x: jax.Array, dropout: Dropout) -> jax.Array:
        """x after dropout, [batch, length, (halves,) inputs...], for each matrix's adapter."""
        numbers = tuple(matrix_number(self.name, half) for half in self.halves)
        return dropout.apply(x, self.lora.dropout, numbers, self.halves[0] is not None)

    def _dora_with_dropout(
        self, spec: str, x: jax.Array, norm_scale: jax.Array, dropout: Dropout
    ) -> jax.Array:
        """What DoRA with dropout adds to a product with a frozen weight, as PEFT has it:
        ``(norm_scale - 1) * x' W + norm_scale * x' scaling A B``. x' are the inputs after dropout;
        the product itself sees all of x."""
        rows, inner, pair, _ = _spec_letters(spec)
        of_weight, output = spec.split(",")[1].split("->")
        own_inputs = f"{rows}{pair}{inner},{of_weight}->{output}"
        weight, scale = self.weight, self.scale
        if len(self.halves) == 1 and (half := self.halves[0]) is not None:
            weight = jax.lax.slice_in_dim(weight, half, half + 1, axis=of_weight.index(pair))
            norm_scale = norm_scale[half : half + 1]
            scale = None if scale is None else scale[half : half + 1]
        weight = jax.lax.stop_gradient(weight)

        def dropped(x: jax.Array, a: jax.Array, b: jax.Array, norm_scale: jax.Array) -> jax.Array:
            x = self._dropped_inputs(x, dropout)
            through = jnp.einsum(own_inputs, x, weight.astype(x.dtype))
            if scale is not None:
                through = (through.astype(jnp.float32) * scale).astype(x.dtype)
            added = adapter_product(spec, x, a, b, self.lora.scaling)
            return (norm_scale - 1).astype(x.dtype) * through + norm_scale.astype(x.dtype) * added

        # Remat as in ``_addition``; the matrix is kept in its, perhaps quantized, dtype.
        return jax.checkpoint(dropped)(x, self.a, self.b, norm_scale)

    def _dora_scale(self) -> jax.Array:
        """DoRA's factor of a layer's outputs, float32 [(2,) outputs...].

        The norm has no gradient, as in section 4.3 of the paper and in PEFT.
        """
        weight, a, b = (jax.lax.stop_gradient(x)[None] for x in (self.weight, self.a, self.b))
        if self.scale is not None:
            weight = dequantize(weight, self.scale[None], self.parameter)
        whole = _merged_weight(weight, a, b, self.parameter, self.lora.scaling, self.halves)
        assert self.magnitude is not None
        scale = _magnitude_scale(whole, self.magnitude[None], self.parameter, self.halves)
        factor: jax.Array = scale[0]
        return factor


def adapter_product(spec: str, x: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """The adapter's addition to ``einsum(spec, x, weight)``, in the dtype of x.

    Args:
      spec: of the product with the weight, such as ``btd,dcke->btcke``.
      x: [batch, length, inputs...], or [batch, length, halves, inputs...], inputs for each half.
      a, b: of one layer.
      scale: of ``Lora``.

    Returns:
      [batch, length, outputs...], of a pair with the size of ``a``'s.
    """
    rows, inner, pair, outputs = _spec_letters(spec)
    own_inputs = pair if x.ndim > len(rows + inner) else ""
    down = f"{rows}{own_inputs}{inner},{pair}{inner}z->{rows}{pair}z"
    projected = jnp.einsum(down, x, a.astype(x.dtype))
    both = f"{rows}{pair}z,{pair}z{outputs}->{rows}{pair}{outputs}"
    return jnp.einsum(both, projected, scale * b.astype(x.dtype))


def _spec_letters(spec: str) -> tuple[str, str, str, str]:
    """Letters of a product's spec: rows, summed axes, the pair axis (or nothing), outputs."""
    left, output = spec.split("->")
    x, weight = left.split(",")
    inner = "".join(letter for letter in weight if letter not in output)
    pair = "c" if "c" in weight else ""
    return x[:2], inner, pair, "".join(c for c in weight if c in output and c != "c")


def _fill_other_half(x: Any, halves: Halves, axis: int, fill: float = 0.0) -> Any:
    """x of one half of a pair, with ``fill`` for the other, which has no adapter; else x itself."""
    if len(halves) > 1 or halves[0] is None:
        return x
    xp = x.__array_namespace__()
    other = xp.full_like(x, fill)
    return xp.concatenate([x, other] if halves[0] == 0 else [other, x], axis=axis)


def merge_adapters(params: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """Merge adapters into their matrices.

    Args:
      params: nested dict of jax.Array or numpy arrays; not modified.
      network: a ``hjax.models.parameters.Network`` with adapters.

    Returns:
      nested dict of the base's parameters, each in its dtype, summed in float32. Unquantized ones
      without adapters are the same arrays.
    """
    decoder = params.get("decoder", params)
    layers, base = decoder["layers"], layers_of(network.base.shapes)
    kept = {name: layers[name] for name in base} | merge_matrices(layers, network)
    decoder = {**decoder, "layers": kept}
    return {**params, "decoder": decoder} if "decoder" in params else decoder


def merge_matrices(layers: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """The matrices with an adapter, merged, and the quantized ones, dequantized, by name.

    Args:
      layers: arrays by name, these matrices with their scales and adapters at least.
      network: of the layers.
    """
    matrices = {}
    lora, base = network.config.lora, layers_of(network.base.shapes)
    for name, parameter in layers_of(network.declared).items():
        halves = adapted_halves(lora, name, parameter)
        if not halves and not parameter.quantized:
            continue
        weight = _as_floats(layers, name, parameter)
        if halves:
            a, b = layers[f"{name}_a"], layers[f"{name}_b"]
            weight = _merged_weight(weight, a, b, parameter, lora.scaling, halves)
            if lora.dora:
                scale = _magnitude_scale(weight, layers[f"{name}_m"], parameter, halves)
                xp = scale.__array_namespace__()
                weight = weight * xp.expand_dims(scale, input_dimensions(parameter))
        matrices[name] = weight.astype(base[name].dtype)
    return matrices


def initial_magnitudes(layers: Mapping[str, Any], network: Any) -> dict[str, Any]:
    """DoRA's initial magnitudes, the norms of the base's outputs, by name.

    Args:
      layers: the base's parameters by name.
      network: with DoRA adapters.
    """
    results = {}
    for name, parameter in layers_of(network.declared).items():
        if halves := adapted_halves(network.config.lora, name, parameter):
            every = output_norms(_as_floats(layers, name, parameter), parameter)
            results[f"{name}_m"] = every if halves[0] is None else every[:, jnp.array(halves)]
    return results


def _as_floats(layers: Mapping[str, Any], name: str, parameter: ParameterSpec) -> Any:
    if not parameter.quantized:
        return layers[name]
    return dequantize(layers[name], layers[f"{name}_scale"], parameter)


def output_norms(weight: Any, parameter: ParameterSpec) -> Any:
    """The norm of each output's weights, float32 [layers, (2,) outputs...]."""
    xp = weight.__array_namespace__()
    return xp.sqrt(xp.sum(xp.square(weight.astype(np.float32)), axis=input_dimensions(parameter)))


def _magnitude_scale(weight: Any, magnitude: Any, parameter: ParameterSpec, halves: Halves) -> Any:
    """DoRA's factor of each output's weights, magnitude / norm, 1 for a half without adapter:
    float32 [layers, (2,) outputs...]."""
    scale = output_norms(weight, parameter)
    if len(halves) == 1 and halves[0] is not None:
        scale = scale[:, halves[0] : halves[0] + 1]
    return _fill_other_half(magnitude / scale, halves, 1, fill=1.0)


def _merged_weight(
    weight: Any, a: Any, b: Any, parameter: ParameterSpec, scaling: float, halves: Halves
) -> Any:
    xp = weight.__array_namespace__()
    letters = dict(zip(parameter.names, string.ascii_lowercase))
    inner, lead = (
        "".join(letters[axis] for axis in axes)
        for axes in (parameter.inputs, adapter_axes(parameter, halves))
    )
    outputs = "".join(letter for letter in letters.values() if letter not in lead + inner)
    spec = f"{lead}{inner}z,{lead}z{outputs}->{''.join(letters.values())}"
    a, b = (xp.asarray(x, np.float32) for x in (a, b))
    sum_in = {} if xp is np else {"precision": jax.lax.Precision.HIGHEST}
    addition = scaling * xp.einsum(spec, a, b, **sum_in)
    if "pair" in parameter.names:
        addition = _fill_other_half(addition, halves, parameter.names.index("pair"))
    return weight.astype(np.float32) + addition
