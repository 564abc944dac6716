"""Reading rows from data sources: files, glob patterns, folders and Hugging Face datasets."""

import codecs
import contextlib
import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hjax.data.invalid_rows import InvalidRows
from hjax.errors import DataError, short_repr
from hjax.files import special_file
from hjax.user_input import parse_json, user_path

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
_COMPRESSED = (".gz", ".zst")  # may follow the others, except .parquet
_NAMES = f"{', '.join(SUFFIXES[:-1])} or .txt; all but .parquet also with .gz or .zst behind it"
# Decompressed bytes: so many, or so many times the file's. Text becomes a tenth, rarely a fiftieth.
_FREE_BYTES, _LARGEST_RATIO = 1 << 28, 200
_ZST_BYTES = 1 << 12  # at a time: of each four bytes can come 128 KiB
# owner/name, optionally with a configuration and a split: owner/name/main:train.
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?::([\w\[\]%:+-]+))?")
# A source with a name: math=gsm8k.jsonl.
_NAMED = re.compile(r"([A-Za-z][\w.-]*)\s*=\s*(.+)", re.DOTALL)
# The column that has the name.
MIXTURE = "mixture"
# Metadata files of `datasets.save_to_disk`.
_SAVED = ("state.json", "dataset_dict.json")
# Fields by which chat messages and tools are known in Arrow's tables.
_CHAT = {"role", "from", "function", "parameters"}
# The kind of a line that cannot be read.
_UNREADABLE = "unreadable line"


def split_paths(path: str | Path) -> list[str]:
    """Split a `data.path` at its commas."""
    if isinstance(path, Path):
        return [str(path)]
    found = [part.strip() for part in path.split(",") if part.strip()]
    return found or [path]


def data_files(part: str) -> list[Path] | None:
    """The files that one source names: a file, a glob pattern's matches or a folder's, sorted.

    Returns:
      None for a Hugging Face dataset.

    Raises:
      DataError: a pattern without matches, or a folder without data files.
    """
    path = user_path(part, "data: ")
    if path.is_dir():
        if any((path / name).is_file() for name in _SAVED):
            return None
        found = sorted(p for p in path.iterdir() if _kind(p) in SUFFIXES)
        if not found:
            raise DataError(f"{part}: the folder has no file whose name ends in {_NAMES}")
        return found
    if not path.exists() and glob.has_magic(part) and not _HUB.fullmatch(part):
        found = [Path(name) for name in sorted(glob.glob(str(path)))]
        if not found:
            raise DataError(f"{part}: no file matches this pattern")
        return found
    if not path.exists() and _kind(path) not in SUFFIXES and _HUB.fullmatch(part):
        return None
    return [path]


def huggingface_rows(part: str, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """(location, row) pairs of a Hugging Face dataset: a name, or a folder of `save_to_disk`.

    Args:
      part: `owner/name` or `owner/name/configuration`, each optionally with `:split`; or a folder.
      split: the split to read where ``part`` names none.

    Raises:
      DataError: `datasets` is not installed, or cannot load the dataset.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{part}: there is no such file; for a data set of Hugging Face's install its library "
            "(pip install datasets)"
        ) from error
    try:
        if Path(part).expanduser().is_dir():
            table = datasets.load_from_disk(str(Path(part).expanduser()))
            if isinstance(table, dict):
                table = table[split]
        else:
            match = _HUB.fullmatch(part)
            assert match is not None  # `data_files` returned None
            table = datasets.load_dataset(match[1], match[2], split=match[3] or split)
        rows = [_drop_struct_nulls(row) for row in table]
    except Exception as error:  # the library raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{part}: datasets cannot load it ({reason})") from error
    yield from ((f"{part}: row {number}", row) for number, row in enumerate(rows, start=1))


def read_sources(path: str | Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    """(location, row) pairs of all sources of a `data.path`, in order.

    Raises:
      DataError: a source that cannot be read, or that has a name and a column for it.
    """
    rows: list[tuple[str, dict[str, Any]]] = []
    for part in split_paths(path):
        name, part = split_name(part)
        files = data_files(part)
        found = list(huggingface_rows(part)) if files is None else []
        for file in files or ():
            found += _read_rows(file, invalid)
        if name:
            taken = [where for where, row in found if MIXTURE in row]
            if taken:
                raise DataError(
                    f"{taken[0]}: it has a column {MIXTURE!r}, which is to have the name {name!r} "
                    "of its file; rename the column (data.columns)"
                )
            found = [(where, {**row, MIXTURE: name}) for where, row in found]
        rows += found
    return rows


def split_name(part: str) -> tuple[str, str]:
    """The name and the path of a source, `math=gsm8k.jsonl`; the name is empty if it has none."""
    match = _NAMED.fullmatch(part)
    return (match[1], match[2]) if match and not os.path.exists(part) else ("", part)


def _kind(path: Path) -> str:
    """How a file's name says to read it: its suffix without a compression's."""
    if path.suffix in _COMPRESSED and Path(path.stem).suffix != ".parquet":
        return Path(path.stem).suffix
    return path.suffix


def _read_rows(path: Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    """(location, row) pairs of a file; the location is `file:line` or `file: row n`."""
    if _kind(path) not in SUFFIXES:
        raise DataError(f"{path}: its name must end in {_NAMES}")
    if not path.is_file():
        if found := special_file(path) or ("a directory" if path.is_dir() else ""):
            raise DataError(f"{path}: {found}; data.path and data.eval_path name files")
        raise DataError(f"{path}: there is no such file; data.path and data.eval_path name files")
    read = {
        ".txt": _read_lines,
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    try:
        return read[_kind(path)](path, invalid)
    except OSError as error:
        reason = error.strerror or f"not readable as {path.suffix} ({error})"
        raise DataError(f"{path}: {reason}") from error


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """The bytes of a file, decompressed as its suffix says."""
    if path.suffix not in _COMPRESSED:
        with path.open("rb") as file:
            yield file
        return
    most = max(_FREE_BYTES, _LARGEST_RATIO * path.stat().st_size)
    if path.suffix == ".gz":
        try:
            with gzip.open(path) as whole, io.BufferedReader(_Limited(whole, path, most)) as file:
                yield file
        except (EOFError, zlib.error) as error:
            raise DataError(f"{path}: not readable as .gz ({error})") from error
        return
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{path}: .zst is read with a library of its own (pip install zstandard)"
        ) from error
    content = io.BytesIO()
    try:
        with path.open("rb") as file:
            packed = file.read(_ZST_BYTES)
            while packed:  # a frame; its stream reader would take a torn file for a whole one
                frame = zstandard.ZstdDecompressor().decompressobj()
                while packed and not frame.eof:
                    content.write(frame.decompress(packed))
                    _check_ratio(path, content.tell(), most)
                    packed = frame.unused_data if frame.eof else file.read(_ZST_BYTES)
                if not frame.eof:
                    raise zstandard.ZstdError("it ends in the middle")
                packed = packed or file.read(_ZST_BYTES)
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: not readable as .zst ({error})") from error
    content.seek(0)
    yield content


class _Limited(io.RawIOBase):
    """A decompressed stream that ends with an error beyond so many bytes."""

    def __init__(self, file: gzip.GzipFile, path: Path, most: int):
        self._file, self._path, self._most, self._read = file, path, most, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._read += count
        _check_ratio(self._path, self._read, self._most)
        return count


def _check_ratio(path: Path, size: int, most: int) -> None:
    if size > most:
        raise DataError(
            f"{path}: more than {most} bytes come out of its {path.stat().st_size}, more than of "
            "any text; decompress it yourself if it is meant"
        )


def _read_lines(path: Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            with invalid.checking(f"{path}:{number}", _UNREADABLE):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except ValueError as error:
                    raise DataError(f"not UTF-8 ({error})") from None
                if text.strip():
                    rows.append((f"{path}:{number}", {"prompt": text}))
    return rows


def _read_jsonl(path: Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            with invalid.checking(f"{path}:{number}", _UNREADABLE):
                row = parse_json(line, unique_keys=True)
                _check_row(row, b"\\u" in line)
                rows.append((f"{path}:{number}", row))
    return rows


def _read_json(path: Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a JSON array; of a file that is none, as JSON lines."""
    with _open(path) as file:
        content = file.read()
    if content.removeprefix(codecs.BOM_UTF8).lstrip()[:1] != b"[":
        return _read_jsonl(path, invalid)
    rows = []
    for number, row in enumerate(parse_json(content, str(path), unique_keys=True), start=1):
        with invalid.checking(f"{path}: row {number}", _UNREADABLE):
            _check_row(row, b"\\u" in content)
            rows.append((f"{path}: row {number}", row))
    return rows


def _read_csv(path: Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    """Rows of texts under the names in the first one; an empty cell is None."""
    rows = []
    with _open(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        table = csv.reader(text, strict=True)
        try:
            names = next(table, [])
            if not all(names) or len(set(names)) < len(names):
                raise DataError(
                    f"{path}: the first row names the columns, and these are not all different "
                    f"names: {short_repr(names)}"
                )
            for number, cells in enumerate(table, start=1):
                with invalid.checking(f"{path}: row {number}", _UNREADABLE):
                    if cells and len(cells) != len(names):
                        raise DataError(f"{len(cells)} cells under {len(names)} column names")
                    if cells:
                        row = {name: cell or None for name, cell in zip(names, cells)}
                        rows.append((f"{path}: row {number}", row))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 ({error.reason})") from None
        except csv.Error as error:
            raise DataError(f"{path}:{table.line_num}: not readable as .csv ({error})") from None
    return rows


def _check_row(row: Any, escaped: bool) -> None:
    """Refuse what is no JSON object, and in `escaped` text halves of surrogate pairs (`\\ud83d`
    alone), which no tokenizer takes."""
    if not isinstance(row, dict):
        raise DataError(f"a JSON object is needed, found {short_repr(row)}")
    if not escaped:
        return
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except RecursionError:
        raise DataError("too deeply nested", kind=_UNREADABLE) from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(
            f"it has {half!r}, half of a surrogate pair, which is no character; write both halves",
            kind="text with half a character",
        ) from None


def _read_parquet(path: Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()  # conversion may fail too
    except Exception as error:  # Arrow's errors, and those of value conversion
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: not a readable parquet file ({reason[:200]})") from None
    return [(f"{path}: row {i}", _drop_struct_nulls(row)) for i, row in enumerate(rows, start=1)]


def _drop_struct_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without null fields of its chat messages and tools.

    Arrow gives all objects of a column the same fields: one that an object does not have is null.
    Only these columns are rendered, so elsewhere nulls stay.
    """
    return {
        name: _without_nulls(value)
        if isinstance(value, list) and all(isinstance(x, dict) and x.keys() & _CHAT for x in value)
        else value
        for name, value in row.items()
    }


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
