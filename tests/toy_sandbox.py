"""A sandbox of one's own: this file, and one line that adds it."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from repl_rl.sandbox import Births, Local, Sandbox, SandboxKind
from repl_rl.sandbox.local import launch
from repl_rl.sandbox.served import serve
from repl_rl.settings.bounds import AtLeast, check_fields


@dataclass(frozen=True, slots=True)
class Playpen(SandboxKind):
    """Namespaces on this machine, whose processes leave the cores to others."""

    kind: ClassVar[str] = "playpen"
    about: ClassVar[str] = "polite processes"

    politeness: Annotated[int, AtLeast(0)] = 0
    """How nice its processes are."""

    def __post_init__(self) -> None:
        check_fields(self, self.kind)

    def open(self, births: Births) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxKind.open`."""
        plain = launch(births.preload)
        polite = replace(plain, argv=["/usr/bin/nice", "-n", str(self.politeness), *plain.argv])
        return serve(self.kind, polite, births)

    def reference(self, script: Path) -> Sequence[str]:
        """See `SandboxKind.reference`."""
        return Local().reference(script)
