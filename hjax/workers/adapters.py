"""A worker's adapters (LoRA), added to their matrices for whoever reads the model."""

from __future__ import annotations

from typing import Any

import jax

from hjax.models.lora import halves, layers_of
from hjax.models.low_rank import merged_matrices
from hjax.models.parameters import Network, Params
from hjax.sharding.layout import Layout

_PARTS = ("", "_a", "_b", "_m", "_scale")  # of a matrix, those that there are


class Merge:
    """Adds a model's adapters to their matrices, each device its own parts of them; quantized
    matrices become floats.

    Args:
      network: with adapters.
      layout: of the parameters, before and after.
    """

    def __init__(self, network: Network, layout: Layout):
        assert network.config.lora is not None
        declared, lora = layers_of(network.declared), network.config.lora
        self._matrices = [n for n, p in declared.items() if p.quantized or halves(lora, n, p)]
        beside = [f"{name}{part}" for name in self._matrices for part in _PARTS]
        self._reads = [name for name in beside if name in declared]
        shardings = layers_of(network.shardings(layout))
        self._shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
            for name, x in layers_of(network.shapes).items()
            if name in self._reads
        }

        def merge(layers: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return merged_matrices(layers, network)

        placed = {name: shardings[name] for name in self._matrices}
        self._program = jax.jit(merge, out_shardings=placed)
        self._network = network

    def __call__(self, params: Params) -> Params:
        """The parameters without adapters; float matrices that have none are the same arrays."""
        layers, base = layers_of(params), layers_of(self._network.base.shapes)
        matrices = self._program({name: layers[name] for name in self._reads})
        return _with_layers(params, {name: layers[name] for name in base} | matrices)

    def restored(self, plain: Params, params: Params) -> Params:
        """The parameters with adapters, of those that ``__call__`` made and were brought back.

        Args:
          plain: as made, perhaps other arrays of the same values.
          params: that were merged; matrices with adapters and quantized ones are taken from here.
        """
        layers = layers_of(params)
        own = {name: x for name, x in layers.items() if name in self._reads}
        return _with_layers(plain, {**layers_of(plain), **own})

    def trace(self) -> Any:
        """The program, a jax.stages.Traced of abstract arguments."""
        return self._program.trace(self._shapes)

    def kept(self) -> Any:
        """Abstract arrays that stand beside the merged ones."""
        return self._shapes


def _with_layers(tree: Params, layers: Params) -> Params:
    """The tree with these layers in place of its own."""
    if "decoder" in tree:
        return {**tree, "decoder": _with_layers(tree["decoder"], layers)}
    return {**tree, "layers": layers}
