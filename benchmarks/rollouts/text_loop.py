"""Loop of TRL's issue 2723: text in, one `LLM.generate` per line with `stop="\\n"`, run the lines, send longer texts.

It needs a separate vLLM with our arguments, because our engine has no tokenizer and `LLM` cannot share it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from vllm import LLM, SamplingParams

from benchmarks.rollouts.baselines import QUESTION, Stage, Way
from repl_rl.engine.backend_configs import Vllm
from repl_rl.engine.config import EngineOptions, read_model_folder
from repl_rl.engine.vllm_engine import build_process_environment, build_vllm_arguments
from repl_rl.engine.vllm_subprocess import open_socket_folder, set_environment
from repl_rl.trajectory.console_text import choose_prompt


@asynccontextmanager
async def text_loop(opening: EngineOptions, options: Vllm) -> AsyncIterator[Way]:
    """Start vLLM's `LLM` on a model, and yield the contender that uses it."""
    with open_socket_folder() as variables:
        llm = await asyncio.to_thread(_start, opening, options, variables)
        try:
            yield lambda stage: _play(llm, stage)
        finally:
            await asyncio.to_thread(llm.llm_engine.engine_core.shutdown)


def _start(opening: EngineOptions, options: Vllm, variables: Mapping[str, str]) -> LLM:
    with set_environment({**build_process_environment(options), **variables}):
        given = build_vllm_arguments(opening, read_model_folder(opening), options)
        return LLM(**given | {"skip_tokenizer_init": False})


async def _play(llm: LLM, stage: Stage) -> int:
    lengths = stage.plan.lengths()
    texts = [stage.renderer.build_prompt(QUESTION, "bare").text] * len(lengths)
    sampled = 0
    async with AsyncExitStack() as stack:
        consoles = [await stack.enter_async_context(stage.sandbox.session()) for _ in lengths]
        # One turn: all rollouts sample a line, then all consoles run it.
        for line in zip(*lengths, strict=True):
            parameters = [
                SamplingParams(max_tokens=most, stop="\n", temperature=1.0, logprobs=0, ignore_eos=True)
                for most in line
            ]
            outputs = await asyncio.to_thread(llm.generate, texts, parameters, use_tqdm=False)
            written = [output.outputs[0] for output in outputs]
            codes = [stage.renderer.decode(part.token_ids).rstrip("\n") for part in written]
            results = await asyncio.gather(*(c.push(code) for c, code in zip(consoles, codes, strict=True)))
            shown = [result.text + choose_prompt(result.incomplete) for result in results]
            texts = [f"{t}{part.text}\n{seen}" for t, part, seen in zip(texts, written, shown, strict=True)]
            sampled += sum(len(part.token_ids) for part in written)
    return sampled
