"""The memory plan of a run on this process's GPU: what it takes, or why it cannot begin. `memory` has the figures."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from transformers import PreTrainedModel

from repl_rl.engine import ENGINES, EngineKind, Opening, Transformers, Vllm
from repl_rl.engine.names import outline
from repl_rl.engine.options import Dtype, read_model_folder
from repl_rl.errors import ConfigError
from repl_rl.machine.launched import own_gpu, processes
from repl_rl.settings.named import Named
from repl_rl.tasks import Task
from repl_rl.trainer import choices, sharded
from repl_rl.trainer.apart import sampler_dtype
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.memory import GIB, PHASES, SHARE, Case, Gpu, Plan, Sampling, Shape, Update, planned, with_cache
from repl_rl.world import World

_BYTES: Mapping[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "auto": 2}
"""Of a number, on a GPU."""
_BLOCKWISE = 4 / 256
"""bitsandbytes keeps a float32 for each block of 256 numbers in 8 bits (arXiv 2110.02861)."""
_MOMENTS: Mapping[str, float] = {
    **dict.fromkeys(("adamw_torch_fused", "adamw_torch", "paged_adamw_32bit"), 8.0),
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit"), 2 * (1 + _BLOCKWISE)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), 4.0),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), 1 + _BLOCKWISE),
    "adafactor": 4.0,
    "sgd": 0.0,
    "rmsprop": 4.0,
}
"""Bytes for each number that is trained, without momentum. What is paged is counted too: it may leave the GPU."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a run, and the run in numbers."""

    case: Case
    plan: Plan
    """For rollouts as long as their limits allow."""
    tokens: int
    """Of a rollout, prompt included, up to which all of a step may be that long; those of the limits where it fits."""


_ASK = "import sys, torch; print(*torch.cuda.mem_get_info(int(sys.argv[1])))"


def this_gpu() -> Gpu | None:
    """Memory of the GPU that this process trains on; None: it has none.

    Another process asks: in this one CUDA would be at work from then on, and vLLM would start its process otherwise.

    Raises:
        ConfigError: there is one, and PyTorch cannot use it.
    """
    if not torch.cuda.is_available():
        return None
    command = [sys.executable, "-P", "-c", _ASK, str(own_gpu(torch.cuda.device_count()))]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        said = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError("GPU", said, "PyTorch cannot use it; see nvidia-smi, or hide it with CUDA_VISIBLE_DEVICES=")
    free, total = map(int, asked.stdout.split())
    return Gpu(total, free)


def plan_run(
    world: World,
    config: TrainerConfig,
    tasks: Sequence[Task],
    local: bool = True,
    gpu: Callable[[], Gpu | None] = this_gpu,
) -> Planned | None:
    """The memory plan of a run; None: it trains on a CPU, or shards its weights, of which nothing is planned.

    Args:
        world: the policy and what it acts in.
        config: settings of the update.
        tasks: those to train on; the longest question is looked for among them.
        local: whether this process samples.
        gpu: says what there is.

    Raises:
        ConfigError: it cannot fit, however short rollouts are; the remedy is the fewest settings with which it does.
    """
    there = gpu()
    if there is None or sharded.asked() or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return None
    context = read_model_folder(Opening(world.model_folder, world.context_tokens)).context_tokens
    question = max((task.question for task in tasks), key=len, default="")
    prompt = len(world.renderer().prompt(question, world.prompt).token_ids)
    case = case_of(world, config, context, min(context, prompt + world.rollout.most_tokens), local, there)
    _refuse_occupied(case)
    least = planned(_as_long(case, prompt))
    if not least.fits:
        remedy = f"the run takes {gib(least.peak)} of it {PHASES[least.needed.index(least.peak)]}, of which nothing is "
        remedy += f"that of long rollouts; {advice(case) or _advice_for(_as_long(case, prompt))}"
        raise ConfigError("free memory of the GPU", gib(there.free), remedy)
    return Planned(case, planned(case), fitting_tokens(case, prompt))


def fitting_tokens(case: Case, least: int) -> int:
    """How long all rollouts of a step may be, tokens, at most as long as `case` has them; `least` fits."""
    low, high = min(least, case.update.longest), case.update.longest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if planned(_as_long(case, middle)).fits else (low, middle - 1)
    return low


def _as_long(case: Case, longest: int) -> Case:
    return replace(case, update=replace(case.update, longest=longest))


def case_of(world: World, config: TrainerConfig, context: int, longest: int, local: bool, gpu: Gpu) -> Case:
    """A run in numbers. `context` and `longest`: tokens that the model takes, and that a rollout can have."""
    engine = ENGINES.chosen(world.engine)
    itemsize = _BYTES[sampler_dtype(config.dtype, world.dtype)]
    sampling = _sampling(engine, world, itemsize, context, longest, config.ahead > 0) if local else None
    return Case(shape_of(outline(world.model_folder).model), update_of(config, longest), sampling, gpu)


def _sampling(
    engine: EngineKind, world: World, itemsize: int, context: int, longest: int, beside: bool
) -> Sampling | None:
    if isinstance(engine, Vllm):
        cache = None if engine.kv_cache_gib is None else engine.kv_cache_gib * GIB
        return Sampling("vllm", world.concurrency, context, itemsize, cache, engine.sleep)
    if isinstance(engine, Transformers):
        return Sampling("transformers", world.concurrency, longest, itemsize, beside=beside)
    return None  # of somebody else's engine nothing is known


def update_of(config: TrainerConfig, longest: int) -> Update:
    """The update in numbers. `longest`: tokens of the longest rollout."""
    named = Named.read("trainer.optimizer", config.optimizer)
    momentum = 4.0 if named.options.get("momentum") else 0.0
    return Update(
        rows=config.share(processes())[0],
        longest=longest,
        itemsize=_BYTES[config.dtype],
        moments=_MOMENTS[named.name] + momentum,
        factored=named.name == "adafactor",
        lora_rank=config.lora_rank,
        reference=bool(choices.kl(config.kl)["beta"]),
        checkpointing=config.checkpointing,
        copies=processes() > 1,
    )


def shape_of(model: PreTrainedModel) -> Shape:
    """A model in numbers; its weights need not be there (the meta device)."""
    text = model.config.get_text_config()
    weights = list(model.parameters())
    words, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    matrices = sum(w.numel() for w in weights if w.dim() > 1)
    tied = head is not None and head.weight is words
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1))
    return Shape(
        weights=sum(w.numel() for w in weights),
        matrices=matrices if tied else matrices - words.numel(),
        adapted=sum(m.in_features + m.out_features for m in linear),
        edges=sum(w.numel() // w.size(-1) + w.numel() // w.size(-2) if w.dim() > 1 else w.numel() for w in weights),
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        inner=_inner(text),
        heads=heads,
        queries=heads * width,
        keys=int(getattr(text, "num_key_value_heads", None) or heads) * width,
        vocab=int(text.vocab_size),
        heads_normed=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        windows=tuple(_windows(text)),
        states=sum(map(_states, model.modules())),
    )


def _states(mixer: torch.nn.Module) -> int:
    """Numbers of a session's states in a mixer; 0 where it has none."""
    conv = getattr(mixer, "conv1d", None) or getattr(mixer, "conv", None)
    if not isinstance(conv, torch.nn.Conv1d):
        return 0
    parts: tuple[str, ...] = ()
    if hasattr(mixer, "head_v_dim"):  # linear attention
        parts = ("num_v_heads", "head_k_dim", "head_v_dim")
    elif hasattr(mixer, "ssm_state_size"):  # Mamba
        parts = ("intermediate_size", "ssm_state_size")
    recurrent = math.prod(int(getattr(mixer, part)) for part in parts) if parts else 0
    return conv.in_channels * conv.kernel_size[0] + recurrent


def _inner(text: object) -> int:
    """Width of the MLPs that a token meets in a layer."""
    each = getattr(text, "moe_intermediate_size", None)
    met = getattr(text, "num_experts_per_tok", None)
    plain = int(getattr(text, "intermediate_size", None) or 4 * int(getattr(text, "hidden_size", 0)))
    if not met:
        return plain
    beside = getattr(text, "shared_expert_intermediate_size", None)
    shared = int(beside or int(getattr(text, "n_shared_experts", None) or 0) * int(each or plain))
    return max(int(met) * int(each or plain) + shared, plain if each else 0)


def _windows(text: object) -> Iterator[int | None]:
    window = getattr(text, "sliding_window", None)
    for kind in getattr(text, "layer_types", None) or ():
        if kind == "sliding_attention" and window:
            yield int(window)
        else:
            yield None if kind == "hybrid" or ("attention" in kind and "linear" not in kind) else 0


def _refuse_occupied(case: Case) -> None:
    given, gpu = case.sampling, case.gpu
    if given is not None and given.engine == "vllm" and gpu.free < SHARE * gpu.total:
        remedy = f"vLLM starts only where {SHARE:.0%} of {gib(gpu.total)} are free; end what else runs there, "
        raise ConfigError("free memory of the GPU", gib(gpu.free), f"{remedy}or choose --engine transformers")


Change = tuple[str, Case]
"""The option that makes it, and the run with it."""


def advice(case: Case) -> str:
    """The fewest settings with which `case` would fit, as options of `repl-rl train`; "": there are none."""
    for count in range(len(_CHANGES) + 1):
        for chosen in combinations(_CHANGES, count):
            for words, changed in _applied(case, chosen):
                fitting = with_cache(changed)
                if planned(fitting).fits:
                    return f"it fits with {' '.join([*words, *_cache_words(changed, fitting)])}"
    return ""


def _advice_for(short: Case) -> str:
    told = advice(short)
    if told:
        return f"{told}, as long as its rollouts are short"
    return "no setting makes it fit; choose a smaller model, or a GPU with more memory"


def _applied(case: Case, chosen: Sequence[Callable[[Case], Iterator[Change]]]) -> Iterator[tuple[list[str], Case]]:
    """`case` with those changes; one that can be made in several ways is made in each."""
    if not chosen:
        yield [], case
        return
    for word, changed in chosen[0](case):
        for words, last in _applied(changed, chosen[1:]):
            yield [word, *words], last


def _cache_words(before: Case, after: Case) -> list[str]:
    if before == after or after.sampling is None or after.sampling.cache is None:
        return []
    return [f"--vllm.kv-cache-gib {after.sampling.cache // GIB}"]


def _asleep(case: Case) -> Iterator[Change]:
    if case.sampling is not None and case.sampling.engine == "vllm" and not case.sampling.sleep:
        yield "--vllm.sleep", replace(case, sampling=replace(case.sampling, sleep=True))


def _in_parts(case: Case) -> Iterator[Change]:
    rows = case.update.rows
    for part in range(rows - 1, 0, -1):
        if rows % part == 0:
            yield f"--trainer.micro-batch {part}", replace(case, update=replace(case.update, rows=part))


def _checkpointed(case: Case) -> Iterator[Change]:
    if not case.update.checkpointing:
        yield "--trainer.checkpointing", replace(case, update=replace(case.update, checkpointing=True))


def _low(case: Case) -> Iterator[Change]:
    if case.update.itemsize > 2:
        yield "--trainer.dtype bfloat16", replace(case, update=replace(case.update, itemsize=2))


def _adapted(case: Case) -> Iterator[Change]:
    if not case.update.lora_rank:
        yield "--trainer.lora-rank 16", replace(case, update=replace(case.update, lora_rank=16))


_CHANGES = (_asleep, _in_parts, _checkpointed, _low, _adapted)
"""In the order in which they are better than another."""


def gib(size: int) -> str:
    """Bytes, told in GiB."""
    return f"{size / GIB:.1f} GiB"
