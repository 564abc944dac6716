"""What the fuzz suite throws at hjax, and what it may answer: nothing, or one line."""

from __future__ import annotations

import contextlib
import json
import pathlib
import resource
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hjax.errors import ConfigError, RunError, one_line

SECONDS = 20  # that an answer may take; nearly all take milliseconds
GROWTH = 1 << 30  # bytes that it may take


def examples(number: int) -> Any:
    """So many cases, the same in every run of the tests, however long they take."""
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


class Hang(BaseException):
    """No answer in time; nothing catches it on its way."""


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Work that ends well, or with an error of hjax's, soon and in little memory."""

    def late(*_: Any) -> None:
        raise Hang(f"no answer after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(SECONDS)
    try:
        yield
    except (ConfigError, RunError) as error:
        assert 10 < len(said := one_line(error)) < 2000, said  # as commands show it
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) * 1024
    assert grown < GROWTH, f"{grown >> 20} MiB"


@contextlib.contextmanager
def folder() -> Iterator[pathlib.Path]:
    """A folder to be attacked in; hypothesis calls a test many times with one ``tmp_path``."""
    with tempfile.TemporaryDirectory() as name:
        yield pathlib.Path(name)


class Text(str):
    """A string that is none of Python's own."""


class Rude:
    """A value that answers no question."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]


RUDE = "a value that answers no question"  # until ``rude``: hypothesis prints what it draws


def rude(value: Any) -> Any:
    """The same with ``Rude`` where that is meant."""
    if isinstance(value, dict):
        return {key: rude(some) for key, some in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(rude(some) for some in value)
    return Rude() if isinstance(value, str) and value == RUDE else value


WORDS = st.sampled_from([
    "", " ", "None", "null", "nan", "inf", "-inf", "true", "False", "-1", "0", "1", "1e400",
    "1e-400", "9" * 400, "0x10", "1_000", "١", "½", "[]", "{}", "(1,)", "[1", "a\nb", "\0",
    "\ud800", "é" * 3000, "../..", "~nosuchuser", "/dev/null", "/proc/self/mem", "*" * 50,
    "{workdir}", "%s%n", "a,b", "a:b", "a=b", "ppo.py", "auto", "none", "tensor", "1x8:a100",
    "-9" * 30, "__class__", "os.system",
])  # fmt: skip
TEXTS = WORDS | st.text(max_size=30) | st.integers().map(str) | st.floats().map(str)
NUMBERS = (
    st.integers()
    | st.integers(-3, 70)
    | st.floats()
    | st.sampled_from([2**31, 2**63, 2**64, 10**30, -(2**31), 10**400, True, False])
)
PLAIN = st.none() | NUMBERS | TEXTS
VALUES = st.recursive(
    PLAIN | st.binary(max_size=8) | st.complex_numbers() | st.builds(Text, TEXTS) | st.just(RUDE)
    | st.builds(object) | st.just(len),
    lambda some: st.lists(some, max_size=3) | st.tuples(some, some)
    | st.dictionaries(TEXTS, some, max_size=3) | st.sets(TEXTS, max_size=2),
    max_leaves=5,
)  # fmt: skip
# What JSON can say, and what Python's reader takes for it.
JSON = st.recursive(
    PLAIN,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(TEXTS, some, max_size=3),
    max_leaves=6,
)


@st.composite
def torn(draw: Callable[..., Any], content: bytes) -> bytes:
    """Bytes that were something: cut, flipped, doubled, with others between, or none of it."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(made) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "flip", "cut", "put", "drop", "copy", "encode"]))
        if kind == "flip" and made:
            made[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del made[at:]
        elif kind == "put":
            made[at:at] = draw(st.binary(max_size=12) | TEXTS.map(_bytes))
        elif kind == "drop":
            del made[at : at + draw(st.integers(1, 40))]
        elif kind == "copy":
            made += made[at : at + 200]
        else:
            made = bytearray(_bytes(made.decode("utf-8", "replace"), "utf-16"))
    return bytes(made)


@st.composite
def changed(draw: Callable[..., Any], content: Any) -> Any:
    """JSON with a value, at any depth, that is another, gone, or new."""
    if isinstance(content, dict) and content and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(content)))
        kind = draw(st.sampled_from(["value", "value", "gone", "new", "deeper"]))
        made = dict(content)
        if kind == "gone":
            del made[key]
        elif kind == "new":
            made[draw(TEXTS)] = draw(JSON)
        else:
            made[key] = draw(changed(made[key]) if kind == "deeper" else JSON)
        return made
    if isinstance(content, list) and content and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(content) - 1))
        return [*content[:at], draw(changed(content[at])), *content[at + 1 :]]
    return draw(JSON)


def as_json(value: Any) -> bytes:
    """As a file has it; halves of surrogates stay as they are."""
    return _bytes(json.dumps(value, default=str))


@st.composite
def tensor_file(draw: Callable[..., Any], content: bytes) -> bytes:
    """A file of safetensors, torn anywhere or with another header."""
    if draw(st.booleans()):
        return draw(torn(content))
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    made = as_json(draw(changed(header)))
    said = draw(st.just(len(made)) | st.integers(0, 2**64 - 1))
    return struct.pack("<Q", said) + made + content[8 + size :]


def _bytes(text: str, encoding: str = "utf-8") -> bytes:
    return text.encode(encoding, "surrogatepass")
