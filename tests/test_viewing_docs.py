"""docs/report.md and docs/replay.md: their commands parse and their code runs."""

import re
import shlex
from pathlib import Path

import pytest

from repl_rl.cli.arguments import parse
from repl_rl.cli.replay import ReplayConfig
from repl_rl.cli.view import ViewConfig
from repl_rl.store import write_step
from tests.test_replay import played

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [(DOCS / name).read_text() for name in ("report.md", "replay.md")]


def blocks(language: str) -> list[str]:
    return [block for page in PAGES for block in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)]


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_accepted(command: str) -> None:
    program, verb, *flags = shlex.split(command, comments=True)
    kinds: dict[str, type[ReplayConfig] | type[ViewConfig]] = {"view": ViewConfig, "replay": ReplayConfig}
    assert program == "repl-rl"
    assert parse(kinds[verb], verb, flags)


def test_the_code_runs(tmp_path: Path) -> None:
    (source,) = blocks("python")
    namespace: dict[str, object] = {}
    exec(source.replace('open_sandbox("local"', 'open_sandbox("unsafe"'), namespace)
    look = namespace["look"]
    assert callable(look)
    write_step(tmp_path, 1, [played(["x = 6\n", "x\n", "exit()\n"])])
    assert look(tmp_path) == "ok: a line of mine\n"
