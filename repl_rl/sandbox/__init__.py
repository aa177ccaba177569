"""Fresh, isolated Python consoles that take one physical line at a time.

`open_sandbox(kind)` is the way in; `base` has the contract, docs/specification.md the promises.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from repl_rl.sandbox.base import Births, Limits, PushResult, Sandbox, SandboxKind, SandboxSession
from repl_rl.sandbox.docker import Docker
from repl_rl.sandbox.gateway import Gateway
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.sandbox.local import Local
from repl_rl.sandbox.nodes import Nodes
from repl_rl.sandbox.unsafe import Unsafe
from repl_rl.settings.seams import Seam

__all__ = [
    "SANDBOXES",
    "Births",
    "Docker",
    "Gateway",
    "InProcessSandbox",
    "Limits",
    "Local",
    "Nodes",
    "PushResult",
    "Sandbox",
    "SandboxKind",
    "SandboxSession",
    "Unsafe",
    "open_sandbox",
]

SANDBOXES: Seam[SandboxKind] = Seam("sandbox", {kind.kind: kind for kind in (Local, Docker, Gateway, Nodes, Unsafe)})
"""Every sandbox that can be chosen by name."""


def open_sandbox(
    kind: SandboxKind | str,
    *,
    limits: Limits | None = None,
    preload: Sequence[str] = (),
    warm: int = 8,
    starting: int = 4,
) -> AbstractAsyncContextManager[Sandbox]:
    """A sandbox, for the length of an `async with`.

    Args:
        kind: `local`, `docker`, `gateway`, `nodes`, `unsafe` or whatever else is among `SANDBOXES`; or one with options
            of its own, such as `Docker(image="mine")`.
        limits: what a line and a rollout may use; None: the defaults of `Limits`.
        preload: modules that are imported before a console is born, so that they cost it nothing.
        warm: consoles kept alive, those in use included (>= 0).
        starting: consoles started at the same time (>= 1).

    Raises:
        ConfigError: there is no such kind.
        SandboxUnavailable: its isolation cannot be had on this machine. Nothing weaker is used instead.
    """
    return SANDBOXES.chosen(kind).open(Births(limits or Limits(), preload, warm, starting))
