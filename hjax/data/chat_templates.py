"""Chat templates (Jinja) rendered apart: they come with models, from anybody.

A sandbox keeps a template from Python's inner objects, not from taking all time and memory. So it
is rendered in a process of its own, with limits on both, and what it writes has one too.
"""

import datetime
import functools
import json
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from hjax.errors import DataError
from hjax.isolated_process import DeadlineExceeded, IsolatedProcess, ProcessDied, TaskFailed

# Of one rendering: time, and characters. Of the process: memory.
SECONDS, CHARACTERS, MEMORY_BYTES = 10.0, 16 * 2**20, 2**30


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render a template.

    Args:
      template: its source.
      values: that it may read.

    Raises:
      DataError: it refuses them, takes too long or too much, or they cannot be handed to it; the
        message is half a sentence about the template.
    """
    try:
        request = pickle.dumps(dict(values))
    except Exception as error:
        raise DataError(f"cannot be given this ({type(error).__name__}: {error})") from None
    try:
        said = json.loads(_apart(template).call(request, SECONDS))
    except DeadlineExceeded:
        raise DataError(f"takes longer than {SECONDS:g} s") from None
    except (ProcessDied, TaskFailed) as error:
        raise DataError(f"could not be rendered ({error})") from None
    if "error" in said:
        raise DataError(f"refuses this: {' '.join(said['error'].split())[:500]}")
    return said["text"]


@functools.lru_cache(maxsize=16)
def _apart(template: str) -> IsolatedProcess:
    return IsolatedProcess("hjax.data.chat_templates:answers", template.encode())


def answers(given: bytes) -> Callable[[bytes], bytes]:
    """What renders a template, in its process: pickled values in, JSON out."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source = given.decode()

    def answer(request: bytes) -> bytes:
        try:
            text = _limited(_compiled(source), pickle.loads(request))
            return json.dumps({"text": text}).encode()
        except Exception as error:  # Jinja's own, and whatever its filters raise
            return json.dumps({"error": str(error) or type(error).__name__}).encode()

    return answer


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
    """The environment that Hugging Face chat templates are written for, sandboxed."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's tokens; for rendering it is transparent."""

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
