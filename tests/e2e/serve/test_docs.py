"""docs/serve.md: its servers start, its Python and its curl ask them, and what they print is what the page says."""

import io
import shlex
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from repl_rl.cli import main
from repl_rl.serve.http_errors import PATIENCE_S
from repl_rl.serve.openai_requests import NEUTRAL, ReplOptions
from repl_rl.utils.package_data import find_asset
from tests.support.documents import PAGES, blocks, commands
from tests.support.serve.raw_requests import program

PAGE = PAGES["docs/serve.md"]
SERVERS = [command for command in commands() if command.startswith("repl-rl serve")]
KEY = "a-key-of-somebody-whom-we-know"


def _docker_runs() -> bool:
    return subprocess.run(["sh", "-c", "docker info"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    shutil.copytree(find_asset("policies/quickstart"), tmp_path / "FOLDER")
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "config.toml").write_text('prompt = "base"\n')
    (tmp_path / "keys.txt").write_text(f"{KEY}\n")
    return tmp_path


@pytest.mark.heavy
@pytest.mark.parametrize("command", SERVERS)
def test_every_server_of_every_page_answers(command: str, desk: Path) -> None:
    if "docker" in command and not _docker_runs():
        pytest.skip("no Docker daemon answers here")
    words = shlex.split(command)[2:]
    keyed = "--keys" in words
    with program(desk, *words) as (_, address):
        address = address.replace("0.0.0.0", "127.0.0.1")
        headers = {"Authorization": f"Bearer {KEY}"} if keyed else {}
        (model,) = httpx.get(f"{address}/models", headers=headers).json()["data"]
        usual = "quickstart" if "--run" in words else "builtin:quickstart"
        assert model["id"] == (words[words.index("--name") + 1] if "--name" in words else usual)
        assert (httpx.get(f"{address}/models").status_code == 401) == keyed


@pytest.mark.heavy
def test_the_pages_python_and_its_curl_ask_a_server(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = blocks("python", "docs/serve.md")
    (curl,) = [block for block in blocks("sh", "docs/serve.md") if block.startswith("curl")]
    with program(desk) as (_, address):
        exec(source.replace("http://127.0.0.1:8000/v1", address), {"__name__": "page"})
        shown = capsys.readouterr().out
        assert "answered submit_final_answer(" in shown
        assert shown.rstrip().endswith(")"), "the second answer is a transcript"
        done = subprocess.run(
            ["sh", "-c", curl.replace("http://127.0.0.1:8000/v1", address)], capture_output=True, text=True, check=True
        )
        assert '"object": "text_completion"' in done.stdout.replace('":"', '": "')


@pytest.mark.heavy
def test_the_pages_chat_asks_a_server(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (chat,) = [command for command in commands() if command.startswith("repl-rl chat --server")]
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 6 * 7?\n"))
    with program(desk) as (_, address):
        assert main(shlex.split(chat.replace("http://127.0.0.1:8000/v1", address))[1:]) == 0
    assert "submit_final_answer(" in capsys.readouterr().out


def test_the_patience_that_the_page_tells_is_the_servers() -> None:
    assert {10: "ten seconds"}[PATIENCE_S] in PAGE


def test_the_page_names_every_field_of_ours_and_what_it_refuses() -> None:
    table = PAGE.partition("| `repl` | |")[2].partition("\n\n")[0]
    assert [row.split("`")[1] for row in table.splitlines() if row.startswith("| `")] == list(ReplOptions.model_fields)
    refused = PAGE.partition("Unsupported fields are refused")[2].partition("\n\n")[0]
    assert {"n", "tools", "logprobs", "top_p", "response_format"} <= NEUTRAL.keys()
    assert all(f"`{name}`" in refused for name in ("n", "tools", "logprobs", "top_p", "response_format"))
