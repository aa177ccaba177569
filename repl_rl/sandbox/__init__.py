"""Fresh, isolated Python consoles that take one physical line at a time.

`open_sandbox(kind)` is the way in; `base` has the contract, docs/specification.md the promises.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from repl_rl.errors import ConfigError
from repl_rl.sandbox import docker, local, unsafe
from repl_rl.sandbox.base import Limits, PushResult, Sandbox, SandboxSession
from repl_rl.sandbox.docker import DockerOptions
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.sandbox.served import serve

__all__ = [
    "KINDS",
    "DockerOptions",
    "InProcessSandbox",
    "Limits",
    "PushResult",
    "Sandbox",
    "SandboxSession",
    "open_sandbox",
]

KINDS = ("local", "docker", "gateway", "unsafe")
_WARM = 8
_STARTING = 4


def open_sandbox(
    kind: str,
    *,
    limits: Limits | None = None,
    preload: Sequence[str] = (),
    warm: int = _WARM,
    starting: int = _STARTING,
    containers: DockerOptions | None = None,
) -> AbstractAsyncContextManager[Sandbox]:
    """A sandbox of one of `KINDS`, for the length of an `async with`.

    Args:
        limits: what a line and a rollout may use; None: the defaults of `Limits`.
        preload: modules that the fork server imports, so that they cost a console nothing.
        warm: consoles kept alive, those in use included (>= 0).
        starting: consoles started at the same time (>= 1).
        containers: of the kind "docker"; None: the defaults of `DockerOptions`.

    Raises:
        ConfigError: there is no such kind, or this version does not have it yet ("gateway").
        SandboxUnavailable: its isolation cannot be had on this machine. Nothing weaker is used instead.
    """
    chosen = limits or Limits()
    if containers is not None and kind != "docker":
        raise ConfigError("containers", containers, f"they have no effect on the sandbox {kind!r}; leave them out")
    if warm < 0 or starting < 1:
        raise ConfigError("warm, starting", (warm, starting), "give warm >= 0 and starting >= 1")
    if kind == "local":
        return serve(kind, local.launch(preload), chosen, warm=warm, starting=starting)
    if kind == "unsafe":
        return serve(kind, unsafe.launch(preload), chosen, warm=warm, starting=starting)
    if kind == "docker":
        options = containers or DockerOptions()
        each = options.isolation == "container"
        launch = docker.launch(chosen, preload, options)
        return serve(kind, launch, chosen, warm=warm, starting=starting, server_each=each)
    if kind == "gateway":
        raise ConfigError("sandbox", kind, "this version cannot reach a Jupyter gateway; use local or docker")
    raise ConfigError("sandbox", kind, f"choose one of {', '.join(KINDS)}")
