"""Settings of a fine-tuning, and the type of its output folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError
from repl_rl.settings.help_pages import COMMON
from repl_rl.settings.model_defaults import DTYPE, PretrainedDefault
from repl_rl.settings.value_bounds import Above, AtLeast, check_fields
from repl_rl.utils.atomic_files import OutputFolder

_OWN_TOKEN = b'"submit_final_answer"'
"""Token that only the tokenizer of `--fresh` has."""


def _is_legacy_policy(folder: Path) -> bool:
    """Return True for a folder that only version 0.2's fine-tuning can have written.

    Such a policy has the tokenizer of `--fresh`, or its own rollouts. Other policies of 0.2 look like any model, and a
    user's models are never replaced.
    """
    if not (folder / "config.json").is_file():
        return False
    tokenizer = folder / "tokenizer.json"
    has_own_tokenizer = tokenizer.is_file() and _OWN_TOKEN in tokenizer.read_bytes()
    return has_own_tokenizer or any((folder / "rollouts").glob("[0-9]*.jsonl.gz"))


POLICY = OutputFolder(
    "sft",
    "output folder",
    (
        *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "rollouts"),
        *("*token*", "vocab*", "merges*", "chat_template*", "README.md", "training_args.bin", "checkpoint-[0-9]*"),
    ),
    _is_legacy_policy,
)
"""Output type of a policy folder of a fine-tuning or cold start: its file names, and the test for version 0.2."""


_LEARNING_RATE = PretrainedDefault("2e-5, without a GPU 2e-4", lambda facts: 2e-5 if facts.has_gpu() else 2e-4)


@keeps_old_names
@dataclass(frozen=True, slots=True)
class FinetuneConfig:
    """Length, batch size and learning rate of a fine-tuning.

    The defaults are those of the bundled policy. For any other model on a GPU the learning rate is TRL's for
    fine-tuning, and number format and micro-batches are those of its training. Without a GPU, steps, their size and the
    learning rate are those of `make pretrained`, which teaches the format to 0.1 B parameters (docs/pretrained.md).
    """

    steps: Annotated[int, AtLeast(1), PretrainedDefault.on_cpu(16), COMMON] = 200
    """Optimizer steps, >= 1."""
    batch_size: Annotated[int, AtLeast(1), PretrainedDefault.on_cpu(16), COMMON] = 32
    """Trajectories per step, >= 1."""
    per_device_batch_size: Annotated[int, AtLeast(0), PretrainedDefault.largest_divisor(8, 2), COMMON] = 0
    """Trajectories per forward pass, >= 0; 0 means the whole batch."""
    learning_rate: Annotated[
        float,
        Above(0),
        PretrainedDefault("2e-5, without a GPU 2e-4", lambda facts: 2e-5 if facts.has_gpu() else 2e-4),
        COMMON,
    ] = 5e-4
    """Peak learning rate, > 0; a cosine schedule decays it to a tenth."""
    warmup_steps: Annotated[int, AtLeast(0), PretrainedDefault.eighth_of_run(10)] = 10
    """Warm-up steps, over which the learning rate rises, >= 0."""
    dtype: Annotated[Literal["float32", "bfloat16"], DTYPE, COMMON] = "float32"
    """Number format of the computation. Weights and optimizer are float32, because bfloat16 loses small updates."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.per_device_batch_size and self.batch_size % self.per_device_batch_size:
            raise ConfigError(
                "per_device_batch_size", self.per_device_batch_size, f"it must divide batch_size, {self.batch_size}"
            )
