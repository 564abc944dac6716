"""Chat templates (Jinja), rendered in an isolated process: a model's template is untrusted code.

Jinja's sandbox hides Python's internals from a template, but it does not limit time or memory.
So each template is rendered in a process with a deadline and limits on memory and output size.
"""

import datetime
import functools
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from hjax.data.limited_process import CHARACTERS, LimitedProcess
from hjax.errors import DataError


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render a template.

    Args:
      template: its source.
      values: variables of the template.

    Raises:
      DataError: the template raises, exceeds a limit, or the values cannot be pickled. The message
        has no subject: the caller puts the template's name before it.
    """
    try:
        request = pickle.dumps(dict(values))
    except Exception as error:
        raise DataError(f"cannot be given this ({type(error).__name__}: {error})") from None
    return _renderer(template).ask(request)


@functools.lru_cache(maxsize=16)
def _renderer(template: str) -> LimitedProcess:
    entry = "hjax.data.chat_templates:make_renderer"
    return LimitedProcess(entry, template.encode())


def make_renderer(template: bytes) -> Callable[[bytes], str]:
    """Return the isolated process's function of pickled values: the text."""
    return lambda values: _limited(_compiled(template.decode()), pickle.loads(values))


def _limited(template: Any, values: Mapping[str, Any]) -> str:
    parts, size = [], 0
    for part in template.generate(values):
        parts.append(part)
        size += len(part)
        if size > CHARACTERS:
            raise ValueError(f"it writes more than {CHARACTERS} characters")
    return "".join(parts)


@functools.lru_cache(maxsize=1)
def _compiled(template: str) -> Any:
    """The template, compiled in a sandboxed copy of the environment that transformers uses."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's tokens; rendering ignores the tag."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any):
        # Jinja's own filter escapes HTML characters, which templates don't want.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)
