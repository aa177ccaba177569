"""Supervised fine-tuning by TRL's trainer: on the tokens that a policy sampled, and if asked to on what it observed.

TRL gets ids and labels, and tokenises nothing: the ids are those of the trajectory, and a label is the id where the
policy is to learn it, else -100, which TRL's loss leaves out of sum and count.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import is_torch_bf16_gpu_available
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig

from repl_rl.coldstart.kept import Keeping, KeptTrainer
from repl_rl.coldstart.observing import IGNORED, LOSS, OBSERVED, Collator, ObservingTrainer
from repl_rl.coldstart.selection import POLICY, FinetuneConfig
from repl_rl.engine.dropout import disable_dropout
from repl_rl.engine.forbidden import forbid
from repl_rl.engine.logits import attention
from repl_rl.engine.names import causal_class, complete, read_config
from repl_rl.errors import ConfigError
from repl_rl.machine.folders import whole_folder
from repl_rl.record.printed import printed
from repl_rl.record.trajectory import Trajectory, spread
from repl_rl.rollout.renderer import Renderer

_TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "chat_template*")
OnStep = Callable[[int, float], None]
"""Told the optimizer step, from 1, and its loss, nats a learned token of the policy's lines."""
OnObserved = Callable[[int, float], None]
"""Told the optimizer step, from 1, and the loss on what the console printed, nats a token."""


def sft_args(config: FinetuneConfig, out: Path, seed: int) -> SFTConfig:
    """TRL's configuration for this one.

    Raises:
        ConfigError: this machine cannot compute in `config.dtype`.
    """
    low, on_cpu = config.dtype == "bfloat16", not torch.accelerator.is_available()
    if low and not (on_cpu or is_torch_bf16_gpu_available()):
        raise ConfigError("dtype", config.dtype, "this GPU does not compute in it; leave it at float32")
    micro_batch = config.micro_batch or config.batch_size
    return SFTConfig(
        output_dir=str(out),
        max_steps=config.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=config.batch_size // micro_batch,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=config.warmup_steps,
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        max_length=None,  # cutting would leave half a line; what is too long was left out before
        loss_type="nll",
        bf16=low,
        use_cpu=low and on_cpu,
        gradient_checkpointing=False,
        seed=seed,
        save_strategy="no",
        logging_steps=1,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def labelled(
    trajectory: Trajectory, learn_errors: bool = False, never: frozenset[int] | None = None
) -> Mapping[str, list[int]]:
    """`input_ids` and `labels` of a trajectory, both (T,), prompt included.

    The tokens of each line of the policy are learned; prompt and observations are context. So are, unless
    `learn_errors`, the lines that ended in an error. With `never`, the ids that the policy never samples, there is
    `observed` too, (T,): what the console printed, for `FinetuneConfig.observation_weight`.
    """
    prompt = trajectory.prompt.token_ids
    learned_L = [
        float(learn_errors or line.execution is None or not line.execution.status.is_error) for line in trajectory.lines
    ]
    pairs = zip(trajectory.completion_ids, spread(learned_L, trajectory), strict=True)
    labels = [*[IGNORED] * len(prompt), *(i if learned else IGNORED for i, learned in pairs)]
    example = {"input_ids": [*prompt, *trajectory.completion_ids], "labels": labels}
    if never is not None:
        words = zip(trajectory.completion_ids, printed(trajectory, never), strict=True)
        example[OBSERVED] = [*[IGNORED] * len(prompt), *(i if learned else IGNORED for i, learned in words)]
    return example


def trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Mapping[str, list[int]]],
    args: SFTConfig,
    callbacks: Sequence[TrainerCallback] = (),
    observation_weight: float = 0.0,
) -> KeptTrainer:
    """TRL's trainer on examples of `labelled`, which have `observed` if there is an `observation_weight`."""
    # TRL advises about chat templates and end tokens; it tokenises nothing here.
    logging.getLogger("trl.trainer.sft_trainer").setLevel(logging.ERROR)
    names = ("input_ids", "labels", OBSERVED) if observation_weight else ("input_ids", "labels")
    columns = {name: [list(example[name]) for example in examples] for name in names}
    kind = ObservingTrainer if observation_weight else KeptTrainer
    made = kind(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        data_collator=Collator(pad_token_id=tokenizer.pad_token_id) if observation_weight else None,
    )
    if isinstance(made, ObservingTrainer):
        made.observation_weight = observation_weight
    made.remove_callback(PrinterCallback)
    return made


def finetune(
    base: Path,
    renderer: Renderer,
    examples: Sequence[Mapping[str, list[int]]],
    out: Path,
    config: FinetuneConfig,
    seed: int = 0,
    on_step: OnStep = lambda step, loss: None,
    on_observed: OnObserved = lambda step, loss: None,
    keeping: Keeping | None = None,
) -> float:
    """Fine-tune the policy in folder `base` on examples of `labelled`; save it, with its tokenizer, in `out`.

    An older policy of a fine-tuning in `out` is replaced; anything else there is refused.

    The policy that learns is the one that samples: what `renderer` forbids has probability 0.

    With `config.observation_weight` it learns what the console printed too: examples then have `observed`, and
    `on_observed` is told that loss.

    With `keeping` its state is saved now and then, and it goes on with the newest one: the same call then ends with
    the same weights as one that was never stopped.

    Returns the last step's loss, nats a learned token of the policy's lines.

    Raises:
        ConfigError: there is nothing to learn, an example is longer than the policy's context or holds an id to learn
            that is forbidden, or the policy cannot forbid one.
    """
    if not examples:
        raise ConfigError("examples", 0, "give at least one trajectory to learn from")
    if config.observation_weight and not all(OBSERVED in example for example in examples):
        remedy = "give `labelled` the ids that are never sampled, so that its examples say what the console printed"
        raise ConfigError("observation_weight", config.observation_weight, remedy)
    never = sum(not renderer.forbidden_ids.isdisjoint(example["labels"]) for example in examples)
    if never:
        raise ConfigError("examples with forbidden ids to learn", never, "leave them out, or use --overshoot carry")
    disable_progress_bar()
    torch.manual_seed(seed)
    found = read_config(base)
    how = attention(*causal_class(found))
    model = AutoModelForCausalLM.from_pretrained(base, config=found, dtype=torch.float32, attn_implementation=how)
    disable_dropout(model)
    forbid(model, renderer.forbidden_ids)
    longest, room = max(len(example["input_ids"]) for example in examples), context_tokens(base)
    if longest > room:
        remedy = f"the policy's context has {room} tokens; leave longer trajectories out"
        raise ConfigError("tokens of a trajectory", longest, remedy)
    with whole_folder(out, POLICY) as torn:
        told = Told(config.observation_weight, on_step, on_observed)
        args = sft_args(config, torn, seed)
        learning = trainer(model, renderer.tokenizer, examples, args, [told], config.observation_weight)
        learning.keeping = keeping
        learning.go_on()
        model.config.use_cache = True  # TRL turns it off for the training
        model.save_pretrained(torn)
        complete(torn, base)
        for file in (file for pattern in _TOKENIZER_FILES for file in base.glob(pattern)):
            shutil.copy(file, torn)
    return told.last


def context_tokens(base: Path) -> int:
    """Most tokens that the policy in folder `base` can see."""
    return int(AutoConfig.from_pretrained(base).get_text_config().max_position_embeddings)


class Told(TrainerCallback):
    """Tells each step's losses."""

    def __init__(self, weight: float, on_step: OnStep, on_observed: OnObserved) -> None:
        self._weight = weight
        self._on_step = on_step
        self._on_observed = on_observed
        self.last: float
        """The newest step's loss, nats a learned token of the policy's lines."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float],
        **_: object,
    ) -> None:
        if "loss" not in logs:
            return
        observed = float(logs.get(LOSS, 0.0))
        self.last = float(logs["loss"]) - self._weight * observed
        self._on_step(state.global_step, self.last)
        if self._weight:
            self._on_observed(state.global_step, observed)
