"""What pages of docs/algorithms take from the source: dataflows, functions, keys, the index.

    python docs/generate/algorithm_pages.py

writes it anew into every page, between a comment that asks for it and `<!-- end -->`:

- `<!-- source MODULE:NAME -->`: a function's or method's lines, without its docstring;
- `<!-- keys CLASS -->`: the keys that an algorithm declares itself;
- `<!-- sets CLASS -->`: the keys of its base to which it gives other defaults, and what its config
  changes of them;
- `<!-- curve CONFIG -->`: the curve of a config's runs, if `benchmarks/learning.py` has drawn one;
- `<!-- index -->`: all algorithms, with their configs and where their sections are.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from hjax.algorithms import ALGORITHMS, Algorithm
from hjax.config import flatten
from hjax.errors import ConfigError
from hjax.rules import Key
from hjax.settings.config_loading import config_names, load_config

_BLOCK = re.compile(
    r"(<!-- (source|keys|sets|curve|index)(?: ([^\s>]+))? -->\n).*?(<!-- end -->)", re.S
)
_HEAD = ["| key | default | meaning | must be |", "|---|---|---|---|"]


def written(page: str, folder: Path) -> str:
    """A page's text with its blocks as the source has them now.

    Args:
      page: the text.
      folder: docs/algorithms, whose headings the index looks up.

    Raises:
      ConfigError: a block asks for what is not there, or an algorithm has no section.
    """

    def block(match: re.Match[str]) -> str:
        begin, kind, name, end = match.groups()
        if kind == "index":
            lines = _index(folder)
        elif kind == "curve":
            lines = _curve(name, folder)
        elif kind == "source":
            lines = ["```python", *source(name).splitlines(), "```"]
        elif name not in ALGORITHMS:
            raise ConfigError(f"<!-- {kind} {name} -->: there is no such algorithm")
        else:
            lines = (_keys if kind == "keys" else _sets)(ALGORITHMS[name])
        return begin + "".join(f"{line}\n" for line in lines) + end

    return _BLOCK.sub(block, page)


def source(spec: str) -> str:
    """The lines of a function, method or class, without its docstring.

    Args:
      spec: `package.module:Name.method`.

    Raises:
      ConfigError: there is none.
    """
    module, _, name = spec.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"<!-- source {spec} -->: {error}") from error
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(found, "__func__", found))))
    lines = text.splitlines()
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    if ast.get_docstring(node) is not None:
        end = node.body[0].end_lineno
        assert end is not None
        del lines[node.body[0].lineno - 1 : end]
    return "\n".join(lines).rstrip()


def sections(folder: Path) -> dict[str, str]:
    """The link to each heading of the pages that is an algorithm's name."""
    found = {}
    for path in sorted(folder.glob("*.md")):
        for title in re.findall(r"^#+ (\w+)$", path.read_text(), re.M):
            if title in ALGORITHMS:
                found[title] = f"{path.name}#{title.lower()}"
    return found


@functools.cache
def configs() -> dict[str, list[str]]:
    """The shipped configs of each algorithm, the one of its name first."""
    found: dict[str, list[str]] = {}
    for name in config_names():
        algorithm = load_config(name).algorithm.name
        found.setdefault(algorithm, []).append(name)
    for algorithm, names in found.items():
        names.sort(key=lambda name: (name[:-3].replace("_", "") != algorithm.lower(), name))
    return found


def _index(folder: Path) -> list[str]:
    links, files = sections(folder), configs()
    lines = ["| algorithm | config | in a line |", "|---|---|---|"]
    for name, cls in ALGORITHMS.items():
        if name not in links:
            raise ConfigError(
                f"{name} has no section: give a page of docs/algorithms the heading `## {name}`"
            )
        said = (inspect.getdoc(cls) or "").splitlines()[0]
        shown = ", ".join(f"`{file}`" for file in files.get(name, ()))
        lines.append(f"| [{name}]({links[name]}) | {shown} | {said} |")
    return lines


def _curve(config: str, folder: Path) -> list[str]:
    if f"{config}.py" not in config_names():
        raise ConfigError(f"<!-- curve {config} -->: there is no such config")
    drawn = (folder / "curves" / f"{config}.svg").is_file()
    return [f"![{config}.py by step](curves/{config}.svg)"] if drawn else []


def _keys(cls: type[Algorithm]) -> list[str]:
    own = vars(cls).get("keys", {})
    return [*_HEAD, *(_row(name, cls.all_keys()[name]) for name in own)] if own else []


def _row(name: str, key: Key) -> str:
    rule = key.rule.text if key.rule else ""
    doc = key.doc.replace("|", "\\|")
    return f"| `algorithm.{name}` | `{key.default!r}` | {doc} | {rule} |"


def _sets(cls: type[Algorithm]) -> list[str]:
    """What a preset is: other defaults, and what its config changes for its task."""
    defaults = vars(cls).get("defaults", {})
    base = cls.__mro__[1].__name__
    beside = f"is `{base}`" if base in ALGORITHMS else "stands"
    lines = [f"`{cls.__name__}` {beside} with {_listed(defaults)}."] if defaults else []
    for name in configs().get(cls.__name__, [])[:1]:
        own = {key: value.default for key, value in cls.all_keys().items()}
        given = flatten(load_config(name).algorithm)
        changed = {k: v for k, v in given.items() if k in own and v != own[k]}
        if changed:
            lines.append(f"`{name}` sets {_listed(changed)} for its task.")
    return lines


def _listed(values: Any) -> str:
    texts = [f"`{name}={value!r}`" for name, value in values.items()]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


if __name__ == "__main__":
    pages = Path(__file__).parents[1] / "algorithms"
    for path in sorted(pages.glob("*.md")):
        path.write_text(written(path.read_text(), pages))
