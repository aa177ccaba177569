"""Every command of every page is accepted, and runs: in small, on files that are made here."""

import io
import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from repl_rl.cli import VERBS, main
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.runs.store import Store
from repl_rl.settings.argument_parser import parse
from repl_rl.sft.create_random_model import make_random_policy, make_tokenizer
from repl_rl.utils.package_data import find_asset
from scripts.site.settings import ACTIONS, import_settings_module
from tests.support.documents import PAGES, blocks, commands
from tests.support.gguf_files import write_gguf
from tests.unit.test_suites import HUMANEVAL

ELSEWHERE = {
    "bench rollout": "tests/integration/bench/test_rollout.py",
    "bench update": "tests/integration/trainer/test_bench.py",
    "bench credit": "tests/e2e/bench/test_credit_worker.py",
    "bench faults": "tests/e2e/bench/test_faults.py",
    "bench fleet": "tests/e2e/bench/test_fleet.py",
    "bench serve": "tests/e2e/bench/test_serve.py",
    "--serve": "tests/e2e/test_browser.py",
    "repl-rl chat --server": "tests/e2e/serve/test_docs.py, with a server to ask",
    "repl-rl serve": "tests/e2e/serve/test_docs.py, until it is stopped",
    "ray://": "tests/e2e/ray/test_ray.py",
    "--workers ray": "tests/e2e/ray/test_ray.py, where Ray has the machine to itself",
    "workers status": "tests/integration/ray/test_cli.py",
    "--sampler.user http": "tests/integration/samplers/test_simulated.py, with its own server",
    "--sandbox gateway": "tests/e2e/sandbox/test_gateway.py, on their own servers",
    "--sandbox nodes": "tests/e2e/sandbox/test_nodes_ray.py, where Ray has the machine to itself",
    "sandbox build": "scripts/docker, on a base image that can be had without a registry",
    "--from-doctests sympy": "tests/integration/test_doctests.py, where it takes a quarter of an hour",
}
"""What runs until it is interrupted, for long, or on what only a registry has, and where it runs all the same."""
SMALL = {
    "train": "--overwrite --engine transformers --trainer.steps 1 --trainer.prompts-per-step 2 --trainer.group-size 4 "
    "--trainer.dtype float32 --trainer.per-device-batch-size 4 --train-tasks 8 --eval-tasks 4 --rollout.max-lines 3 "
    "--rollout.max-line-tokens 24",
    "eval": "--engine transformers --count 4 --rollout.max-lines 3 --rollout.max-line-tokens 24",
    "rollout": "--engine transformers --count 1 --rollout.max-lines 3 --rollout.max-line-tokens 24",
    "transcripts --from-tasks": "--overwrite --count 40",
    "transcripts --from-doctests": "--overwrite",
    "export": "--overwrite",
    "kernel": "--prefix kernels",
    "sft --fresh": "--overwrite",
    "sft": "--overwrite --learning.steps 2 --learning.batch-size 4 --learning.warmup-steps 0",
}
"""Options that are put after those of a command, by its verb, or by that and its first option: the last one counts."""
OURS = {
    "--model FOLDER": "--model qwen",
    "my_samplers:patient": "my_samplers:patient --model qwen",
    "FILE.jsonl": "problems.jsonl",
    "--out FOLDER": "--out runs/looked-at",
    "--to-line 2": "--to-line 1",
    "runs/quickstart runs/mine": "runs/quickstart runs/twin",
    "--eval-steps 10": "--eval-steps 1",
    "runs/mine/checkpoints/checkpoint-60": "policy",
    "--train-tasks 512": "--engine transformers --train-tasks 4 --rollout.max-lines 3",
}
POLICIES = ("policy", "console", "fenced", "fenced-console", "runs/pretrained-coldstart")
DEMONSTRATIONS = (
    "transcripts",
    "warm",
    "cold",
    "fenced-warm",
    "fenced-cold",
    "runs/pretrained-warm",
    "runs/pretrained-cold",
)


@pytest.mark.parametrize("command", commands())
def test_every_command_is_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a command that was run in the checkout has left its output there
    (tmp_path / "prompts").symlink_to(find_asset("prompts"))
    _, verb, *words = shlex.split(command)
    assert verb in VERBS
    module = import_settings_module(verb)
    kinds = {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
    }
    action = f"{verb} {words[0]}" if words else ""
    if action in ACTIONS:
        name, words = ACTIONS[action], words[2:] if verb == "sampler" else words[1:]
    else:
        (name,) = [name for name in kinds if name.lower() in (f"{verb}config", f"{verb}commandconfig")]
    if "--config" not in words:
        assert parse(kinds[name], verb, words, presets=find_asset("presets") if verb in ("train", "bench") else None)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the pages name: policies, demonstrations, tasks, samplers, and a run."""
    desk = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as there:
        there.chdir(desk)
        for folder in POLICIES:
            shutil.copytree(find_asset("policies/quickstart"), folder)
        _write_tasks()
        _write_chat_model(Path("qwen"))
        shutil.copytree(find_asset("prompts"), "prompts")
        write_gguf(Path("smollm2.gguf"))
        Path("mine.toml").write_text(blocks("toml", "docs/howto.md")[0])
        (plan_first,) = [b for b in blocks("python", "docs/samplers/README.md") if "class PlanFirst" in b]
        Path("plan_first.py").write_text(plan_first)
        Path("my_module.py").write_text(blocks("python", "README.md")[0])
        patient = "from repl_rl import FeedbackSampler\n\npatient = FeedbackSampler(max_assistant_turns=7)\n"
        Path("my_samplers.py").write_text(patient)
        assert run("transcripts --from-tasks builtin:quickstart --mix cold --sandbox inprocess --out transcripts") == 0
        for folder in DEMONSTRATIONS[1:]:
            shutil.copytree("transcripts", folder)
        assert run("train") == 0
        shutil.copytree("runs/quickstart", "runs/twin")
        assert run("eval --samples 8 --k 4 --out runs/before") == 0
        assert run("replay runs/quickstart --export one.ipynb") == 0
        assert run("export runs/quickstart --out runs/table.parquet") == 0
    return desk


def _write_tasks() -> None:
    """Data sets in the fields and the places that the pages name, those of the hub among them."""
    problems = [json.loads(line) for line in blocks("json", "docs/howto.md")[0].splitlines()]
    rows = [p | {"id": f"{p['id']}{n}", "question": f"({n}) {p['question']}"} for n in range(20) for p in problems]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ages = {"id": "ages", "question": "Who is the oldest?", "answer": "alan", "workspace": {"values": {"limit": 40}}}
    Path("ages.jsonl").write_text(json.dumps(ages) + "\n")
    sums = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    plain = [{"question": s["question"], "answer": s["answer"][5:]} for s in sums]
    other = [s | {"problem": s["question"], "result": s["answer"]} for s in plain]
    Dataset.from_list([s | {"result": {"value": s["result"]}} for s in other]).to_parquet("problems.parquet")
    _write_dataset(Path("my_dataset"), train=other, test=other)
    _write_dataset(Path("openai/gsm8k"), train=sums, test=sums)
    _write_dataset(Path("HuggingFaceH4/MATH-500"), test=other)
    shutil.copy("openai/gsm8k/test.jsonl", "test.jsonl")
    Path("HumanEval.jsonl").write_text(json.dumps(HUMANEVAL) + "\n")
    configs = "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: train.jsonl}\n---\n"
    Path("openai/gsm8k/README.md").write_text(configs)


def _write_dataset(folder: Path, **parts: Sequence[dict[str, str]]) -> None:
    folder.mkdir(parents=True)
    for part, rows in parts.items():
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_chat_model(folder: Path) -> None:
    """A tiny model that is not the bundled policy's kind, with a chat template."""
    make_tokenizer(folder)
    renderer = Renderer.from_folder(folder)
    ids = len(renderer.tokenizer), renderer.pad_id, renderer.end_id
    make_random_policy(*ids, hidden=64, layers=2, context_tokens=4096).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}assistant: "
        "{% if enable_thinking is defined and not enable_thinking %}(at once) {% endif %}"
    )
    tokenizer.save_pretrained(folder)


def run(arguments: str) -> int:
    """The exit code of a command, in small."""
    words = shlex.split(arguments)
    small = shlex.split(SMALL.get(" ".join(words[:2]), SMALL.get(words[0], "")))
    return main([*words, *(word for word in small if not (word == "--overwrite" and "--resume" in words))])


def filled_in(command: str) -> str:
    """With names of the desk for placeholders, and a rollout of its run that has lines enough for the one meant."""
    entry = next(entry for entry in Store(Path("runs/quickstart")) if len(entry.trajectory.lines) > 1)
    if command.startswith("repl-rl train") and "--name" not in command:
        # The run of the desk is for the others; one that goes on must have the settings that it began with.
        command += " --name afresh" if "--resume" in command else " --name scratch"
    names = OURS | {"0-chain-5a4c-3": entry.trajectory.id, "--to-line 1": f"--id {entry.trajectory.id} --to-line 1"}
    for theirs, ours in names.items():
        command = command.replace(theirs, ours)
    return command.removeprefix("repl-rl ")


def _docker_runs() -> bool:
    return subprocess.run(["sh", "-c", "docker info"], capture_output=True, check=False).returncode == 0


def expected(command: str) -> int:
    """0, but for what this machine has no daemon, no runtime or no GPU for: that is refused."""
    if "--gpu" in command:
        return 0 if torch.cuda.is_available() else 2
    if "docker" not in command:
        return 0
    return 0 if _docker_runs() and ("runsc" not in command or shutil.which("runsc")) else 2


@pytest.mark.heavy
@pytest.mark.parametrize("command", [c for c in commands() if not any(words in c for words in ELSEWHERE)])
def test_every_command_runs(
    command: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setenv("BROWSER", "true")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(filled_in(command)) == expected(command), capsys.readouterr().err


def test_what_runs_elsewhere_is_still_on_a_page() -> None:
    assert all(any(words in command for command in commands()) for words in ELSEWHERE)
    assert len(PAGES) > 20
