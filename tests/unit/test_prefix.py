"""Invariant I5 at scale: every engine request is a prefix of the final ids, whatever the tokenizer's newline habits."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from repl_rl.engine import ScriptedEngine
from repl_rl.engine.base import Chunk, EngineSession, Watch
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSettings
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.tokenizers import TOKENIZERS

_FRAGMENTS = [
    "x = 1\n", "x\n", "print('a b')\n", "1/0\n", "if x:\n", "    x\n", "\n", "\n\n", "def f(y):\n", "    return y\n\n",
    "# a thought\n", "'é€'\n", "print('<|im_end|>')\n", "y = [1,\n", "2]\n", "x =\n", "print(1, end='')\n",
]  # fmt: skip


class Auditor:
    """Wraps an engine and remembers the ids of every request."""

    def __init__(self, inner: ScriptedEngine) -> None:
        self.inner = inner
        self.requests: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self.name, self.policy_step, self.context_tokens = "auditor", 0, inner.context_tokens
        self.seeds_sessions, self.fallback_reason = True, None
        self.forbidden_ids = inner.forbidden_ids
        self.seen: list[list[tuple[int, ...]]] = []

    def session(self, prompt_ids: Sequence[int], sampling: object) -> "AuditedSession":
        return AuditedSession(self, prompt_ids, sampling)


class AuditedSession:
    def __init__(self, auditor: Auditor, prompt_ids: Sequence[int], sampling: object) -> None:
        self.requests: list[tuple[int, ...]] = []
        auditor.seen.append(self.requests)
        self._opened = auditor.inner.session(prompt_ids, sampling)  # type: ignore[arg-type]

    async def __aenter__(self) -> "AuditedSession":
        self._session: EngineSession = await self._opened.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._opened.__aexit__(None, None, None)

    @property
    def ids(self) -> Sequence[int]:
        return self._session.ids

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        self.requests.append((*self._session.ids, *observed))
        return await self._session.sample(observed, max_tokens=max_tokens, stop_ids=stop_ids, watch=watch)


def noisy_policy(renderer: Renderer, seed: int) -> list[list[int]]:
    """Scripts that tokenise lines in ways the tokenizer itself would not: cut at random places."""
    draw = random.Random(seed)
    scripts = []
    for _ in range(64):
        ids: list[int] = []
        for _ in range(60):
            text = draw.choice(_FRAGMENTS)
            cut = draw.randrange(len(text))
            ids += (*renderer.encode(text[:cut]), *renderer.encode(text[cut:]))
        scripts.append(ids)
    return scripts


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_no_request_differs_from_the_record_over_thousands_of_lines(name: str) -> None:
    renderer = Renderer(TOKENIZERS[name](), "carry")
    auditor = Auditor(ScriptedEngine(noisy_policy(renderer, 7)))
    limits = RolloutLimits(max_lines=40, max_line_tokens=200)
    settings = RolloutSettings("bare")
    rollouts = Rollouts(auditor, InProcessSandbox(), renderer, ReplSampler(), limits, settings)  # type: ignore[arg-type]
    tasks = [Task(str(i), f"task {i}", "0") for i in range(100)]

    trajectories = asyncio.run(rollouts.collect(tasks))

    by_prompt = {requests[0]: requests for requests in auditor.seen}
    violations = sum(_violations(t, by_prompt[t.prompt.token_ids]) for t in trajectories)
    assert violations == 0
    assert sum(len(t.lines) for t in trajectories) >= 3_400
    for t in trajectories:
        caption = "".join(line.text for line in t.lines)
        ids = [i for line in t.lines for i in line.token_ids]
        assert renderer.decode(ids) == caption or name == "sentencepiece"


def _violations(t: Trajectory, requests: list[tuple[int, ...]]) -> int:
    final = (*t.prompt.token_ids, *t.completion_ids)
    return sum(request != final[: len(request)] for request in requests)
