"""Tasks that other packages define; their classes are made when a task is asked for."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hjax.data.tasks.task import Task, get_task
from hjax.errors import ConfigError


class PackageTask(Task):
    """A task of another package, whose options are those that the package has for it."""

    def __reduce__(self) -> Any:
        # Its class is made at run time, so it is found by its name.
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return functools.partial(get_task, self.name, **options), ()


def import_package(module: str, package: str, name: str) -> ModuleType:
    """The package's module.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"task {name} needs {package}, which cannot be imported ({error}): "
            "pip install 'hjax[environments]'"
        ) from None


def make_class(
    base: type[PackageTask], name: str, options: Mapping[str, Any], **attributes: Any
) -> type[PackageTask]:
    """A class of tasks with options of its own.

    Args:
      name: for `get_task`.
      options: defaults by name; those that are no plain values are left out.
      attributes: of the class.
    """
    taken = {key for key in dir(base) if key != "size"}
    fields: list[Any] = []
    for key, default in options.items():
        default = tuple(default) if isinstance(default, list) else default
        values = default if isinstance(default, tuple) else (default,)
        plain = all(type(value) in (bool, int, float, str) for value in values)
        if plain and key not in taken and key.isidentifier():
            fields.append((key, type(default), dataclasses.field(default=default)))
    made: type[PackageTask] = dataclasses.make_dataclass(
        base.__name__, fields, bases=(base,), frozen=True, namespace={"name": name, **attributes}
    )
    return made
