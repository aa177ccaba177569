"""The player in a real browser, as a page of its own without a kernel."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from repl_rl.player import TrajectoryPlayer
from tests.chromium import Tab, chromium
from tests.runs import run_folder

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
    assert alone.run("window.hacked === undefined")
    assert alone.errors == []
