"""Safetensors files (github.com/huggingface/safetensors): read by rows, written in any order.

A file is eight bytes with the length of a JSON header, the header (by name dtype, shape and offsets
into what follows) and the tensors' bytes. Rows are read into memory of their own, so a tensor is
never whole in it, nor a file mapped.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError

# Those that parameters may be stored in, by the file's names.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100 * 2**20  # as the library has it


class TensorFile:
    """The tensors of a file, read by rows.

    Attributes:
      shapes: by name.
      dtypes: by name, as the file calls them.

    Raises:
      ConfigError: the file is damaged or cut short.
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
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, _LARGEST_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, about in header.items():
            start, stop = about["data_offsets"]
            if not 0 <= start <= stop or 8 + length + stop > size:
                raise ValueError(f"{name!r} ends at byte {8 + length + stop} of {size}")
            self.shapes[name], self.dtypes[name] = tuple(about["shape"]), about["dtype"]
            self._offsets[name] = 8 + length + start
            if about["dtype"] in DTYPES:
                wanted = math.prod(about["shape"]) * self.dtype(name).itemsize
                if stop - start != wanted:
                    raise ValueError(f"{name!r} has {stop - start} bytes, its shape {wanted}")

    def dtype(self, name: str) -> np.dtype:
        """The dtype of a tensor in ``DTYPES``."""
        return jnp.dtype(DTYPES[self.dtypes[name]])

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A tensor's rows from ``start`` to ``stop``, in the file's dtype; all without them."""
        shape, dtype = self.shapes[name], self.dtype(name)
        whole = shape or (1,)
        row = whole[1:]
        count = (whole[0] if stop is None else stop) - start
        read = np.empty((count, *row), dtype)
        with self.path.open("rb") as file:
            file.seek(self._offsets[name] + start * math.prod(row) * dtype.itemsize)
            if file.readinto(read.view(np.uint8).reshape(-1).data) != read.nbytes:
                raise ConfigError(f"{self.path}: {name} is cut short")
        return read.reshape((count, *row) if shape else ())


def create_file(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, np.ndarray]:
    """A file of these tensors, and by name arrays on the disk to write their values into.

    Args:
      path: of the file, which is not there yet.
      tensors: shapes and dtypes by name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The widest first, so that each begins at a multiple of its elements' bytes.
    for name in sorted(tensors, key=lambda name: -jnp.dtype(tensors[name][1]).itemsize):
        shape, dtype = tensors[name]
        start, end = end, end + math.prod(shape) * jnp.dtype(dtype).itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)

    def array(name: str) -> np.ndarray:
        shape, dtype = tensors[name]
        at = 8 + len(text) + header[name]["data_offsets"][0]
        return np.memmap(path, jnp.dtype(dtype), "r+", offset=at, shape=shape)

    return {name: array(name) for name in tensors}
