"""Weight update of a running service: checks that new weights are of the same model."""

from typing import Any

from hjax.errors import ConfigError
from hjax.sharding.parameter_manifest import named_leaves


def check_same_model(params: Any, like: Any) -> None:
    """Check that parameters are those of the same model.

    Args:
      params: nested dict of arrays.
      like: nested dict of jax.Array or jax.ShapeDtypeStruct.

    Raises:
      ConfigError: other names, shapes or dtypes; it names the first.
    """
    new, old = named_leaves(params), named_leaves(like)
    for name in (*old, *new):
        ours, theirs = (_kind(some[name]) if name in some else "nothing" for some in (old, new))
        if ours != theirs:
            raise ConfigError(
                f"{name} of the new weights is {theirs}, of the current ones {ours}; give weights "
                "of a model of the same shapes"
            )


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"a {type(x).__name__}"
