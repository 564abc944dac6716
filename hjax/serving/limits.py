"""What a server takes on at most, so that no client can take it all."""

import dataclasses

from hjax.errors import ConfigError

# Connections that the system holds until they are taken, which may be all at once.
BACKLOG = 1024
# For sockets and files of everything else.
OTHERS = 256


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Limits of one server.

    Attributes:
      body_bytes: of a request.
      body_seconds: until a request's body is there.
      header_seconds: until a request's headers are there, from its first byte (of a connection's
        first request from the connection).
      idle_seconds: that a connection may stay open between two requests, and that a client may
        leave what was written to it unread before it is cut off.
      connections: at a time.
      choices: responses of one request, over all its prompts.
      stops: stop strings of one request.
      drain_seconds: that requests have to end by themselves when the server is stopped.
    """

    body_bytes: int = 8 * 2**20
    body_seconds: float = 60.0
    header_seconds: float = 10.0
    idle_seconds: float = 60.0
    connections: int = 1024
    choices: int = 128
    stops: int = 4
    drain_seconds: float = 10.0


def allow_connections(count: int) -> None:
    """Let this process have so many connections at a time, and refuse more: without file
    descriptors left a server can do nothing at all.

    Raises:
      ConfigError: the system does not let it.
    """
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows, which has no such limit
        return
    wanted = count + BACKLOG + OTHERS
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
