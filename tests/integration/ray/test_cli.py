"""How a fleet is chosen and looked at from the command line."""

import json
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.cli.train import TrainConfig
from repl_rl.errors import ConfigError
from repl_rl.ray.config import RayOptions, parse_workers
from repl_rl.ray.remote_rollouts import STATUS
from repl_rl.settings.argument_parser import parse
from repl_rl.trainer.config_checks import validate_run
from tests.support.processes import wait_for
from tests.support.ray.memory_cluster import MemoryCluster, fleet


def test_a_fleet_is_named_with_options() -> None:
    assert parse_workers("local") is None
    assert parse_workers("ray") == RayOptions("", 0, 1, False, 300.0)
    assert parse_workers("ray://head-1:6379") == RayOptions("head-1:6379", 0, 1, False, 300.0)
    assert parse_workers("ray(max_workers=2, simulate_machines=True, startup_timeout_s=5)") == RayOptions(
        "", 2, 1, True, 5.0
    )


def test_its_options_are_flags() -> None:
    words = ("--workers", "ray://head:6379", "--workers.max-workers", "3", "--workers.startup-timeout-s", "60")
    config = parse(TrainConfig, "train", words)
    assert parse_workers(config.workers) == RayOptions("head:6379", 3, 1, False, 60.0)


@pytest.mark.parametrize(("text", "told"), [
    ("dask", "workers is 'dask'; choose local, ray or ray://HOST:PORT"),
    ("local://x:1", "choose local, ray or ray://HOST:PORT"),
    ("ray://head", "give ray://HOST:PORT, the address that `ray start --head` prints"),
    ("ray(max_workers=-1)", "max_workers of workers ray"),
    ("ray(seats=1)", "its options are max_workers, gpus_per_worker, simulate_machines, startup_timeout_s"),
    ("ray(simulate_machines=True)", "say how many machines: --workers.max-workers 2"),
    ("local(nodes=2)", "it has no options"),
])  # fmt: skip
def test_what_is_no_fleet_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_workers(text)
    assert told in str(raised.value)


def test_gpus_that_an_engine_would_leave_idle_are_refused_before_anything_opens() -> None:
    config = TrainConfig(engine="vllm", workers="ray(gpus_per_worker=2)")
    with pytest.raises(
        ConfigError, match=r"workers\.gpus_per_worker is 2; the engine vllm samples on one GPU.*leave it at 1"
    ):
        validate_run(config, config.trainer, 512, config.workers)


def test_the_command_refuses_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs"
    assert main(["train", "--out", str(out), "--workers", "ray", "--workers.gpus-per-worker", "2"]) == 2
    assert "workers.gpus_per_worker is 2; the engine vllm samples on one GPU" in capsys.readouterr().err
    assert not out.exists()


def told_of(run: Path) -> dict[str, object]:
    """What a run's file says of its nodes now."""
    told: dict[str, object] = json.loads((run / STATUS).read_text())
    return told


def test_the_status_of_a_run_names_its_nodes_and_the_lost_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = MemoryCluster(2)
    with fleet(cluster) as source:
        source.write_notes(tmp_path)
        wait_for(lambda: len(source.pool.ready_workers) == 2, None)
        cluster.nodes[-1].kill()
        wait_for(lambda: source.pool.lost_workers and len(source.pool.ready_workers) == 2, None)
        source.collect(["t0"], 0)
        wait_for(lambda: told_of(tmp_path)["lost"] and json.dumps(told_of(tmp_path)).count('"ready"') == 2, None)
        assert main(["workers", "status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "memory: nodes of" in said
    assert said.count("ready") == 2
    assert "lost: node 1 at seat 1: it was killed by the test" in said


@pytest.mark.parametrize("words", [["workers", "status", "."], ["workers"], ["workers", "status"]])
def test_what_has_no_status_is_told_in_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
