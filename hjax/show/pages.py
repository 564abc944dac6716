"""HTML pages from the templates beside this file.

Whatever a template prints is escaped, and control characters in it become dots. There is no other
way into a page: no text of a user's, a model's or a file's can be markup.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2

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


def printable(text: str) -> str:
    """A text with dots for control characters other than line breaks and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def _escapable(value: Any) -> Any:
    # What another template has drawn stands as it is.
    return value if hasattr(value, "__html__") else printable(str(value))
