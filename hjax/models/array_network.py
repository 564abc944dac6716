"""Networks of a user's own: parameters in a nested dict or a flax.nnx module, in any layout."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from hjax.errors import ConfigError
from hjax.models.parameter_spec import ParameterKind, ParameterSpec
from hjax.models.parameters import Params, place_params
from hjax.sharding.layout import Layout
from hjax.trainable_split import TrainableSplit

# Of a parameter's dimension that no logical axis names.
_UNNAMED = "dimension{}"


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayNetwork:
    """A user's network without parameter values; to a ``NetworkWorker`` what
    ``hjax.models.parameters.Network`` is to a language model's worker.

    Attributes:
      shapes: nested dict of jax.ShapeDtypeStruct.
      axes: nested dict like it, of logical axis names; None: a dimension that is never split.
      declared: nested dict like it, of ``ParameterSpec``: matrices have weight decay, vectors and
        scalars have none.
      graph: flax.nnx graph definition; None: the parameters are a plain dict.
      what: names the worker's class in errors.
    """

    shapes: Params
    axes: Params
    declared: Params
    graph: Any
    what: str
    _create: Callable[[jax.Array], Params]
    _state: Any = None
    partition: TrainableSplit = dataclasses.field(default_factory=TrainableSplit)
    draws_noise: bool = True  # a loss gets a key per row
    dimensions: Mapping[str, int] = dataclasses.field(default_factory=dict)  # see ``shardings``

    @property
    def base(self) -> "ArrayNetwork":
        """Itself: it has no adapters."""
        return self

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(x.size for x in jax.tree.leaves(self.shapes))

    def without_adapters_of(self, tree: Params) -> Params:
        """The tree: there are no adapters."""
        return tree

    def bind(self, params: Params) -> Any:
        """What a user's methods get as ``model``: the parameters, or the module with them."""
        if self.graph is None:
            return params
        state = jax.tree.map(lambda x: x, self._state)
        nnx.replace_by_pure_dict(state, _with_keys_of(nnx.to_pure_dict(state), params))
        return nnx.merge(self.graph, state)

    def shardings(self, layout: Layout) -> Params:
        """NamedSharding of every parameter under a layout.

        Raises:
          ConfigError: an axis that is unknown or does not divide, by the parameter's name.
        """

        def placed(path: Any, x: Any, names: tuple[str | None, ...]) -> Any:
            sharding = layout.sharding(*names)
            for name, size in zip(names, x.shape, strict=True):
                parts = 1 if name is None else layout.shard_count(name)
                if size % parts:
                    raise ConfigError(
                        f"{self.what}: {name} of {jax.tree_util.keystr(path)} has size {size}, "
                        f"which does not divide over {parts} parts ({layout.describe()}); change "
                        "the layout, or leave the name out of axes()"
                    )
            return sharding

        return jax.tree.map_with_path(placed, self.shapes, self.axes)

    def create(self, seed: int, layout: Layout) -> Params:
        """Initial parameters, sharded as they are drawn; equal under every layout."""
        create = jax.jit(self._create, out_shardings=self.shardings(layout))
        drawn: Params = create(jax.random.key(seed))
        return drawn

    def place(self, params: Params, layout: Layout) -> Params:
        """Host or device arrays, sharded for ``layout``."""
        return place_params(params, self.shardings(layout), self.shapes)


def array_network(
    init: Callable[[jax.Array], Any], axes: Mapping[str, Any], what: str
) -> ArrayNetwork:
    """The network of an ``init(key)`` that returns a nested dict of arrays or a flax.nnx module.

    Args:
      init: called once without values, for the shapes, and once to draw them.
      axes: nested dict of logical axis names, such as ``{"hidden": {"kernel": (None, "mlp")}}``;
        what it lacks is not split.
      what: names the worker's class in errors.

    Raises:
      ConfigError: ``init`` returns something else, or ``axes`` does not fit it.
    """
    made = nnx.eval_shape(functools.partial(init, jax.random.key(0)))
    graph = state = None
    if isinstance(made, nnx.Module):
        graph, state = nnx.split(made)
        others = [v for _, v in nnx.to_flat_state(state) if not isinstance(v, nnx.Param)]
        if others:
            raise ConfigError(
                f"{what}.init: the module keeps {type(others[0]).__name__}, which nothing would "
                "update; hjax trains modules whose state is nnx.Param"
            )
        shapes = _text_keys(nnx.to_pure_dict(state))
    else:
        shapes = made
    if not isinstance(shapes, dict) or not jax.tree.leaves(shapes):
        raise ConfigError(
            f"{what}.init returned {type(made).__name__}; it must return a flax.nnx module, or a "
            "nested dict of arrays"
        )

    def create(key: jax.Array) -> Params:
        drawn = init(key)
        return drawn if graph is None else _text_keys(nnx.to_pure_dict(nnx.state(drawn)))

    named = _named_axes(shapes, axes, what)
    declared = jax.tree.map(_declared, shapes)
    return ArrayNetwork(shapes, named, declared, graph, what, create, state)


def _declared(x: jax.ShapeDtypeStruct) -> ParameterSpec:
    """The spec of an array, by which weight decay and Muon tell matrices from vectors."""
    names = tuple(_UNNAMED.format(i) for i in range(len(x.shape)))
    matrix = len(x.shape) > 1
    kind = ParameterKind.MATRIX if matrix else ParameterKind.VECTOR
    return ParameterSpec(tuple(zip(names, x.shape)), kind, inputs=names[:-1] if matrix else ())


def _named_axes(shapes: Params, axes: Mapping[str, Any], what: str) -> Params:
    """Nested dict like ``shapes`` of the logical names of dimensions."""
    left = {path for path, _ in jax.tree.leaves_with_path(axes, is_leaf=_is_names)}

    def names(path: tuple[Any, ...], x: Any) -> tuple[str | None, ...]:
        found: Any = axes
        for part in path:
            found = found.get(getattr(part, "key", part), {}) if isinstance(found, Mapping) else {}
        left.discard(path)
        if not found:
            return (None,) * len(x.shape)
        if len(found) != len(x.shape):
            raise ConfigError(
                f"{what}.axes: {jax.tree_util.keystr(path)} has {len(x.shape)} dimensions, and "
                f"{found} names {len(found)}; use None for those that are not split"
            )
        return tuple(found)

    named: Params = jax.tree.map_with_path(names, shapes)
    if left:
        known = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(shapes)]
        raise ConfigError(
            f"{what}.axes: no parameter {jax.tree_util.keystr(min(left, key=str))}; there are "
            f"{', '.join(known)}"
        )
    return named


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple)


def _text_keys(tree: Any) -> Any:
    """The tree with keys as texts, as files keep them; flax.nnx counts a list's modules."""
    if not isinstance(tree, Mapping):
        return tree
    return {str(key): _text_keys(value) for key, value in tree.items()}


def _with_keys_of(own: Any, tree: Any) -> Any:
    """Undo ``_text_keys`` by the keys of a tree of the same structure."""
    if not isinstance(own, Mapping):
        return tree
    return {key: _with_keys_of(value, tree[str(key)]) for key, value in own.items()}
