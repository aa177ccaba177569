"""Promises of the doctest harvest: what is executed, what is kept, and why the rest is not."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.console import doctests
from repl_rl.cli import main
from repl_rl.cli.transcripts import TranscriptsConfig
from repl_rl.errors import ConfigError
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.runs.store import read_trajectories
from repl_rl.sandbox import InProcessSandbox
from repl_rl.settings.argument_parser import parse
from repl_rl.sft.demonstrations_from_doctests import (
    STDLIB,
    DemonstrationCounts,
    DocstringTest,
    DoctestRecipe,
    generate_verified_doctests,
    iterate_doctests,
)
from repl_rl.trajectory.console_text import split_into_typed_lines
from repl_rl.trajectory.trajectory import LineStatus, Observed, Sampled, Stop, Trajectory
from tests.support.scripted_rollouts import RENDERER

SOURCE = '''
"""Not a doctest."""

import math as mathematics

SCALE = 3


def good(x):
    """Multiply by the scale.

    More prose.

    >>> good(2)
    6
    >>> for i in range(2):
    ...     print(good(i))
    0
    3
    >>> good(None)
    Traceback (most recent call last):
    TypeError: whatever it says
    >>> mathematics.floor(SCALE + 0.5)
    3
    >>> good(5)  # doctest: +SKIP
    'left out'
    >>> list(range(100))  # doctest: +ELLIPSIS
    [0, 1, ..., 99]
    """
    return x * SCALE if x is not None else x + SCALE


def half():
    """
    >>> 1 + 1
    2
    >>> 1 + 1
    3
    >>> 4
    4
    """


def wrong():
    """
    >>> 1 + 1
    5
    """


def raises():
    """
    >>> 1 / 0
    0
    """


def calm():
    """
    >>> 1
    Traceback (most recent call last):
    ValueError
    """


def silent():
    """
    >>> x = 1
    """


def leaves():
    """
    >>> exit()
    """


def twin():
    """Another docstring, the same lines.

    >>> 1 + 1
    2
    >>> 1 + 1
    3
    """


def long():
    """
    >>> 'y'
    'y'
    >>> 'z' * 2000  # doctest: +ELLIPSIS
    'zz...'
    """
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a doctest of each kind; importing it on the host would raise."""
    folder = tmp_path / "site" / "specimen_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "kinds.py").write_text(SOURCE)
    (folder / "bomb.py").write_text('raise RuntimeError("imported on the host")\n"""\n>>> 1\n1\n"""\n')
    (folder / "torn.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    return "specimen-package"


def played(specimens: list[DocstringTest], max_tokens: int = 1500) -> tuple[list[Trajectory], DemonstrationCounts]:
    async def play() -> tuple[list[Trajectory], DemonstrationCounts]:
        tally = DemonstrationCounts()
        # One console at a time: those of this sandbox share a process.
        recipe = DoctestRecipe(RENDERER, max_tokens=max_tokens, concurrency=1)
        return [t async for t in generate_verified_doctests(specimens, InProcessSandbox(), recipe, tally)], tally

    return asyncio.run(play())


def named(package: str, word: str) -> DocstringTest:
    line = SOURCE.split("\n").index(next(s for s in SOURCE.split("\n") if s.startswith(f"def {word}("))) + 2
    return next(s for s in iterate_doctests(package) if s.name == f"specimen_package.kinds:{line}")


def test_a_doctest_that_is_too_deep_for_the_parser_is_harvested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_specimen.py").write_text(
        f'"""Deep.\n\n>>> x = (\n{("... " + "-" * 400 + chr(10)) * 100}... 1)\n"""\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (specimen,) = iterate_doctests("deep_specimen")
    assert specimen.setup == ()
    assert len(specimen.examples) == 1


def test_lines_are_typed_as_a_person_does_and_only_an_open_block_gets_a_blank_line() -> None:
    assert split_into_typed_lines("x = 1\n") == ("x = 1",)
    assert split_into_typed_lines("for i in x:\n    i\n") == ("for i in x:", "    i", "")
    assert split_into_typed_lines("for i in x: i\n") == ("for i in x: i", "")
    assert split_into_typed_lines("f(1,\n  2)\n") == ("f(1,", "  2)")
    assert split_into_typed_lines("1 +\n") == ("1 +",)


def test_a_doctest_is_harvested_with_its_question_its_imports_and_without_what_it_skips(package: str) -> None:
    good = named(package, "good")
    assert good.question == "Show how specimen_package.kinds is used: Multiply by the scale."
    assert good.setup == ("from specimen_package.kinds import SCALE, good, mathematics",)
    assert [example.lines[0] for example in good.examples] == [
        "good(2)",
        "for i in range(2):",
        "good(None)",
        "mathematics.floor(SCALE + 0.5)",
        "list(range(100))  # doctest: +ELLIPSIS",
    ]
    assert good.examples[2].expected_error == "TypeError"


def test_what_printed_what_it_should_is_kept_and_its_mask_is_its_lines(package: str) -> None:
    (t,), tally = played([named(package, "good")])
    assert (tally.complete, tally.accepted_count, t.stop, t.outcome, t.answer) == (1, 1, Stop.FINISHED, None, None)
    assert t.prompt.text.endswith("Multiply by the scale.\n>>> ")
    written = "".join(line.text for line in t.lines)
    assert RENDERER.decode([i for i, own in zip(t.completion_ids, t.loss_mask, strict=True) if own]) == written
    assert written.startswith(
        "from specimen_package.kinds import SCALE, good, mathematics\ngood(2)\nfor i in range(2):\n"
    )
    shown = [s.text for s in t.segments if isinstance(s, Observed)]
    assert shown[1:5] == ["6\n>>> ", "... ", "... ", "0\n3\n>>> "]
    pieces = [s.lines[0].text if isinstance(s, Sampled) else s.text for s in t.segments]
    assert t.completion_ids == tuple(i for piece in pieces for i in RENDERER.encode(piece))
    errors = [line for line in t.lines if line.execution and line.execution.status is LineStatus.EXCEPTION]
    assert [line.text for line in errors] == ["good(None)\n"]
    assert set(t.logprobs_T()) == {0.0}


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("wrong", "printed something else"),
        ("raises", "raised what it should not"),
        ("calm", "did not raise what it should"),
        ("silent", "prints nothing"),
        ("leaves", "ended its console"),
    ],
)
def test_what_went_wrong_at_once_is_dropped_with_its_reason(package: str, word: str, reason: str) -> None:
    kept, tally = played([named(package, word)])
    assert kept == []
    assert dict(tally.rejected) == {reason: 1}


def test_what_goes_wrong_later_is_kept_up_to_there(package: str) -> None:
    (t,), tally = played([named(package, "half")])
    assert [line.text for line in t.lines] == ["1 + 1\n"]
    assert dict(tally.truncated) == {"printed something else": 1}


def test_what_is_too_long_is_cut_between_two_statements(package: str) -> None:
    (t,), tally = played([named(package, "long")], max_tokens=600)
    assert [line.text for line in t.lines] == ["'y'\n"]
    assert dict(tally.truncated) == {"is too long": 1}


def test_equal_demonstrations_are_kept_once_and_every_doctest_is_counted(package: str) -> None:
    specimens = list(iterate_doctests(package))
    kept, tally = played(specimens)
    assert tally.rejected["is there already"] == 1
    assert tally.accepted_count == len(kept)
    assert tally.accepted_count + tally.rejected.total() == len(specimens) == 10
    assert len({t.completion_ids for t in kept}) == len(kept)


def test_a_module_a_part_of_a_package_and_the_standard_library_can_be_named(package: str) -> None:
    assert {s.name.split(":")[0] for s in iterate_doctests("specimen_package.kinds")} == {"specimen_package.kinds"}
    assert ("from statistics import mean",) in {s.setup for s in iterate_doctests("statistics")}
    assert STDLIB == "stdlib"
    for absent in ("no_such_package_at_all", "specimen_package.nothing", "a b"):
        with pytest.raises(ConfigError, match=f"package is '{absent}'; name an installed package"):
            list(iterate_doctests(absent))


def test_the_verb_writes_trajectories_and_counts_that_can_be_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t"
    flags = ["transcripts", "--from-doctests", "statistics", "heapq", "--out", str(out)]
    assert main([*flags, "--sandbox", "unsafe", "--concurrency", "2"]) == 0
    counts = json.loads((out / "transcripts.json").read_text())
    kept = list(read_trajectories(out / "trajectories"))
    assert counts["kept"] == len(kept) > 0
    assert set(counts["packages"]) == {"statistics", "heapq"}
    assert "kept whole" in capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == [".repl-rl", "config.toml", "trajectories", "transcripts.json"]
    written = parse(TranscriptsConfig, "transcripts", ["--config", str(out / "config.toml")])
    assert written.from_doctests == ("statistics", "heapq")
    assert main(flags) == 2
    assert "it exists" in capsys.readouterr().err
    assert main(["transcripts"]) == 2
    assert "name packages, such as --from-doctests sympy stdlib" in capsys.readouterr().err


def test_the_counts_on_the_page_are_those_of_the_published_command() -> None:
    assert doctests.PAGE.text == doctests.block(json.loads(doctests.FIGURES.read_text()))


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_sympy_more_itertools_and_the_standard_library_give_3000_verified_trajectories(tmp_path: Path) -> None:
    out = tmp_path / "t"
    assert main(["transcripts", "--from-doctests", "sympy", "more-itertools", STDLIB, "--out", str(out)]) == 0
    kept = list(read_trajectories(out / "trajectories"))
    assert json.loads((out / "transcripts.json").read_text())["kept"] == len(kept) >= 3000
    renderer = Renderer.from_folder(Path(__file__).parents[2] / "repl_rl" / "policies" / "quickstart")
    for t in kept:
        assert len(t.prompt.token_ids) + len(t.completion_ids) <= 1024
        own = [i for i, sampled in zip(t.completion_ids, t.loss_mask, strict=True) if sampled]
        assert renderer.decode(own) == "".join(line.text for line in t.lines)
