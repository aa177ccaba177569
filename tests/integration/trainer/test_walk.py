"""docs/design.md walks one line from the sampler to its gradient: here the line itself does."""

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import repl_rl
from repl_rl.engine import ScriptedEngine
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSettings
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.trainer.config import TrainerConfig
from tests.support.documents import PAGES
from tests.support.scripted_rollouts import RENDERER, TASK
from tests.support.trainer.grpo_runs import make, run
from tests.support.trainer.tiny_policies import ReplayedSource, tiny_model

PACKAGE = Path(repl_rl.__file__).parent
Function = tuple[str, str]
"""A file of the package, and the name of a function in it."""


DEPRECATIONS = {"deprecations/__init__.py"}
"""Old names, which are gone in 0.5.0."""
PLAIN_ROLLOUT = {
    "engine/base.py",
    "engine/scripted_engine.py",
    "judges/apply_judges.py",
    "rollout/concurrent_rollouts.py",
    "rollout/episode.py",
    "rollout/sampler_base.py",
    "rollout/token_renderer.py",
    "sandbox/base.py",
    "sandbox/inprocess.py",
    "tasks/task.py",
    "trajectory/console_text.py",
    "trajectory/trajectory.py",
    "trajectory/trajectory_builder.py",
}
"""Files that a rollout enters where each optional feature is off. A name may be taken out, and none added."""
PLAIN_UPDATE = {
    "credit/advantage_estimators.py",
    "credit/credit_metrics.py",
    "credit/rewards.py",
    "models/parameter_names.py",
    "trainer/forward_pass.py",
    "trainer/collect_groups.py",
    "trainer/grpo.py",
    "trainer/importance_sampling.py",
    "trainer/logprobs.py",
    "trainer/weight_sync.py",
}
"""Files that the update enters in addition, where each optional feature is off. None may be added."""


def is_importing(frame: FrameType) -> bool:
    """Return True during an import, which asks our finder of user modules if an earlier test installed it."""
    back: FrameType | None = frame
    while back is not None and back.f_code.co_filename != "<frozen importlib._bootstrap>":
        back = back.f_back
    return back is not None


@contextmanager
def entered() -> Iterator[list[Function]]:
    """The functions of the package in the order in which they are first entered, in this thread."""
    found: dict[Function, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            function = (path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname)
            if function not in found and not is_importing(frame):
                found[function] = None

    order: list[Function] = []
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield order
    finally:
        sys.setprofile(before)
        order.extend(found)


def plain_rollouts(script: str) -> Rollouts:
    """Rollouts without hooks, whose policy writes `script`."""
    engine = ScriptedEngine.from_text([script], RENDERER.encode_as_sampled)
    return Rollouts(
        replace(engine, forbidden_ids=RENDERER.forbidden_ids),
        InProcessSandbox(),
        RENDERER,
        ReplSampler(),
        RolloutLimits(max_line_tokens=200),
        RolloutSettings("bare"),
    )


def test_a_line_enters_the_functions_that_the_page_names_in_its_order(tmp_path: Path) -> None:
    section = (
        PAGES["docs/design.md"].partition("## One line, from the sampler to its gradient")[2].partition("\n## ")[0]
    )
    page = [(file, name) for file, name in re.findall(r"`([\w/]+\.py)`,\s+`([\w.]+)`", section)]
    rollouts = plain_rollouts("print(6*7)\nsubmit_final_answer(42)\n")
    with entered() as sampling:
        played = asyncio.run(rollouts.collect([TASK] * 4))
    assert played[0].lines[0].text == "print(6*7)\n"
    config = TrainerConfig(
        steps=1, prompts_per_step=1, group_size=4, warmup_steps=0, importance_sampling="token_truncate(tolerance=99.0)"
    )
    trainer = make(tiny_model(vocab=500), ReplayedSource([played]), config, tmp_path, [TASK.id])
    with entered() as learning:
        run(trainer)
    walked = list(dict.fromkeys([*sampling, *learning]))
    assert {file for file, _ in walked} - DEPRECATIONS == PLAIN_ROLLOUT | PLAIN_UPDATE
    assert len(page) > 15
    assert [step for step in walked if step in page] == list(dict.fromkeys(page))


def test_a_rollout_without_hooks_enters_no_file_of_an_optional_feature() -> None:
    rollouts = plain_rollouts("submit_final_answer(42)\n")
    with entered() as functions:
        played = asyncio.run(rollouts.collect([TASK] * 4))
    assert [t.outcome for t in played] == [1.0] * 4
    assert {file for file, _ in functions} - DEPRECATIONS == PLAIN_ROLLOUT
