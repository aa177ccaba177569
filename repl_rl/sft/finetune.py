"""Supervised fine-tuning on trajectories with TRL's trainer; only sampled tokens have a loss.

TRL gets ids and labels and tokenizes nothing. The ids are those of the trajectory. The label is the id for a token to
learn, else -100, which TRL's loss leaves out of sum and count.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
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
from trl import SFTConfig, SFTTrainer

from repl_rl.errors import ConfigError
from repl_rl.models.describe_load_error import make_savable
from repl_rl.models.disable_dropout import disable_dropout
from repl_rl.models.parameter_names import complete_checkpoint, read_config, resolve_causal_class
from repl_rl.models.transform_logits import choose_attention, forbid_ids
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sft.finetune_config import POLICY, FinetuneConfig
from repl_rl.trajectory.trajectory import Trajectory, spread
from repl_rl.utils.atomic_files import replace_folder_atomically

IGNORED = -100
"""Label of a context token, which is not learned."""
_TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "chat_template*")
"""Patterns of the files to copy from the base policy."""
OnSftStep = Callable[[int, float], None]
"""Callback for each optimizer step: its number from 1, and its loss in nats per learned token."""


def build_sft_args(config: FinetuneConfig, out: Path, seed: int) -> SFTConfig:
    """Return TRL's configuration for `config`.

    Raises:
        ConfigError: this machine cannot compute in `config.dtype`.
    """
    low_precision, on_cpu = config.dtype == "bfloat16", not torch.accelerator.is_available()
    if low_precision and not (on_cpu or is_torch_bf16_gpu_available()):
        raise ConfigError("dtype", config.dtype, "this GPU does not compute in it; leave it at float32")
    micro_batch = config.per_device_batch_size or config.batch_size
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
        # Truncation would leave half a line; sequences that are too long were left out before.
        max_length=None,
        loss_type="nll",
        bf16=low_precision,
        use_cpu=low_precision and on_cpu,
        gradient_checkpointing=False,
        seed=seed,
        save_strategy="no",
        logging_steps=1,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def build_labelled_example(trajectory: Trajectory, learn_errors: bool = False) -> Mapping[str, list[int]]:
    """Return `input_ids` and `labels` of a trajectory, both (T,), prompt included.

    The tokens of the policy's lines are learned; prompt and observations are context. Without `learn_errors`, lines
    that ended in an error are context too.
    """
    prompt = trajectory.prompt.token_ids
    learned_L = [
        float(learn_errors or line.execution is None or not line.execution.status.is_error) for line in trajectory.lines
    ]
    pairs = zip(trajectory.completion_ids, spread(learned_L, trajectory), strict=True)
    labels = [*[IGNORED] * len(prompt), *(i if learned else IGNORED for i, learned in pairs)]
    return {"input_ids": [*prompt, *trajectory.completion_ids], "labels": labels}


def build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Mapping[str, list[int]]],
    args: SFTConfig,
    callbacks: Sequence[TrainerCallback] = (),
) -> SFTTrainer:
    """Build TRL's trainer on examples of `build_labelled_example`."""
    # Silence TRL's advice about chat templates and end tokens, because it tokenizes nothing here.
    logging.getLogger("trl.trainer.sft_trainer").setLevel(logging.ERROR)
    columns = {name: [list(example[name]) for example in examples] for name in ("input_ids", "labels")}
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run_finetuning(
    base: Path,
    renderer: Renderer,
    examples: Sequence[Mapping[str, list[int]]],
    out: Path,
    config: FinetuneConfig,
    seed: int = 0,
    on_step: OnSftStep = lambda step, loss: None,
) -> float:
    """Fine-tune the policy in folder `base` on examples of `build_labelled_example`, and save it in `out`.

    An older policy of a fine-tuning in `out` is replaced; anything else there is refused.

    Ids that `renderer` forbids have probability 0 in training, as they have in sampling.

    Returns the last step's loss in nats per learned token.

    Raises:
        ConfigError: there is nothing to learn; an example is longer than the policy's context, or has a forbidden id to
            learn; or the policy cannot forbid an id.
    """
    # Check the examples before the model is loaded.
    if not examples:
        raise ConfigError("examples", 0, "give at least one trajectory to learn from")
    forbidden_examples = sum(not renderer.forbidden_ids.isdisjoint(example["labels"]) for example in examples)
    if forbidden_examples:
        raise ConfigError(
            "examples with forbidden ids to learn", forbidden_examples, "leave them out, or use --newline-tokens carry"
        )
    disable_progress_bar()
    torch.manual_seed(seed)
    # Fused attention ignores capped attention weights, so choose an implementation that fits the architecture.
    model_config = read_config(base)
    attention = choose_attention(*resolve_causal_class(model_config))
    model = AutoModelForCausalLM.from_pretrained(
        base, config=model_config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
    )
    make_savable(model)
    disable_dropout(model)
    forbid_ids(model, renderer.forbidden_ids)
    longest, context_tokens = max(len(example["input_ids"]) for example in examples), read_context_tokens(base)
    if longest > context_tokens:
        remedy = f"the policy's context has {context_tokens} tokens; leave longer trajectories out"
        raise ConfigError("tokens of a trajectory", longest, remedy)
    with replace_folder_atomically(out, POLICY) as unfinished:
        losses = LossCallback(on_step)
        build_trainer(model, renderer.tokenizer, examples, build_sft_args(config, unfinished, seed), [losses]).train()
        # TRL disables the KV cache for the training.
        model.config.use_cache = True
        model.save_pretrained(unfinished)
        complete_checkpoint(unfinished, base)
        for file in (file for pattern in _TOKENIZER_FILES for file in base.glob(pattern)):
            shutil.copy(file, unfinished)
    return losses.last_losses


def read_context_tokens(base: Path) -> int:
    """Return the context length in tokens of the policy in folder `base`."""
    return int(read_config(base).get_text_config().max_position_embeddings)


class LossCallback(TrainerCallback):
    """Callback that passes each step's loss on."""

    def __init__(self, on_step: OnSftStep) -> None:
        self._on_step = on_step
        self.last_losses: float
        """Loss of the newest step in nats per learned token."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float],
        **_: object,
    ) -> None:
        """Handle TRL's event. The last event of a training has no loss of a step."""
        if "loss" in logs:
            self.last_losses = float(logs["loss"])
            self._on_step(state.global_step, self.last_losses)
