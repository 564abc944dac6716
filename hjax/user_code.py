"""Users' Python files: import by path, objects by ``path.py:name``, tracebacks."""

import dataclasses
import functools
import hashlib
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hjax.errors import USER_MODULE, ConfigError, did_you_mean
from hjax.files import read_bytes
from hjax.user_input import user_path

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parent
# Beginnings of the files of hjax's own checks.
_CHECKS = (f"{_PACKAGE}{os.sep}", "<string>")


@dataclasses.dataclass(frozen=True)
class _Imported:
    """A file as it was when imported."""

    path: Path
    content: bytes
    module: types.ModuleType


# By module name, also the key in sys.modules.
_imported: dict[str, _Imported] = {}
# Content of files from another process, by path.
_provided: dict[Path, bytes] = {}


def imported() -> dict[str, bytes]:
    """Content of the users' files that this process has imported, by absolute path."""
    return {str(file.path): file.content for file in _imported.values()}


def provide_files(files: Mapping[str, bytes]) -> None:
    """Use another process's files, whatever this host has at their paths.

    Args:
      files: its ``imported()``.
    """
    _provided.update({Path(path): content for path, content in files.items()})


def import_file(path: Path, setting: str) -> types.ModuleType:
    """Import a Python file as a module.

    The same module is returned while the file's text is the same, so that its classes can be
    pickled by name; an edited file is imported again. Its folder is appended to `sys.path`, so that
    it can import its neighbours (not for hjax's own files).

    Args:
      path: of the file.
      setting: that names the file, for the message: `--config=mine.py`.

    Raises:
      ConfigError: it is no Python file, cannot be read or fails on import; the line is named.
    """
    path = path.resolve()
    if path.suffix != ".py":
        raise ConfigError(f"{setting}: not a Python file (its name must end in .py)")
    try:
        content = _provided[path] if path in _provided else read_bytes(path)
    except OSError as error:
        raise ConfigError(f"{setting}: {path}: {error.strerror}") from error
    # The name depends on the path: two files called reward.py don't hide each other.
    name = f"{USER_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    before = _imported.get(name)
    if before is not None and before.content == content and sys.modules.get(name) is before.module:
        return before.module
    if _PACKAGE not in path.parents and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # The loader would use a stale .pyc for a file edited to the same length within a second.
        exec(compile(content, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{setting}: {error_line(path, error)}") from error
    _imported[name] = _Imported(path, content, module)
    return module


def load_object(spec: str, setting: str, beside: Path | None = None) -> Any:
    """The object called `name` in the file `path.py`, given as "path.py:name".

    Args:
      spec: the path and the name; dots in the name reach into classes.
      setting: the key that names it, such as `reward.function`, for messages.
      beside: a folder in which a relative path is looked up too.

    Raises:
      ConfigError: another form, no such file or name, or the file fails on import.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where.endswith(".py") or not name:
        raise ConfigError(f"{setting}={spec!r}: it must look like path.py:name")
    given = user_path(where, f"{setting}=")
    candidates = [given] if beside is None else [given, beside / given]
    path = next((p for p in candidates if p in _provided or p.is_file()), None)
    if path is None:
        raise ConfigError(f"{setting}={spec!r}: there is no file {where} in {Path.cwd()}")
    module = import_file(path, f"{setting}={spec!r}")
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        found = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        has = f"{did_you_mean(name, found)}it has {', '.join(found) or 'none'}"
        raise ConfigError(f"{setting}={spec!r}: {where} has no {name}; {has}") from None


def load_subclass(
    spec: str, setting: str, base: type[T], shipped: Mapping[str, type[T]] | None = None
) -> type[T]:
    """The subclass of ``base`` that a setting names: one of ``shipped``, or ``path.py:Class``.

    Raises:
      ConfigError: there is none of that name, or it is something else.
    """
    if shipped and spec in shipped:
        return shipped[spec]
    if shipped and ":" not in spec:
        raise ConfigError(
            f"{setting}={spec!r}: there are {', '.join(shipped)}, and classes of yours as "
            "path.py:Class"
        )
    found = load_object(spec, setting)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{setting}={spec!r}: {found!r} is no subclass of {base.__module__}.{base.__name__}"
        )
    return found


def file_and_name(thing: Any) -> tuple[str, str] | None:
    """The user's file and the name in it that define a class or function.

    `load_object(f"{path}:{name}", ...)` loads it again, also in another process.

    Returns:
      (absolute path, name, dotted inside classes), or None: it is from an ordinary module, or not
      reachable by its name (inside a function, or replaced).
    """
    file = _imported.get(getattr(thing, "__module__", None) or "")
    name = getattr(thing, "__qualname__", None)
    if file is None or name is None or "<" in name:
        return None
    try:
        found = functools.reduce(getattr, name.split("."), file.module)
    except AttributeError:
        return None
    return (str(file.path), name) if found is thing else None


def find_object(thing: Any) -> tuple[str, str] | None:
    """The user's file and the name in it that refer to this very object, of any kind.

    Returns:
      (absolute path, name), or None: no imported file has it.
    """
    for file in _imported.values():
        for name, value in list(vars(file.module).items()):
            if value is thing:
                return str(file.path), name
    return None


def reduce_by_name(value: Any) -> Any:
    """Pickle a user file's class or function by path and name.

    Returns:
      the value for ``reducer_override``; NotImplemented: it is from elsewhere.
    """
    if isinstance(value, type) or callable(value) and hasattr(value, "__qualname__"):
        where = file_and_name(value)
        if where is not None:
            path, name = where
            return load_object, (f"{path}:{name}", name)
    return NotImplemented


def user_traceback(error: BaseException, *others: str) -> str:
    """A traceback as Python prints it, from the user's first frame on; of hjax's own errors only
    the user's frames.

    Args:
      error: that was caught.
      *others: files or folders whose frames come before the user's.
    """
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(others):
        frames = frames.tb_next
    # If the call itself failed there is no frame of the user's.
    found = traceback.TracebackException(type(error), error, frames)
    if isinstance(error, ConfigError):  # a check, which dataclasses call from "<string>"
        while len(found.stack) > 1 and found.stack[-1].filename.startswith(_CHECKS):
            found.stack.pop()
    lines = list(found.format())
    head = "" if lines[0].startswith("Traceback") else "Traceback (most recent call last):\n"
    return (head + "".join(lines)).rstrip()


def error_line(path: Path, error: BaseException) -> str:
    """`file:line: Kind: message` of an error, on one line; the line is the last one in ``path``."""
    path = path.resolve()
    line: int | None = None
    if isinstance(error, SyntaxError):
        line = error.lineno if error.filename == str(path) else None
        text = error.msg
    else:
        text = str(error)
    if line is None:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = lines[-1] if lines else None
    place = f"{path.name}:{line}" if line else path.name
    text = text.removeprefix(f"{place}: ")  # of a config's unknown key
    # hjax's own errors are shown without their type.
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return f"{place}: {kind}{' '.join(text.split())}"
