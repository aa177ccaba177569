"""The faults that `repl-rl bench faults` lets strike a small training."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.faults.fault_injection import FaultsConfig, is_log, log_file, run_faults
from benchmarks.faults.strikes import STRIKES, tear
from repl_rl.cli import main
from repl_rl.errors import ConfigError
from repl_rl.runs.store import read_trajectories

STEPS = 12
"""Of a run a strike: one may take two seconds to come, in which a quick machine ends half a dozen steps."""
PAGE = Path(__file__).parents[3] / "docs" / "specification.md"


def test_every_fault_stands_in_the_specification() -> None:
    section = PAGE.read_text().split("### Faults")[1].split("\n## ")[0]
    assert [name for name in STRIKES if f"| `{name}` |" not in section] == []


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="faults is 'flood'; choose among sigkill, sigterm"):
        FaultsConfig(faults=("flood",))
    assert main(["bench", "faults", "--faults", "flood"]) == 2


def test_what_cannot_be_tried_here_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told: list[str] = []
    found = run_faults(FaultsConfig(tmp_path, ("container",), seed=3), told.append, read_trajectories)
    assert told == ["seed 3", "container: not tried: there is no program docker"]
    assert found["seed"] == 3


def test_a_torn_state_is_the_newest_and_another_than_was_written(tmp_path: Path) -> None:
    for seed in range(20):
        states = [tmp_path / str(seed) / name for name in ("000001", "000002")]
        for state in states:
            state.mkdir(parents=True)
            (state / "tensors.pt").write_bytes(b"weights")
        assert tear(tmp_path / str(seed), random.Random(seed)) == ""
        assert [(state / "tensors.pt").read_bytes() == b"weights" for state in states] == [True, False]


@pytest.mark.heavy
@pytest.mark.parametrize("fault", ["fork-server", "torn-state"])
def test_a_small_training_survives(fault: str, tmp_path: Path) -> None:
    told: list[str] = []
    run_faults(FaultsConfig(tmp_path, (fault,), steps=STEPS), told.append, read_trajectories)
    assert told[1].startswith(f"{fault}: survived: "), told
    assert is_log(log_file(tmp_path, fault))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("times", [3, 10])
def test_a_training_whose_vllm_is_killed_several_times_comes_to_its_end(times: int, tmp_path: Path) -> None:
    told: list[str] = []
    found = run_faults(
        FaultsConfig(tmp_path, ("engine",), steps=STEPS * times, strikes=times), told.append, read_trajectories
    )
    assert told[1].startswith("engine: survived: "), told
    assert f'"engine_deaths": {times}' in json.dumps(found)
