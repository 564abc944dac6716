"""The file descriptors that connections take: without any left a server can do nothing at all."""

from __future__ import annotations

from hjax.errors import ConfigError

# Connections that the system holds until they are taken, which may be all at once.
BACKLOG = 1024
# For sockets and files of everything else.
OTHERS = 256


def allow_connections(count: int) -> None:
    """Let this process have so many connections at a time, and refuse more.

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
