"""Limits of a server, so that no client can use up its resources."""

import dataclasses

from hjax.errors import ConfigError

# Connections that the system queues until they are accepted.
BACKLOG = 1024
# File descriptors for everything else.
OTHER_FILES = 256


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Limits of one server.

    Attributes:
      body_bytes: of a request.
      body_parts: arrays, objects and strings of a request's JSON, keys among them: each takes many
        times its bytes once it is parsed.
      body_values: parts and commas, so at least the numbers too.
      chunks: of a body in chunks.
      head_bytes: of a request's first line and headers.
      body_seconds: until a request's body has arrived.
      header_seconds: until a request's headers have arrived, from its first byte (for a
        connection's first request from the connection).
      idle_seconds: that a connection may stay open between two requests, and that a client may
        leave output unread before it is cut off.
      connections: at a time.
      choices: responses of one request, over all its prompts.
      constraint_seconds: processor time of one request's constraints, over all its responses: to
        compile each, and to match a few tokens.
      constraint_bytes: memory of them.
      log_probs: of one request, over all its responses: a token's own and its top ones each.
      stops: stop strings of one request.
      origins: whose web pages' scripts may ask (CORS); `*`: all; none: browsers keep answers from
        them.
      hosts: names that requests may have in Host, beside those of the loopback and the address;
        `*`: all.
      drain_seconds: that requests have to finish when the server is stopped.
    """

    body_bytes: int = 8 * 2**20
    body_parts: int = 2**16
    body_values: int = 2**19
    chunks: int = 2**14
    head_bytes: int = 2**14
    body_seconds: float = 60.0
    header_seconds: float = 10.0
    idle_seconds: float = 60.0
    connections: int = 1024
    choices: int = 128
    constraint_seconds: float = 5.0
    constraint_bytes: int = 2**29
    log_probs: int = 2**22
    stops: int = 128
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    drain_seconds: float = 10.0


def allow_connections(count: int) -> None:
    """Raise this process's limit of file descriptors for this many connections: without descriptors
    left a server can do nothing at all.

    Raises:
      ConfigError: the system's limit is lower.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return
    wanted = count + BACKLOG + OTHER_FILES
    soft, hard = (
        wanted if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if hard < wanted:
        raise ConfigError(
            f"--max_connections={count}: {wanted} open files are needed for so many, and this "
            f"process may have {hard}; raise that (ulimit -n), or give fewer connections"
        )
    if soft < wanted:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
