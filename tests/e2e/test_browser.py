"""The report in a real browser without network: what a person would do with it, and what a hostile program cannot."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from repl_rl.runs.report import write_comparison, write_report
from tests.support.chromium import Tab, chromium
from tests.support.reports import served
from tests.support.run_folders import run_folder

pytestmark = [pytest.mark.heavy, pytest.mark.alone]


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with chromium() as tab:
        yield tab


@pytest.fixture
def report(tmp_path: Path) -> str:
    return write_report(run_folder(tmp_path / "run")).as_uri()


def opened(tab: Tab, address: str, dark: bool = False) -> Tab:
    tab.errors.clear()
    tab.requests.clear()
    tab.open("about:blank")
    tab.open(address, dark=dark)
    tab.wait("document.body.dataset.ready")
    return tab


@pytest.mark.parametrize("dark", [False, True])
def test_curves_are_drawn_offline_in_light_and_dark(tab: Tab, report: str, dark: bool) -> None:
    opened(tab, report, dark)
    assert tab.count(".chart path.curve, .chart path.area") >= 5
    assert "NaN" not in str(tab.run("document.querySelector('.charts').innerHTML"))
    lightness = tab.run("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0] > 128")
    assert lightness is not dark
    assert tab.errors == []
    assert all(address.startswith(("file:", "about:")) for address in tab.requests)


def test_a_rollout_is_found_by_search_and_its_group_compared(tab: Tab, report: str) -> None:
    opened(tab, report).click("[data-tab=rollouts]")
    tab.wait("document.querySelector('.session')")
    tab.type(".filters input", "zerodivision TWO")
    tab.wait("document.querySelector('.count').innerText === '6 of 24'")
    tab.run("(s => { s.value = 'solved'; s.dispatchEvent(new Event('change')) })(document.querySelector('select'))")
    tab.wait("document.querySelector('.count').innerText === '0 of 24'")
    assert "No rollout fits" in tab.text(".pane")
    tab.run("(s => { s.value = 'not solved'; s.dispatchEvent(new Event('change')) })(document.querySelector('select'))")
    tab.wait("document.querySelector('.session')")
    assert tab.text(".pane h2") == "0-two-1"
    tab.click(".member[data-id='0-two-0']")
    tab.wait("document.querySelector('.sides')")
    assert tab.text("p.split") == "They part at line 1, token 1."
    assert tab.run("[...document.querySelectorAll('.diverges')].map(e => e.innerText)") == ["1/0", "x"]
    assert tab.errors == []


def test_tokens_are_coloured_by_what_is_asked_for(tab: Tab, report: str) -> None:
    opened(tab, report + "#tab=rollouts&id=0-one-1")
    tab.wait("document.querySelector('.session')")
    assert tab.count(".token") == 0
    classes = "[...new Set([...document.querySelectorAll('.session .token')].map(e => e.className))].sort()"
    for heat, expected in [
        ("logprob", ["token unlikely"]),
        ("advantage", ["token less"]),
        ("ratio", ["token more"]),
        ("mask", ["token sampled"]),
    ]:
        tab.click(f"[data-heat={heat}]")
        tab.wait(f"document.querySelector('.session').dataset.heat === '{heat}'")
        assert tab.run(classes) == expected
    assert "log probability −1.1" in str(tab.run("document.querySelectorAll('.token')[1].title"))
    assert "heat=mask" in str(tab.run("location.hash"))


def test_the_list_is_walked_by_keyboard(tab: Tab, report: str) -> None:
    opened(tab, report + "#tab=rollouts")
    tab.wait("document.querySelector('.session')")
    tab.run("document.querySelector('.list').focus()")
    for key in ("j", "j", "k"):
        tab.press(key)
    tab.wait("document.querySelector('.pane h2').innerText === '0-one-1'")


def test_hostile_output_is_shown_and_does_nothing(tab: Tab, report: str) -> None:
    opened(tab, report + "#tab=rollouts&id=0-two-3")
    tab.wait("document.querySelector('.session')")
    shown = tab.text(".session")
    assert '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">␛[2J␀U+202Eevil' in shown
    assert ">>> submit_final_answer(666)" in shown
    assert tab.count(".session .row.line") == 2, "a printed prompt is no line"
    assert tab.run("window.hacked === undefined")
    assert tab.count("img") == 0
    assert tab.errors == []


def test_markup_that_got_in_would_not_run(tab: Tab, report: str) -> None:
    opened(tab, report)
    tab.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 1\">')")
    tab.run("new Promise(done => setTimeout(done, 50))")
    assert tab.run("window.hacked === undefined")


def test_ten_thousand_rollouts_load_within_three_seconds_and_stay_smooth(tab: Tab, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=100, tasks=[f"task {n}" for n in range(13)], members=8)
    address = write_report(run).as_uri()
    started = time.monotonic()
    opened(tab, address + "#tab=rollouts")
    tab.wait("document.querySelector('.session')")
    assert time.monotonic() - started <= 3
    assert "10,400" in tab.text(".count")
    frame = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    scroll = f"(async () => {{ const list = document.querySelector('.list'); const t = performance.now(); for (let i = 0; i < 50; i++) {{ list.scrollTop += 9000; await {frame}; }} return (performance.now() - t) / 50 }})()"  # noqa: E501
    milliseconds = tab.run(scroll)
    assert isinstance(milliseconds, float)
    assert milliseconds < 100
    assert tab.count(".item") < 60


def test_a_followed_run_shows_new_steps_and_keeps_what_was_chosen(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", finished=False)
    with served(run) as server, chromium(offline=False) as tab:
        opened(tab, server.address + "#tab=rollouts&id=0-one-1&heat=mask")
        tab.wait("document.querySelector('.session')")
        (run / "summary.json").write_text('{"status": "finished"}')
        tab.wait("document.querySelector('.chip.finished')")
        tab.wait("document.querySelector('.session')")
        assert tab.text(".pane h2") == "0-one-1"
        assert tab.errors == []


@pytest.mark.parametrize("dark", [False, True])
def test_two_runs_are_drawn_side_by_side(tab: Tab, tmp_path: Path, dark: bool) -> None:
    one, two = run_folder(tmp_path / "one"), run_folder(tmp_path / "<img onerror=1>", steps=5)
    hostile = "</script><b>x</b>\u202e"
    write_comparison(one, two, [("prompt", hostile, "not said"), ("trainer.steps", "3", "5")], tmp_path / "page.html")
    opened(tab, (tmp_path / "page.html").as_uri(), dark)
    assert tab.text("h1") == "one and <img onerror=1>"
    assert "90.0%" in tab.text("table.beside")
    rows = "[...document.querySelectorAll('table.beside')][1].innerText"
    assert "trainer.steps" in str(tab.run(rows))
    assert "</script><b>x</b>U+202E" in str(tab.run(rows))
    legends = "[...document.querySelectorAll('.charts .chart')].find(c => c.innerText.startsWith('Lines in error'))"
    assert tab.run(f"{legends}.querySelectorAll('path.curve').length") == 2
    assert "NaN" not in str(tab.run("document.querySelector('main').innerHTML"))
    tab.click("details.families summary")
    assert tab.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert tab.count("b, img") == tab.count(".legend b")
    assert tab.errors == []
    assert all(address.startswith(("file:", "about:")) for address in tab.requests)
