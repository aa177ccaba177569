"""Trains, scores and samples on a device: `python -m tests.support.trainer.device_cases cpu|pretend:0 CASE ...`.

Prints, as JSON, the numbers that each case comes to.
"""

import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from repl_rl.engine.transformers_engine import Decoder, DecodeRow
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.logprobs import ScoringBatch
from repl_rl.trainer.plugins.prefix_sharing import PrefixSharing
from repl_rl.trainer.train import TrainingOptions, run_training
from tests.support.fake_gpu import NAME, pretending
from tests.support.trainer.grpo_runs import TASKS, batch
from tests.support.trainer.prefix_trees import TaskTextSource, forest, make_scorer, padded
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

CONFIG = TrainerConfig(
    steps=2, prompts_per_step=2, group_size=3, warmup_steps=0, learning_rate=0.002, save_steps=1
)  # fmt: skip


def trained(
    out: Path, device: torch.device, config: TrainerConfig = CONFIG, kind: type[SampledSource] = SampledSource
) -> list[float]:
    """The weights after two steps; the source samples on the CPU, as another process would."""
    start = tiny_model()
    source = kind(copy.deepcopy(start), forbidden_ids=frozenset({60}))
    final = run_training(start, tiny_tokenizer(), TASKS, source, config, out, TrainingOptions(warn=sys.exit))
    assert next(start.parameters()).device == device, "it was trained elsewhere"
    return [float(weight.double().sum()) for _, weight in sorted(load_file(final / "model.safetensors").items())]


def scored(_: Path, device: torch.device, dtype: torch.dtype, shared: bool = False) -> list[float]:
    """Log probabilities, and the gradients' sums; in bfloat16 their lengths, since a sum is mostly rounding there."""
    model = tiny_model().to(device, dtype)
    sharing = PrefixSharing(sys.exit) if shared else None
    if sharing is not None:
        sharing.install_attention(model)
    fast = make_scorer(model, 200 if shared else 16, sharing)
    made = padded(forest(0), 24) if shared else batch([(2, 3), (4, 1), (1, 4)], 0)
    ids, attention, sampled = (one.to(device) for one in made)
    step = ScoringBatch(ids, attention, sampled, sampled.any(dim=1))
    fast.score_step(model, step, keep_graph=False)
    scores = fast.rescore(model, step, torch.arange(len(ids), device=device), with_graph=False).logprobs
    assert sharing is None or sharing.stats.shared_tokens
    torch.autograd.backward([scores.sum()])
    gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
    told = [float(one.sum() if dtype == torch.float32 else one.norm()) for one in gradients]
    return [*scores.detach().flatten().tolist(), *told]


def sampled(out: Path, device: torch.device) -> list[float]:
    """Ids and log probabilities that the engine draws; one session has a stream of its own."""
    tiny_model().save_pretrained(out)
    decoder = Decoder(out, "float32", 0, frozenset({60}), device)
    rows = [
        DecodeRow(decoder.kv_cache.allocate_slot(), [5, 9, 11], 0, 1.0, decoder.make_generator(3)),
        DecodeRow(decoder.kv_cache.allocate_slot(), [7], 0, 0.0, None),
    ]
    drawn = decoder.step(rows)
    return [number for draw in drawn for number in (float(draw.token_id), draw.logprob)]


CASES: Mapping[str, Callable[[Path, torch.device], list[float]]] = {
    "fast": trained,
    "trl": partial(trained, config=replace(CONFIG, fast_logprobs=False)),
    "adapters": partial(trained, config=replace(CONFIG, lora_rank=4)),
    "reference": partial(trained, config=replace(CONFIG, kl="k3(beta=0.1)")),
    "masked": partial(trained, config=replace(CONFIG, importance_sampling="token_mask", num_iterations=2)),
    "checkpointed": partial(trained, config=replace(CONFIG, gradient_checkpointing=True)),
    "float32": partial(scored, dtype=torch.float32),
    "bfloat16": partial(scored, dtype=torch.bfloat16),
    "trees": partial(trained, kind=TaskTextSource, config=replace(CONFIG, kl="k3(beta=0.1)")),
    "trees, checkpointed": partial(trained, kind=TaskTextSource, config=replace(CONFIG, gradient_checkpointing=True)),
    "trees, float32": partial(scored, dtype=torch.float32, shared=True),
    "trees, bfloat16": partial(scored, dtype=torch.bfloat16, shared=True),
    "sampled": sampled,
}


def main(name: str, cases: list[str]) -> None:
    os.environ["ACCELERATE_TORCH_DEVICE"] = name
    with pretending() if name.startswith(NAME) else nullcontext(), tempfile.TemporaryDirectory() as folder:
        device = torch.device(name)
        print(json.dumps({case: CASES[case](Path(folder) / case, device) for case in cases}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
