"""Ask a trained policy through `repl-rl serve` with OpenAI's own client, and publish what it answers.

    python -m benchmarks.serving.openai_client runs/quickstart

The program is the one that stands on the page; what it prints is put under it.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.generated_blocks import ROOT, Block, Report

PAGE = Block(ROOT / "docs" / "serve.md", "serving/openai_client")
FIGURES = ROOT / "benchmarks" / "results" / "serve_openai_client.json"
_ADDRESS = "http://127.0.0.1:8000/v1"
_OF_THE_RUN = ("steps", "held_out_tasks", "greedy_first", "greedy_last")


def program() -> str:
    """The one of the page's programs that streams from a trained policy."""
    sources = re.findall(r"```python\n(.*?)```", PAGE.document.read_text(), re.DOTALL)
    (found,) = [str(source) for source in sources if 'model="quickstart"' in source]
    return found


@contextlib.contextmanager
def serving(run: Path) -> Iterator[str]:
    """The address of a server of what `run` trained."""
    command = [sys.executable, "-m", "repl_rl.cli", "serve", "--run", str(run), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().partition(" ")[0]
        if not address:
            raise SystemExit(f"{' '.join(command[3:])} does not start")
        yield address
    finally:
        process.terminate()
        process.communicate()


def asked(run: Path) -> Report:
    """What the page's program prints, and of which run."""
    shown = io.StringIO()
    with serving(run) as address, contextlib.redirect_stdout(shown):
        exec(program().replace(_ADDRESS, address), {"__name__": "page"})
    summary = json.loads((run / "summary.json").read_text())
    return {"run": {name: summary[name] for name in _OF_THE_RUN}, "shown": shown.getvalue()}


def block(found: Report) -> str:
    """The generated block of docs/serve.md."""
    run = found["run"]
    assert isinstance(run, Mapping)
    text = f"A policy that solves {run['greedy_last']:.1%} of {run['held_out_tasks']} held-out tasks, and solved "
    text += f"{run['greedy_first']:.1%} before its {run['steps']} steps, answers:\n\n"
    return f"{text}```text\n{found['shown']}```\n"


def main(run: Path) -> None:
    """Ask, and publish."""
    FIGURES.write_text(json.dumps(asked(run), indent=2) + "\n")
    PAGE.write(block(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
