"""docs/replay.md: its code runs."""

from pathlib import Path

from repl_rl.runs.store import write_step
from tests.support.documents import blocks
from tests.unit.test_replay import played


def test_the_code_runs(tmp_path: Path) -> None:
    (source,) = blocks("python", "docs/report.md", "docs/replay.md")
    namespace: dict[str, object] = {}
    exec(source.replace('open_sandbox("local"', 'open_sandbox("unsafe"'), namespace)
    look = namespace["look"]
    assert callable(look)
    write_step(tmp_path, 1, [played(["x = 6\n", "x\n", "exit()\n"])])
    assert look(tmp_path) == "ok: a line of mine\n"
