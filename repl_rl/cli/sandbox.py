"""`repl-rl sandbox check | build`: run the conformance suite on a sandbox, or build the image of the docker sandbox."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table

from repl_rl.cli.terminal_output import make_terminal
from repl_rl.errors import ConfigError
from repl_rl.sandbox import SANDBOXES, SandboxConfig
from repl_rl.sandbox.conformance import run_suite
from repl_rl.sandbox.docker import build_image
from repl_rl.settings.argument_parser import parse
from repl_rl.settings.value_bounds import AtLeast, check_fields


@dataclass(frozen=True)
class SandboxCheckConfig:
    """Run the conformance suite on a sandbox. The exit code is 1 if any check fails."""

    sandbox: Annotated[SandboxConfig | str, SANDBOXES] = "local"
    """Sandbox to check."""
    doctests: Annotated[int, AtLeast(0)] = 60
    """Transcripts from doctests of the standard library to replay, >= 0."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ImageBuildConfig:
    """Build the image of the docker sandbox."""

    base: str = ""
    """Image with pip and Python >= 3.11 to build on. Empty: python:3.11-slim-bookworm, or a similar local image."""
    wheels: Path | None = None
    """Folder with the wheels of ipykernel and its dependencies, for machines without network. Without it pip downloads
    them."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    action, rest = (argv[0], argv[1:]) if argv else ("", argv)
    if action == "check":
        return _check_sandbox(parse(SandboxCheckConfig, "sandbox check", rest))
    if action == "build":
        config = parse(ImageBuildConfig, "sandbox build", rest)
        print(build_image(base=config.base, wheels=config.wheels))
        return 0
    if action in ("-h", "--help"):
        print("usage: repl-rl sandbox check|build [options]    (--help after either lists them)")
        return 0
    raise ConfigError("sandbox action", action, "choose check or build")


def _check_sandbox(config: SandboxCheckConfig) -> int:
    rows = asyncio.run(run_suite(config.sandbox, doctests=config.doctests))
    table = Table("section", "promise", "kept", "detail", title=f"sandbox {SANDBOXES.resolve(config.sandbox).kind}")
    for row in rows:
        table.add_row(row.section, row.name, "yes" if row.passed else "NO", row.detail)
    make_terminal().print(table)
    return int(not all(row.passed for row in rows))
