"""Conformance suite for samplers: checks that every sampler has to pass. `check(sampler)` returns a table.

A scripted policy writes the sampler's `rehearsals`, and texts that no protocol expects. Consoles run in this process,
so a rehearsal must not write code that you would not run yourself.
"""

import asyncio
import sys
import threading
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from repl_rl.machine.assets import asset
from repl_rl.machine.threads import InThread
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.sampler import RolloutSampler
from repl_rl.samplers.conformance.checks import CHECKS, Bench, Check

__all__ = ["CHECKS", "Bench", "Check", "Row", "check"]

TIMEOUT_S = 30.0

_CHAT_TEMPLATE = """
{%- if tools %}system: call with <tool_call>{"name": ..., "arguments": ...}</tool_call>:
{%- for tool in tools %} {{ tool | tojson }}{% endfor %}{{ eos_token }}
{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments
| tojson }}}</tool_call>{% endfor %}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    passed: bool
    detail: str = ""


def check(
    sampler: RolloutSampler,
    renderer: Renderer | None = None,
    template: str = "bare",
    timeout_s: float = TIMEOUT_S,
    only: Sequence[str] = (),
) -> list[Row]:
    """Run the checks on `sampler`, with a new event loop per check.

    Args:
        sampler: sampler under test.
        renderer: tokenizer and chat format of its prompts. None means the bundled policy's, with a plain chat template.
        template: prompt template, see `Renderer.prompt`.
        timeout_s: wall clock of one check, seconds. A sampler that blocks its thread for that long is abandoned, and
            the remaining checks are skipped.
        only: names of checks, as in `CHECKS`; an empty sequence means all.

    Raises:
        ConfigError: the sampler does not fit the tokenizer or its chat template.
    """
    bench = Bench(sampler, renderer or _bundled(), template)
    # Before any timeout starts, because it may import slow packages.
    sampler.check_policy(bench.renderer, template)
    rows = []
    for each in (each for each in CHECKS if not only or each.__name__ in only):
        row, finished = _run(each, bench, timeout_s)
        rows.append(row)
        # The abandoned thread could disturb later checks.
        if not finished:
            break
    return rows


def _bundled() -> Renderer:
    renderer = Renderer.from_folder(asset("policies/quickstart"))
    renderer.tokenizer.chat_template = renderer.tokenizer.chat_template or _CHAT_TEMPLATE
    return renderer


def _run(each: Check, bench: Bench, timeout_s: float) -> tuple[Row, bool]:
    """Return the row of one check, and True if the check has finished."""
    name = each.__name__.replace("_", " ")
    # In a thread, because a sampler may block its thread forever.
    thread = InThread(lambda: _in_new_loop(each(bench)), name)
    thread.join(timeout_s)
    if not thread.outcome.done():
        return Row(name, False, f"it blocks its thread, or swallows its cancellation: {_where(thread)}"), False
    error = thread.outcome.exception()
    problem = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return Row(name, error is None, problem if error else ""), True


def _in_new_loop(work: Coroutine[None, None, None]) -> None:
    """Run `work` like `asyncio.run`, but do not wait for tasks that ignore their cancellation."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


def _where(thread: threading.Thread) -> str:
    """Return the line that a thread executes, outside of asyncio and threading."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack: Sequence[traceback.FrameSummary] = traceback.extract_stack(frame) if frame else ()
    own = [f for f in stack if "asyncio" not in f.filename and "threading" not in f.filename]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else "nowhere to be seen"
