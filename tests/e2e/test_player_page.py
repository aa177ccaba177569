"""The player in a real browser, as a page of its own without a kernel."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from repl_rl.runs.report import write_report
from repl_rl.runs.store import write_step
from repl_rl.runs.trajectory_player import TrajectoryPlayer
from tests.support.chromium import Tab, chromium
from tests.support.run_folders import calling, rollout, run_folder

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with chromium() as tab:
        yield tab


@pytest.fixture
def alone(tab: Tab, tmp_path: Path) -> Tab:
    path = tmp_path / "player.html"
    path.write_text(TrajectoryPlayer(run_folder(tmp_path / "run"), sandbox="").html(), encoding="utf-8")
    tab.errors.clear()
    tab.open("about:blank")
    tab.open(path.as_uri())
    tab.wait("document.body.dataset.ready && document.querySelector('.session')")
    return tab


def test_without_a_kernel_the_player_steps_scrubs_and_compares(alone: Tab) -> None:
    assert alone.text(".place") == "line 2 of 2"
    alone.click("[data-act=first]")
    alone.wait("document.querySelector('.place').innerText === 'line 0 of 2'")
    assert alone.count(".row.line") == 0
    alone.run("document.querySelector('.player').focus()")
    alone.press("ArrowRight")
    alone.wait("document.querySelectorAll('.row.line').length === 1")
    alone.run(
        "(s => { s.value = 2; s.dispatchEvent(new Event('input')) })(document.querySelector('input[type=range]'))"
    )
    alone.wait("document.querySelectorAll('.row.line').length === 2")
    alone.run("(s => { s.value = 'advantage'; s.dispatchEvent(new Event('change')) })"
              "(document.querySelector('[aria-label=\"token colours\"]'))")  # fmt: skip
    alone.wait("document.querySelector('.token.more')")
    alone.run("(s => { s.value = '1'; s.dispatchEvent(new Event('change')) })"
              "(document.querySelector('[aria-label=\"compare with\"]'))")  # fmt: skip
    alone.wait("document.querySelector('.sides')")
    assert alone.text("p.split") == "They part at line 1, token 1."
    assert alone.count(".live") == 0
    assert alone.errors == []


def test_without_a_kernel_the_player_plays_and_hostile_output_does_nothing(alone: Tab) -> None:
    alone.type("input[type=search]", "2-two-3")
    alone.wait("document.querySelector('.stage').innerText.includes('window.hacked')")
    alone.click("[data-act=play]")
    alone.wait("document.querySelector('.place').innerText === 'line 0 of 2'")
    alone.wait("document.querySelector('.place').innerText === 'line 2 of 2'")
    assert "␛[2J␀U+202Eevil" in alone.text(".stage")
    assert alone.count(".session .row.line") == 2, "a printed prompt is no line"
    assert alone.run("window.hacked === undefined")
    assert alone.errors == []


def test_a_line_of_ten_million_characters_is_cut_in_player_and_report(tab: Tab, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=0)
    flood = rollout(0, "one", 1, "a" * 10_000_000 + "\n")
    write_step(run / "trajectories", 1, [flood])
    player = tmp_path / "player.html"
    player.write_text(TrajectoryPlayer(flood, sandbox="").html(), encoding="utf-8")
    for path, at in ((player, ""), (write_report(run), f"#tab=rollouts&id={flood.id}")):
        assert path.stat().st_size < 200_000
        tab.open("about:blank")
        tab.open(path.as_uri() + at)
        tab.wait("document.body.dataset.ready && document.querySelector('.session')")
        shown = tab.text(".session")
        assert "characters not shown" in shown
        assert len(shown) < 10_000


def test_calls_and_children_are_folds_in_player_and_report_and_hostile_ones_do_nothing(
    tab: Tab, tmp_path: Path
) -> None:
    run, t = run_folder(tmp_path / "run", steps=0), calling(rollout(0, "one", 0))
    write_step(run / "trajectories", 1, [t])
    player = tmp_path / "player.html"
    player.write_text(TrajectoryPlayer(t, sandbox="").html(), encoding="utf-8")
    for path, at in ((player, ""), (write_report(run), f"#tab=rollouts&id={t.id}")):
        tab.errors.clear()
        tab.open("about:blank")
        tab.open(path.as_uri() + at)
        tab.wait("document.body.dataset.ready && document.querySelector('.session')")
        assert tab.count("details.call") == 3
        assert tab.count("details.child") == 2
        assert "250 ms, child, trained" in tab.text("details.call > summary")
        tab.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert "What is inner?" in tab.text("details.child details.child .session")
        assert "no such function </script>" in tab.text(".session > .row > details.call > summary.bad")
        assert tab.run("window.hacked === undefined")
        assert (tab.count("img"), tab.errors) == (0, [])
