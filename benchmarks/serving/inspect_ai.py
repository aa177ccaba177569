r"""The harness inspect_ai against `repl-rl serve`, beside `repl-rl eval` on the same problems, for docs/serve.md.

    python -m benchmarks.serving.inspect_ai bundled 50                     held-out tasks of the bundled families
    python -m benchmarks.serving.inspect_ai GSM8K 50 test.jsonl -- --model FOLDER --prompt few_shot \
        --rollout.max-lines 8 --rollout.max-line-tokens 48 --rollout.max-observation-tokens 128

The file has `question` and `answer`, as GSM8K has them. What stands after `--` goes to `serve` and `eval` alike. The
task of the harness is the one of the page. Each call replaces the row of its name.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.generated_blocks import ROOT, Block
from repl_rl.evaluation import wilson
from repl_rl.rollout_config import QUICKSTART
from repl_rl.tasks import load_tasks

PAGE = Block(ROOT / "docs" / "serve.md", "serving/inspect_ai")
FIGURES = ROOT / "benchmarks" / "results" / "serve_inspect_ai.json"
REPL_RL = (sys.executable, "-m", "repl_rl.cli")


@dataclass(frozen=True, slots=True)
class Row:
    """What both said of the same problems, greedily."""

    name: str
    policy: str
    package: str
    """The harness, with its version."""
    problems: int
    harness: int
    """How many the harness says are solved."""
    eval: int
    """How many `repl-rl eval` says are."""
    agreed: int
    """Problems of which both say the same."""

    @property
    def equal(self) -> bool:
        """Whether the harness's score lies within the interval of the other."""
        found = wilson(self.eval, self.problems)
        return found.low <= self.harness / self.problems <= found.high


def block(rows: Sequence[Row]) -> str:
    """The generated block."""
    text = "| problems, all greedy | policy | | score of the harness | `repl-rl eval` | they agree on |\n"
    text += "|---|---|---|---|---|---|\n"
    for row in rows:
        scores = " | ".join(str(wilson(solved, row.problems)) for solved in (row.harness, row.eval))
        text += f"| {row.name}, {row.package} | {row.policy} | {row.problems} | {scores} | {row.agreed} |\n"
    return text


def rows() -> list[Row]:
    """What was measured last."""
    return [Row(**each) for each in json.loads(FIGURES.read_text())] if FIGURES.exists() else []


def write_problems(source: str, count: int, path: Path) -> None:
    """The first `count` problems of a file, or held-out tasks of the bundled families, as both sides read them."""
    if source:
        rows = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines() if line.strip()]
        chosen = [{"question": row["question"], "answer": row["answer"].rpartition("####")[2].strip()} for row in rows]
        tasks = [row | {"judge": "numeric"} for row in chosen[:count]]
    else:
        drawn = load_tasks(QUICKSTART, split="held_out", count=count, seed=1)
        tasks = [{"question": task.question, "answer": task.answer, "judge": task.judge} for task in drawn]
    text = "".join(json.dumps({"id": str(number), **row}) + "\n" for number, row in enumerate(tasks))
    path.write_text(text, encoding="utf-8")


@contextmanager
def served(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A server of its own: its address, and what it calls its model."""
    command = [*REPL_RL, "serve", "--port", "0", "--max-waiting", "256", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said = re.match(r"(\S+) serves (.+?)    \(", server.stdout.readline())
        if said is None:
            raise RuntimeError(f"the server did not start: {' '.join(command)}")
        yield said[1], said[2]
    finally:
        server.terminate()
        server.wait()


def of_harness(problems: Path, address: str, model: str, folder: Path) -> dict[str, bool]:
    """Whether the harness says of each problem, by its id, that it is solved."""
    (source,) = re.findall(r"```inspect\n(.*?)```", PAGE.document.read_text(), re.DOTALL)
    (folder / "served.py").write_text(source)
    command = [sys.executable, "-m", "inspect_ai", "eval", "served.py", "--model", f"openai-api/repl/{model}"]
    command += ["--model-base-url", address, "-T", f"problems={problems}", "--display", "none"]
    command += ["--log-dir", "logs", "--log-format", "json"]
    subprocess.run(command, cwd=folder, env={**os.environ, "REPL_API_KEY": "none"}, check=True)
    (log,) = (folder / "logs").glob("*.json")
    said = json.loads(log.read_text())
    if said["status"] != "success":
        raise RuntimeError(f"the harness failed: {said.get('error')}")
    samples = said["samples"]
    return {str(each["id"]): all(score["value"] == "C" for score in each["scores"].values()) for each in samples}


def of_eval(problems: Path, folder: Path, options: Sequence[str]) -> dict[str, bool]:
    """Whether `repl-rl eval` says so, of its greedy rollouts."""
    figures = folder / "eval.json"
    command = [*REPL_RL, "eval", "--tasks", str(problems), "--split", "all", "--json", str(figures), *options]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return {result["task_id"]: bool(result["greedy"]) for result in json.loads(figures.read_text())["results"]}


def measure(name: str, count: int, source: str, options: Sequence[str]) -> Row:
    """Both, one after the other. `source`: a file; "": tasks of the bundled families."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        problems = folder / "problems.jsonl"
        write_problems(source, count, problems)
        with served(options) as (address, model):
            harness = of_harness(problems, address, model, folder)
        ours = of_eval(problems, folder, options)
    assert harness.keys() == ours.keys()
    agreed = sum(harness[id] == ours[id] for id in ours)
    package = f"inspect_ai {version('inspect_ai')}"
    return Row(name, model, package, len(ours), sum(harness.values()), sum(ours.values()), agreed)


def main(argv: Sequence[str]) -> int:
    """Measure one row and publish it. The exit code is 1 where the scores are not equal."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    (name, count, *files), options = argv[:at], argv[at + 1 :]
    row = measure(name, int(count), files[0] if files else "", options)
    print(row)
    published = [row if each.name == name else each for each in rows()]
    published += [] if row in published else [row]
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps([asdict(each) for each in published], indent=1) + "\n")
    PAGE.write(block(published))
    return 0 if row.equal else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
