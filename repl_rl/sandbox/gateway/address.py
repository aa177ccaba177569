"""Where a Jupyter server is: in the variables that Jupyter's own gateway client reads. They are stored with no run."""

import os
import urllib.parse
from dataclasses import dataclass
from typing import Self

from repl_rl.errors import ConfigError

URL, TOKEN = "JUPYTER_GATEWAY_URL", "JUPYTER_GATEWAY_AUTH_TOKEN"


@dataclass(frozen=True, slots=True)
class Address:
    """A server, and which of its kernels."""

    url: str
    kernel: str
    """Name of a kernelspec; "": ours where the server has it, else the server's default."""
    token: str
    """What the server asks for; "": nothing."""

    @classmethod
    def named(cls) -> Self:
        """The one that the environment names.

        Raises:
            ConfigError: it names none, or says a token in the URL.
        """
        url = os.environ.get(URL, "")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(URL, url, "set it to the address of a Jupyter server, such as http://host:8888")
        if parts.query or parts.username or parts.password:
            shown = parts._replace(query="...", netloc=parts.hostname).geturl()
            raise ConfigError(URL, shown, f"put the token into {TOKEN} instead: addresses are shown in messages")
        return cls(parts._replace(fragment="").geturl().rstrip("/"), parts.fragment, os.environ.get(TOKEN, ""))
