"""Tool loop of TRL's GRPOTrainer with one Python tool, on transformers' generation.

TRL's own vLLM mode does not run on CPU: its weight sync raises `'Parameter' object has no attribute 'weight_loader'`.
Every completion counts as a call of the tool, which runs a line in its rollout's console. All lines of a turn have the
mean length of ours, because TRL's generation has one length for the whole batch.
"""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from benchmarks.rollouts.baselines import QUESTION, Stage
from benchmarks.rollouts.forced_lengths import LONGEST, SHORTEST, Plan
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.base import SandboxSession
from repl_rl.utils.hardware import count_cores

LENGTH = (SHORTEST + LONGEST) // 2
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['tool_calls'] %}{{ m['tool_calls'] }}{% endif %}"
    "{% if m['role'] == 'tool' %}>>> {% endif %}{% endfor %}"
)
"""Smallest template that TRL accepts. It renders calls, which the sampled ids replace, and tool outputs unchanged."""


class TrlLoop:
    """TRL's trainer on the policy in a folder, with the tool, and a parser that turns sampled ids into a call of it."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._trainer = _trainer(folder, plan, self)
        self._consoles: Sequence[SandboxSession] = ()
        self._next: Iterator[int] = iter(())
        self._renderer: Renderer | None = None
        self._sampled = 0

    async def __call__(self, stage: Stage) -> int:
        """Play the plan as a contender. The last line of each rollout is not run, because no turn follows it."""
        self._loop = asyncio.get_running_loop()
        self._sampled, self._renderer = 0, stage.renderer
        self._trainer.max_tool_calling_iterations = stage.plan.lines - 1
        # TRL gives no rollout number to the parser, so count completions in their order.
        self._next = itertools.cycle(range(stage.plan.rollouts))
        async with AsyncExitStack() as stack:
            rollouts = range(stage.plan.rollouts)
            self._consoles = [await stack.enter_async_context(stage.sandbox.session()) for _ in rollouts]
            await asyncio.to_thread(_generate, self._trainer, stage.plan.rollouts)
        return self._sampled

    def python(self, console: int, line: str) -> str:
        """Runs a line of Python.

        Args:
            console: Number of the console.
            line: The line.
        """
        return asyncio.run_coroutine_threadsafe(self._run(console, line), self._loop).result()

    async def _run(self, console: int, line: str) -> str:
        return (await self._consoles[console].push(line)).text

    def parse_response(self, ids: Sequence[int], **_more: object) -> dict[str, object]:
        """Return the message of the sampled `ids`, as TRL expects it from a tokenizer.

        Calls come in the order of the rollouts.
        """
        assert self._renderer is not None
        self._sampled += len(ids)
        call = {"console": next(self._next), "line": self._renderer.decode(ids).rstrip("\n")}
        function = {"name": "python", "arguments": call}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _generate(trainer: GRPOTrainer, rollouts: int) -> None:
    # Generate on all cores, and restore the number of threads afterwards.
    threads = torch.get_num_threads()
    torch.set_num_threads(count_cores())
    trainer._sync_tool_dicts = [{"python": trainer.tools[0]}] * rollouts
    trainer._async_tool_dicts = [{}] * rollouts
    try:
        trainer._generate([[{"role": "user", "content": QUESTION + "\n>>> "}]] * rollouts)
    finally:
        torch.set_num_threads(threads)


def _trainer(folder: Path, plan: Plan, tools: TrlLoop) -> GRPOTrainer:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = {"forced": True}
    tokenizer.parse_response = tools.parse_response
    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_completion_length=plan.lines * 3 * LONGEST,
        num_generations=plan.rollouts,
        per_device_train_batch_size=plan.rollouts,
        report_to="none",
        bf16=False,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=[lambda **_: [0.0] * plan.rollouts],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": QUESTION}]]}),
        processing_class=tokenizer,
        tools=[tools.python],
    )
    trainer.generation_config.max_new_tokens = trainer.generation_config.min_new_tokens = LENGTH
    trainer.model.eval()
    return trainer
