"""One process of `test_processes`: python -m tests.support.trainer.forward_pass_process STEPS OUT

It learns from rows of random lengths with so few tokens a pass that the processes need other numbers of passes, with
each of `WAYS`, one after the other: importing takes longer than all of them. In `trees`, prompts are long and some rows
have the same one, so that some passes of some processes are trees.
"""

import os
import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from repl_rl.trainer.forward_pass import BatchLayout, bucket_by_length
from repl_rl.trainer.logprobs import ScoringBatch
from repl_rl.trainer.plugins.prefix_sharing import PrefixSharing, PrefixSharingStats, split_into_trees
from tests.support.trainer.prefix_trees import make_scorer
from tests.support.trainer.tiny_policies import PAD, VOCAB, tiny_model

KINDS = ("ddp", "fsdp2")
WAYS = ("rows", "trees")
ROWS = 6
TOKENS_PER_PASS = 8
LEARNING_RATE = 1e-3
"""Small enough for 500 steps: at ten times as much, one process that adds two halves in place of the whole is 5e-3 off
by then, by nothing but rounding."""
LIMIT = timedelta(seconds=120)
"""A process that waits longer for the other one gives up."""


def batch_of(step: int, rank: int, processes: int, alike: bool = False) -> tuple[ScoringBatch, Tensor]:
    """This process's rows of a step, with the weights of their tokens in the loss, (b, T): 0 for rows at rest.

    Every fifth step one half of the rows has nothing to learn, every seventh the other half has nothing sampled.
    """
    rng = random.Random(step)
    drawn: list[tuple[list[int], list[int], list[bool], list[float]]] = []
    for row in range(ROWS):
        prompt, length = rng.randint(1, 4), rng.randint(1, 14)
        begun = [random.Random(f"{step} {row // 3}").randrange(3, VOCAB)] * 16 if alike and step % 3 else []
        prompt += len(begun)
        ids = begun + [rng.randrange(3, VOCAB) for _ in range(prompt - len(begun) + length)]
        sampled = [rng.random() < 0.5 and not (step % 7 == 0 and row >= ROWS // 2) for _ in range(length)]
        learns = rng.random() < 0.6 and not (step % 5 == 0 and row < ROWS // 2)
        weights = [rng.gauss(0, 1) * learns * one for one in sampled]
        drawn.append((ids[:prompt], ids[prompt:], sampled, weights))
    mine = drawn[rank * ROWS // processes : (rank + 1) * ROWS // processes]
    before, after = max(len(row[0]) for row in mine), max(len(row[1]) for row in mine)
    ids_S = torch.tensor([[PAD] * (before - len(p)) + p + c + [PAD] * (after - len(c)) for p, c, _, _ in mine])
    real = torch.tensor([[0] * (before - len(p)) + [1] * len(p + c) + [0] * (after - len(c)) for p, c, _, _ in mine])
    sampled_T = torch.tensor([s + [False] * (after - len(s)) for _, _, s, _ in mine])
    weights_T = torch.tensor([w + [0.0] * (after - len(w)) for _, _, _, w in mine])
    return ScoringBatch(ids_S, real, sampled_T, weights_T.any(dim=1)), weights_T


def passes_of(batch: ScoringBatch, alike: bool) -> int:
    """Passes that the learning rows of a batch need by themselves, at most."""
    laid = BatchLayout.from_batch(batch.input_ids, batch.attention, batch.sampled_mask)
    rows = batch.learning_rows.nonzero()[:, 0]
    found, left = split_into_trees(laid, rows, TOKENS_PER_PASS, PrefixSharingStats()) if alike else ([], rows)
    return len(found) + len(bucket_by_length(left, batch.attention.sum(dim=1), TOKENS_PER_PASS))


def wrapped(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


def learned(kind: str, alike: bool, steps: int, out: Path) -> None:
    """Learn for so many steps, and store the weights in `out`. `kind` is `one`, `ddp` or `fsdp2`."""
    rank, processes = (0, 1) if kind == "one" else (distributed.get_rank(), distributed.get_world_size())
    model = tiny_model(hidden=16)
    sharing = PrefixSharing(sys.exit) if alike else None
    if sharing is not None:
        sharing.install_attention(model)
    fast = make_scorer(model, TOKENS_PER_PASS, sharing)
    policy = wrapped(model, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    uneven, shared = 0, 0
    for step in range(steps):
        batch, weights = batch_of(step, rank, processes, alike)
        uneven += len({passes_of(batch_of(step, other, 2, alike)[0], alike) for other in range(2)}) > 1
        # By turns, the scoring of the step serves its update or is done anew for it.
        once = step % 2 == 0
        with torch.no_grad():
            first = fast.score_step(policy, batch, keep_graph=once)
        scores = fast.rescore(policy, batch, torch.arange(len(weights)), with_graph=once)
        shared += sharing is not None and sharing.stats.shared_tokens > 0
        assert torch.allclose(first.logprobs, scores.logprobs, atol=1e-5)
        loss = -(scores.logprobs * weights).sum() * processes / ROWS
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert uneven > steps // 3
    assert not alike or shared > steps // 3
    state = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().contiguous()
        for name, p in model.named_parameters()
    }
    if rank == 0:
        save_file(state, out)


def main(steps: int, out: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=LIMIT)
    for kind in KINDS:
        for way in WAYS:
            learned(kind, way == "trees", steps, out / f"{kind}-{way}.safetensors")
    # Destroyed while its threads still free the tensors of the last meeting, gloo waits for them for ever.
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]), Path(sys.argv[2]))
