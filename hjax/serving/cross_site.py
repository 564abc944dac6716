"""Host and Origin of requests: other sites' web pages must not use a server without a key.

A browser sends a page's POST to any server that it reaches, this machine's loopback too, before it
asks whether the page may read the answer. And a page whose name comes to resolve to 127.0.0.1 (DNS
rebinding) is of the server's own origin, but for the name in Host.
"""

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import Scope

from hjax.serving.limits import ServerLimits
from hjax.serving.request_errors import RequestRefused

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:@/\[\]\s]+))(?::\d*)?")
# Paths that change the server itself.
_ADMIN = "/admin/"
_CHANGE_NOTHING = ("GET", "HEAD", "OPTIONS")


class CrossSiteCheck:
    """Refuses requests of other sites' pages to a server that asks for no key.

    Args:
      address: the IP address that the server listens on.
      limits: ``hosts`` and ``origins`` that are allowed beside its own.
    """

    def __init__(self, address: str, limits: ServerLimits):
        self._address = ipaddress.ip_address(address.partition("%")[0])
        self._hosts = {host.lower() for host in limits.hosts}
        self._origins = limits.origins

    def check(self, scope: Scope) -> None:
        """Check a request's headers.

        Host is checked of a server on the loopback, as behind a proxy a server is called by names
        that it does not know; of requests to ``/admin/`` always.

        Raises:
          RequestRefused: a foreign host or origin, with 403.
        """
        headers = Headers(scope=scope)
        admin = scope["path"].startswith(_ADMIN)
        host = headers.get("host", "")
        if (admin or self._address.is_loopback) and not self._is_own(host):
            raise RequestRefused(
                f"Host: {host[:100]} is no name of this server; start it with --allowed_hosts=NAME "
                "or --api_key_env=NAME",
                403,
                code="host_not_allowed",
            )
        if scope["method"] not in _CHANGE_NOTHING:
            self._check_origin(headers, host, admin)

    def _is_own(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None:
            return not host  # of HTTP/1.0; no browser leaves it out
        name = (found[1] or found[2]).lower().rstrip(".")
        if "*" in self._hosts or name in self._hosts or name == "localhost":
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name.endswith(".localhost")
        # An address is no name that could be made to resolve to another one.
        return address.is_loopback or self._address.is_unspecified or address == self._address

    def _check_origin(self, headers: Headers, host: str, admin: bool) -> None:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        # No page's script can set the second header.
        if site in ("same-origin", "none") or (origin is None and site is None):
            return
        if origin is not None:
            everyone = "*" in self._origins and not admin
            same = origin.lower().partition("://")[2] == host.lower()
            if everyone or origin in self._origins or same:
                return
        raise RequestRefused(
            f"Origin: {(origin or site or '')[:100]} is another site; start the server with "
            "--cors=ORIGIN or --api_key_env=NAME",
            403,
            code="origin_not_allowed",
        )
