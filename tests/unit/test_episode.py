"""One rollout's record: what is sampled, spliced, rewarded, and how it ends."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from repl_rl.engine import ScriptedEngine
from repl_rl.errors import InvariantError, SandboxFault, UserCodeError
from repl_rl.rollout import Rollouts, RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.sandbox.base import LineResult
from repl_rl.trajectory.trajectory import LineEnd, LineStatus, Observed, Sampled, Stop, Trajectory
from tests.support.scripted_rollouts import RENDERER, TASK, world


def play(rollouts: Rollouts) -> Trajectory:
    return asyncio.run(rollouts.collect([TASK]))[0]


def shown(t: Trajectory) -> str:
    parts = [s.text if isinstance(s, Observed) else "".join(line.text for line in s.lines) for s in t.segments]
    return t.prompt.text + "".join(parts)


def statuses(t: Trajectory) -> list[LineStatus]:
    return [execution.status for execution in t.executions]


def test_a_rollout_reads_like_a_console_session() -> None:
    t = play(world(["x = 6 * 7\n", "x\n", "submit_final_answer(42)\n"]))
    assert shown(t) == "What is 6 * 7?\n>>> x = 6 * 7\n>>> x\n42\n>>> submit_final_answer(42)\n"
    assert (t.stop, t.answer, t.outcome) == (Stop.ANSWERED, "42", 1.0)
    assert statuses(t) == [LineStatus.OK, LineStatus.OK, LineStatus.ANSWERED]


def test_a_wrong_answer_is_graded_zero() -> None:
    assert play(world(["submit_final_answer(41)\n"])).outcome == 0.0


def test_blocks_are_continued_at_the_second_prompt() -> None:
    t = play(world(["for i in range(2):\n", "    i\n", "\n", "submit_final_answer(42)\n"]))
    assert ">>> for i in range(2):\n...     i\n... \n0\n1\n>>> submit" in shown(t)
    assert statuses(t)[:2] == [LineStatus.INCOMPLETE] * 2


def test_errors_are_observed_and_the_rollout_goes_on() -> None:
    t = play(world(["1/0\n", "x = \n", "submit_final_answer(42)\n"]))
    assert statuses(t) == [LineStatus.EXCEPTION, LineStatus.SYNTAX_ERROR, LineStatus.ANSWERED]
    assert "ZeroDivisionError: division by zero\n>>> x = \n" in shown(t)
    assert t.outcome == 1.0


def test_a_token_with_two_newlines_closes_two_lines_and_is_one_record() -> None:
    t = play(world(["if 1:\n", "    7\n\n", "submit_final_answer(42)\n"]))
    second = t.lines[1]
    assert second.text == "    7\n\n"
    assert second.execution is not None
    assert second.execution.status is LineStatus.OK
    assert "    7\n\n7\n>>> submit" in shown(t)


def test_what_the_engine_saw_is_a_prefix_of_the_record() -> None:
    rollouts = world(["x = 1\n", "x\n", "submit_final_answer(42)\n"])
    t = play(rollouts)
    assert (*t.prompt.token_ids, *t.completion_ids)[: len(t.prompt.token_ids)] == t.prompt.token_ids
    assert all(isinstance(s, Sampled) == (i % 2 == 0) for i, s in enumerate(t.segments))


def test_i5_an_engine_whose_ids_differ_from_the_record_stops_the_run() -> None:
    class Meddler(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            line = await episode.sample()
            ids = episode._generation.seen_ids
            assert isinstance(ids, list)
            ids[-1] += 1
            await episode.push(line)

    with pytest.raises(InvariantError, match="I5"):
        play(world(["x = 1\n"], Meddler()))


def test_a_line_over_its_budget_is_cut_and_ends_the_rollout() -> None:
    t = play(world(["x = 1\n", "y" * 50 + "\n"], limits=RolloutLimits(max_line_tokens=10)))
    assert t.stop is Stop.LINE_TOO_LONG
    assert t.lines[-1].end is LineEnd.LENGTH
    assert len(t.lines[-1].token_ids) == 10
    assert t.lines[-1].execution is None


def test_the_number_of_lines_is_bounded() -> None:
    t = play(world(["x = 1\n"] * 9, limits=RolloutLimits(max_lines=3)))
    assert t.stop is Stop.MAX_LINES
    assert len(t.lines) == 3


def test_a_full_context_ends_the_rollout_with_a_typed_stop() -> None:
    rollouts = world(["x = 1\n"] * 99, limits=RolloutLimits(max_lines=99))
    assert isinstance(rollouts.engine, ScriptedEngine)
    rollouts.engine.context_tokens = 60
    t = play(rollouts)
    assert t.stop is Stop.MAX_TOKENS
    assert len(t.prompt.token_ids) + len(t.completion_ids) <= 60 + len(RENDERER.encode(">>> "))


def test_an_end_token_ends_the_rollout_and_is_part_of_the_last_line() -> None:
    rollouts = world([])
    eos = min(RENDERER.eos_ids)
    rollouts.engine.scripts = [[*RENDERER.encode("x = 1\ny = 2"), eos]]  # type: ignore[attr-defined]
    t = play(rollouts)
    assert t.stop is Stop.EOS
    assert t.lines[-1].token_ids[-1] == eos
    assert t.lines[-1].text == "y = 2"
    assert t.loss_mask[-1] is True


def test_exit_ends_the_rollout_without_an_answer() -> None:
    t = play(world(["exit()\n", "never\n"]))
    assert (t.stop, t.answer, t.outcome) == (Stop.EXITED, None, 0.0)


class Broken:
    """A sandbox whose consoles fail on our side."""

    name = "broken"
    python_version = (3, 11, 0)

    def session(self) -> object:
        raise SandboxFault("no kernel came up")


def test_a_sandbox_fault_is_recorded_never_rewarded_and_never_trained() -> None:
    rollouts = world(["x = 1\n"])
    object.__setattr__(rollouts, "sandbox", Broken())
    t = play(rollouts)
    assert t.stop is Stop.FAULT
    assert t.failure is not None
    assert t.failure.message == "no kernel came up"
    assert t.outcome is None
    assert not t.trainable


class Faulting:
    """A sandbox whose console fails on our side at the second line."""

    name = "faulting"
    python_version = (3, 11, 0)

    def __init__(self) -> None:
        self.pushed = 0
        self.ended = False

    @asynccontextmanager
    async def session(self) -> AsyncIterator["Faulting"]:
        yield self

    async def push(self, line: str) -> LineResult:
        self.pushed += 1
        self.ended = self.pushed == 2
        status = LineStatus.SANDBOX_FAULT if self.ended else LineStatus.OK
        return LineResult("the kernel died" if self.ended else "", False, status, None, 0.0)


def test_i11_our_failure_is_never_rendered_as_program_output() -> None:
    rollouts = world(["x = 1\n", "x\n", "x\n"])
    object.__setattr__(rollouts, "sandbox", Faulting())
    t = play(rollouts)
    assert t.stop is Stop.FAULT
    assert t.failure is not None
    assert t.failure.message == "the kernel died"
    assert "the kernel died" not in shown(t)
    assert statuses(t) == [LineStatus.OK, LineStatus.SANDBOX_FAULT]


class Scripted(RolloutSampler):
    """Runs a function as a sampler."""

    def __init__(self, act: object) -> None:
        self.act = act

    async def rollout(self, episode: Episode) -> None:
        assert callable(self.act)
        await self.act(episode)


def test_a_regular_expression_stops_in_the_middle_of_a_line() -> None:
    async def act(episode: Episode) -> None:
        call = await episode.sample(until=r"</fn>", max_tokens=100)
        assert call.text.endswith("</fn>")
        assert call.end is LineEnd.MATCH
        episode.observe("<fn_results>sunny</fn_results>\n")
        await episode.sample()

    t = play(world(["think <fn>weather()</fn>and then go on\n"], Scripted(act)))
    assert shown(t).endswith("think <fn>weather()</fn><fn_results>sunny</fn_results>\nand then go on\n")
    assert t.stop is Stop.FINISHED


def test_rewards_go_to_the_line_that_was_sampled_last() -> None:
    async def act(episode: Episode) -> None:
        async for line in episode.lines():
            episode.reward(0.25, name="before")
            await episode.push(line)
            episode.reward(0.5, name="after")

    t = play(world(["x = 1\n", "submit_final_answer(42)\n"], Scripted(act)))
    assert [[r.name for r in line.rewards] for line in t.lines] == [["before", "after"]] * 2


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda e: e.observe("text"), "follows a sampled line"),
        (lambda e: e.reward(1.0), "sample a line first"),
    ],
)
def test_calls_out_of_order_are_named(act: object, message: str) -> None:
    async def run(episode: Episode) -> None:
        assert callable(act)
        act(episode)

    with pytest.raises(UserCodeError, match=rf"Scripted\.rollout: .*{message}"):
        play(world(["x = 1\n"], Scripted(run)))


def test_a_line_is_pushed_once() -> None:
    async def act(episode: Episode) -> None:
        line = await episode.sample()
        await episode.push(line)
        await episode.push(line)

    with pytest.raises(UserCodeError, match="sampled last, once"):
        play(world(["x = 1\n", "y\n"], Scripted(act)))


def test_a_line_that_was_executed_already_is_not_pushed() -> None:
    async def act(episode: Episode) -> None:
        line = await episode.sample()
        await episode.execute("x = 2")
        await episode.push(line)

    with pytest.raises(UserCodeError, match="sampled last, once"):
        play(world(["x = 1\n", "y\n"], Scripted(act)))


def test_sampling_after_the_end_is_named() -> None:
    async def act(episode: Episode) -> None:
        episode.finish()
        await episode.sample()

    with pytest.raises(UserCodeError, match="after the end of the rollout"):
        play(world(["x = 1\n"], Scripted(act)))


def test_an_error_of_user_code_names_its_class() -> None:
    async def act(episode: Episode) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(UserCodeError, match=r"Scripted\.rollout raised ZeroDivisionError"):
        play(world(["x = 1\n"], Scripted(act)))


def test_a_sampler_that_never_finishes_is_ended_by_the_wall_clock() -> None:
    async def act(episode: Episode) -> None:
        await asyncio.Event().wait()

    t = play(world(["x = 1\n"], Scripted(act), RolloutLimits(max_wall_s=0.05)))
    assert t.stop is Stop.WALL_CLOCK


def texts(trajectories: Sequence[Trajectory]) -> list[str]:
    return [t.id for t in trajectories]


def test_trajectories_come_in_the_order_of_the_tasks_and_groups_share_a_prompt() -> None:
    rollouts = world(["submit_final_answer(42)\n"])
    found = asyncio.run(rollouts.collect([TASK] * 5))
    assert [t.id for t in found] == [f"0-t1-{i}" for i in range(5)]
    assert len({t.prompt for t in found}) == 1
    assert len({t.seed for t in found}) == 5
