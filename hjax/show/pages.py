"""HTML pages from the templates beside this file.

Whatever a template prints is escaped, and control characters in it become dots. There is no other
way into a page: no text of a user's, a model's or a file's can be markup.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from hjax.errors import ConfigError, DataError
from hjax.show.format import printable

COLORS = 13  # of the classes c0 ... c12


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
    # What another template has drawn stands as it is.
    return value if hasattr(value, "__html__") else printable(str(value))


@contextlib.contextmanager
def from_files(of: object) -> Iterator[None]:
    """Draw what stands in a run's files; DataError where they are not as a run leaves them.

    ``of``: whose files, for the message.
    """
    try:
        yield
    except (ConfigError, OSError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{of}: its files are not as a run leaves them ({type(error).__name__}: {error}); "
            "were they changed by hand? Training again writes them anew"
        ) from error
