"""What docs/scaling.md tells to do on a cluster: its commands play, its script and its manifest start what it says."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from repl_rl.cli.train import TrainConfig
from repl_rl.ray.config import RayOptions, parse_workers
from repl_rl.ray.connect_cluster import validate_free_gpus
from repl_rl.ray.remote_rollouts import RolloutWorkers
from repl_rl.settings.argument_parser import parse
from repl_rl.trainer.local_or_ray_rollouts import build_worker_plan
from tests.support.documents import PAGES, blocks, commands
from tests.support.ray.memory_cluster import QUICK, MemoryCluster

PAGE = PAGES["docs/scaling.md"]
(SCRIPT,) = blocks("bash", "docs/scaling.md")
(MANIFEST,) = [yaml.safe_load(source) for source in blocks("yaml", "docs/scaling.md")]
SMALL = shlex.split(
    "--engine transformers --sandbox unsafe --train-tasks 4 --rollout.max-lines 1 --rollout.max-line-tokens 8"
)
TRAININGS = [command for command in commands() if command.startswith("repl-rl train") and "--workers ray" in command]


def chosen(words: Sequence[str]) -> tuple[TrainConfig, RayOptions]:
    """What the words behind `repl-rl train` say, in small."""
    config = parse(TrainConfig, "train", [*words, *SMALL])
    fleet = parse_workers(config.workers)
    assert fleet is not None
    return config, fleet


def test_the_page_has_trainings_on_a_fleet() -> None:
    assert len(TRAININGS) >= 3


@pytest.mark.parametrize("command", TRAININGS)
def test_a_training_of_the_page_plays_on_a_cluster(command: str) -> None:
    config, fleet = chosen(shlex.split(command)[2:])
    tasks = {task.id: task for task in config.draw_tasks("train", 1)}
    with RolloutWorkers(nullcontext(MemoryCluster(1)), build_worker_plan(config, fleet, QUICK), tasks) as source:
        assert [played.task_id for played in source.collect(list(tasks) * 2, 0)] == list(tasks) * 2


_PROGRAM = r"""#!/bin/bash
(IFS='|'; echo "${0##*/}|${CUDA_VISIBLE_DEVICES-all}|$*" >> "$TOLD")
"""
"""Writes down how it was called."""
_DOES = {
    "scontrol": "printf 'first\\nsecond\\n'",
    "srun": 'while [[ $1 == -* ]]; do [[ $1 == -w ]] && shift; shift; done; exec "$@"',
    "ray": "",
    "repl-rl": "",
}


@dataclass(frozen=True, slots=True)
class Called:
    """How the script called a program."""

    name: str
    gpus: str
    words: Sequence[str]


@pytest.fixture
def called(tmp_path: Path) -> Sequence[Called]:
    """What the script for SLURM does on two hosts, in whatever order."""
    for name, does in _DOES.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"{_PROGRAM}{does}\n")
        program.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    slurm = {"SLURM_JOB_NODELIST": "h[1-2]", "SLURM_NNODES": "2"}
    env = {**slurm, "PATH": path, "HOME": str(tmp_path), "TOLD": str(tmp_path / "told")}
    subprocess.run(["bash"], input=f"{SCRIPT}\nwait", env=env, text=True, check=True, timeout=60)
    told = [line.split("|") for line in (tmp_path / "told").read_text().splitlines()]
    return [Called(name, gpus, words) for name, gpus, *words in told]


def test_the_script_for_slurm_starts_a_head_others_that_join_it_and_the_run_beside_the_head(
    called: Sequence[Called],
) -> None:
    rays = {call.words[1]: call for call in called if call.name == "ray"}
    assert rays.keys() == {"--head", "--address=first:6379"}
    assert rays["--head"].words == ["start", "--head", "--port=6379", "--block"]
    (run,) = [call.words for call in called if call.name == "repl-rl"]
    assert run[0] == "train"
    assert chosen(run[1:])[1].address == "first:6379"
    places = [" ".join(call.words) for call in called if call.name == "srun"]
    assert len(places) == 3
    for words in places:
        joins = "--address=first:6379" in words
        assert ("--nodes=1 --ntasks=1 --exclude=first" in words) == joins
        assert ("--nodes=1 --ntasks=1 -w first" in words) != joins
        assert ("--overlap" in words) == ("repl-rl" in words)


def test_the_script_for_slurm_leaves_the_trainer_the_gpu_that_it_is_refused_without(called: Sequence[Called]) -> None:
    (there,) = (int(word.partition("=")[2]) for word in SCRIPT.split() if word.startswith("--gpus-per-node"))
    gpus = {call.words[1]: call.gpus for call in called if call.name == "ray"}
    assert gpus == {"--head": ",".join(map(str, range(1, there))), "--address=first:6379": "all"}
    validate_free_gpus("fleet", len(gpus["--head"].split(",")), there, 1)


def test_the_manifest_has_one_token_for_all_no_node_beside_the_trainer_and_a_volume_for_runs() -> None:
    spec = MANIFEST["spec"]
    head, (workers,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    pods = [group["template"]["spec"] for group in (head, workers)]
    (first,), (other,) = (pod["containers"] for pod in pods)
    assert first["env"] == other["env"]
    values = {one["name"]: one for one in first["env"]}
    assert values["RAY_AUTH_MODE"]["value"] == "token"
    secret = values["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in " ".join(PAGE.split())
    # Machines without CPUs are no seats (`ray/actor_calls.py`), so the head's one GPU is the trainer's.
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert first["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert workers["replicas"] * other["resources"]["limits"]["nvidia.com/gpu"] >= 1
    named = {volume["name"] for volume in pods[0]["volumes"]}
    assert {mount["name"] for mount in first["volumeMounts"]} == named == {"runs"}
    assert first["volumeMounts"][0]["mountPath"].endswith("/runs")
