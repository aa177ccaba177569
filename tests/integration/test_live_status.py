"""The live status of rollouts shows their number, those that ended, the speed, and the time left."""

import asyncio
import io
import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from repl_rl.cli import main
from repl_rl.cli.live_status import LiveStatus, RolloutProgress, describe_opening
from repl_rl.cli.next_steps import select_flags
from repl_rl.cli.rollout import RolloutCommandConfig, _play_and_print
from repl_rl.cli.sft import FinetuneProgress
from repl_rl.rollout import ReplSampler, RolloutSettings, SyncRollouts
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_stats import RolloutCounts
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.scripted_rollouts import TASK, world

LINES = ["x = 3\n", "x\n", "submit_final_answer(x)\n"]
OTHER = Task("t2", "What is 1 + 2?", "3")
TASKS = {task.id: task for task in (TASK, OTHER)}


def opened(sampler: ReplSampler | None = None) -> SyncRollouts:
    played = world(LINES, sampler) if sampler else world(LINES)
    return SyncRollouts(lambda: nullcontext(played), TASKS)


def test_the_counts_are_those_of_the_trajectories() -> None:
    ended: list[Trajectory] = []
    with opened() as source:
        assert source.stats.counts == RolloutCounts()
        source.progress.subscribe(ended.append)
        played = [*source.sample([TASK, OTHER, OTHER]), *source.collect([OTHER.id], 0)]
        counts = source.stats.counts
    assert {t.id for t in ended} == {t.id for t in played}
    assert counts == RolloutCounts(
        ended=4,
        solved=sum(t.solved for t in played),
        sampled_lines=sum(len(list(t.lines)) for t in played),
        sampled_tokens=sum(t.sampled_tokens for t in played),
    )
    assert counts.solved
    assert counts.sampled_lines == 12


def test_altered_rollouts_count_with_those_that_they_come_from() -> None:
    with opened() as source:
        source.sample(
            [TASK], alter=lambda rollouts: replace(rollouts, settings=RolloutSettings("bare", purpose="altered"))
        )
        assert source.stats.counts.ended == 1


class FirstBeforeSecond(ReplSampler):
    """The console sampler. The rollout of the second task waits until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.on = asyncio.Event()

    async def rollout(self, episode: Episode) -> None:
        if episode.task.id == OTHER.id:
            await self.on.wait()
        await super().rollout(episode)


def test_a_transcript_is_printed_before_the_other_rollouts_have_ended() -> None:
    sampler, shown = FirstBeforeSecond(), io.StringIO()
    at_first: list[str] = []

    def let_go_on() -> None:
        at_first.append(shown.getvalue())
        sampler.on.set()

    def let_second_go_on(trajectory: Trajectory) -> None:
        # What the display prints follows this call, in the same turn of the loop.
        asyncio.get_running_loop().call_soon(let_go_on)

    config = RolloutCommandConfig(engine="transformers", sandbox="unsafe")
    console = Console(file=shown, width=200)
    with opened(sampler) as source, LiveStatus(console) as status:
        source.progress.subscribe(let_second_go_on)
        played = _play_and_print(config, [TASK, OTHER], source, console, status)
    assert len(played) == 2
    assert at_first[0].count("sampled tokens]") == 1
    assert shown.getvalue().count("sampled tokens]") == 2


def test_progress_tells_a_bound_first_and_a_guess_when_enough_rollouts_ended() -> None:
    counts = [RolloutCounts(ended=5, solved=1, sampled_lines=7, sampled_tokens=70)]
    progress = RolloutProgress("evaluation", 8, 4, lambda: counts[-1])
    assert progress.describe() == "evaluation: 0 of 8 rollouts ended, 0 solved"
    assert progress.get_since_completion_s() is None
    counts.append(RolloutCounts(ended=6, solved=2, sampled_lines=10, sampled_tokens=100))
    assert re.fullmatch(
        r"evaluation: 1 of 8 rollouts ended, 1 solved, \d+ tokens/s, up to about \d+ s left", progress.describe()
    )
    counts.append(RolloutCounts(ended=7, solved=2, sampled_lines=15, sampled_tokens=150))
    assert re.fullmatch(
        r"evaluation: 2 of 8 rollouts ended, 1 solved, \d+ tokens/s, about \d+ s left", progress.describe()
    )
    counts.append(RolloutCounts(ended=13, solved=2, sampled_lines=30, sampled_tokens=300))
    assert re.fullmatch(r"evaluation: 8 of 8 rollouts ended, 1 solved, \d+ tokens/s", progress.describe())
    last = progress.describe()
    assert (progress.get_since_completion_s() or 0.0) > 0.0
    assert progress.describe() == last, "an update does not change the speed of sampling"


def test_without_a_terminal_the_status_is_printed_at_its_times_and_the_inner_one_comes_first() -> None:
    printed, asked = io.StringIO(), threading.Semaphore(0)

    def describe(name: str) -> str:
        asked.release()
        return f"status of {name}"

    def wait_for(name: str, lines: int) -> None:
        while printed.getvalue().count(f"status of {name}\n") < lines:
            assert asked.acquire(timeout=60)

    live = LiveStatus(Console(file=printed), first_print_s=0.01, print_s=0.01)
    with live as status, status.show(lambda: describe("outer")):
        wait_for("outer", 2)
        with status.show(lambda: describe("inner")):
            wait_for("inner", 2)
        before = printed.getvalue().count("outer")
        wait_for("outer", before + 1)
    assert set(printed.getvalue().splitlines()) == {"status of outer", "status of inner"}


def test_a_short_operation_prints_no_status_where_there_is_no_terminal() -> None:
    printed = io.StringIO()
    with LiveStatus(Console(file=printed)) as status, status.show(lambda: "status"):
        pass
    assert printed.getvalue() == ""


def test_a_terminal_shows_the_status_at_once() -> None:
    printed = io.StringIO()
    with LiveStatus(Console(file=printed, force_terminal=True, width=80)) as status, status.show(lambda: "status"):
        pass
    assert "status" in printed.getvalue()


class Failing(ReplSampler):
    async def rollout(self, episode: Episode) -> None:
        raise KeyError("no such thing")


def test_an_evaluation_that_stops_tells_how_far_it_came(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("--engine", "transformers", "--sandbox", "unsafe", "--count", "2")
    assert main(["eval", *flags, "--sampler", f"{__name__}:Failing", "--out", str(tmp_path / "e")]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "opening engine transformers and sandbox unsafe ... playing 2 tasks (--count sets the number) ..." in told
    assert f"rollouts at temperature 1: 2 of 2 rollouts ended, 0 solved; {tmp_path / 'e'} keeps those of" in told


def test_a_fine_tuning_tells_the_time_left_from_its_first_step_to_its_last() -> None:
    out = io.StringIO()
    progress = FinetuneProgress(20, Console(file=out, width=100))
    assert progress.describe() == "fine-tuning: 0 of 20 steps"
    progress.report_step(1, 0.5)
    assert re.fullmatch(r"fine-tuning: 1 of 20 steps, about \d+ s left", progress.describe())
    for step in range(2, 21):
        progress.report_step(step, 0.25)
    printed = out.getvalue().splitlines()
    assert re.fullmatch(r"step     1/20  loss 0\.5000 nats per token, about \d+ s left", printed[0])
    assert [line.split()[1] for line in printed] == ["1/20", *(f"{step}/20" for step in range(2, 21, 2))]
    assert printed[-1] == "step    20/20  loss 0.2500 nats per token"
    assert progress.describe() == "fine-tuning: 20 of 20 steps"


def test_the_opening_names_engine_and_sandbox() -> None:
    config = RolloutCommandConfig(engine="transformers", sandbox="unsafe")
    assert describe_opening(config) == "opening engine transformers and sandbox unsafe ..."


class Silent(ReplSampler):
    async def rollout(self, episode: Episode) -> None:
        return


def test_an_evaluation_that_solves_nothing_prints_the_commands_that_teach_the_format(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--engine", "transformers", "--sandbox", "unsafe", "--count", "1", "--rollout.max-lines", "8")
    assert main(["eval", *flags, "--sampler", f"{__name__}:Silent"]) == 0
    told = capsys.readouterr().out
    assert "no held-out task is solved" in told
    assert "repl-rl sft --model builtin:quickstart --data demonstrations --out taught" in told
    assert "--name taught --rollout.max-lines 8 " in told, "a limit of this command belongs to the training as well"


def test_a_training_repeats_the_sizes_of_a_command_line_and_nothing_else() -> None:
    argv = "--model m --rollout.max-lines=8 --name mine --trainer.report-to wandb trackio --overwrite --eval-tasks 8"
    kept = ["--rollout.max-lines=8", "--trainer.report-to", "wandb", "trackio", "--eval-tasks", "8"]
    assert select_flags(argv.split()) == kept


def test_the_time_left_falls_while_no_rollout_ends() -> None:
    counts = [RolloutCounts()]
    progress = RolloutProgress("evaluation", 16, 8, lambda: counts[-1])
    counts.append(RolloutCounts(ended=13, solved=0, sampled_lines=90, sampled_tokens=900))
    progress.get_since_completion_s()
    assert "left" not in progress.describe(), "the 13 ended at once, so the others already take longer"
    assert progress.describe().endswith("the others take longer")
