"""A sandbox of one's own: this file, and one line that adds it."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from repl_rl.sandbox import Local, Sandbox, SandboxConfig, SandboxOptions
from repl_rl.sandbox.console_pool import open_fork_server_sandbox
from repl_rl.sandbox.isolated_subprocess import make_local_launcher
from repl_rl.settings.value_bounds import AtLeast, check_fields


@dataclass(frozen=True, slots=True)
class Playpen(SandboxConfig):
    """Namespaces on this machine, whose processes leave the cores to others."""

    kind: ClassVar[str] = "playpen"
    about: ClassVar[str] = "polite processes"

    politeness: Annotated[int, AtLeast(0)] = 0
    """How nice its processes are."""

    def __post_init__(self) -> None:
        check_fields(self, self.kind)

    def open(self, births: SandboxOptions) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxConfig.open`."""
        plain = make_local_launcher(births.preload)
        polite = replace(plain, argv=["/usr/bin/nice", "-n", str(self.politeness), *plain.argv])
        return open_fork_server_sandbox(self.kind, polite, births)

    def build_reference_command(self, script: Path) -> Sequence[str]:
        """See `SandboxConfig.build_reference_command`."""
        return Local().build_reference_command(script)
