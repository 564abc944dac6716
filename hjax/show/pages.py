"""HTML pages from the Jinja templates in `hjax/show/templates`.

All printed values are escaped, and their control characters become dots. So no text of a user, a
model or a file can inject markup.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from hjax.errors import ConfigError, DataError
from hjax.show.format import printable

COLORS = 14  # of the classes c0 ... c13


def render(template: str, **values: Any) -> str:
    """A template of `hjax/show/templates` with its values filled in.

    Args:
      template: its name, such as `report.jinja`.
      values: what it prints and iterates over; a name that it lacks is an error.
    """
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_escapable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["COLORS"] = COLORS
    return environment


def _escapable(value: Any) -> Any:
    # Output of another template is already escaped.
    return value if hasattr(value, "__html__") else printable(str(value))


@contextlib.contextmanager
def from_files(source: object) -> Iterator[None]:
    """Raise a DataError if rendering from a run's files fails because they are not as a run wrote.

    ``source``: name of the run or folder, for the message.
    """
    try:
        yield
    except (ConfigError, OSError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{source}: its files are not as a run leaves them ({type(error).__name__}: {error}); "
            "were they changed by hand? Training again writes them anew"
        ) from error
