"""ServerSettings: the server's address, key and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from sgl_aspects.errors import ConfigError
from sgl_aspects.runtime.checks import check_integer, is_integer, is_number


@dataclass
class ServerSettings:
    """A bad value is a ConfigError when the object is made. Times in seconds."""

    #: Address to listen on. Any other than a loopback address needs an api_key.
    host: str = "127.0.0.1"
    #: 0 takes a free one, which is logged.
    port: int = 8000
    #: Clients send it as "Authorization: Bearer KEY".
    api_key: str | None = field(default=None, repr=False)
    #: Take new weights and profiles without a key, too, from every user of this machine.
    admin: bool = False
    #: A larger body is answered with status 413.
    max_body_bytes: int = 4 << 20
    #: Answers under way, each choice of each call counted; a call beyond them is answered with status 429.
    max_concurrent_requests: int = 256
    #: A body that takes longer to arrive is answered with status 408; a connection on which no request comes
    #: for as long is closed.
    body_timeout: float = 30.0
    #: How long a stopping server waits for answers under way before it fails them.
    shutdown_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host={self.host!r}: write an address such as 127.0.0.1")
        if not is_integer(self.port) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port!r}: write a number from 0 to 65535")
        if self.api_key is not None and (not isinstance(self.api_key, str) or not self.api_key.strip()):
            raise ConfigError("api_key is empty: write a secret text, or leave it out")
        for name in ("max_body_bytes", "max_concurrent_requests"):
            check_integer(ConfigError, self, name, 1)
        for name in ("body_timeout", "shutdown_timeout"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value!r}: write a number of seconds above 0")
        if self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"host={self.host!r} lets other machines in: set an api_key (--api-key, or the variable "
                "SGL_ASPECTS_API_KEY), or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
