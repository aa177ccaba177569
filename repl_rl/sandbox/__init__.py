"""Fresh, isolated Python consoles that run one physical line at a time.

`open_sandbox(kind)` opens a source of consoles. `base` defines the interface, and docs/specification.md lists the
guarantees.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from repl_rl.sandbox.base import Limits, LineResult, Sandbox, SandboxConfig, SandboxOptions, SandboxSession
from repl_rl.sandbox.docker import Docker
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.sandbox.isolated_subprocess import Local
from repl_rl.sandbox.jupyter_gateway import Gateway
from repl_rl.sandbox.unsafe_subprocess import Unsafe
from repl_rl.settings.component_registry import Registry

__all__ = [
    "SANDBOXES",
    "Docker",
    "Gateway",
    "InProcessSandbox",
    "Limits",
    "LineResult",
    "Local",
    "Sandbox",
    "SandboxConfig",
    "SandboxOptions",
    "SandboxSession",
    "Unsafe",
    "open_sandbox",
]

SANDBOXES: Registry[SandboxConfig] = Registry(
    "sandbox", {kind.kind: kind for kind in (Local, Docker, Gateway, Unsafe)}, ["repl_rl.sandboxes"]
)
"""Registry of all sandboxes that can be chosen by name."""


def open_sandbox(
    kind: SandboxConfig | str,
    *,
    limits: Limits | None = None,
    preload: Sequence[str] = (),
    warm: int = 8,
    starting: int = 4,
) -> AbstractAsyncContextManager[Sandbox]:
    """Open a sandbox for the duration of an `async with`.

    Args:
        kind: `local`, `docker`, `gateway`, `nodes`, `unsafe` or another name in `SANDBOXES`; or an instance with
            options, such as `Docker(image="mine")`.
        limits: resource limits of a line and of a rollout; None means the defaults of `Limits`.
        preload: modules to import before any console starts, so that a console imports them at no cost.
        warm: consoles kept alive, leased ones included (>= 0).
        starting: consoles that start at the same time, at most (>= 1).

    Raises:
        ConfigError: no sandbox has this name.
        SandboxUnavailable: this machine cannot provide the sandbox's isolation. Weaker isolation is never used instead.
    """
    return SANDBOXES.resolve(kind).open(SandboxOptions(limits or Limits(), preload, warm, starting))
