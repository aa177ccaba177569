"""`repl-rl bench update`: our update compared with that of TRL's GRPOTrainer, on the same rollouts.

Each measurement runs in a new process, to measure its peak memory alone. Both trainers score the sampler's rollouts
(TRL's old log probabilities) and compute the loss and its gradients. Neither takes the optimizer step.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
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

from benchmarks.update.synthetic_rollouts import CASES, EOS, PAD, Case, Work
from repl_rl.credit.advantage_estimators import load_estimator
from repl_rl.credit.rewards import CreditConfig
from repl_rl.errors import ReplRLError
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.grpo import MakeScorerFn, ReplGRPOTrainer, TrainerComponents
from repl_rl.trainer.logprobs import TOKENS_PER_PASS_CPU, TOKENS_PER_PASS_GPU, LogprobScorer, build_token_columns
from repl_rl.trainer.plugins.prefix_sharing import PrefixSharing, PrefixSharingScorer
from repl_rl.trainer.trl_arguments import GRPOTrainer, grpo_args
from repl_rl.trajectory.trajectory import Trajectory

Side = Literal["ours", "off", "other", "trl"]
"""Variant: ours by default, ours without prefix sharing, the same with another number of rows per pass, and TRL's."""
Gradients = dict[str, Tensor]
"""Gradient of every weight, on the CPU."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one update."""

    update_s: float
    """Time of scoring, loss and gradients, seconds: wall clock on a GPU, else CPU time of all threads."""
    loss_s: float
    """Time of loss and gradients alone, as in a step of several micro-batches, by the same clock."""
    peak_mib: float
    """Peak memory above that of the loaded model and the rollouts, MiB."""
    loss: float
    token_ratio: float = 1.0
    """Tokens of the rollouts over tokens that were scored; above 1 if prefixes were shared."""


def bench_update(cases: Sequence[Case] = CASES, repeats: int = 2) -> list[dict[str, float | str]]:
    """Measure each case; return one row per case with ratios of ours over TRL's, best of `repeats` for times."""
    return [_row(case, repeats) for case in cases]


def _row(case: Case, repeats: int) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as folder:
        ours, our_gradients = apart(case, "ours", repeats, Path(folder))
        theirs, gradients = apart(case, "trl", repeats, Path(folder))
    return {**asdict(case), **against_trl(ours, our_gradients, theirs, gradients)}


def against_trl(ours: Cost, our_gradients: Gradients, theirs: Cost, gradients: Gradients) -> dict[str, float | str]:
    """Return the figures for one workload: ours, TRL's, and their ratios and differences."""
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
    """Run `update_cost` in a new process.

    Raises:
        ReplRLError: the process ended without figures.
    """
    # Neither CUDA nor PyTorch's threads survive a fork. The fork server uses neither, and has done all imports.
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
    """Return the cost of one variant's update, and its gradients."""
    model, rollouts = work.load()
    trainer = _trl(model, rollouts, folder) if side == "trl" else _ours(model, rollouts, folder, side)
    parts = trainer.current_gradient_accumulation_steps = len(_tasks(rollouts)) if side == "trl" else 1
    update_s, loss_s = [], []
    # A whole update, from scoring to the gradients.
    before = _reset_peak()
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        start = _clock()
        batch = trainer._generate_and_score_completions([{"prompt": one.task_id} for one in rollouts])
        loss = _learn(trainer, batch, parts)
        _wait()
        update_s.append(_clock() - start)
    peak_mib = _peak() - before
    told = trainer.scored_batch.metrics if isinstance(trainer, ReplGRPOTrainer) else {}
    gradients = {name: p.grad.float().cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    # With several losses per step, each has to score its rows again.
    trainer.num_iterations = 2
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        start = _clock()
        _learn(trainer, batch, parts)
        _wait()
        loss_s.append(_clock() - start)
    return Cost(min(update_s), min(loss_s), peak_mib, loss, told.get("token_ratio", 1.0)), gradients


def _learn(trainer: GRPOTrainer, batch: dict[str, Tensor], parts: int) -> float:
    """Compute the gradients of a step in `parts` parts; return its loss.

    TRL's pass over a part keeps the logits of all its positions, so its groups are passed one by one. Our trainer
    splits a step into passes itself.
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
    # Random weights do not match the made-up log probabilities, so disable the check by a huge tolerance.
    return TrainerConfig(
        steps=1,
        prompts_per_step=tasks,
        group_size=len(rollouts) // tasks,
        importance_sampling="token_truncate(tolerance=1e9)",
    )


def _tasks(rollouts: Sequence[Trajectory]) -> list[str]:
    return list(dict.fromkeys(one.task_id for one in rollouts))


def _ours(model: PreTrainedModel, rollouts: Sequence[Trajectory], folder: Path, side: Side) -> ReplGRPOTrainer:
    config = _config(rollouts)
    make_scorer: MakeScorerFn = LogprobScorer
    if side == "ours":
        sharing = PrefixSharing(_refuse)
        sharing.install_attention(model)
        make_scorer = partial(PrefixSharingScorer, sharing=sharing)
    elif side == "other":
        # Another number of rows per pass rounds differently.
        row = max(len(t.prompt.token_ids) + len(t.completion_ids) for t in rollouts)
        usual = TOKENS_PER_PASS_GPU if torch.cuda.is_available() else TOKENS_PER_PASS_CPU
        make_scorer = partial(LogprobScorer, tokens_per_pass=row if 2 * row <= usual else 2 * row)
    trainer = ReplGRPOTrainer(
        model=model,
        tokenizer=_tokenizer(),
        task_ids=_tasks(rollouts),
        source=_Replay(rollouts),
        args=grpo_args(config, folder),
        credit=CreditConfig(load_estimator("outcome"), config.rewards),
        components=TrainerComponents(
            weights_folder=folder,
            logprob_tolerance=config.compute_logprob_tolerance(),
            make_scorer=make_scorer,
        ),
    )
    # The weights are already in place, so no weight sync is needed.
    trainer._last_loaded_step = 0
    trainer.model_wrapped.train()
    return trainer


def _refuse(what: str) -> None:
    raise ReplRLError(f"what was to be measured is not: {what}")


def _trl(model: PreTrainedModel, rollouts: Sequence[Trajectory], folder: Path) -> GRPOTrainer:
    rows = build_token_columns(rollouts, PAD)
    ids = {"prompt_ids": rows.prompt_ids, "completion_ids": rows.completion_ids, "logprobs": rows.logprobs}
    config = _config(rollouts)
    args = grpo_args(replace(config, fast_logprobs=False, per_device_batch_size=config.group_size), folder)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[lambda **_: [t.outcome for t in rollouts]],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": _tasks(rollouts)}),
        processing_class=_tokenizer(),
        # TRL removes the mask from this dict, so pass a new one each time.
        rollout_func=lambda prompts, _: {**ids, "env_mask": rows.mask},
    )
    # Correct for the sampler as with vLLM, but without an engine to sync.
    trainer.use_vllm, trainer._last_loaded_step = True, 0
    trainer.model.train()
    return trainer


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<eos>": EOS}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _reset_peak() -> float:
    """Reset the peak; return the memory in use now, MiB."""
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
    # Without a GPU measure CPU time, which does not depend on other processes.
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
