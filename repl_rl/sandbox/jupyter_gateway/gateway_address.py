"""Address of the server, from the variables that Jupyter's own gateway client reads; no run stores them.

It is no part of `gateway_console`, whose client is an extra.
"""

import os
import urllib.parse
from dataclasses import dataclass
from typing import Self

from repl_rl.errors import ConfigError

URL, TOKEN = "JUPYTER_GATEWAY_URL", "JUPYTER_GATEWAY_AUTH_TOKEN"
"""Variables with the address of the server and its token."""


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Address of a server, and the name of one of its kernels."""

    url: str
    kernel: str
    """Name of a kernelspec. Empty means ours if the server has it, else the server's default."""
    token: str
    """Token for the server. Empty means none."""

    @classmethod
    def from_environment(cls) -> Self:
        """Return the address that the environment names.

        Raises:
            ConfigError: it names none, or the URL contains a token.
        """
        url = os.environ.get(URL, "")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(URL, url, "set it to the address of a Jupyter server, such as http://host:8888")
        if parts.query or parts.username or parts.password:
            safe_url = parts._replace(query="...", netloc=parts.hostname).geturl()
            raise ConfigError(URL, safe_url, f"put the token into {TOKEN} instead: addresses are shown in messages")
        return cls(parts._replace(fragment="").geturl().rstrip("/"), parts.fragment, os.environ.get(TOKEN, ""))
