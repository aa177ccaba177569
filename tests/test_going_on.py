"""`sft` and `transcripts` go on after the same command is given again, and end as if they had never been stopped."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from repl_rl.cli import main
from repl_rl.cli.begun import Portions, begun, kept
from repl_rl.coldstart import selection
from repl_rl.coldstart.demonstrations import MIXES
from repl_rl.coldstart.finetune import finetune, labelled
from repl_rl.coldstart.kept import Keeping
from repl_rl.coldstart.played import Course, demonstrations
from repl_rl.coldstart.selection import FinetuneConfig
from repl_rl.coldstart.verified import Tally
from repl_rl.errors import ConfigError
from repl_rl.machine.durable import DIGESTS
from repl_rl.record.trajectory import Trajectory
from repl_rl.runs.store import read
from repl_rl.sandbox import Births, Limits
from repl_rl.sandbox.inprocess import InProcess
from tests.processes import wait_for
from tests.test_finetune import POLICY, RECOVERED, RENDERER, RIGHT

COURSE = Course(("count", "dates/2"), MIXES["cold"], 23, 5)


class Stopped(BaseException):
    """Stands for whatever ends a program."""


def told(trajectories: Iterable[Trajectory]) -> list[tuple[object, ...]]:
    """What is learned of them, and where they come from."""
    return [(t.id, t.task_id, t.prompt, t.completion_ids, t.loss_mask, t.stop) for t in trajectories]


def demonstrate(folder: Path, stop_after: int = 1000) -> tuple[list[tuple[object, ...]], Tally, int]:
    """Demonstrations in portions of 4, and how many were executed for it."""
    executed = 0

    async def work() -> tuple[list[Trajectory], Tally]:
        async with InProcess().open(Births(Limits())) as sandbox:

            async def make(tally: Tally, done: Sequence[Trajectory]) -> AsyncIterator[Trajectory]:
                nonlocal executed
                async for trajectory in demonstrations(COURSE, sandbox, RENDERER, tally, concurrency=3):
                    executed += 1
                    if executed > stop_after:
                        raise Stopped
                    yield trajectory

            return await kept(make, Portions(folder), 1000, portion=4)

    made, tally = asyncio.run(work())
    return told(made), tally, executed


def test_demonstrations_go_on_where_they_were_stopped_and_are_those_of_one_that_never_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, tally, everything = demonstrate(tmp_path / "whole")
    with pytest.raises(Stopped):
        demonstrate(tmp_path / "stopped", stop_after=9)
    again, counted, executed = demonstrate(tmp_path / "stopped")
    assert (again, counted) == (whole, tally)
    assert executed < everything - 4
    assert demonstrate(tmp_path / "stopped")[2] == 0
    (tmp_path / "stopped" / "000001" / DIGESTS).unlink()
    assert demonstrate(tmp_path / "stopped")[0] == whole
    assert "000001 is damaged" in caplog.text


def test_what_became_of_all_is_counted_as_it_was(tmp_path: Path) -> None:
    tally = Tally(3)
    tally.cut["printed too much"] += 2
    tally.dropped["is there already"] += 4
    assert Tally.of_record(json.loads(json.dumps(tally.as_record()))) == tally
    assert tally.done == 9


LEARNING = FinetuneConfig(steps=8, batch_size=2, micro_batch=1, warmup_steps=2)
EXAMPLES = [labelled(t) for t in (RIGHT, RECOVERED, RIGHT, RECOVERED, RECOVERED)]


def learn(out: Path, keeping: Keeping | None = None, stop_at: int = 0) -> list[float]:
    """The losses of the steps that were made."""
    losses: list[float] = []

    def on_step(step: int, loss: float) -> None:
        if step == stop_at:
            raise Stopped
        losses.append(loss)

    finetune(POLICY, RENDERER, EXAMPLES, out, LEARNING, 3, on_step, keeping=keeping)
    return losses


def test_a_fine_tuning_that_is_stopped_twice_ends_with_the_weights_of_one_that_never_was(tmp_path: Path) -> None:
    whole = learn(tmp_path / "whole")
    keeping = Keeping(tmp_path / "states", seconds=0, share=1.0)
    for stop_at in (4, 7):  # in the second round through the examples, and in the third
        with pytest.raises(Stopped):
            learn(tmp_path / "stopped", keeping, stop_at)
    assert learn(tmp_path / "stopped", keeping) == whole[-2:]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert all(weight.equal(other[name]) for name, weight in one.items())
    assert not all(weight.equal(load_file(POLICY / "model.safetensors")[name]) for name, weight in one.items())


def test_a_damaged_state_of_a_fine_tuning_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeping = Keeping(tmp_path / "states", seconds=0, share=1.0)
    with pytest.raises(Stopped):
        learn(tmp_path / "stopped", keeping, 6)
    assert sorted(place.name for place in keeping.folder.iterdir()) == ["000004", "000005"]
    (keeping.folder / "000005" / "optimizer.pt").write_bytes(b"")
    assert len(learn(tmp_path / "stopped", keeping)) == 4
    assert "000005 is damaged: optimizer.pt is not what was written; the one before it is taken" in caplog.text


def test_sft_does_not_play_again_what_it_has_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, place = tmp_path / "policy", tmp_path / ".policy.begun"
    flags = ["sft", "--samples", "2", "--train-tasks", "6", "--out", str(out), "--sandbox", "unsafe"]
    flags += ["--engine", "transformers", "--tasks", "builtin:count", "--learning.steps"]
    file = place / "rollouts" / "000000.jsonl.gz"
    with subprocess.Popen([sys.executable, "-m", "repl_rl.cli", *flags, "40"], stderr=subprocess.PIPE) as process:
        wait_for(file.exists, process)
        process.terminate()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    played = told(read(file))
    assert main([*flags, "4"]) == 2
    assert "learning.steps is 4, the run's 40" in capsys.readouterr().err
    assert main([*flags, "40"]) == 0
    assert "going on with what" in capsys.readouterr().out
    assert told(read(out / "rollouts")) == played
    assert not place.exists()


def test_what_was_begun_is_for_one_process_and_leaves_nothing_where_nothing_was_done(tmp_path: Path) -> None:
    with (
        begun(tmp_path / "out", "seed = 1\n", (), selection.POLICY, overwrite=False) as place,
        pytest.raises(ConfigError, match="another process is at work on it"),
        begun(tmp_path / "out", "seed = 1\n", (), selection.POLICY, overwrite=False),
    ):
        raise AssertionError
    assert not place.exists()
    (tmp_path / "out").mkdir()
    with (
        pytest.raises(ConfigError, match="it exists; name a new --out"),
        begun(tmp_path / "out", "seed = 1\n", (), selection.POLICY, overwrite=False),
    ):
        raise AssertionError
