"""The trainer's weights on their way to the rollout source."""

import os
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import save_file

from repl_rl.machine.folders import private_folder
from repl_rl.trainer.config import GRPOTrainer
from repl_rl.trainer.lora import merged
from repl_rl.trainer.source import RolloutSource

_PREFIX = "repl_rl-weights-"


class Sync:
    """Stands where TRL expects its vLLM: TRL calls `sync_weights` whenever it would refresh its own engine."""

    def __init__(self, trainer: GRPOTrainer, source: RolloutSource, folder: Path) -> None:
        self.trainer = trainer
        self.source = source
        self.folder = folder
        self.elapsed_s = 0.0
        """Wall clock of all syncs so far."""

    def sync_weights(self) -> None:
        """Hand the current weights to the rollout source; on every process, from the main process's folder."""
        start = time.perf_counter()
        accelerator = self.trainer.accelerator
        state = accelerator.get_state_dict(self.trainer.model_wrapped)
        if accelerator.is_main_process:
            save_weights(merged(state, accelerator.unwrap_model(self.trainer.model_wrapped)), self.folder)
        # Also the barrier that keeps the others from reading before it is written.
        (folder,) = broadcast_object_list([str(self.folder)])
        self.source.load_weights(Path(folder), self.trainer.state.global_step)
        self.elapsed_s += time.perf_counter() - start


def weights_folder() -> AbstractContextManager[Path]:
    """A private folder for weights on their way to the engine, in memory where the system offers that.

    It is removed at the end; what a killed process left behind is removed at the next start.
    """
    shared = Path("/dev/shm")
    root = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return private_folder(root, _PREFIX)


def save_weights(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Write `folder/model.safetensors`. Weights that share storage (tied embeddings) are written once."""
    seen: dict[int, str] = {}
    unique = {}
    for name, tensor in state.items():
        if seen.setdefault(tensor.data_ptr(), name) == name:
            unique[name] = tensor.detach().contiguous()
    save_file(unique, str(folder / "model.safetensors"), metadata={"format": "pt"})
