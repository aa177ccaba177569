"""Snapshots of what users hold on to: public names and help. `tests/e2e/test_seeded_run.py` has those of a run.

Record a deliberate change with `pytest tests/integration/test_snapshots.py --snapshot-update`, and name it in
CHANGELOG.md.
"""

import inspect
import re
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

import repl_rl
from repl_rl import cli
from repl_rl.cli import VERBS

SNAPSHOTS = Path(__file__).parent / "__snapshots__" / "test_snapshots.ambr"


@pytest.mark.parametrize("name", sorted(repl_rl.__all__))
def test_public_name(name: str, snapshot: SnapshotAssertion) -> None:
    """Parameters with their kinds, and whether they may be left out; the public members of a class."""
    found = getattr(repl_rl, name)
    members = sorted(member for member in dir(found) if not member.startswith("_")) if inspect.isclass(found) else []
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):  # a protocol, a constant
        parameters = []
    described = [f"{p.kind.description}: {p.name}{'' if p.default is p.empty else ' (optional)'}" for p in parameters]
    assert {"parameters": described, "members": members} == snapshot


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help(
    verb: str, snapshot: SnapshotAssertion, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    try:
        code: object = cli.main([verb, "--help"])
    except SystemExit as exit:
        code = exit.code
    assert code in (0, None)
    assert capsys.readouterr().out == snapshot


def test_every_snapshot_is_of_a_test_that_is_there() -> None:
    names = re.findall(r"^# name: (.*)$", SNAPSHOTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(names) == {
        *(f"{test_public_name.__name__}[{name}]" for name in repl_rl.__all__),
        *(f"{test_help.__name__}[{verb}]" for verb in VERBS),
    }
