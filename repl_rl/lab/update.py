"""`repl-rl bench update`: our update against the update of TRL's GRPOTrainer, on the same rollouts.

Each measurement runs in a process of its own, so that peak memory is its own. Both trainers score the sampler's
rollouts (TRL's old log probabilities), form the loss and its gradients; neither takes the optimizer step.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl.trainer.utils import split_tensor_dict

from repl_rl.credit.advantages import estimator
from repl_rl.credit.group import Credit
from repl_rl.credit.tensors import columns
from repl_rl.errors import ReplRLError
from repl_rl.lab.work import CASES, EOS, PAD, Case, Work
from repl_rl.record.trajectory import Trajectory
from repl_rl.trainer.config import GRPOTrainer, TrainerConfig
from repl_rl.trainer.fast import TOKENS_PER_PASS_CPU, TOKENS_PER_PASS_GPU
from repl_rl.trainer.grpo import ReplGRPOTrainer
from repl_rl.trainer.sharing import Sharing

Side = Literal["ours", "off", "other", "trl"]
"""Ours as it comes, without shared prefixes, without them and with another number of rows a pass, and TRL's."""
Gradients = dict[str, Tensor]
"""The gradient of every weight, on the CPU."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one update took."""

    update_s: float
    """Scoring of the rollouts, loss and gradients: wall clock on a GPU, CPU time of all threads without one."""
    loss_s: float
    """Loss and gradients alone, as in a step of several micro-batches; same clock."""
    peak_mib: float
    """Peak memory above what the loaded model and the rollouts take."""
    loss: float
    token_ratio: float = 1.0
    """Tokens of the rollouts over those that were scored: above 1 where prefixes were shared."""


def bench_update(cases: Sequence[Case] = CASES, repeats: int = 2) -> list[dict[str, float | str]]:
    """Measure each case; a row a case with ratios of ours over TRL's, best of `repeats` for times."""
    return [_row(case, repeats) for case in cases]


def _row(case: Case, repeats: int) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as folder:
        ours, our_gradients = apart(case, "ours", repeats, Path(folder))
        theirs, gradients = apart(case, "trl", repeats, Path(folder))
    return {**asdict(case), **against_trl(ours, our_gradients, theirs, gradients)}


def against_trl(ours: Cost, our_gradients: Gradients, theirs: Cost, gradients: Gradients) -> dict[str, float | str]:
    """What is told of the same work: our figures, TRL's, and what is between them."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "dtype": "float32",
        "time_ratio": ours.update_s / theirs.update_s,
        "loss_time_ratio": ours.loss_s / theirs.loss_s,
        "memory_ratio": ours.peak_mib / theirs.peak_mib,
        "max_abs_loss_diff": abs(ours.loss - theirs.loss),
        "max_abs_gradient_diff": max((our_gradients[name] - g).abs().max().item() for name, g in gradients.items()),
        "gradient_max": max(g.abs().max().item() for g in gradients.values()),
        "token_ratio": ours.token_ratio,
        **{f"ours_{key}": value for key, value in asdict(ours).items() if key != "token_ratio"},
        **{f"trl_{key}": value for key, value in asdict(theirs).items() if key != "token_ratio"},
    }


def apart(work: Work, side: Side, repeats: int, folder: Path) -> tuple[Cost, Gradients]:
    """`update_cost` in a process of its own.

    Raises:
        ReplRLError: that ended without figures.
    """
    # Neither CUDA nor PyTorch's threads survive a fork; the server that forks here uses neither, and has all imported.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    near, far = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(work, side, repeats, folder, far))
    process.start()
    far.close()
    try:
        cost = near.recv()
    except EOFError as error:
        raise ReplRLError(f"the process that measured {side!r} ended without figures; see what it printed") from error
    finally:
        process.join()
    return cost, load_file(folder / f"{side}.safetensors")


def _report(work: Work, side: Side, repeats: int, folder: Path, pipe: Connection) -> None:
    cost, gradients = update_cost(work, side, repeats, folder)
    save_file(gradients, folder / f"{side}.safetensors")
    pipe.send(cost)


def update_cost(work: Work, side: Side, repeats: int, folder: Path) -> tuple[Cost, Gradients]:
    """Cost of one side's update, and its gradients."""
    model, rollouts = work.load()
    trainer = _trl(model, rollouts, folder) if side == "trl" else _ours(model, rollouts, folder, side)
    parts = trainer.current_gradient_accumulation_steps = len(_tasks(rollouts)) if side == "trl" else 1
    update_s, loss_s = [], []
    before = _reset_peak()
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        start = _clock()
        batch = trainer._generate_and_score_completions([{"prompt": one.task_id} for one in rollouts])
        loss = _learn(trainer, batch, parts)
        _wait()
        update_s.append(_clock() - start)
    peak_mib = _peak() - before
    told = trainer.scored.metrics if isinstance(trainer, ReplGRPOTrainer) else {}
    gradients = {name: p.grad.float().cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    trainer.num_iterations = 2  # a step of several losses: each has to score its rows anew
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        start = _clock()
        _learn(trainer, batch, parts)
        _wait()
        loss_s.append(_clock() - start)
    return Cost(min(update_s), min(loss_s), peak_mib, loss, told.get("token_ratio", 1.0)), gradients


def _learn(trainer: GRPOTrainer, batch: dict[str, Tensor], parts: int) -> float:
    """Form the gradients of a step, in so many parts; returns its loss.

    TRL's pass over a part keeps the logits of all of its positions, so that groups have to be passed one by one; ours
    cuts a step into passes of its own.
    """
    losses = []
    for part in split_tensor_dict(batch, parts) if parts > 1 else [batch]:
        loss = trainer._compute_loss(trainer.model, part)
        loss.backward()
        losses.append(float(loss.detach()))
    return sum(losses)


class _Replay:
    forbidden_ids = frozenset[int]()

    def __init__(self, rollouts: Sequence[Trajectory]) -> None:
        self.rollouts = rollouts

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        return self.rollouts

    def load_weights(self, folder: Path, policy_step: int) -> None:
        pass


def _config(rollouts: Sequence[Trajectory]) -> TrainerConfig:
    tasks = len(_tasks(rollouts))
    # Random weights and made-up log probabilities disagree, so the check of the sync is set wide.
    return TrainerConfig(
        steps=1,
        prompts_per_step=tasks,
        group_size=len(rollouts) // tasks,
        importance="token_truncate(tolerance=1e9)",
    )


def _tasks(rollouts: Sequence[Trajectory]) -> list[str]:
    return list(dict.fromkeys(one.task_id for one in rollouts))


def _ours(model: PreTrainedModel, rollouts: Sequence[Trajectory], folder: Path, side: Side) -> ReplGRPOTrainer:
    config = _config(rollouts)
    trainer = ReplGRPOTrainer(
        model=model,
        tokenizer=_tokenizer(),
        task_ids=_tasks(rollouts),
        source=_Replay(rollouts),
        args=config.grpo_args(folder),
        credit=Credit(estimator("outcome"), config.rewards),
        tolerance=config.tolerance(),
        weights=folder,
        sharing=Sharing(_refuse) if side == "ours" else None,
    )
    if side == "other":
        assert trainer._fast is not None
        row = max(len(t.prompt.token_ids) + len(t.completion_ids) for t in rollouts)
        usual = TOKENS_PER_PASS_GPU if torch.cuda.is_available() else TOKENS_PER_PASS_CPU
        trainer._fast.tokens_per_pass = row if 2 * row <= usual else 2 * row
    trainer._last_loaded_step = 0  # the weights need not travel
    trainer.model_wrapped.train()
    return trainer


def _refuse(what: str) -> None:
    raise ReplRLError(f"what was to be measured is not: {what}")


def _trl(model: PreTrainedModel, rollouts: Sequence[Trajectory], folder: Path) -> GRPOTrainer:
    rows = columns(rollouts, PAD)
    ids = {"prompt_ids": rows.prompt_ids, "completion_ids": rows.completion_ids, "logprobs": rows.logprobs}
    config = _config(rollouts)
    args = replace(config, fast=False, micro_batch=config.group_size).grpo_args(folder)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[lambda **_: [t.outcome for t in rollouts]],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": _tasks(rollouts)}),
        processing_class=_tokenizer(),
        # TRL takes the mask out of what it is given.
        rollout_func=lambda prompts, _: {**ids, "env_mask": rows.mask},
    )
    trainer.use_vllm, trainer._last_loaded_step = True, 0  # corrected for the sampler, without an engine to sync
    trainer.model.train()
    return trainer


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<eos>": EOS}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _reset_peak() -> float:
    """Forget the peak so far; returns the memory in use now, MiB."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> float:
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else _status("VmHWM")


def _status(key: str) -> float:
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith(f"{key}:"):
            return int(row.split()[1]) / 1024
    raise KeyError(key)


def _clock() -> float:
    # Without a GPU the work is what counts, not who else uses the machine.
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
