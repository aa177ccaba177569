"""Weight sync: the trainer writes its weights to a folder, and the rollout source loads them."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, is_peft_model
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from repl_rl.errors import ConfigError, EngineError
from repl_rl.models.parameter_names import rename_to_checkpoint
from repl_rl.trainer.plugins.lora import merge_adapter_state
from repl_rl.trainer.rollout_source import RolloutSource
from repl_rl.trainer.trl_arguments import GRPOTrainer
from repl_rl.utils.atomic_files import open_private_folder

_PREFIX = "repl_rl-weights-"
WEIGHTS = "model.safetensors"
"""Name of the file in a folder of weights."""
_HEADER = 16 << 20
"""Additional room for the names in a file of weights, bytes."""
SHARED = Path("/dev/shm")
"""Folder of the shared-memory file system, whose files are in RAM."""

WarnFn = Callable[[str], None]
"""Callback for one line of text about a fallback to a slower method."""


@dataclass(frozen=True, slots=True)
class FallbackFolder:
    """Second folder for weight syncs. Once a write to the first one fails, all later syncs use it."""

    open_folder: Callable[[], Path]
    """Function that creates the folder."""
    warn: WarnFn


class WeightSync:
    """Weight sync in place of TRL's vLLM client: TRL calls `sync_weights` whenever it would update its own engine."""

    def __init__(self, trainer: GRPOTrainer, source: RolloutSource, folder: Path, alternate: bool = False) -> None:
        """With `alternate`, syncs alternate between two folders in `folder`.

        Async rollouts need this: a crashed engine can restart with its last weights while new ones are written.
        """
        self.trainer = trainer
        self.source = source
        self.folder = folder
        self._alternate, self._turn = alternate, 0
        self.fallback: FallbackFolder | None = None
        """Fallback folder, used once; None if it is used or does not exist."""
        self.elapsed_s = 0.0
        """Wall clock seconds of all syncs so far."""

    def sync_weights(self) -> None:
        """Give the current weights to the rollout source; all processes load them from the main process's folder."""
        start = time.perf_counter()
        accelerator = self.trainer.accelerator
        # All processes call this together, because each may hold a shard of the weights.
        state = accelerator.get_state_dict(self.trainer.model_wrapped)
        self._turn += 1
        if accelerator.is_main_process:
            self._save_weights(accelerator.unwrap_model(self.trainer.model_wrapped), state)
        if torch.cuda.is_available():
            # Release cached memory of the update, so that a vLLM that wakes up has room.
            torch.cuda.empty_cache()
        # The broadcast is also a barrier: no process reads the folder before it is written.
        (folder,) = broadcast_object_list([str(self._target_folder)])
        self.source.load_weights(Path(folder), self.trainer.state.global_step)
        self.elapsed_s += time.perf_counter() - start

    @property
    def _target_folder(self) -> Path:
        """Folder of the current sync."""
        return self.folder / str(self._turn % 2) if self._alternate else self.folder

    def _save_weights(self, model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> None:
        """Write the weights to the folder of this sync, or to the fallback folder if that fails."""
        self._target_folder.mkdir(exist_ok=True)
        try:
            save_weights(model, state, self._target_folder)
        except EngineError as error:
            if self.fallback is None:
                raise
            # Remove the unfinished file, which would take room from other programs.
            (self._target_folder / WEIGHTS).unlink(missing_ok=True)
            # Use the fallback for this sync and all later ones.
            fallback, self.fallback = self.fallback, None
            self.folder = fallback.open_folder()
            fallback.warn(f"weights reach the engine through {self.folder.parent} from now on: {error}")
            self._target_folder.mkdir(exist_ok=True)
            save_weights(model, state, self._target_folder)


def compute_weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all weights and buffers of `model`."""
    return sum(int(weight.nbytes) for weights in (model.parameters(), model.buffers()) for weight in weights)


def find_folder_with_space(
    size: int, folders: Sequence[Path] | None = None, free: Callable[[Path], int] | None = None
) -> Path:
    """Return the first of `folders` with room for `size` bytes: memory if the system offers it, or temporary files.

    Args:
        size: bytes of the weights.
        folders: folders, best first; None means /dev/shm and the temporary folder.
        free: returns the free bytes of a folder; None means those that the system reports.

    Raises:
        ConfigError: no folder has room.
    """
    get_free_bytes = free or _get_free_bytes
    usable = [folder for folder in folders or (SHARED, Path(tempfile.gettempdir())) if os.access(folder, os.W_OK)]
    folder = next((folder for folder in usable if get_free_bytes(folder) >= size + _HEADER), None)
    if folder is None:
        space = (
            ", ".join(f"{get_free_bytes(folder) >> 20} MiB in {folder}" for folder in usable) or "no folder to write to"
        )
        remedy = f"the policy takes {size >> 20} MiB; free some, or set TMPDIR to a folder with room"
        raise ConfigError("room for weights on their way to the engine", space, remedy)
    return folder


def _get_free_bytes(folder: Path) -> int:
    return int(shutil.disk_usage(folder).free)


@contextmanager
def open_weights_folder(
    size: int, warn: WarnFn | None = None, find_folder: Callable[[int], Path] = find_folder_with_space
) -> Iterator[Path]:
    """Yield a private folder for weight syncs of `size` bytes, in memory if that has room.

    The folder is removed at the end; folders of killed processes are removed at the next start. The warning callback
    receives a line if memory exists but is too small. `find_folder` chooses the folder.

    Raises:
        ConfigError: no folder has room.
    """
    root = find_folder(size)
    if root != SHARED and os.access(SHARED, os.W_OK) and warn is not None:
        warn(f"{SHARED} has no room for {size >> 20} MiB of weights, so they reach the engine through {root}")
    with open_private_folder(root, _PREFIX) as folder:
        yield folder


@contextmanager
def open_fallback_folder(weights: Path, warn: WarnFn) -> Iterator[FallbackFolder | None]:
    """Yield a fallback through temporary files if `weights` is in memory, or else None.

    A folder that the fallback has created is removed at the end.
    """
    if SHARED not in weights.parents:
        yield None
        return
    with ExitStack() as stack:
        yield FallbackFolder(
            lambda: stack.enter_context(open_private_folder(Path(tempfile.gettempdir()), _PREFIX)), warn
        )


def save_weights(model: PreTrainedModel, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write `state`, the weights of `model`, to `folder/model.safetensors` under the names of its checkpoint.

    Tied weights are written once, and adapters are merged into their layers.

    Raises:
        EngineError: the weights cannot be written.
    """
    base_model, merged = model, dict(state)
    if is_peft_model(model):
        base_model, merged = model.get_base_model(), merge_adapter_state(merged, model)
    weights = {name: w.detach().contiguous() for name, w in rename_to_checkpoint(base_model, merged).items()}
    try:
        save_file(weights, str(folder / WEIGHTS), metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        remedy = "free some room there, or set TMPDIR to another folder if it is the temporary one"
        raise EngineError(f"the policy's weights could not be written to {folder}: {error}; {remedy}") from error
