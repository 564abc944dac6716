"""What a tree of parameters consists of, written down and checked before any of it is used.

Of parameters that come from other processes nothing is known but what is said of them. Names,
shapes, dtypes, regions and a version are held against what the receiver expects; whatever differs
is one error that names the parameter and both values, and no number is read.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hjax.errors import RunError
from hjax.sharded_values import ArrayRegions, Region, overlap, region_of, volume
from hjax.sharding.transfer_buckets import leaf_name


@dataclasses.dataclass(frozen=True)
class ManifestEntry:
    """One parameter in a manifest.

    Attributes:
      shape, dtype: of the whole array.
      regions: that are there, each named once however many devices hold it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    regions: tuple[Region, ...]


@dataclasses.dataclass(frozen=True)
class ParameterManifest:
    """What is sent of a model's parameters; plain, can be pickled.

    Attributes:
      version: grows with every set of parameters that the sender gives away.
      entries: by name, the keys in the tree with dots between them.
    """

    version: int
    entries: Mapping[str, ManifestEntry]


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a nested dict by name, in the tree's order."""
    return {leaf_name(path): leaf for path, leaf in jax.tree.flatten_with_path(tree)[0]}


def manifest_of(tree: Any, version: int) -> ParameterManifest:
    """The manifest of a nested dict of ``ArrayRegions``, jax.Array or numpy arrays.

    Of an array that several processes hold together each of them gets the same manifest.

    Raises:
      RunError: something else is in the tree.
    """
    return ParameterManifest(
        version, {name: _entry(name, x) for name, x in named_leaves(tree).items()}
    )


def _entry(name: str, x: Any) -> ManifestEntry:
    if isinstance(x, ArrayRegions):
        regions = [region for region, _ in x.parts]
    elif isinstance(x, jax.Array):
        indices = x.sharding.devices_indices_map(x.shape).values()
        regions = list(dict.fromkeys(region_of(index or (), x.shape) for index in indices))
    elif isinstance(x, np.ndarray):
        regions = [tuple((0, n) for n in x.shape)]
    else:
        raise RunError(
            f"{name} is a {type(x).__name__}; parameters are hjax.sharded_values.ArrayRegions, "
            "jax.Array or numpy arrays, so send one of these"
        )
    return ManifestEntry(tuple(x.shape), np.dtype(x.dtype), tuple(regions))


def check(manifest: ParameterManifest, expected: Any, after: int | None = None) -> None:
    """Refuse parameters that are not the expected ones.

    Args:
      manifest: of what is sent.
      expected: nested dict of jax.ShapeDtypeStruct, as it is to be sent (before a cast on the
        receiver's side); or the Manifest that was promised.
      after: the version in use, which the new one must follow; None: any.

    Raises:
      RunError: a parameter is missing or unknown, has another shape or dtype, its regions leave a
        hole or overlap, or the version is not after the one in use.
    """
    if after is not None and manifest.version <= after:
        raise RunError(
            f"weights of version {manifest.version} came while version {after} is in use; "
            f"allowed: {after + 1} or more, so send newer ones"
        )
    wanted = expected.entries if isinstance(expected, ParameterManifest) else named_leaves(expected)
    for name, x in wanted.items():
        if name not in manifest.entries:
            raise RunError(
                f"{name} {_kind(x)} is missing among the weights of version {manifest.version} "
                f"({len(manifest.entries)} parameters, {len(wanted)} expected); send it too"
            )
    for name, entry in manifest.entries.items():
        if name not in wanted:
            raise RunError(
                f"{name} {_kind(entry)} is among the weights of version {manifest.version}, but "
                "the receiving model has no such parameter; leave it out"
            )
        x = wanted[name]
        if entry.shape != tuple(x.shape):
            raise RunError(
                f"{name} comes in the shape {list(entry.shape)}, but must be {list(x.shape)}; "
                "send the parameters of a model of the same shapes"
            )
        if entry.dtype != np.dtype(x.dtype):
            raise RunError(
                f"{name} comes as {entry.dtype}, but must be {np.dtype(x.dtype)}; cast it before "
                "it is sent, or have the receiver expect it so"
            )
        check_regions(name, entry.shape, entry.regions)


def check_regions(name: str, shape: Sequence[int], regions: Sequence[Region]) -> None:
    """Refuse regions that do not make up a whole array, each element once.

    Raises:
      RunError: a region is not within the array, two overlap, or some of the array is in none.
    """
    for region in regions:
        if len(region) != len(shape) or any(
            not 0 <= start <= stop <= n for (start, stop), n in zip(region, shape, strict=False)
        ):
            raise RunError(
                f"{name}: the region {region} is not within the array {list(shape)}; send regions "
                "of the array that is named"
            )
    bounds = np.array(regions, np.int64).reshape(len(regions), len(shape), 2)
    for i, region in enumerate(regions):
        for j in touching(bounds[i + 1 :], region):
            other = regions[i + 1 + j]
            raise RunError(
                f"{name} {list(shape)}: the regions {region} and {other} overlap in "
                f"{overlap(region, other)}; every element may be sent once"
            )
    # Disjoint and within the array, so the count alone tells whether they fill it.
    whole = tuple((0, n) for n in shape)
    if sum(map(volume, regions)) != volume(whole):
        raise RunError(
            f"{name} {list(shape)}: no part holds the region {_hole(whole, regions)}; the parts "
            "must make up the whole array, so send what is missing"
        )


def touching(bounds: np.ndarray, region: Region) -> list[int]:
    """Which regions have something in common with one.

    Args:
      bounds: int64 [regions, rank, 2], starts and stops.
      region: the one.
    """
    one = np.array(region, np.int64).reshape(bounds.shape[1:])
    start = np.maximum(bounds[..., 0], one[:, 0])
    stop = np.minimum(bounds[..., 1], one[:, 1])
    found: list[int] = np.flatnonzero((start < stop).all(-1)).tolist()
    return found


def _hole(whole: Region, regions: Sequence[Region]) -> Region:
    """A region that none of these has; there is one."""
    left = [whole]
    for region in regions:
        left = [rest for box in left for rest in _less(box, region)]
    return left[0]


def _less(box: Region, region: Region) -> Iterator[Region]:
    """A box without a region, as boxes."""
    common = overlap(box, region)
    if common is None:
        yield box
        return
    rest = list(box)
    for i, ((start, stop), (first, last)) in enumerate(zip(box, common, strict=True)):
        for bounds in ((start, first), (last, stop)):
            if bounds[0] < bounds[1]:
                yield (*rest[:i], bounds, *rest[i + 1 :])
        rest[i] = (first, last)


def _kind(x: Any) -> str:
    return f"({np.dtype(x.dtype)}{list(x.shape)})"
