"""Host functions: described, held to their signature, limited, recorded, and answered from the record."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.credit.credited_trajectory import CreditedTrajectory
from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError, InvariantError, UserCodeError
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSettings
from repl_rl.rollout.host_functions import (
    LIMIT_REACHED,
    HostCallSession,
    HostFunction,
    HostFunctions,
    HostLimits,
    HostModel,
    RecordedHostCalls,
    host_function,
    load_host_functions,
    matches_schema,
)
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.runs.replay import DifferenceCause, branch, get_branch_point, open_replay, verify_all
from repl_rl.runs.store import Store, write_step
from repl_rl.runs.store.trajectory_json import dump_record, parse_record
from repl_rl.sandbox import InProcessSandbox, Sandbox, open_sandbox
from repl_rl.settings.function_tables import OptionTable
from repl_rl.trajectory.trajectory import HostCall, Observed, Sampled, Stop, Trajectory
from tests.support.scripted_rollouts import RENDERER, TASK


def double(number: int, times: int = 2) -> int:
    """Multiply.

    Args:
        number: What to multiply.
        times: By what.
    """
    if number == 13:
        raise ValueError("unlucky " * 1000)
    return number * times


async def hangs(number: int) -> int:
    """Never answer.

    Args:
        number: Nothing.
    """
    await asyncio.Event().wait()
    return number


def ask(session: HostCallSession | RecordedHostCalls, name: str, *args: object, **kwargs: object) -> dict[str, object]:
    """What the console is told."""
    call = json.dumps({"name": name, "args": args, "kwargs": kwargs}).encode()
    told: dict[str, object] = json.loads(asyncio.run(session.answer_call(call)))
    return told


def one(limits: HostLimits | None = None) -> HostCallSession:
    return HostCallSession([host_function(double, limits)])


def test_a_function_is_described_by_its_hints_and_its_docstring() -> None:
    made = host_function(double)
    assert made.declaration == "double(number: int, times: int = 2) -> int: Multiply."


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((1,), {}, None), ((1, 3), {}, None), ((), {"number": 1}, None), ((), {"times": 1}, "needs number"),
        ((1, 2, 3), {}, "at most 2 arguments"), ((1,), {"number": 2}, "two values for 'number'"),
        ((1,), {"other": 2}, "no argument 'other'"), (("1",), {}, "must be of type integer"),
        ((True,), {}, "must be of type integer"), ((1.5,), {}, "must be of type integer"),
    ],
)  # fmt: skip
def test_arguments_are_held_to_the_signature(args: tuple[object, ...], kwargs: dict[str, object], said: str) -> None:
    told = ask(one(), "double", *args, **kwargs)
    assert said in str(told["error"]) if said else "answer" in told


def test_an_error_of_the_function_is_told_in_a_few_words_and_recorded() -> None:
    session = one()
    told = str(ask(session, "double", 13)["error"])
    assert told.startswith("ValueError: unlucky")
    assert len(told) < 600
    assert [(call.name, call.answer) for call in session.take_calls()] == [("double", None)]
    assert session.take_calls() == ()


def test_a_call_that_takes_too_long_is_given_up() -> None:
    session = HostCallSession([host_function(hangs, HostLimits(timeout_s=0.05))])
    assert ask(session, "hangs", 1)["error"] == "hangs() took longer than 0.05 s"


def test_calls_beyond_those_of_a_rollout_are_refused_and_a_flood_leaves_a_small_record() -> None:
    session = one(HostLimits(max_calls=3))

    async def flood() -> None:
        for i in range(10_000):
            await session.answer_call(json.dumps({"name": "double", "args": [i], "kwargs": {}}).encode())

    asyncio.run(flood())
    made = session.take_calls()
    assert [call.answer for call in made[:3]] == ["0", "2", "4"]
    assert len(made) <= 5
    assert all((call.error or "").endswith(LIMIT_REACHED) for call in made[3:])


def test_large_arguments_and_answers_are_refused() -> None:
    assert "at most 64 are allowed" in str(ask(one(HostLimits(max_argument_bytes=64)), "double", 10**70)["error"])
    assert "has 20 bytes as JSON" in str(ask(one(HostLimits(max_answer_bytes=10)), "double", 10**19, 1)["error"])


@given(st.binary(max_size=200))
def test_rubbish_is_refused_and_recorded(call: bytes) -> None:
    session = one()
    assert "error" in json.loads(asyncio.run(session.answer_call(call)))
    assert len(session.take_calls()) == 1


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5))
def test_a_value_fits_a_schema_without_a_type_and_only_its_own_type(value: object) -> None:
    kinds = ("string", "integer", "boolean", "array", "null")
    assert matches_schema(value, {})
    assert sum(matches_schema(value, {"type": kind}) for kind in kinds) == 1


def test_unions_choices_and_items_are_read() -> None:
    union: Mapping[str, object] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}
    assert [matches_schema(value, union) for value in ("x", [1], ["x"], 3)] == [True, True, False, False]
    choice: Mapping[str, object] = {"type": "string", "enum": ["a"], "nullable": True}
    assert [matches_schema(value, choice) for value in ("a", "b", None)] == [True, False, True]


def test_functions_are_named_with_options() -> None:
    query, own = load_host_functions(
        {"llm_query": {"train": True, "max_calls": 3}, "tests.integration.test_host:double": {"timeout_s": 2.5}}
    )
    assert (query.limits.max_calls, query.is_staged, own.limits.timeout_s) == (3, True, 2.5)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nothing", {}, "choose one of llm_query, rollout"),
        ("llm_query", {"depth": 1}, "its options are train"),
        ("tests.integration.test_host:ask", {}, "write type hints, and a docstring"),
        ("tests.integration.test_host:double", {"max_calls": 0}, "give at least 1"),
        ("tests.integration.test_host:TASK", {}, "name a function"),
        ("llm_query", {"max_tokens": 0}, "give at least 1"),
        ("llm_query", {"train": True, "model": "x"}, "only the policy can be trained"),
    ],
)
def test_what_cannot_be_offered_is_refused_by_name(name: str, options: Mapping[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_host_functions({name: options})


same_name = double


def test_two_functions_of_one_name_are_refused() -> None:
    doubles: OptionTable = {"tests.integration.test_host:double": {}, "tests.integration.test_host:same_name": {}}
    with pytest.raises(ConfigError, match="another function or the console has this name"):
        load_host_functions(doubles)


def rollouts(sandbox: Sandbox, lines: list[str], *functions: HostFunction) -> Rollouts:
    return Rollouts(
        replace(ScriptedEngine.from_text(lines, RENDERER.encode_as_sampled), forbidden_ids=RENDERER.forbidden_ids),
        sandbox,
        RENDERER,
        ReplSampler(),
        RolloutLimits(max_line_tokens=200),
        RolloutSettings("bare"),
        (HostFunctions(functions),),
    )


LINES = ["x = double(3)\n", "try: double(13)\n", "except HostError: x += 1\n", "\n", "submit_final_answer(x, x + 1)\n"]


async def played(sandbox: Sandbox, *functions: HostFunction, lines: list[str] = LINES) -> Trajectory:
    return (await rollouts(sandbox, lines, *functions).collect([TASK]))[0]


def test_a_rollout_calls_is_told_of_it_in_its_prompt_recorded_stored_replayed_and_branched() -> None:
    async def main() -> None:
        async with open_sandbox("unsafe", warm=0) as sandbox:
            t = await played(sandbox, host_function(double))
            assert "#   double(number: int, times: int = 2) -> int: Multiply." in t.prompt.text
            assert (t.answer, t.host_functions) == ("7, 8", ("double",))
            calls = [
                (call.name, json.loads(call.arguments)["args"], call.answer) for e in t.executions for call in e.calls
            ]
            assert calls == [("double", [3], "6"), ("double", [13], None)]
            assert parse_record(dump_record(CreditedTrajectory(t)), "here").trajectory == t
            assert (await verify_all([t], sandbox)).match_rate == 1.0
            await _differs(t, sandbox)
            await _branches(t, sandbox)

    asyncio.run(main())


async def _differs(t: Trajectory, sandbox: Sandbox) -> None:
    """A record that says another call than the line makes is told as a difference, though the line prints the same."""
    first = t.lines[0]
    assert first.execution is not None
    other = replace(first.execution.calls[0], arguments='{"args": [4], "kwargs": {}}')
    rest = t.segments[1:]
    changed = replace(first, execution=replace(first.execution, calls=(other,)))
    forged = replace(t, segments=(Sampled((changed,)), *rest))
    found = (await verify_all([forged], sandbox)).divergent
    assert [v.difference.cause for v in found if v.difference] == [DifferenceCause.HOST]
    async with open_replay(t, sandbox, 1) as replay:
        assert (await replay.run_typed("x")).result.text == "6\n"
        assert "answered from a record" in (await replay.run_typed("double(5)")).result.text


async def _branches(t: Trajectory, sandbox: Sandbox) -> None:
    lines = ["double(x)\n", "submit_final_answer(x)\n"]
    known = await branch(rollouts(sandbox, lines, host_function(double)), get_branch_point(t, 1), TASK, 1)
    absent = await branch(rollouts(sandbox, lines), get_branch_point(t, 1), TASK, 1)
    shown = [segment.text for b in (known, absent) if isinstance(segment := b.trajectories[0].segments[3], Observed)]
    assert shown[0] == "12\n>>> "
    assert "double() is known from a record only" in shown[1]
    assert [b.trajectories[0].answer for b in (known, absent)] == ["6", "6"]


def test_a_record_answers_calls_in_any_order_once_each() -> None:
    recall = RecordedHostCalls({"double": ""})
    recall.expect_calls([HostCall("double", json.dumps({"args": [n], "kwargs": {}}), str(2 * n)) for n in (1, 2)])
    assert [ask(recall, "double", n).get("answer") for n in (2, 1, 1)] == [4, 2, None]
    assert "called: double" in recall.difference


def test_a_sandbox_without_a_channel_is_refused_by_name() -> None:
    with pytest.raises(UserCodeError, match="use local, docker, gateway, nodes or unsafe"):
        asyncio.run(played(InProcessSandbox(), host_function(double)))


def test_a_call_has_an_answer_or_an_error_and_a_child_has_its_parents_id() -> None:
    with pytest.raises(InvariantError, match="an answer or an error"):
        HostCall("f", "{}", "1", "no")
    with pytest.raises(InvariantError, match="name the child"):
        HostCall("f", "{}", "1", trained=True)


def test_the_policy_is_asked_by_a_line_and_what_it_says_is_recorded_and_masked() -> None:
    async def main() -> None:
        async with open_sandbox("unsafe", warm=0) as sandbox:
            world = rollouts(
                sandbox, ["x = llm_query('hm')\n", "submit_final_answer(x)\n"], *load_host_functions({"llm_query": {}})
            )
            t = (await world.collect([TASK]))[0]
            (child,) = t.children
            assert (child.parent, child.prompt.text, child.stop) == (t.id, "hm\n", Stop.FINISHED)
            assert t.answer == child.lines[0].text.removesuffix("\n") == "x = llm_query('hm')"
            (call,) = (call for e in t.executions for call in e.calls)
            assert (call.child, call.trained) == (child.id, False)
            assert parse_record(dump_record(CreditedTrajectory(t)), "here").trajectory == t

    asyncio.run(main())


def test_another_model_is_asked_where_one_is_named() -> None:
    async def main() -> None:
        async with open_sandbox("unsafe", warm=0) as sandbox:
            lines = ["submit_final_answer(llm_query('hm'))\n"]
            world = rollouts(sandbox, lines)
            other = HostModel(ScriptedEngine.from_text(["hello\n"], RENDERER.encode_as_sampled), RENDERER)
            functions = HostFunctions(load_host_functions({"llm_query": {"model": "other"}}), {"other": other})
            t = (await replace(world, hooks=(functions,)).collect([TASK]))[0]
            assert t.answer == "hello"

    asyncio.run(main())


def test_a_rollout_within_a_rollout_has_a_console_of_its_own_and_ends_at_its_depth(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_sandbox("unsafe", warm=0) as sandbox:
            lines = ["try: y = rollout('again?')\n", "except NameError: y = 0\n", "\n", "submit_final_answer(y)\n"]
            world = replace(
                rollouts(sandbox, lines, *load_host_functions({"rollout": {"depth": 2}})),
                settings=RolloutSettings("bare", concurrency=1),
            )
            t = (await world.collect([TASK]))[0]
            (child,) = t.children
            (grandchild,) = child.children
            assert (grandchild.parent, grandchild.host_functions, t.host_functions) == (child.id, (), ("rollout",))
            assert (t.answer, child.answer, grandchild.answer) == ("0", "0", "0")
            assert (child.outcome, t.outcome is not None) == (None, True)
            store = Store(write_step(tmp_path, 1, [t]))
            assert [store[each.id].trajectory for each in (t, child, grandchild)] == [t, child, grandchild]
            assert (await verify_all([t, child], sandbox)).match_rate == 1.0

    asyncio.run(main())
