"""Safetensors files (github.com/huggingface/safetensors): read by rows, written in any order.

A file is eight bytes with the length of a JSON header, the header (dtype, shape and byte offsets by
name), and the tensors' bytes. Rows are read into new memory, so that neither a tensor needs to be
complete in memory nor a file mapped.
"""

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError, truncate
from hjax.files import open_regular
from hjax.user_input import object_with_unique_keys

# Dtypes that parameters may be stored in, by their names in files.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100 * 2**20  # the library's limit
_MOST_SIZES = 2 + 32  # offsets and dimensions of a tensor


class TensorFile:
    """A safetensors file, whose tensors are read by rows.

    Attributes:
      shapes: by name.
      dtypes: by name, as spelled in the file.

    Raises:
      ConfigError: the file is damaged or truncated.
    """

    def __init__(self, path: Path):
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._offsets: dict[str, int] = {}
        try:
            self._read_header()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(f"{path}: not a readable safetensors file ({reason})") from error
        except RecursionError:
            raise ConfigError(
                f"{path}: not a readable safetensors file (its header is too deeply nested)"
            ) from None

    def _read_header(self) -> None:
        size = self.path.stat().st_size
        with open(self.path, "rb", opener=open_regular) as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, _LARGEST_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length), object_pairs_hook=object_with_unique_keys)
        header.pop("__metadata__", None)
        for name, info in header.items():
            start, stop = info["data_offsets"]
            _check_sizes(name, [start, stop, *info["shape"]])
            if not 0 <= start <= stop or 8 + length + stop > size:
                raise ValueError(f"{name!r} ends at byte {8 + length + stop} of {size}")
            self.shapes[name], self.dtypes[name] = tuple(info["shape"]), info["dtype"]
            self._offsets[name] = 8 + length + start
            if info["dtype"] in DTYPES:
                wanted = math.prod(info["shape"]) * self.dtype(name).itemsize
                if stop - start != wanted:
                    raise ValueError(f"{name!r} has {stop - start} bytes, its shape {wanted}")
        end, before = 0, ""
        for (start, stop), name in sorted((x["data_offsets"], n) for n, x in header.items()):
            if start < end:
                raise ValueError(f"{name!r} begins within the bytes of {before!r}")
            if start > end:
                raise ValueError(f"{start - end} bytes before {name!r} belong to no tensor")
            end, before = stop, name
        if 8 + length + end < size:
            raise ValueError(f"its last {size - 8 - length - end} bytes belong to no tensor")

    def dtype(self, name: str) -> np.dtype:
        """The dtype of a tensor in ``DTYPES``."""
        return jnp.dtype(DTYPES[self.dtypes[name]])

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A tensor's rows from ``start`` to ``stop`` (default: all), in the file's dtype."""
        shape, dtype = self.shapes[name], self.dtype(name)
        whole = shape or (1,)
        row = whole[1:]
        count = (whole[0] if stop is None else stop) - start
        read = np.empty((count, *row), dtype)
        with open(self.path, "rb", opener=open_regular) as file:
            file.seek(self._offsets[name] + start * math.prod(row) * dtype.itemsize)
            if file.readinto(read.view(np.uint8).reshape(-1).data) != read.nbytes:
                raise ConfigError(f"{self.path}: {name} is cut short")
        return read.reshape((count, *row) if shape else ())


def _check_sizes(name: str, sizes: list[Any]) -> None:
    """Raise ValueError unless these are whole numbers that an array can have: floats of the same
    value and true and false compare equal to them, and products of larger ones take for ever."""
    if len(sizes) > _MOST_SIZES or any(type(x) is not int or not 0 <= x < 2**63 for x in sizes):
        shown = truncate(", ".join(str(x)[:20] for x in sizes[:_MOST_SIZES]), 60)
        allowed = f"whole numbers of 0 or more, at most {_MOST_SIZES - 2} dimensions"
        raise ValueError(f"{name!r} has offsets and shape {shown}; {allowed}")
    if math.prod(max(x, 1) for x in sizes[2:]) >= 2**60:
        raise ValueError(f"{name!r} has a shape that no array has")


def create_file(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, np.ndarray]:
    """Create a file; returns memory-mapped arrays by name, to write the values into.

    The file's whole size is allocated on the disk before this returns: writing to a mapped page
    that the disk has no room for would end the process.

    Args:
      path: of the new file.
      tensors: shapes and dtypes by name.

    Raises:
      OSError: with the file's name: the disk has no room for it.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Widest dtypes first, so that every tensor is aligned to its element size.
    for name in sorted(tensors, key=lambda name: -jnp.dtype(tensors[name][1]).itemsize):
        shape, dtype = tensors[name]
        start, offset = offset, offset + math.prod(shape) * jnp.dtype(dtype).itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, offset]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        try:
            _allocate(file.fileno(), 8 + len(text), offset)
        except OSError as error:
            error.filename = str(path)
            raise

    def array(name: str) -> np.ndarray:
        shape, dtype = tensors[name]
        at = 8 + len(text) + header[name]["data_offsets"][0]
        return np.memmap(path, jnp.dtype(dtype), "r+", offset=at, shape=shape)

    return {name: array(name) for name in tensors}


_ZEROS = bytes(2**20)


def _allocate(descriptor: int, start: int, size: int) -> None:
    """Extend a file that ends at byte ``start`` by ``size`` bytes of zeros that have their room."""
    if size == 0:
        return
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, start, size)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # of some file systems
                raise
    while size > 0:
        written = os.pwrite(descriptor, _ZEROS[:size], start)
        start, size = start + written, size - written
