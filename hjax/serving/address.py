"""The address that a server listens on."""

import contextlib
import socket

from hjax.errors import ConfigError, truncate


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to that address, not listening yet; port 0 is a free one.

    Raises:
      ConfigError: no such address here, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as stack:
            bound = stack.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            stack.pop_all()
            return bound
    except (OSError, ValueError) as error:
        # A zero byte and a name that is none (UnicodeError) are ValueErrors.
        said = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--host={truncate(host, 80)} --port={port}: {said}; another port, or 0 for a free one"
        ) from None


def address_of(bound: socket.socket) -> str:
    """HOST:PORT, as in a URL."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
