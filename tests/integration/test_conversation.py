"""Several questions in one console: ids are only appended, names stay bound, and each question has its own answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError
from repl_rl.rollout import Rollouts
from repl_rl.rollout.host_functions import HostFunctions, load_host_functions
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.samplers.retry_with_feedback_sampler import FeedbackSampler
from repl_rl.sandbox import InProcessSandbox, SandboxSession, open_sandbox
from repl_rl.sandbox.base import SupportsContinue
from repl_rl.serve.conversation import (
    Conversation,
    build_follow_up_prompt,
    build_turn_prompt,
    join_completion_text,
    validate_multi_turn,
)
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Line, LineStatus, Observed, Prompt, Stop, Trajectory
from repl_rl.trajectory.trajectory_builder import UNFOLLOWED, RolloutObserver
from tests.support.samplers.marked_text import chat_renderer
from tests.support.sandbox.docker import needs_docker
from tests.support.scripted_rollouts import RENDERER, TASK, world

LIMITS = RolloutLimits(max_line_tokens=200)


def writing(*lines: str) -> Rollouts:
    """Rollouts of a policy that writes these lines one after the other, whoever asks."""
    pieces = iter([RENDERER.encode_as_sampled(line) for line in lines])
    engine = ScriptedEngine.from_policy(lambda ids: next(pieces), forbidden_ids=RENDERER.forbidden_ids)
    return replace(world([]), engine=engine)


async def asked(
    conversation: Conversation, rollouts: Rollouts, question: str, followed: RolloutObserver = UNFOLLOWED
) -> Trajectory:
    """A turn of a conversation, its first or a later one."""
    task = Task("turn", question, "")
    return await conversation.play_turn(task, build_turn_prompt(conversation, rollouts, task), 0, 0.0, followed)


def test_a_turn_that_is_followed_is_the_rollout_that_nobody_follows() -> None:
    async def main() -> None:
        rollouts = world(["x = 6\n", "x * 7\n", "submit_final_answer(_)\n"])
        (alone,) = await rollouts.collect([TASK], 0.0)
        conversation = Conversation(rollouts, keep=False)
        turn = await conversation.play_turn(TASK, rollouts.build_prompt(TASK), 0, 0.0, UNFOLLOWED)
        assert turn.prompt == alone.prompt
        assert turn.completion_ids == alone.completion_ids
        assert turn.loss_mask == alone.loss_mask
        assert (alone.outcome, turn.outcome) == (1.0, None)
        assert not conversation.open

    asyncio.run(main())


def test_whoever_follows_is_told_the_whole_record_in_its_order() -> None:
    async def main() -> None:
        heard: list[Line | Observed] = []
        rollouts = world(["x = 6\n", "x\n", "submit_final_answer(x)\n"])
        followed = RolloutObserver(heard.append)
        turn = await Conversation(rollouts, keep=False).play_turn(TASK, rollouts.build_prompt(TASK), 0, 0.0, followed)
        new = [item for item in heard if isinstance(item, Observed) or item.execution is None]
        assert (
            "".join(item.text for item in new)
            == join_completion_text(turn)
            == "x = 6\n>>> x\n6\n>>> submit_final_answer(x)\n"
        )
        ran = [item for item in heard if isinstance(item, Line) and item.execution is not None]
        assert tuple(ran) == turn.lines

    asyncio.run(main())


@pytest.mark.parametrize("most", [1, 7, 9, 26])
def test_no_more_ids_are_sampled_than_were_asked_for(most: int) -> None:
    async def main() -> None:
        rollouts = world(["x = 61234567\n", "print(x)\n", "y = 1\n", "submit_final_answer(x)\n"])
        (free,) = await rollouts.collect([TASK], 0.0)
        turn = await Conversation(rollouts, keep=False).play_turn(
            TASK, rollouts.build_prompt(TASK), 0, 0.0, RolloutObserver(max_tokens=most)
        )
        assert turn.sampled_tokens == most < free.sampled_tokens
        assert turn.stop in (Stop.MAX_TOKENS, Stop.LINE_TOO_LONG)
        assert free.completion_ids[: len(turn.completion_ids)] == turn.completion_ids

    asyncio.run(main())


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    async def main() -> None:
        rollouts = world(["x = 6\n", "submit_final_answer(x)\n"])
        (free,) = await rollouts.collect([TASK], 0.0)
        followed = RolloutObserver(max_tokens=free.sampled_tokens)
        turn = await Conversation(rollouts, keep=False).play_turn(TASK, rollouts.build_prompt(TASK), 0, 0.0, followed)
        assert (turn.completion_ids, turn.stop) == (free.completion_ids, Stop.ANSWERED)

    asyncio.run(main())


def test_the_second_question_finds_the_names_of_the_first_and_has_an_answer_of_its_own() -> None:
    async def main() -> None:
        rollouts = writing("x = 6\n", "submit_final_answer(x)\n", "submit_final_answer(x * 7)\n")
        conversation = Conversation(rollouts, keep=True)
        first = await asked(conversation, rollouts, "Six?")
        assert conversation.open
        second = await asked(conversation, rollouts, "Times seven?")
        assert (first.answer, second.answer) == ("6", "42")
        assert second.prompt.token_ids[: len(first.prompt.token_ids)] == first.prompt.token_ids
        before = (*first.prompt.token_ids, *first.completion_ids)
        assert second.prompt.token_ids[: len(before)] == before
        assert second.prompt.text == "Six?\n>>> x = 6\n>>> submit_final_answer(x)\nTimes seven?\n>>> "
        await conversation.aclose()

    asyncio.run(main())


def test_a_turn_that_is_not_kept_leaves_nothing_to_go_on_with() -> None:
    async def main() -> None:
        rollouts = world(["x = 1\n", "exit()\n"])
        kept = Conversation(rollouts, keep=True)
        assert (await asked(kept, rollouts, "?")).stop is Stop.EXITED
        assert not kept.open
        await kept.aclose()

    asyncio.run(main())


def test_a_console_within_a_cell_is_not_gone_on_with() -> None:
    async def main() -> None:
        rollouts = replace(world(["if 1:\n"] * 9), limits=replace(LIMITS, max_lines=1))
        conversation = Conversation(rollouts, keep=True)
        turn = await asked(conversation, rollouts, "?")
        assert (turn.stop, turn.lines[-1].execution and turn.lines[-1].execution.status) == (
            Stop.MAX_LINES,
            LineStatus.INCOMPLETE,
        )
        assert not conversation.open
        await conversation.aclose()

    asyncio.run(main())


def test_functions_of_the_host_and_a_kept_console_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="a console that is kept can call none"):
        Conversation(replace(world([]), hooks=(HostFunctions(load_host_functions({"llm_query": {}})),)), keep=True)


def test_a_further_question_in_a_chat_is_the_users_next_message() -> None:
    renderer = chat_renderer()
    first = renderer.build_prompt("Six?", "chat", "3")
    so_far = Prompt(first.text + "submit_final_answer(6)\n", (*first.token_ids, *renderer.encode_as_sampled("6\n")))
    more = build_follow_up_prompt(renderer, "chat", "And seven?", "3", so_far)
    assert more.token_ids[0] == renderer.end_id
    assert "And seven?" in more.text
    assert more.text.endswith(">>> ")
    assert "Python console" not in more.text, "the system message was said before"
    ended = Prompt(so_far.text, (*so_far.token_ids, renderer.end_id))
    assert build_follow_up_prompt(renderer, "chat", "And seven?", "3", ended).token_ids == more.token_ids[1:]


def test_samplers_that_are_no_line_console_are_refused_for_conversations() -> None:
    with pytest.raises(ConfigError, match="FeedbackSampler"):
        validate_multi_turn(FeedbackSampler())


@asynccontextmanager
async def console(kind: str) -> AsyncIterator[SandboxSession]:
    if kind == "inprocess":
        async with InProcessSandbox().session() as session:
            yield session
        return
    async with open_sandbox(kind, warm=1) as sandbox, sandbox.session() as session:
        yield session


@pytest.mark.parametrize("kind", ["local", "unsafe", "inprocess", pytest.param("docker", marks=needs_docker)])
def test_a_console_goes_on_after_an_answer_and_forgets_it(kind: str) -> None:
    async def main() -> None:
        async with console(kind) as session:
            await session.push("x = 6")
            assert isinstance(session, SupportsContinue)
            assert (await session.push("submit_final_answer(x)")).answer == "6"
            with pytest.raises(ConfigError, match="ended"):
                await session.push("x")
            session.continue_after_answer()
            between = await session.push("x + 1")
            assert (between.text, between.answer, between.status) == ("7\n", None, LineStatus.OK)
            assert (await session.push("submit_final_answer('other')")).answer == "other"
            session.continue_after_answer()
            await session.push("exit()")
            with pytest.raises(ConfigError, match="only an answer"):
                session.continue_after_answer()

    asyncio.run(main())
