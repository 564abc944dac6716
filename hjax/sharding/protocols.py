"""Transfer protocols: how a call's batch is split over a worker group, and its result collected.

HybridFlow (arXiv 2409.19256, Table 3) binds each method of a model class to a protocol: a
distribute function and a collect function. In JAX the distribute function is a PartitionSpec from
the receiver's layout, and collecting is the global view of the resulting array, in which replicas
appear once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from hjax.errors import ConfigError
from hjax.sharded_values import PartialValue, ShardedRows, map_leaves
from hjax.sharding.global_arrays import is_array, place, to_numpy
from hjax.sharding.layout import Layout, RoleLayouts

# A batch key that only the host reads: it stays a numpy array in every call.
PROMPT_ID = "prompt_id"

Split = Literal["batch", "replicated", "none"]
LayoutName = Literal["train", "generate"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How a batch gets into a worker group and its result out.

    Attributes:
      name: the paper's name.
      split: ``batch``: arrays are split on their leading dimension by the layout's ``batch`` rule;
        ``replicated``: every device gets them whole; ``none``: passed on unchanged.
      layout: which of the role's layouts the split is read from.
      collect: ``global``: global arrays, replicas once; ``shards``: a list with each device's
        part, in device order (for debugging).
    """

    name: str
    split: Split
    layout: LayoutName = "train"
    collect: Literal["global", "shards"] = "global"

    def distribute(self, value: Any, layouts: RoleLayouts | None) -> Any:
        """Place the arrays of ``value`` (nested dicts, lists and tuples) for the receiver.

        Lists of strings and other Python objects pass through unchanged. Without layouts (a
        worker on no device) arrays become numpy arrays.

        Raises:
          ConfigError: a leading dimension that the batch axes do not divide.
        """
        if self.name == CONTROL.name:
            return value
        if self.split == "none":
            return _to_local(value)
        if layouts is None:
            return _map_arrays(to_numpy, value)
        layout: Layout = getattr(layouts, self.layout)
        shards = layout.shard_count("batch")

        def check(rows: int) -> None:
            if rows % shards:
                raise ConfigError(
                    f"a batch of {rows} rows does not divide over {shards} data-parallel "
                    f"parts ({layout.describe()}); use a multiple of {shards}"
                )

        def placed(x: Any) -> Any:
            if isinstance(x, ShardedRows):
                check(len(x.rows))
                take = _take_rows_program(layout.sharding("batch"))
                return take(x.held, place(x.rows, layout.replicated))
            if self.split == "replicated" or not x.shape:
                return place(x, layout.replicated)
            check(x.shape[0])
            return place(x, layout.sharding("batch"))

        return _map_arrays(placed, value)

    def gather(self, value: Any) -> Any:
        """What the controller sees of a method's result."""
        if self.collect == "global":
            return value
        return map_leaves(  # which keeps the order of a dict's keys
            lambda x: (
                [shard.data for shard in x.addressable_shards] if isinstance(x, jax.Array) else x
            ),
            value,
        )


@functools.lru_cache(maxsize=64)
def _take_rows_program(sharding: Sharding) -> Any:
    """A compiled function that takes rows by number from a dict of arrays with this sharding."""

    def take_rows(held: dict[str, jax.Array], rows: jax.Array) -> dict[str, jax.Array]:
        return {key: jnp.take(x, rows, axis=0, mode="clip") for key, x in held.items()}

    return jax.jit(take_rows, out_shardings=sharding)


def _map_arrays(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, ShardedRows):
        return _map_rows(function, value)
    if isinstance(value, Mapping):
        return {
            key: to_numpy(item) if key == PROMPT_ID else _map_arrays(function, item)
            for key, item in value.items()
        }
    if isinstance(value, tuple):
        return tuple(_map_arrays(function, item) for item in value)
    if is_array(value):
        return function(value)
    return value.whole() if isinstance(value, PartialValue) else value


def _map_rows(function: Callable[[Any], Any], value: ShardedRows) -> Any:
    """Rows of a batch that workers hold: device arrays by ``function``, others on the host."""
    if value.rows is None:
        return value.held
    rows = to_numpy(value.rows).astype(np.int32)
    on_devices = {k: x for k, x in value.held.items() if isinstance(x, jax.Array) and x.ndim}
    taken = function(ShardedRows(on_devices, rows)) if on_devices else {}
    others = {k: x for k, x in value.held.items() if k not in on_devices}
    return {k: x[rows] if np.ndim(x) else x for k, x in others.items()} | taken


def _to_local(value: Any) -> Any:
    """``value`` with every array whole in this process; copies only where needed."""
    if isinstance(value, Mapping):
        return {key: _to_local(item) for key, item in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_to_local(item) for item in value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return to_numpy(value)
    return value.whole() if isinstance(value, PartialValue) else value


PROTOCOLS: dict[str, Protocol] = {
    p.name: p
    for p in (
        Protocol("ONE_TO_ALL", split="replicated"),
        Protocol("3D_PROTO", split="batch"),
        Protocol("3D_ALL_MICRO_DP", split="batch", layout="generate"),
        Protocol("3D_PP_ONLY", split="replicated"),
        Protocol("DP_PROTO", split="batch"),
        Protocol("ALL_TO_ALL", split="none", collect="shards"),
    )
}


# For calls outside the dataflow: arguments and results are passed on unchanged.
CONTROL = Protocol("CONTROL", split="none")

# Keys of a batch, or a function of a worker's class and context that returns them.
Reads = Sequence[str] | Callable[..., Sequence[str]] | None


def protocol(name: str, phase: str = "prepare", reads: Reads = None) -> Callable[[F], F]:
    """Bind a worker's method to a transfer protocol, so that the controller can call it.

    Args:
      name: a key of ``PROTOCOLS`` (Table 3's names).
      phase: under which its time is counted: ``generate``, ``prepare`` or ``update``.
      reads: the keys of a batch that the method reads; only those are sent. A function is called
        with the worker's class and its ``WorkerContext``. None: all.

    Raises:
      ConfigError: an unknown name.
    """
    if name not in PROTOCOLS:
        raise ConfigError(
            f"unknown transfer protocol {name!r}; allowed: {', '.join(sorted(PROTOCOLS))}"
        )

    def bind(method: F) -> F:
        method.protocol = PROTOCOLS[name]  # type: ignore[attr-defined]
        method.phase = phase  # type: ignore[attr-defined]
        method.reads = reads  # type: ignore[attr-defined]
        return method

    return bind


def control(method: F) -> F:
    """Let the controller call a worker's method outside the dataflow.

    Such a call runs in the pool's order. It is no part of a step, so it is on no timeline and
    triggers no offload.
    """
    method.protocol = CONTROL  # type: ignore[attr-defined]
    method.phase = ""  # type: ignore[attr-defined]
    return method


def control_in_background(method: F) -> F:
    """As ``control``, for a method that returns a function with the rest of its work.

    The rest runs in the background while the pool continues; the call's future has its result.
    """
    method.background = True  # type: ignore[attr-defined]
    return control(method)
