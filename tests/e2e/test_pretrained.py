"""`make pretrained` in small: a real instruct model, on real vLLM, from its package to its report."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from repl_rl.cli.train import TrainConfig
from repl_rl.evaluation import read_study
from repl_rl.runs.store import read_trajectories
from repl_rl.settings.argument_parser import parse
from tests.support.documents import ROOT


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_pretrained_model_goes_from_its_package_to_its_report(tmp_path: Path) -> None:
    done = subprocess.run(
        ["scripts/pretrained", "small"],
        cwd=ROOT,
        env={**os.environ, "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = tmp_path / "pretrained"
    assert len(read_study(tmp_path / "pretrained-before" / "eval.json").results) == 4
    assert [len(list(read_trajectories(tmp_path / f"pretrained-{mix}"))) for mix in ("warm", "cold")] == [8, 8]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert max(row["logprob_gap_max"] for row in rows) <= 1e-3
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["engine"], summary["engine_fallback"]) == ("finished", "vllm", None)
    told = parse(TrainConfig, "train", ["--config", str(run / "config.toml")])
    assert (told.newline_tokens, told.trainer.dtype) == ("forbid", "float32")
    assert (run / "report.html").is_file()
    assert (run / "checkpoints" / "final" / "model.safetensors").is_file()
