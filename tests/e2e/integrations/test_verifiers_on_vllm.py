"""Environments of verifiers trained on real vLLM: every id, mask, log probability and reward held to what was said."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from repl_rl.rollout.token_renderer import Renderer
from repl_rl.runs.store import read_trajectories
from repl_rl.trajectory.trajectory import LineEnd, Trajectory
from repl_rl.utils.package_data import find_asset
from tests.support.documents import ROOT
from tests.support.integrations.environment_packages import COUNTING, DIGITS, write_package

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(find_spec("verifiers") is None, reason="the extra verifiers is not installed"),
]
POLICY = find_asset("policies/quickstart")
SMALL = (
    *("--trainer.steps", "10", "--trainer.prompts-per-step", "2", "--trainer.group-size", "4", "--train-tasks", "16"),
    *("--eval-tasks", "4", "--rollout.max-lines", "3", "--rollout.max-line-tokens", "24"),
)


def trained(folder: Path, name: str, source: str) -> list[Trajectory]:
    project = write_package(folder, name, source)
    command = [sys.executable, "-m", "repl_rl.cli", "train", "--tasks", f"verifiers:{name}", "--sampler", "verifiers"]
    command += ["--sampler.chat", "false", "--out", str(folder), "--name", "run", *SMALL]
    paths = os.pathsep.join([str(project), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["engine"], summary["status"]) == ("vllm", "finished")
    return list(read_trajectories(folder / "run" / "trajectories"))


def digits(text: str) -> int:
    return sum(character.isdigit() for character in text)


def check_tokens(t: Trajectory, renderer: Renderer, between: bool) -> None:
    """Its ids and mask are those of what was said, encoded piece by piece; log probabilities stand where it sampled."""
    ids: list[int] = []
    mask: list[bool] = []
    for number, line in enumerate(t.lines):
        assert renderer.decode(line.token_ids[: -1 if line.end is LineEnd.EOS else None]) == line.text
        ids += line.token_ids
        mask += [True] * len(line.token_ids)
        if between and number + 1 < len(t.lines):
            said = renderer.encode(f"{digits(line.text.strip())} digits. Again:\n")
            ids += said
            mask += [False] * len(said)
    assert (list(t.completion_ids), list(t.loss_mask)) == (ids, mask)
    assert [bool(logprob) or own for own, logprob in zip(mask, t.logprobs_T(), strict=True)] == mask


def check_logprobs(found: list[Trajectory]) -> None:
    """Those of the starting policy are a plain forward pass's."""
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    for t in (t for t in found if t.policy_step == 0):
        ids = [*t.prompt.token_ids, *t.completion_ids]
        with torch.no_grad():
            nats = model(torch.tensor([ids])).logits[0].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        for own, ours, theirs in zip(
            t.loss_mask, t.logprobs_T(), nats[len(t.prompt.token_ids) - 1 :].tolist(), strict=True
        ):
            assert ours == (pytest.approx(theirs, abs=1e-3) if own else 0.0)


def test_one_turn_is_trained_with_the_reward_that_its_environment_gave(tmp_path: Path) -> None:
    renderer = Renderer.from_folder(POLICY)
    found = trained(tmp_path, "trained_lines", DIGITS)
    assert len(found) == 80
    for t in found:
        (line,) = t.lines
        said, most = line.text.strip(), int(t.prompt.text.rpartition("most ")[2].rstrip(".\n"))
        assert t.prompt.token_ids == tuple(renderer.encode(t.prompt.text))
        expected = {"digits": digits(said) / max(len(said), 1), "brief": 0.1 * (len(said) <= most)}
        assert {part.name: part.value for part in t.outcomes} == pytest.approx(expected)
        check_tokens(t, renderer, between=False)
    check_logprobs(found)


def test_several_turns_are_trained_and_what_the_env_says_between_them_is_masked(tmp_path: Path) -> None:
    renderer = Renderer.from_folder(POLICY)
    found = trained(tmp_path, "trained_talk", COUNTING)
    assert len(found) == 80
    assert any(len(t.lines) == 3 for t in found)
    for t in found:
        text = "".join(line.text.strip() for line in t.lines)
        assert t.outcome == pytest.approx(digits(text) / max(len(text), 1))
        check_tokens(t, renderer, between=True)
    check_logprobs(found)
