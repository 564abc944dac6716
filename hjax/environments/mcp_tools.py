"""Tools of MCP servers, which run beside this process (stdio) or answer at a URL (HTTP)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, RunError, did_you_mean, one_line, short_repr
from hjax.user_input import parse_json, read_file

# Seconds for a server to end after its tools are closed.
_END_SECONDS = 5.0
# JSON-RPC's code of mcp for a connection that has ended.
_CONNECTION_CLOSED = -32000


@dataclasses.dataclass(frozen=True)
class McpTool:
    """A tool of an MCP server.

    Attributes:
      name, description: of the tool.
      parameters: the JSON schema of its arguments, an object.
      reads_only: whether its server says that it changes nothing.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    reads_only: bool
    _server: _McpServer = dataclasses.field(repr=False)

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The tool's answer. Its errors, arguments that it refuses and a call that takes too long
        are answers too, which begin with ``error:``.

        Raises:
          RunError: the server has ended or cannot be reached.
        """
        return self._server.call(self.name, arguments)

    def close(self) -> None:
        """Give the tool up; its server ends with the last of its tools."""
        self._server.give_up(self.name)


def connect_tools(
    config_file: str, wanted: Sequence[tuple[str, str]], *, seconds: float = 60.0
) -> list[McpTool]:
    """Start or connect to the servers of the wanted tools.

    Args:
      config_file: JSON as other programs have it, ``{"mcpServers": {NAME: SERVER}}``. A server is
        ``command`` with ``args``, ``env`` and ``cwd``, or ``url`` with ``headers``; its other keys
        are not read. Of this process's variables a command gets no more than mcp passes on
        (``PATH``, ``HOME``).
      wanted: names of a server and of a tool of it.
      seconds: for a server to begin, and for a call.

    Returns:
      the wanted tools, in this order.

    Raises:
      ConfigError: mcp is not installed, the file is not of this form, or there is no such server or
        tool.
      RunError: a server does not begin.
    """
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"tools of MCP servers need mcp, which cannot be imported ({one_line(error)}): "
            "pip install 'hjax[mcp]'"
        ) from None
    known = _read_config(config_file)
    names = [name for _, name in wanted]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"two tools are called {twice!r}; a policy can call one of a name")
    for server, _ in wanted:
        if server not in known:
            there = f"{did_you_mean(server, known)}it has {', '.join(known) or 'none'}"
            raise ConfigError(f"{config_file} has no server {server!r}; {there}")
    servers: dict[str, _McpServer] = {}
    try:
        for server, _ in wanted:
            if server not in servers:
                servers[server] = _McpServer(server, known[server], seconds)
        return [servers[server].take(name) for server, name in wanted]
    except BaseException:
        for each in servers.values():
            each.close()
        raise


class SharedMcpTools:
    """Tools of MCP servers that all episodes of a process use by one connection, which is made
    with the first call, and made anew after a server was lost.

    Args:
      config_file, wanted: as of ``connect_tools``.
    """

    def __init__(self, config_file: str, wanted: Sequence[tuple[str, str]]):
        self._file, self._wanted = config_file, list(wanted)
        self._tools: dict[str, McpTool] = {}

    def connect(self) -> dict[str, McpTool]:
        """The tools by name; raises as ``connect_tools`` does."""
        if not self._tools:
            self._tools = {x.name: x for x in connect_tools(self._file, self._wanted)}
        return self._tools

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """As ``McpTool.call``."""
        try:
            return self.connect()[name].call(arguments)
        except RunError:
            self.close()
            raise

    def close(self) -> None:
        """Give up the connections."""
        tools, self._tools = self._tools, {}
        for each in tools.values():
            each.close()


def _read_config(file: str) -> dict[str, Mapping[str, Any]]:
    """Servers by name."""
    found = parse_json(read_file(Path(file)), file)
    servers = found.get("mcpServers") if isinstance(found, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError(f'{file} must be {{"mcpServers": {{NAME: SERVER}}}}')
    kinds = {"command": str, "url": str, "args": list, "env": dict, "cwd": str, "headers": dict}
    for name, about in servers.items():
        if not isinstance(about, dict) or ("command" in about) == ("url" in about):
            raise ConfigError(
                f"{file}: {name} is {short_repr(about)}; it must be an object with `command` or "
                "with `url`"
            )
        for key, kind in kinds.items():
            value = about.get(key)
            parts = list(value.values()) if isinstance(value, dict) else value
            parts = parts if isinstance(parts, list) else []
            texts = all(isinstance(part, str) for part in parts)
            if value is not None and not (isinstance(value, kind) and texts):
                form = {list: "a list of strings", dict: "strings by name"}.get(kind, "a string")
                raise ConfigError(
                    f"{file}: {name}: {key} is {short_repr(value)}; it must be {form}"
                )
    return servers


class _McpServer:
    """A connection to a server, in a thread with an event loop of its own.

    Raises:
      RunError: it does not begin.
    """

    def __init__(self, name: str, about: Mapping[str, Any], seconds: float):
        self._name, self._about, self._seconds = name, about, seconds
        self._used = set[str]()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._client: Any = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._task: asyncio.Task[Any] | None = None
        self._begun = concurrent.futures.Future[dict[str, Any]]()  # its tools by name
        self._held = asyncio.run_coroutine_threadsafe(self._hold(), self._loop)
        try:
            self._tools = self._begun.result(seconds)
        except BaseException as error:
            self.close()
            raise self._failure("does not begin", error) from error

    async def _hold(self) -> None:
        """Keep the connection until it is ended; one task enters and leaves it."""
        from mcp import Client

        self._task = asyncio.current_task()
        try:
            async with contextlib.AsyncExitStack() as stack:
                client = Client(await self._transport(stack), read_timeout_seconds=self._seconds)
                self._client = await stack.enter_async_context(client)
                tools: dict[str, Any] = {}
                page = await self._client.list_tools()
                while True:
                    tools |= {tool.name: tool for tool in page.tools}
                    if page.next_cursor is None:
                        break
                    page = await self._client.list_tools(cursor=page.next_cursor)
                self._begun.set_result(tools)
                await self._ended.wait()
        except BaseException as error:
            if self._begun.done():
                raise
            self._begun.set_exception(error)

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        from mcp import StdioServerParameters

        about = self._about
        if "command" in about:
            keys = {key: about[key] for key in ("command", "args", "env", "cwd") if about.get(key)}
            return StdioServerParameters(**keys)
        if not about.get("headers"):
            return about["url"]
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(30.0, read=300.0)  # mcp's own: an answer may take long
        web = httpx2.AsyncClient(headers=about["headers"], timeout=timeout)
        await stack.enter_async_context(web)
        return streamable_http_client(about["url"], http_client=web)

    def take(self, name: str) -> McpTool:
        """A tool of this server.

        Raises:
          ConfigError: it has none of that name.
        """
        tool = self._tools.get(name)
        if tool is None:
            has = f"{did_you_mean(name, self._tools)}it has {', '.join(self._tools) or 'none'}"
            raise ConfigError(f"the MCP server {self._name} has no tool {name!r}; {has}")
        self._used.add(name)
        reads_only = bool(tool.annotations and tool.annotations.read_only_hint)
        return McpTool(name, tool.description or "", tool.input_schema, reads_only, self)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        from mcp import MCPError

        if self._held.done():
            raise self._failure("has ended", None)
        call = self._client.call_tool(name, dict(arguments))
        try:
            answer = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except MCPError as error:
            if error.code == _CONNECTION_CLOSED:
                raise self._failure("has ended", error) from error
            return f"error: {error.message}"
        except Exception as error:  # of the transport
            raise self._failure("has ended", error) from error
        text = "\n".join(map(_block_text, answer.content))
        if not answer.content and answer.structured_content is not None:
            text = json.dumps(answer.structured_content, ensure_ascii=False)
        return f"error: {text}" if answer.is_error else text

    def give_up(self, name: str) -> None:
        """A tool is not used any more; the server ends with the last."""
        self._used.discard(name)
        if not self._used:
            self.close()

    def close(self) -> None:
        """End the connection, and a server that was started for it; may be called again."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._ended.set)
        if not self._begun.done() and self._task is not None:  # it hangs at its beginning
            self._loop.call_soon_threadsafe(self._task.cancel)
        # What it raises at its end changes nothing.
        with contextlib.suppress(Exception, concurrent.futures.CancelledError):
            self._held.result(_END_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _failure(self, what: str, error: BaseException | None) -> RunError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        said = f": {type(error).__name__}: {one_line(error)}" if error is not None else ""
        return RunError(f"the MCP server {self._name} {what}{said}")


def _block_text(block: Any) -> str:
    """A part of an answer as text; of an image or another file its kind."""
    if block.type == "text":
        return str(block.text)
    text = getattr(getattr(block, "resource", None), "text", None)
    return str(text) if text is not None else f"[{getattr(block, 'mime_type', '') or block.type}]"
