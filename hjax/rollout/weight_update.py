"""Weights that take the place of others while requests are answered."""

from typing import Any

from hjax.errors import ConfigError
from hjax.sharding.parameter_manifest import named_leaves


def check_alike(params: Any, like: Any) -> None:
    """That parameters are those of the same model.

    Args:
      params: nested dict of arrays.
      like: nested dict of jax.Array or jax.ShapeDtypeStruct.

    Raises:
      ConfigError: other names, shapes or dtypes, the first of them.
    """
    new, old = named_leaves(params), named_leaves(like)
    for name in (*old, *new):
        ours, theirs = (_kind(some[name]) if name in some else "nothing" for some in (old, new))
        if ours != theirs:
            raise ConfigError(
                f"{name} of the new weights is {theirs}, of those that answer {ours}; give weights "
                "of a model of the same shapes"
            )


def _kind(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return f"a {type(x).__name__}"
    return f"{x.dtype}{list(x.shape)}"
