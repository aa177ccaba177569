"""`bench serve` in small, what it publishes, and what the published figures are held to."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.serving import openai_client as served
from benchmarks.serving import page as serve
from benchmarks.serving.load_clients import quantiles
from repl_rl.cli import main
from tests.e2e.serve.test_trained import solved

NOTHING = "Nothing is published yet.\n"


def hold(file: Path) -> None:
    """Figures to what every server promises, whatever its machine."""
    found = json.loads(file.read_text())
    assert found["errors"] == found["crowd"]["others"] == {}
    assert found["crowd"]["played"] + found["crowd"]["refused"] == found["crowd"]["asked"]
    assert found["crowd"]["refused"] > 0
    assert 1 <= found["crowd"]["retry_after_s"]["p50"] <= found["crowd"]["retry_after_s"]["max"] <= 60
    assert found["after"]["processes"] == found["before"]["processes"]
    assert found["after"]["descriptors"] == found["before"]["descriptors"]
    assert (found["exit_code"], found["left"]) == (143, 0)


def test_quantiles_are_values_that_were_measured() -> None:
    assert quantiles([]) == {"count": 0}
    assert quantiles([3.0]) == {"count": 1, "p50": 3.0, "p99": 3.0, "max": 3.0}
    assert quantiles([float(n) for n in range(200, 0, -1)]) == {"count": 200, "p50": 100.0, "p99": 198.0, "max": 200.0}


@pytest.mark.parametrize("flags", ["--conversations 0", "--concurrency 0", "--seconds 0"])
def test_a_load_of_nothing_is_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *flags.split()]) == 2
    assert "give " in capsys.readouterr().err


@pytest.mark.heavy
def test_a_server_that_does_not_start_is_told_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--engine", "none"]) == 2
    said = capsys.readouterr().err
    assert "it does not start: repl-rl: " in said
    assert "engine is 'none'; choose one of " in said


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_small_load_is_borne_and_published(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    small = ("--conversations", "6", "--concurrency", "2", "--seconds", "8", "--engine", "transformers")
    assert main(["bench", "serve", *small, "--json", str(file)]) == 0
    hold(file)
    found = json.loads(file.read_text())
    assert found["turns"] > 6
    assert found["lines"] >= found["turns"] - found["full"]
    assert found["left_under_load_s"]["count"] >= 1
    assert found["left_alone_console_s"]["count"] == 32
    text = serve.block(found)
    assert text.startswith("6 conversations at once for ")
    assert "ended it with exit code 143; 0 processes were left." in text


def test_the_page_holds_what_was_measured_or_says_that_nothing_was() -> None:
    for maker in (serve, served):
        found = maker.FIGURES.exists()
        assert maker.PAGE.text == (maker.block(json.loads(maker.FIGURES.read_text())) if found else NOTHING)
    around = serve.PAGE.around.replace(served.PAGE.text, "")
    assert not re.search(r"\d+(\.\d+)?(x|%| ?s| ?MiB)\b", around)


@pytest.mark.skipif(not serve.FIGURES.exists(), reason="nothing is published yet")
def test_the_published_server_keeps_its_promises() -> None:
    hold(serve.FIGURES)
    found = json.loads(serve.FIGURES.read_text())
    assert found["conversations"] == 64
    assert found["cpus"] <= 2
    assert found["elapsed_s"] >= 300
    for left in ("left_under_load_s", "left_alone_s", "left_alone_console_s"):
        assert found[left]["max"] <= 1.0


@pytest.mark.skipif(not served.FIGURES.exists(), reason="nothing is published yet")
def test_the_published_answers_are_right_and_come_piece_by_piece() -> None:
    assert solved(json.loads(served.FIGURES.read_text())["shown"]) == [True] * 3
