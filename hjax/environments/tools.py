"""Tools that a policy calls in a conversation: functions and classes in Python files.

    environment.tools=path.py:add,lookup

A function's name, its docstring and the types of its arguments make the definition that the chat
template shows the model. A class is made anew for each episode, with ``seed`` and ``sandbox`` if it
takes them, so its object may hold state: it is called, and closed at the episode's end if it has
``close``. Tools of MCP servers are named ``servers.json:SERVER/TOOL``. Calls of one turn that stand
next to each other run at once if their tools are ``async def``, or an MCP server's that say
``readOnlyHint``; others one after another, as a later one may need what an earlier one has done.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hjax.environments.mcp_tools import SharedMcpTools
from hjax.errors import ConfigError, RunError, short_repr
from hjax.sandbox.local_sandbox import Sandbox
from hjax.sandbox.sandbox_settings import THIS_MACHINE, SandboxSettings
from hjax.user_code import load_object

SETTING = "environment.tools"
# Tools of hjax, by their name in the setting.
BUILT_IN = {"python": "hjax.environments.python_tool:Python"}
# One for all episodes of a process; each program has a folder and processes of its own.
_made_sandbox = functools.cache(SandboxSettings.make)
# Longest result of a call, in characters; a longer one is cut, and says so.
RESULT_LIMIT = 8192
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
# An argument in a docstring's section "Args:", and its text up to the next.
_ARGUMENT = re.compile(r"^( *)(\w+)(?: *\([^)\n]*\))?: *(.*(?:\n\1 +.*)*)", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples):", re.M)


@dataclasses.dataclass(frozen=True)
class Tool:
    """What a policy may call.

    Attributes:
      name, description: as the model is told.
      parameters: JSON schema of the arguments, an object.
      make: of an episode's seed, and the sandbox where it runs programs, makes what answers its
        calls: a function of keyword arguments.
      uses_sandbox: whether it runs programs.
      settings: further arguments of ``make``, which rows may give (``settings_of_row``).
      shared: the connection to an MCP server; None: ``make`` does.
      at_once: whether calls may run at the same time as others of their turn.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    make: Callable[..., Callable[..., Any]] | None = None
    uses_sandbox: bool = False
    settings: frozenset[str] = frozenset()
    shared: SharedMcpTools | None = None
    at_once: bool = False

    @property
    def definition(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


def load_tools(spec: str, setting: str = SETTING) -> list[Tool]:
    """The tools of a setting: ``path.py:name,...``, several files one after another.

    Args:
      spec: names without a file are of the file before them; before the first file they are hjax's
        own (``python``).
      setting: that names them, for messages.

    Raises:
      ConfigError: no such file or name, or something whose definition cannot be made.
    """
    tools, file, of_servers = list[Tool](), "", dict[str, list[tuple[str, str]]]()
    for part in (part.strip() for part in spec.split(",")):
        where, colon, name = part.rpartition(":")
        file = where if colon else file
        if file.endswith(".json"):
            server, _, name = name.partition("/")
            of_servers.setdefault(file, []).append((server, name))
            if name:
                continue
        if not name or not (file or name in BUILT_IN):
            raise ConfigError(
                f"{setting}={spec!r}: {part!r} must look like path.py:name, or be one of hjax's: "
                f"{', '.join(BUILT_IN)}"
            )
        tools.append(_tool(f"{file}:{name}" if file else BUILT_IN[name], setting))
    for path, wanted in of_servers.items():
        tools += _tools_of_servers(path, wanted, f"{setting}={spec!r}")
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(f"{setting}={spec!r}: two tools are called {twice}; rename one")
    return tools


def _tools_of_servers(file: str, wanted: list[tuple[str, str]], setting: str) -> list[Tool]:
    """The tools of MCP servers, which are connected to for their definitions."""
    shared = SharedMcpTools(file, wanted)
    try:
        return [
            Tool(
                each.name, each.description, each.parameters, shared=shared, at_once=each.reads_only
            )  # fmt: skip
            for each in shared.connect().values()
        ]
    except (ConfigError, RunError) as error:
        raise ConfigError(f"{setting}: {error}") from error
    finally:
        shared.close()


def _tool(spec: str, setting: str) -> Tool:
    module, _, name = spec.partition(":")
    if module.startswith("hjax."):
        found = getattr(__import__(module, fromlist=[name]), name)
    else:
        found = load_object(spec, setting)
    setting = f"{setting}={spec!r}"
    if not callable(found):
        raise ConfigError(f"{setting}: {name} is {short_repr(found, 60)}, no function or class")
    return tool_of(found, setting)


def tool_of(function: Callable[..., Any], setting: str = SETTING) -> Tool:
    """The tool that a function is, or a class whose objects are called.

    Args:
      function: with a docstring; each argument has a type. What ``Args:`` in the docstring says
        of an argument goes into the schema.
      setting: for messages.

    Raises:
      ConfigError: it has no docstring, or an argument without a type or without a name.
    """
    from pydantic import TypeAdapter

    is_class = inspect.isclass(function)
    of_classes = (vars(each).get("__call__") for each in getattr(function, "__mro__", ()))
    called: Any = next(filter(None, of_classes), None) if is_class else function
    name = getattr(function, "name", None) or function.__name__
    where = f"{setting}: {function.__name__}"
    if called is None:
        raise ConfigError(f"{where} is a class without __call__, which answers the calls")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: its name {name!r} must be letters, digits, _ . and -")
    text = inspect.getdoc(called if is_class and called.__doc__ else function)
    if not text:
        raise ConfigError(f"{where} has no docstring, which tells the model what it does")
    signature = inspect.signature(called)
    parameters = list(signature.parameters.values())[1 if is_class else 0 :]
    for each in parameters:
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise ConfigError(f"{where}: {each} has no name of its own; list each argument")
        if each.annotation is each.empty:
            raise ConfigError(f"{where}: the argument {each.name} has no type; annotate it")
    bound = called.__get__(object()) if is_class else called
    try:
        schema = TypeAdapter(bound).json_schema()
    except Exception as error:  # pydantic's own, and those of unknown names in annotations
        raise ConfigError(f"{where}: no JSON schema of its arguments ({error})") from error
    description, arguments = _read_docstring(text)
    schema = _without_titles(schema)
    for key, told in arguments.items():
        if key in schema.get("properties", {}):
            schema["properties"][key]["description"] = told

    taken = set(inspect.signature(function).parameters) if is_class else set()

    def make(seed: int, sandbox: Sandbox | None, **of_row: Any) -> Callable[..., Any]:
        if not is_class:
            return function
        given = {"seed": seed, "sandbox": sandbox}
        own = {key: value for key, value in given.items() if key in taken}
        made: Callable[..., Any] = function(**own, **of_row)
        return made

    settings = frozenset(taken - {"seed", "sandbox"})
    at_once = inspect.iscoroutinefunction(called)
    return Tool(name, description, schema, make, "sandbox" in taken, settings, at_once=at_once)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each argument."""
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    told = next((sections[n] for n in ("Args", "Arguments", "Parameters") if n in sections), "")
    found = {name: " ".join(said.split()) for _, name, said in _ARGUMENT.findall(told)}
    return " ".join(parts[0].split()), found


def _without_titles(schema: Any) -> Any:
    """A schema without pydantic's titles, which only repeat names."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(each) for name, each in value.items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }


class EpisodeTools:
    """The tools of one episode, with what they hold.

    Args:
      tools: that it may call.
      seed: for those that take one.
      sandbox: of those that run programs.
      settings: by tool, what the row gives it.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        seed: int,
        sandbox: SandboxSettings = THIS_MACHINE,
        settings: Mapping[str, Mapping[str, Any]] = {},
    ):
        self._seed, self._sandbox, self._settings = seed, sandbox, settings
        self._tools = {tool.name: tool for tool in tools}
        self._made: dict[str, Callable[..., Any]] = {}

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """As ``call_all``, of one call."""
        return self.call_all([(name, arguments)])[0]

    def call_all(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, bool]]:
        """For each call of a turn, in order, the text of its result, or of its error, and whether
        it was a call of a tool with arguments that it takes.

        Args:
          calls: names and arguments.

        Raises:
          RunError: a tool's own: it is not the policy's fault, and ends the episode.
        """
        found = list[tuple[str, bool]]()
        for at_once, some in itertools.groupby(calls, lambda each: self._runs_at_once(each[0])):
            if at_once:
                found += self._loop.run(self._together(list(some)))
            else:
                found += [self._call(name, arguments) for name, arguments in some]
        return found

    def _runs_at_once(self, name: str) -> bool:
        return name in self._tools and self._tools[name].at_once

    @functools.cached_property
    def _loop(self) -> asyncio.Runner:
        """One for the whole episode: what a tool holds may belong to it."""
        return asyncio.Runner()

    async def _together(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> list[tuple[str, bool]]:
        running = (self._await(name, arguments) for name, arguments in calls)
        found = await asyncio.gather(*running, return_exceptions=True)
        if failed := [each for each in found if isinstance(each, BaseException)]:
            raise failed[0]
        return [each for each in found if not isinstance(each, BaseException)]

    async def _await(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        shared = self._tools[name].shared
        if shared is not None:
            shared.connect()
            return _cut(await asyncio.to_thread(shared.call, name, arguments)), True
        from pydantic import validate_call

        called = self._callable(name)
        try:
            result = await validate_call(called)(**arguments)
        except Exception as error:
            return _told(error, name, called)
        return _text(result), True

    def _call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        from pydantic import validate_call

        if name not in self._tools:
            return f"error: there is no tool {name}; there are {', '.join(self._tools)}", False
        if (shared := self._tools[name].shared) is not None:
            return _cut(shared.call(name, arguments)), True
        called = self._callable(name)
        try:
            result = validate_call(called)(**arguments)
        except Exception as error:
            return _told(error, name, called)
        return _text(result), True

    def _callable(self, name: str) -> Any:
        """What answers a tool's calls; made with the first."""
        tool = self._tools[name]
        if name not in self._made:
            assert tool.make is not None
            sandbox = _made_sandbox(self._sandbox) if tool.uses_sandbox else None
            of_row = self._settings.get(name, {})
            self._made[name] = tool.make(seed=self._seed, sandbox=sandbox, **of_row)
        made: Any = self._made[name]
        return made if inspect.isroutine(made) else made.__call__

    def close(self) -> None:
        """Give up what the tools hold."""
        made, self._made = self._made, {}
        for each in made.values():
            if callable(close := getattr(each, "close", None)):
                self._loop.run(close()) if inspect.iscoroutinefunction(close) else close()
        if "_loop" in vars(self):
            vars(self).pop("_loop").close()


def _told(error: Exception, name: str, called: Any) -> tuple[str, bool]:
    """What the policy is told of a call that raised, and whether the tool takes its arguments."""
    from pydantic import ValidationError

    if isinstance(error, RunError):
        raise error
    title = error.title if isinstance(error, ValidationError) else ""
    if not isinstance(error, ValidationError) or (
        title != getattr(called, "__name__", "") and "__call__" not in title
    ):
        return _cut(f"error: {type(error).__name__}: {error}"), True
    wrong = "; ".join(f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in error.errors())
    return _cut(f"error: {name}: {wrong}"), False


def _text(result: Any) -> str:
    if isinstance(result, str):
        return _cut(result)
    return _cut(json.dumps(result, ensure_ascii=False, default=str))


def _cut(text: str) -> str:
    more = len(text) - RESULT_LIMIT
    return text if more <= 0 else f"{text[:RESULT_LIMIT]}... ({more} more characters)"
