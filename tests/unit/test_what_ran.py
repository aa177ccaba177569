"""The record says what ran: the physical lines that the console was given, and which observations were cut."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError
from repl_rl.rollout import RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.runs.replay import (
    Verification,
    branch,
    get_branch_point,
    open_replay,
    validate_replayable,
    verify_trajectory,
)
from repl_rl.runs.store import (
    SCHEMA_VERSION,
    Store,
    build_transitions,
    from_record,
    read_trajectories,
    to_record,
    to_text,
    write_step,
)
from repl_rl.samplers.conformance_checks import FaultySandbox
from repl_rl.samplers.fenced_code_sampler import FencedCodeSampler
from repl_rl.samplers.fenced_line_sampler import FencedLineSampler
from repl_rl.samplers.inline_call_sampler import InlineCallSampler
from repl_rl.sandbox.base import Limits
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.trajectory.trajectory import FailureKind, LineEnd, LineStatus, Observed, Sampled, Stop, Trajectory
from repl_rl.trajectory.trajectory_metrics import compute_trajectory_metrics
from tests.support.scripted_rollouts import RENDERER, TASK, world
from tests.support.tokenizers import overshooting_tokenizer

SANDBOX = InProcessSandbox()
OLD = Path(__file__).parents[1] / "stored" / "schema_2.jsonl.gz"
BLOCK = "exec(compile({!r}, '<block>', 'exec'))"
FENCED = [
    "I see.\n```python\nx = 6 * 7\nprint(x)\n```",
    "```python\nx = = 1\n```",
    "```python\nprint(x)\nx / 0\n```",
    "\\boxed{42}",
]


def six() -> int:
    """Six."""
    return 6


def play(
    lines: Sequence[str],
    sampler: RolloutSampler | None = None,
    renderer: Renderer = RENDERER,
    observation_tokens: int = 200,
    most_lines: int = 20,
) -> Trajectory:
    """What a policy leaves behind that writes `lines`, and then its end token."""
    limits = RolloutLimits(max_line_tokens=400, max_observation_tokens=observation_tokens, max_lines=most_lines)
    ids = [i for text in lines for i in renderer.encode_as_sampled(text)]
    engine = replace(ScriptedEngine([[*ids, min(renderer.eos_ids)]]), forbidden_ids=renderer.forbidden_ids)
    return asyncio.run(replace(world([], sampler, limits, renderer), engine=engine).collect([TASK]))[0]


def ran(t: Trajectory) -> list[tuple[str, ...]]:
    return [execution.ran for execution in t.executions]


def test_the_line_console_notes_each_physical_line_in_the_order_in_which_they_ran() -> None:
    t = play(["x = 6\n", "if x:\n    x\n\n", "submit_final_answer(x)\n"])
    assert ran(t) == [("x = 6",), ("if x:",), ("    x", ""), ("submit_final_answer(x)",)]


def test_lines_that_the_console_was_not_given_because_it_had_ended_are_not_noted() -> None:
    class Both(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            await episode.sample()
            await episode.execute("x = 1", "exit()", "never")

    assert ran(play(["go\n"], Both())) == [("x = 1", "exit()")]


def test_text_that_is_carried_over_runs_with_the_line_that_closes_it() -> None:
    carrying = Renderer(overshooting_tokenizer(), "carry")
    t = play(["for i in range(2):\n    print(i)\n\nlen([7])\n", "exit()\n"], renderer=carrying)
    assert [line.text for line in t.lines][:2] == ["for i in range(2):\n    ", "print(i)\n"]
    assert ran(t)[:3] == [("for i in range(2):",), ("    print(i)",), ("",)]
    assert [each.prompt for each in build_transitions(t)] == [">>> ", "... ", "... ", ">>> ", ">>> "]
    assert asyncio.run(verify_trajectory(t, SANDBOX)).difference is None


@pytest.mark.parametrize("line", range(4))
def test_a_branch_goes_on_from_text_that_was_carried_over(line: int) -> None:
    carrying = Renderer(overshooting_tokenizer(), "carry")
    t = play(["for i in range(2):\n    print(i)\n\nlen([7])\n", "exit()\n"], renderer=carrying)
    rest = ScriptedEngine([[i for each in t.lines[line:] for i in each.token_ids]])
    rollouts = replace(world([], renderer=carrying), engine=rest)
    (found,) = asyncio.run(branch(rollouts, get_branch_point(t, line), TASK, 1)).trajectories
    assert (found.completion_ids, found.stop, ran(found)) == (t.completion_ids, t.stop, ran(t))


def test_a_block_is_noted_as_it_ran_although_its_line_is_prose() -> None:
    t = play(FENCED, FencedCodeSampler())
    code = ["x = 6 * 7\nprint(x)\n", "x = = 1\n", "print(x)\nx / 0\n"]
    assert ran(t) == [*((BLOCK.format(text),) for text in code), ()]
    statuses = [LineStatus.OK, LineStatus.SYNTAX_ERROR, LineStatus.EXCEPTION, LineStatus.ANSWERED]
    assert [execution.status for execution in t.executions] == statuses


def test_a_tool_call_and_an_answer_in_text_ran_in_no_console() -> None:
    assert ran(play(["<fn>six()</fn>", "<answer>42</answer>"], InlineCallSampler([six]))) == [(), ()]


def test_all_that_one_line_had_run_is_noted_together() -> None:
    class Twice(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            await episode.sample()
            await episode.execute("x = 1")
            await episode.execute("x")
            episode.submit("1")

    assert ran(play(["go\n"], Twice())) == [("x = 1", "x")]


def test_an_observation_says_that_it_was_cut_by_whoever_cut_it() -> None:
    t = play(["print('a' * 50)\n", "print('[... 9 tokens cut ...]')\n", "1\n", "exit()\n"])
    assert [s.cut for s in t.segments if isinstance(s, Observed)] == [False, False, False]
    short = play(["print('a' * 500)\n", "1\n", "exit()\n"], observation_tokens=16)
    assert [s.cut for s in short.segments if isinstance(s, Observed)] == [True, False]
    assert RENDERER.encode_observation("a" * 70_000).cut
    roomy = RolloutLimits(max_line_tokens=200, max_observation_tokens=1000)
    narrow = world(["print('a' * 500)\n", "exit()\n"], limits=roomy)
    narrow = replace(narrow, sandbox=InProcessSandbox(Limits(output_bytes=256)))
    (limited,) = asyncio.run(narrow.collect([TASK]))
    assert [s.cut for s in limited.segments if isinstance(s, Observed)] == [True]


def test_the_console_in_this_process_cuts_bytes_and_counts_bytes() -> None:
    async def shown() -> str:
        async with InProcessSandbox(Limits(output_bytes=256)).session() as console:
            return (await console.push("print('é' * 200)")).text

    text = asyncio.run(shown())
    assert len(text.encode()) <= 256
    assert f"[... {401 - 256} bytes of output not shown ...]" in text
    assert "\ufffd" not in text


def test_no_program_can_have_its_output_taken_for_a_prompt_or_for_a_cut() -> None:
    t = play(["print('>>> ', end=''); exit()\n"])
    (last,) = build_transitions(t)
    assert (last.output, last.next_prompt) == (">>> ", "")
    fake = play(["import time\n", "print('a\\n[... %d tokens cut ...]\\nb' % time.time_ns())\n", "exit()\n"])
    found = asyncio.run(verify_trajectory(fake, SANDBOX)).difference
    assert found is not None
    assert found.line == 1


def test_a_prompt_that_the_sampler_spliced_in_itself_is_the_next_lines_prompt() -> None:
    class PlanFirst(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            await episode.sample()
            episode.observe("Now do it.\n>>> ")
            async for line in episode.lines():
                await episode.push(line)

    t = play(["I multiply.\n", "6 * 7\n", "exit()\n"], PlanFirst())
    assert [(each.prompt, each.output) for each in build_transitions(t)][1:] == [(">>> ", "42\n"), (">>> ", "")]
    assert "Now do it.\n>>> 6 * 7\n42\n>>> exit()\n" in to_text(t)


def test_fenced_rollouts_are_executed_again_and_compared() -> None:
    t = play(FENCED, FencedCodeSampler())
    found = asyncio.run(verify_trajectory(t, SANDBOX))
    assert (found.lines, found.difference, found.skip_reason) == (3, None, "")
    forgot = replace(t.lines[0], execution=replace(next(t.executions), ran=("x = 42",)))
    silent = asyncio.run(
        verify_trajectory(replace(t, segments=(Sampled((forgot,)), *t.segments[1:])), SANDBOX)
    ).difference
    assert silent is not None
    assert silent.line == 0
    now = play(["```python\nimport time\nprint(time.time_ns())\n```", "\\boxed{42}"], FencedCodeSampler())
    other = asyncio.run(verify_trajectory(now, SANDBOX)).difference
    assert other is not None
    assert (other.line, other.cause.value) == (0, "time")


@pytest.mark.parametrize(("change", "differs"), [("", False), ("+ 1", True)])
def test_a_fenced_observation_that_was_cut_agrees_when_its_ends_do(change: str, differs: bool) -> None:
    sampler = FencedCodeSampler()
    t = play(["```python\nfor i in range(90): print(i)\n```", "\\boxed{42}"], sampler, observation_tokens=40)
    assert [s.cut for s in t.segments if isinstance(s, Observed)] == [True]
    first = t.lines[0]
    assert first.execution is not None
    edited = replace(first.execution, ran=(first.execution.ran[0].replace("print(i)", f"print(i{change})"),))
    changed = Sampled((replace(first, execution=edited),))
    found = asyncio.run(verify_trajectory(replace(t, segments=(changed, *t.segments[1:])), SANDBOX))
    assert (found.skip_reason, found.difference is not None) == ("", differs)


def test_a_policy_goes_on_from_the_middle_of_a_fenced_rollout() -> None:
    t = play(FENCED, FencedCodeSampler())
    ids = [i for text in ("```python\nprint(x)\n```", "\\boxed{42}") for i in RENDERER.encode_as_sampled(text)]
    engine = ScriptedEngine([[*ids, min(RENDERER.eos_ids)]], forbidden_ids=RENDERER.forbidden_ids)
    rest = replace(world([], FencedCodeSampler(), RolloutLimits(max_line_tokens=200)), engine=engine)
    (found,) = asyncio.run(branch(rest, get_branch_point(t, 1), TASK, 1)).trajectories
    assert isinstance(found.segments[3], Observed)
    assert found.segments[3].text == "\n```output\n42\n```\n"
    assert found.outcome == 1.0


FENCED_LINES = [
    "I see.\n```python\n",
    "x = 6 * 7\n",
    "print(x, '\\nand', x)\n",
    "for i in range(2):\n",
    "    i\n",
    "x / 0\n",
    "x = = 1\n",
    "def f(y):\n",
    "    return y\n",
    "```\n",
    "```python\n",
    "f(x)\n",
    "```",
    "\\boxed{42}",
]


def test_lines_between_fences_are_executed_again_and_compared() -> None:
    t = play(FENCED_LINES, FencedLineSampler())
    assert t.outcome == 1.0
    assert asyncio.run(verify_trajectory(t, SANDBOX)) == Verification(t.id, 10, None)
    cut = play(["```python\n", "for i in range(90): i\n", "x\n"], FencedLineSampler(), observation_tokens=40)
    assert any(s.cut for s in cut.segments if isinstance(s, Observed))
    assert asyncio.run(verify_trajectory(cut, SANDBOX)).difference is None
    now = play(["```python\n", "import time\n", "time.time_ns()\n", "```", "\\boxed{42}"], FencedLineSampler())
    other = asyncio.run(verify_trajectory(now, SANDBOX)).difference
    assert other is not None
    assert (other.line, other.cause.value) == (2, "time")


def test_the_last_line_of_a_rollout_without_lines_left_is_compared_too() -> None:
    lines = ["```python\n", "for i in range(2): i\n", "1 / 0\n"]
    for most in (2, 3):
        t = play(lines, FencedLineSampler(), most_lines=most)
        assert t.stop is Stop.MAX_LINES
        assert asyncio.run(verify_trajectory(t, SANDBOX)).difference is None


@pytest.mark.parametrize("line", range(1, len(FENCED_LINES)))
def test_a_policy_goes_on_from_any_line_between_fences(line: int) -> None:
    t = play(FENCED_LINES, FencedLineSampler())
    rest = ScriptedEngine(
        [[i for each in t.lines[line:] for i in each.token_ids]], forbidden_ids=RENDERER.forbidden_ids
    )
    limits = RolloutLimits(max_line_tokens=400, max_observation_tokens=200, max_lines=20)
    rollouts = replace(world([], FencedLineSampler(), limits), engine=rest)
    (found,) = asyncio.run(branch(rollouts, get_branch_point(t, line), TASK, 1)).trajectories
    assert (found.completion_ids, found.stop, ran(found)) == (t.completion_ids, t.stop, ran(t))


def test_nothing_goes_on_after_an_answer_even_if_it_printed_something() -> None:
    t = play(["print(1); submit_final_answer(2)\n"])
    assert isinstance(t.segments[-1], Observed)
    with pytest.raises(ConfigError, match="the rollout ended with that line"):
        get_branch_point(t, 1)


def test_a_sampler_that_swallows_our_fault_gets_no_reward_for_it() -> None:
    class Swallows(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            line = await episode.sample()
            try:
                await episode.push(line)
            except Exception as fault:
                with pytest.raises(ConfigError, match="the console failed"):
                    episode.observe(str(fault))
                episode.finish()

    (t,) = asyncio.run(replace(world(["1\n"], Swallows()), sandbox=FaultySandbox(SANDBOX)).collect([TASK]))
    assert (t.stop, t.outcome, t.trainable) == (Stop.FAULT, None, False)
    assert t.failure is not None
    assert t.failure.kind is FailureKind.SANDBOX_FAULT


@pytest.mark.parametrize("reason", [Stop.ANSWERED, Stop.EOS, Stop.LINE_TOO_LONG, Stop.FAULT])
def test_a_sampler_cannot_claim_a_stop_that_only_the_record_can_give(reason: Stop) -> None:
    class Claims(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            await episode.sample()
            with pytest.raises(ConfigError, match="only the episode itself records this reason"):
                episode.finish(reason)

    assert play(["1\n"], Claims()).stop is Stop.FINISHED


def test_what_ran_and_what_was_cut_survive_on_disk(tmp_path: Path) -> None:
    t = play(FENCED, FencedCodeSampler())
    whole = play(["print('a' * 500)\n", "exit()\n"], observation_tokens=16)
    path = write_step(tmp_path, 1, [t, replace(whole, id="whole")])
    assert list(read_trajectories(path)) == [t, replace(whole, id="whole")]
    assert to_record(Store(path)["whole"])["schema_version"] == SCHEMA_VERSION == 4


def test_a_file_of_schema_2_opens_with_what_ran_as_far_as_it_can_be_told() -> None:
    store = Store(OLD)
    found = {entry.trajectory.id: entry.trajectory for entry in store}
    assert store.damaged_regions == []
    assert list(found) == ["console", "carried", "fenced", "calls", "cut", "lost", "mine", "long"]
    assert ran(found["console"])[:3] == [("x = 6",), ("for i in range(2):",), ("    x += i", "")]
    assert ran(found["carried"])[:3] == [("for i in range(2):",), ("    print(i)",), ("",)]
    assert ran(found["fenced"]) == ran(found["calls"]) == [(), ()]
    assert [s.cut for s in found["console"].segments if isinstance(s, Observed)][:4] == [False, False, False, True]
    failures = [found[name].failure for name in ("lost", "mine", "long")]
    kinds = [FailureKind.SANDBOX_FAULT, FailureKind.USER_ERROR, FailureKind.PROMPT_TOO_LONG]
    assert [failure and failure.kind for failure in failures] == kinds
    assert store["console"].credit_L[3].reward == -0.1
    rates = compute_trajectory_metrics(list(found.values()))
    assert (rates["sandbox_fault_rate"], rates["user_error_rate"]) == (1 / 8, 2 / 8)


def test_records_of_schema_2_are_stored_again_as_those_of_today_and_stay_equal() -> None:
    for entry in Store(OLD):
        record = json.loads(json.dumps(to_record(entry)))
        assert record["schema_version"] == SCHEMA_VERSION
        assert from_record(record) == entry


def test_a_run_of_schema_2_is_verified_and_shown_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    console, carried, fenced, calls = [entry.trajectory for entry in Store(OLD)][:4]
    for t in (console, carried):
        found = asyncio.run(verify_trajectory(t, SANDBOX))
        assert (found.lines, found.difference, found.skip_reason) == (len(t.lines), None, "")
    for t in (fenced, calls):
        with pytest.raises(ConfigError, match="can be shown, but not executed again"):
            validate_replayable(t)
    assert main(["replay", str(OLD), "--id", "fenced"]) == 0
    assert "boxed{42}" in capsys.readouterr().out
    texts = json.loads((OLD.parent / "schema_2.texts.json").read_text())
    assert {entry.trajectory.id: to_text(entry.trajectory) for entry in Store(OLD)} == texts


def test_a_line_cut_by_a_budget_ran_nowhere() -> None:
    t = play(["x" * 900])
    assert (t.lines[-1].end, t.lines[-1].execution, t.stop) == (LineEnd.LENGTH, None, Stop.LINE_TOO_LONG)


def test_a_line_of_ones_own_follows_what_ran() -> None:
    t = play(FENCED, FencedCodeSampler())

    async def work() -> str:
        async with open_replay(t, SANDBOX, to_line=1) as replay:
            return (await replay.run_typed("x + 1")).result.text

    assert asyncio.run(work()) == "43\n"
