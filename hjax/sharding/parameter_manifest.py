"""Manifest of a parameter tree, checked before weights from other processes are used.

The manifest has names, shapes, dtypes, regions and a version. They are compared with what the
receiver expects; a difference is one error that names the parameter and both values, before any
value is read.
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
      regions: that are sent, each listed once however many devices hold it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    regions: tuple[Region, ...]


@dataclasses.dataclass(frozen=True)
class ParameterManifest:
    """What is sent of a model's parameters; picklable.

    Attributes:
      version: increases with every set of parameters that the sender publishes.
      entries: by name: the keys in the tree, joined by dots.
    """

    version: int
    entries: Mapping[str, ManifestEntry]


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a nested dict by name, in tree order."""
    return {leaf_name(path): leaf for path, leaf in jax.tree.flatten_with_path(tree)[0]}


def manifest_of(tree: Any, version: int) -> ParameterManifest:
    """The manifest of a nested dict of ``ArrayRegions``, jax.Array or numpy arrays.

    For an array that spans processes, every process makes the same manifest.

    Raises:
      RunError: a leaf of another type.
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


def check_manifest(
    manifest: ParameterManifest, expected: Any, newer_than: int | None = None
) -> None:
    """Refuse parameters that are not the expected ones.

    Args:
      manifest: of what is sent.
      expected: nested dict of jax.ShapeDtypeStruct, as sent (before the receiver casts); or the
        ParameterManifest that was announced.
      newer_than: the version in use; None: any version is taken.

    Raises:
      RunError: a parameter is missing or unknown, has another shape or dtype, its regions overlap
        or do not cover it, or the version is not newer than the one in use.
    """
    if newer_than is not None and manifest.version <= newer_than:
        raise RunError(
            f"weights of version {manifest.version} came while version {newer_than} is in use; "
            f"allowed: {newer_than + 1} or more, so send newer ones"
        )
    wanted = expected.entries if isinstance(expected, ParameterManifest) else named_leaves(expected)
    for name, x in wanted.items():
        if name not in manifest.entries:
            raise RunError(
                f"{name} {_text(x)} is missing among the weights of version {manifest.version} "
                f"({len(manifest.entries)} parameters, {len(wanted)} expected); send it too"
            )
    for name, entry in manifest.entries.items():
        if name not in wanted:
            raise RunError(
                f"{name} {_text(entry)} is among the weights of version {manifest.version}, but "
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
    """Refuse regions that do not cover an array exactly once.

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
        for j in overlapping(bounds[i + 1 :], region):
            other = regions[i + 1 + j]
            raise RunError(
                f"{name} {list(shape)}: the regions {region} and {other} overlap in "
                f"{overlap(region, other)}; every element may be sent once"
            )
    # They are disjoint and within the array, so equal volumes mean that they cover it.
    whole = tuple((0, n) for n in shape)
    if sum(map(volume, regions)) != volume(whole):
        raise RunError(
            f"{name} {list(shape)}: no part holds the region {_uncovered(whole, regions)}; the "
            "parts must make up the whole array, so send what is missing"
        )


def overlapping(bounds: np.ndarray, region: Region) -> list[int]:
    """Indices of the regions that overlap ``region``.

    Args:
      bounds: int64 [regions, rank, 2], starts and stops of the regions.
    """
    one = np.array(region, np.int64).reshape(bounds.shape[1:])
    start = np.maximum(bounds[..., 0], one[:, 0])
    stop = np.minimum(bounds[..., 1], one[:, 1])
    found: list[int] = np.flatnonzero((start < stop).all(-1)).tolist()
    return found


def _uncovered(whole: Region, regions: Sequence[Region]) -> Region:
    """A region of ``whole`` that is in none of ``regions``; the caller knows that one exists."""
    left = [whole]
    for region in regions:
        left = [rest for box in left for rest in _difference(box, region)]
    return left[0]


def _difference(box: Region, region: Region) -> Iterator[Region]:
    """The parts of ``box`` outside ``region``, as boxes."""
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


def _text(x: Any) -> str:
    return f"({np.dtype(x.dtype)}{list(x.shape)})"
