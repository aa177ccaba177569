"""The report: everything that a run folder has, nothing that runs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.cli.rollout import format_transcript
from repl_rl.credit.credited_trajectory import CreditedTrajectory
from repl_rl.errors import StoreError
from repl_rl.runs.report import build_payload, render_page, write_report
from repl_rl.runs.report.report_data import build_detail, find_error_class, shorten_text
from repl_rl.runs.store import build_transitions, write_step
from repl_rl.trajectory.console_text import TEXT_CHARS
from repl_rl.trajectory.trajectory import Execution, Failure, FailureKind, LineStatus, Observed, Sampled, Stop
from tests.support.processes import wait_for
from tests.support.reports import data_of, pick, served, size, text, unpacked
from tests.support.run_folders import HOSTILE, TOKENS, TRACE, calling, credit, line, rollout, run_folder


def test_the_page_carries_all_that_the_folder_has(tmp_path: Path) -> None:
    data = data_of(write_report(run_folder(tmp_path / "run")).read_text())
    assert pick(data, "metrics", "step") == [1, 2, 3]
    assert size(data["rows"]) == 24
    assert pick(data, "summary", "solve_rate_last") == 0.9
    assert "builtin:quickstart" in str(data["config"])
    assert data["tokens"] == {str(i): text for i, text in enumerate(TOKENS[:7])}
    assert data["notes"] == []
    assert pick(data, "steps", 0) == {
        "step": 1,
        "lines": 16,
        "classes": {"ZeroDivisionError": 4},
        "outcome": 0.5,
        "earned": {"exception": -0.05},
    }


def test_a_rollout_is_drawn_with_its_rewards_advantages_and_ratios() -> None:
    t = rollout(0, "one", 1)
    drawn = build_detail(CreditedTrajectory(t, credit(t)))
    told = [pick(drawn, "lines", 0, name) for name in ("status", "reward", "advantage", "ratios", "seen")]
    assert told == ["exception", -0.1, -1.0, [1.0, 1.0], TRACE + ">>> "]
    assert [pick(drawn, "lines", 1, name) for name in ("seen", "prompt")] == [None, ">>> "]
    assert pick(build_detail(CreditedTrajectory(t)), "lines", 0, "advantage") is None


def test_nothing_that_a_program_printed_is_markup(tmp_path: Path) -> None:
    html = write_report(run_folder(tmp_path / "<script>alert(1)<")).read_text()
    assert "window.hacked" not in html
    assert "alert(1)" not in html.replace("&lt;script&gt;alert(1)&lt;", "")
    assert html.count("<script") == 2
    assert HOSTILE in str(pick(unpacked(str(pick(data_of(html), "chunks", 0))), 7, "lines", 0, "seen"))


def test_a_rollout_is_drawn_with_its_calls_and_what_was_sampled_for_them_has_the_advantage_of_the_line_that_asked() -> (
    None
):
    t = calling(rollout(0, "one", 0))
    drawn = build_detail(CreditedTrajectory(t, credit(t)))
    call = pick(drawn, "lines", 0, "calls", 0)
    told = [pick(call, name) for name in ("name", "answer", "error", "ms", "child")]
    assert told == ["rollout", f'"{HOSTILE}"', None, 250.0, t.children[0].id]
    assert pick(drawn, "lines", 0, "calls", 1, "error") == f"no such function {HOSTILE}"
    child, inner = pick(drawn, "children", 0), pick(drawn, "children", 0, "children", 0)
    assert [pick(each, "trained") for each in (child, inner)] == [True, False]
    assert [pick(each, "lines", 0, "advantage") for each in (child, inner)] == [1.0, None]
    assert (pick(child, "outcome"), pick(child, "prompt")) == (None, "What is child?\n>>> ")
    assert pick(build_detail(CreditedTrajectory(t)), "children", 0, "lines", 0, "advantage") is None


def test_a_child_that_failed_on_our_side_is_not_drawn_as_trained() -> None:
    t = calling(rollout(0, "one", 0))
    failure = Failure(FailureKind.SANDBOX_FAULT, "lost")
    failed = replace(t.children[0], failure=failure, stop=Stop.FAULT, outcome=None)
    lost = replace(t, children=(failed, *t.children[1:]))
    assert pick(build_detail(CreditedTrajectory(lost, credit(lost))), "children", 0, "trained") is False


def test_of_many_calls_the_first_are_drawn_and_the_others_counted() -> None:
    t = calling(rollout(0, "one", 0))
    first = t.segments[0]
    assert isinstance(first, Sampled)
    assert first.lines[0].execution is not None
    many = replace(first.lines[0].execution, calls=first.lines[0].execution.calls * 40)
    t = replace(t, segments=(Sampled((replace(first.lines[0], execution=many),)), *t.segments[1:]))
    drawn = pick(build_detail(CreditedTrajectory(t)), "lines", 0)
    assert (size(pick(drawn, "calls")), pick(drawn, "more_calls")) == (50, 30)
    assert "and 60 calls more" in format_transcript(t).plain


def test_hostile_calls_and_children_are_no_markup_and_steer_no_terminal(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=0)
    write_step(run / "trajectories", 1, [calling(rollout(0, "one", 0))])
    html = write_report(run).read_text()
    assert "window.hacked" not in html
    data = data_of(html)
    assert HOSTILE in str(pick(unpacked(str(pick(data, "chunks", 0))), 0, "children", 0, "children", 0, "id"))
    assert pick(data, "tokens", "4") == "1/0", "tokens that only a child sampled have their text"


def test_the_terminal_shows_calls_below_their_line_and_children_at_the_end() -> None:
    shown = format_transcript(calling(rollout(0, "one", 0))).plain
    assert not re.search(r"[\x00\x1b\u202e]", shown)
    first, second, *_ = shown.split("x = 1\n", 1)[1].split("\n")
    assert first.startswith('  [rollout({"args": ["</script>')
    assert first.endswith("(250.0 ms; 0-one-0/0, trained)]")
    assert "failed: no such function" in second
    assert "[0-one-0/0: sampled for a call]\nWhat is child?" in shown
    assert '[llm_query({"args": ["deep"], "kwargs": {}}) -> "inner says" (1.0 ms; ' in shown


def test_the_page_admits_its_own_scripts_alone_and_names_no_other_host(tmp_path: Path) -> None:
    html = render_page(build_payload(run_folder(tmp_path / "run")))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[\w+/=]+'; script-src 'sha256-[\w+/=]+'; img-src data:; "
        r"base-uri 'none'; form-action 'none'",
        policy[1],
    )
    assert re.findall(r"https?://[^\"' ]+", html) == ["http://www.w3.org/2000/svg"]


def test_long_texts_are_cut_in_the_middle_and_say_so() -> None:
    shown = shorten_text("a" * 10_000_000 + "b")
    assert len(shown) < TEXT_CHARS + 100
    assert "[... 9,996,001 characters not shown ...]" in shown
    assert shown.endswith("b")
    assert shorten_text("\ud800") == "\\ud800"


def test_error_classes_are_names_of_exceptions_or_statuses() -> None:
    (failed, answered) = build_transitions(rollout(0, "one", 1))
    assert (find_error_class(failed), find_error_class(answered)) == ("ZeroDivisionError", "")
    silent = replace(failed, observed=Observed(">>> ", (7,)))
    assert find_error_class(silent) == "exception"
    late = replace(failed, line=replace(line([4, 3]), execution=Execution(LineStatus.TIMEOUT, 5.0)))
    assert find_error_class(late) == "timeout"
    dotted = replace(failed, observed=Observed("json.decoder.JSONDecodeError: no\n>>> ", (7,)))
    assert find_error_class(dotted) == "JSONDecodeError"


def test_a_run_that_goes_on_or_was_torn_is_shown_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", finished=False)
    last = run / "trajectories" / "000003.jsonl.gz"
    last.write_bytes(last.read_bytes()[:-5])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "sol')
    data = build_payload(run)
    assert size(data["rows"]) == 23
    assert pick(data, "metrics", "step") == [1, 2, 3]
    assert "torn" in str(pick(data, "notes", 0))
    assert "no summary.json yet" in str(pick(data, "notes", 1))


def test_of_a_long_run_whole_steps_are_left_out_and_the_page_says_so(tmp_path: Path) -> None:
    data = build_payload(run_folder(tmp_path / "run", steps=4), limit=16)
    assert [pick(data, "rows", i, 3) for i in (0, 7, 8, 15)] == [0, 0, 2, 2]
    assert (size(data["rows"]), size(data["steps"])) == (16, 4)
    assert data["notes"] == ["16 of 32 trajectories are in this page: one step in 2"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StoreError, match="no run folder"):
        build_payload(tmp_path)
    assert main(["view", str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err


def test_view_writes_the_report_and_prints_its_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run")
    assert main(["view", str(run), "--no-open"]) == 0
    assert capsys.readouterr().out.strip() == (run / "report.html").as_uri()
    assert main(["view", str(run), "--port", "1"]) == 2


def status(address: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_server_listens_on_loopback_and_answers_only_who_knows_the_token(tmp_path: Path) -> None:
    with served(run_folder(tmp_path / "run")) as server:
        assert server.server_address[0] == "127.0.0.1"
        root = server.address.removesuffix(f"{server.token}/")
        assert 'data-follow="yes"' in text(server.address)
        assert [status(root + path) for path in ("", "version", "data", "x" * 32 + "/")] == [404] * 4
        assert status(server.address + "../../etc/passwd") == 404
        assert status(server.address, Host="evil.example:80") == 404


def test_the_server_tells_when_a_run_has_got_on(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", finished=False)
    with served(run) as server:
        before = text(server.address + "version")
        assert text(server.address + "version") == before
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "solve_rate": 1.0}\n')
        assert text(server.address + "version") != before
        assert pick(unpacked(text(server.address + "data")), "metrics", "step") == [1, 2, 3, 4]


def _removed(run: Path) -> None:
    run.rename(run.with_name("moved"))


def _damaged(run: Path) -> None:
    (run / "config.toml").write_bytes(b"\xff\xfe")
    (run / "summary.json").write_text("{}")


@pytest.mark.parametrize(("harm", "told"), [(_removed, "no run folder"), (_damaged, "cannot be read")])
def test_a_run_that_cannot_be_read_any_more_is_one_line_and_a_503_until_it_is_there_again(
    tmp_path: Path, harm: Callable[[Path], None], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path / "run", finished=False)
    with served(run) as server:
        harm(run)
        for name in ("", "version", "data"):
            with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                text(server.address + name)
            assert told in refused.value.read().decode()
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line
        shutil.rmtree(run, ignore_errors=True)
        run_folder(run, finished=False)
        assert 'data-follow="yes"' in text(server.address)
    assert capsys.readouterr().err == ""


BROWSER = """
import re, sys, urllib.request
from pathlib import Path

page, found = Path(sys.argv[1].removeprefix("file://")), Path(sys.argv[2])
address = re.search(r'url=(http.+?)"', page.read_text())[1]
answer = urllib.request.urlopen(address, timeout=60).read().decode()
mode, token = oct(page.parent.stat().st_mode & 0o777), address.rstrip("/").rpartition("/")[2]
shown = token in Path("/proc/self/cmdline").read_text()
found.with_suffix(".part").write_text(f"{mode} {'data-follow' in answer} {shown}")
found.with_suffix(".part").rename(found)
"""
"""A browser that is waited for, as w3m and lynx are: it notes what it got, and whether others can read the token."""


def test_a_browser_that_is_waited_for_is_answered_and_its_command_line_has_no_token(tmp_path: Path) -> None:
    run, script, found = run_folder(tmp_path / "run", finished=False), tmp_path / "browser.py", tmp_path / "found"
    script.write_text(BROWSER)
    command = [sys.executable, "-m", "repl_rl.cli", "view", str(run), "--serve"]
    environment = {**os.environ, "BROWSER": f"{sys.executable} {script} %s {found}"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as process:
        try:
            wait_for(found.exists, process)
            assert found.read_text() == "0o700 True False"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 130
        finally:
            process.kill()  # else a failure would wait for it


def test_view_follows_a_run_until_it_is_interrupted(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", finished=False)
    command = [sys.executable, "-m", "repl_rl.cli", "view", str(run), "--serve", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
        assert 'data-follow="yes"' in text(address)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
