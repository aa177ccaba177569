"""The trainer's weights on their way to the rollout source."""

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

from repl_rl.engine.names import as_stored
from repl_rl.errors import ConfigError, EngineError
from repl_rl.machine.folders import private_folder
from repl_rl.trainer.config import GRPOTrainer
from repl_rl.trainer.lora import merged
from repl_rl.trainer.source import RolloutSource

_PREFIX = "repl_rl-weights-"
WEIGHTS = "model.safetensors"
"""The file in their folder."""
_HEADER = 16 << 20
"""Room for the names in a file of weights, bytes."""
SHARED = Path("/dev/shm")

Tell = Callable[[str], None]
"""Given a line about something that is done in a slower way than usual."""


@dataclass(frozen=True, slots=True)
class Spare:
    """Another way for the weights, where the first one fills up while the run goes on."""

    opened: Callable[[], Path]
    """Makes its folder."""
    tell: Tell


class Sync:
    """Stands where TRL expects its vLLM: TRL calls `sync_weights` whenever it would refresh its own engine."""

    def __init__(self, trainer: GRPOTrainer, source: RolloutSource, folder: Path, by_turns: bool = False) -> None:
        """`by_turns`: through two folders in `folder`, by turns. While an engine samples, one that died is opened again
        with the weights that it had, whatever is being written."""
        self.trainer = trainer
        self.source = source
        self.folder = folder
        self._by_turns, self._turn = by_turns, 0
        self.spare: Spare | None = None
        """Taken once; None: there is no other way, or it is taken."""
        self.elapsed_s = 0.0
        """Wall clock of all syncs so far."""

    def sync_weights(self) -> None:
        """Hand the current weights to the rollout source; on every process, from the main process's folder."""
        start = time.perf_counter()
        accelerator = self.trainer.accelerator
        state = accelerator.get_state_dict(self.trainer.model_wrapped)
        self._turn += 1
        if accelerator.is_main_process:
            self._save(accelerator.unwrap_model(self.trainer.model_wrapped), state)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the update has left in PyTorch's hands is no room for a vLLM that wakes
        # Also the barrier that keeps the others from reading before it is written.
        (folder,) = broadcast_object_list([str(self._place)])
        self.source.load_weights(Path(folder), self.trainer.state.global_step)
        self.elapsed_s += time.perf_counter() - start

    @property
    def _place(self) -> Path:
        return self.folder / str(self._turn % 2) if self._by_turns else self.folder

    def _save(self, model: PreTrainedModel, state: Mapping[str, torch.Tensor]) -> None:
        self._place.mkdir(exist_ok=True)
        try:
            save_weights(model, state, self._place)
        except EngineError as error:
            if self.spare is None:
                raise
            (self._place / WEIGHTS).unlink(missing_ok=True)  # what was torn takes room from others
            spare, self.spare = self.spare, None
            self.folder = spare.opened()
            spare.tell(f"weights take {self.folder.parent} on their way to the engine from now on: {error}")
            self._place.mkdir(exist_ok=True)
            save_weights(model, state, self._place)


def size_of(model: PreTrainedModel) -> int:
    """Bytes of the weights of `model`."""
    return sum(int(weight.nbytes) for weights in (model.parameters(), model.buffers()) for weight in weights)


def room_for(size: int, places: Sequence[Path] | None = None, free: Callable[[Path], int] | None = None) -> Path:
    """The first of `places` that takes `size` bytes: memory, where the system offers that, or else temporary files.

    Args:
        size: of the weights, bytes.
        places: folders, best first; None: /dev/shm and the temporary folder.
        free: bytes left in one of them; None: what the system says.

    Raises:
        ConfigError: none of them does.
    """
    left = free or _left
    usable = [place for place in places or (SHARED, Path(tempfile.gettempdir())) if os.access(place, os.W_OK)]
    found = next((place for place in usable if left(place) >= size + _HEADER), None)
    if found is None:
        room = ", ".join(f"{left(place) >> 20} MiB in {place}" for place in usable) or "no folder to write to"
        remedy = f"the policy takes {size >> 20} MiB; free some, or set TMPDIR to a folder with room"
        raise ConfigError("room for weights on their way to the engine", room, remedy)
    return found


def _left(place: Path) -> int:
    return int(shutil.disk_usage(place).free)


@contextmanager
def weights_folder(size: int, tell: Tell | None = None, room: Callable[[int], Path] = room_for) -> Iterator[Path]:
    """A private folder for `size` bytes of weights on their way to the engine, in memory where there is room for them.

    It is removed at the end; what a killed process left behind is removed at the next start. `tell` is given a line
    if memory is there and too small. `room` finds the place.

    Raises:
        ConfigError: there is no room anywhere.
    """
    root = room(size)
    if root != SHARED and os.access(SHARED, os.W_OK) and tell is not None:
        tell(f"{SHARED} has no room for {size >> 20} MiB of weights on their way to the engine: they take {root}")
    with private_folder(root, _PREFIX) as folder:
        yield folder


@contextmanager
def spare_folder(weights: Path, tell: Tell) -> Iterator[Spare | None]:
    """A way through temporary files for weights whose folder is in memory; None: `weights` is not. What it made is
    removed at the end."""
    if SHARED not in weights.parents:
        yield None
        return
    with ExitStack() as ending:
        yield Spare(lambda: ending.enter_context(private_folder(Path(tempfile.gettempdir()), _PREFIX)), tell)


def save_weights(model: PreTrainedModel, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write `state`, the weights of `model`, to `folder/model.safetensors` as its checkpoint names them.

    Tied weights are written once, adapters as part of what they adapt.

    Raises:
        EngineError: they could not be written.
    """
    bare = model.get_base_model() if is_peft_model(model) else model
    weights = {name: w.detach().contiguous() for name, w in as_stored(bare, merged(dict(state), model)).items()}
    try:
        save_file(weights, str(folder / WEIGHTS), metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        remedy = "free some room there, or set TMPDIR to another folder if it is the temporary one"
        raise EngineError(f"the policy's weights could not be written to {folder}: {error}; {remedy}") from error
