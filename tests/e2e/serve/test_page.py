"""The page at `/` in a real browser: what a person would do with it, and what a hostile program cannot."""

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from tests.support.chromium import Tab, chromium
from tests.support.serve.http_server import BOUNDS, Server, Stuck, scripted, served

KEY = "a-key-of-somebody-whom-we-know"


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with chromium(offline=False) as tab:
        yield tab


def opened(tab: Tab, server: Server) -> Tab:
    tab.open("about:blank")
    tab.errors.clear()
    tab.requests.clear()
    tab.open(f"{server.address}/")
    tab.wait("document.body.dataset.ready")
    return tab


def asked(tab: Tab, question: str) -> None:
    tab.type("#question", question)
    tab.press("Enter")
    tab.wait("document.body.dataset.busy === 'true'")


def answered(tab: Tab, question: str) -> None:
    tab.type("#question", question)
    tab.press("Enter")
    tab.wait("document.body.dataset.busy === 'false' && !document.querySelector('#question').value")


@pytest.mark.heavy
@pytest.mark.alone
def test_a_task_is_typed_and_its_lines_are_watched(tab: Tab) -> None:
    with served() as server:
        answered(opened(tab, server), "Six?")
        assert tab.run("[...document.querySelectorAll('.typed')].map(e => e.dataset.prompt + e.innerText)") == [
            ">>> x = 6", ">>> x", ">>> submit_final_answer(x)",
        ]  # fmt: skip
        assert (tab.text(".output"), tab.text(".answer")) == ("6", "6")
        answered(tab, "Times seven?")
        assert tab.run("[...document.querySelectorAll('.answer')].at(-1).innerText") == "42"
        tab.click("#afresh")
        server.wait(lambda: server.sandbox.open == 0)
        answered(tab, "Is x there?")
        assert tab.run("[...document.querySelectorAll('.answer')].at(-1).innerText") == "False"
        assert tab.errors == []
        assert all(address.startswith((server.address, "about:", "data:")) for address in tab.requests)


@pytest.mark.heavy
@pytest.mark.alone
def test_a_console_that_is_gone_is_said_so_and_the_next_question_has_a_new_one(tab: Tab) -> None:
    with served(bounds=replace(BOUNDS, conversation_timeout_s=0.01)) as server:
        answered(opened(tab, server), "Six?")
        server.wait(lambda: server.figure("repl_rl_conversations") == 0)
        answered(tab, "Times seven?")
        assert "no such conversation" in tab.text(".failure")
        assert "the next question begins in a new console" in tab.text(".failure")
        answered(tab, "Is x there?")
        assert tab.run("[...document.querySelectorAll('.answer')].at(-1).innerText") == "False"


@pytest.mark.heavy
@pytest.mark.alone
def test_hostile_questions_lines_and_output_are_text(tab: Tab) -> None:
    with served() as server:
        answered(opened(tab, server), "<b>Hostile</b>?")
        assert tab.text(".question") == "<b>Hostile</b>?"
        assert tab.text(".output") == "</script><img src=x onerror=alert(1)>"
        assert tab.text(".answer") == "<i>no</i>"
        answered(tab, "Steer?")
        assert "U+001B[2J" in str(tab.run("[...document.querySelectorAll('.output')].at(-1).innerText"))
        assert tab.count("main img, main b, main i, main script") == 0
        assert tab.errors == []


@pytest.mark.heavy
@pytest.mark.alone
def test_stop_frees_engine_and_console(tab: Tab) -> None:
    stuck = Stuck()
    with served(scripted(stuck)) as server:
        asked(opened(tab, server), "Six?")
        tab.wait("document.querySelector('.typed')")
        tab.click("#stop")
        server.wait(lambda: server.engine.open_sessions == server.sandbox.open == 0)
        tab.wait("document.querySelector('.failure')")


@pytest.mark.heavy
@pytest.mark.alone
def test_a_key_is_asked_for_where_there_are_keys(tab: Tab) -> None:
    with served(keys=[KEY]) as server:
        opened(tab, server).wait("!document.querySelector('#locked').hidden")
        answered(tab, "Six?")
        assert "no API key" in tab.text(".failure")
        tab.type("#key", KEY)
        answered(tab, "Six?")
        assert tab.text(".answer") == "6"


def test_the_page_may_ask_its_own_server_alone_and_nothing_of_it_stands_in_the_page() -> None:
    with served() as server:
        for path in ("", "page.js", "page.css"):
            said = httpx.get(f"{server.address}/{path}")
            assert said.status_code == 200
            policy = said.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert "unsafe" not in policy
        html = httpx.get(f"{server.address}/").text
        assert "<script>" not in html
        assert "style=" not in html
        assert "innerHTML" not in httpx.get(f"{server.address}/page.js").text
