"""Training states on disk: everything that a run needs to resume exactly at the end of a step."""

import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from transformers import PreTrainedModel, TrainerState

from repl_rl.errors import ConfigError
from repl_rl.machine.durable import keep_newest, newest_whole, write_durably
from repl_rl.machine.files import Json
from repl_rl.machine.refused import writing
from repl_rl.machine.versions import versions
from repl_rl.runs.folder import RunFolder
from repl_rl.settings.same import check_same_settings
from repl_rl.trainer.sharded import parted, whole

log = logging.getLogger(__name__)

SAID, STEPS, TENSORS = "state.json", "trainer_state.json", "tensors.pt"
"""Files of a state: metadata of repl_rl, trainer state of transformers (which reads this name), and tensors.

The tensors are weights, optimizer, learning rate schedule and random generators.
"""
Tensors = Mapping[str, object]
"""Values that `torch.save` accepts: tensors, numbers and texts, in dictionaries, lists and tuples."""


@runtime_checkable
class Remembering(Protocol):
    """Part of a run with state that a checkpoint must hold, besides the policy's weights."""

    def memory(self) -> str:
        """Return the state as JSON."""

    def remember(self, memory: str) -> None:
        """Restore a state that `memory` returned, possibly in another process."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Snapshot at the end of a step, without weights and optimizer; a copy that the next step does not change."""

    step: int
    """Number of steps done, >= 0."""
    said: Mapping[str, Json]
    """Metadata for `state.json`."""
    counted: TrainerState
    """Trainer state of transformers."""
    schedule: object
    randoms: list[Tensors]
    """States of the random generators, one entry per process."""
    order: torch.Tensor
    """State of the task sampler's generator, at the start of the epoch of the next step."""

    def write(self, folder: Path, learned: Tensors) -> None:
        """Write the snapshot, with weights and optimizer in `learned`, as `folder/NNNNNN`.

        Raises:
            ConfigError: the state cannot be written.
        """

        telling = partial(writing, "folder", folder, "the run's state", ", then --resume")

        def fill(made: Path) -> None:
            own = {"schedule": self.schedule, "randoms": self.randoms, "order": self.order}
            # Errors of torch are explained here, because the search for their cause needs the unfinished folder.
            with telling():
                torch.save({**learned, **own}, made / TENSORS)
            (made / SAID).write_text(json.dumps(self.said) + "\n", encoding="utf-8")
            (made / STEPS).write_text(json.dumps(asdict(self.counted)) + "\n", encoding="utf-8")

        with telling():
            write_durably(folder / f"{self.step:06d}", fill)


@dataclass(frozen=True, slots=True)
class State:
    """State on disk, with complete files."""

    folder: Path
    said: Mapping[str, str]
    """Metadata of the run as JSON texts, by origin: `parts` and `run`."""
    step: int
    policy_step: int
    processes: int

    def tensors(self) -> dict[str, object]:
        """Load weights, optimizer, learning rate schedule and random generators to the CPU."""
        found: dict[str, object] = torch.load(self.folder / TENSORS, map_location="cpu", weights_only=True)
        return found


def newest(folder: Path, tell: Callable[[str], None] = log.warning) -> State | None:
    """Return the newest complete state in `folder`, or None. The warning callback receives a line per damaged state."""
    found = newest_whole(states_in(folder), tell)
    return None if found is None else _read(found)


@contextmanager
def taken(folder: RunFolder, settings: str, resume: bool, main: bool = True) -> Iterator[State | None]:
    """Open a run's folder for this process, and yield its newest complete state, or None if the run begins.

    The folder is new, or it is cut back to the step of that state. Only the main process of a training locks and
    changes the folder; the others read it.

    Raises:
        ConfigError: another process has locked the folder, or its content may not be replaced or resumed.
    """
    if not main:
        yield newest(folder.states) if resume and folder.begun else None
        return
    # Lock the folder before anything in it is read or removed.
    with folder.held():
        going_on = resume and folder.begun
        if not going_on:
            folder.create(settings)
        else:
            check_same_settings(folder.path, settings)
        state = newest(folder.states) if going_on else None
        # Without a state, the run was stopped before its first one was saved, and starts at step 0.
        if going_on:
            folder.reopen(settings, state.step if state else 0, state.policy_step if state else 0)
        yield state


def states_in(folder: Path) -> list[Path]:
    """Return the folders of states, oldest first."""
    return sorted(place for place in folder.glob("[0-9]" * 6) if place.is_dir())


def memories(folder: Path, part: str) -> Iterator[str]:
    """Yield the saved state of a part of the main process from each readable state, oldest first, as JSON."""
    for place in states_in(folder):
        # A state may be damaged, or another thread may be removing it.
        with suppress(OSError, ValueError, KeyError):
            said = json.loads((place / SAID).read_text(encoding="utf-8"))["said"]
            yield json.loads(said["parts"])[part][0]


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` states."""
    keep_newest(states_in(folder), keep)


def _read(place: Path) -> State:
    said = json.loads((place / SAID).read_text(encoding="utf-8"))
    now = versions()
    if (then := said["versions"]) != now:
        changed = ", ".join(f"{name} {then.get(name)} -> {now.get(name)}" for name in sorted({*then, *now})
                            if then.get(name) != now.get(name))  # fmt: skip
        log.warning("the run goes on with other packages than it was saved with (%s): figures can differ", changed)
    return State(place, said["said"], said["step"], said["policy_step"], said["processes"])


def generators() -> Tensors:
    """Return a copy of the states of this process's random generators."""
    # `torch.load` with `weights_only` accepts no array of numpy, so its keys become a tensor.
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "devices": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_generators(saved: Tensors) -> None:
    """Restore the random generators of this process to the states that `generators` returned."""
    python, cpu, devices, numbers = (saved[name] for name in ("python", "torch", "devices", "numpy"))
    assert isinstance(python, tuple)
    assert isinstance(numbers, tuple)
    assert isinstance(cpu, torch.Tensor)
    assert isinstance(devices, list)
    random.setstate(python)
    np.random.set_state((numbers[0], numbers[1].numpy().astype(np.uint32), *numbers[2:]))
    torch.set_rng_state(cpu)
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(devices)


def copied(value: object, keep: bool = True) -> object:
    """Return `value` with each tensor in it copied to CPU memory, gathered from its shards.

    With sharded tensors, all processes call this together. Without `keep`, tensors become None, which saves memory if
    another process keeps them.
    """
    if isinstance(value, torch.Tensor):
        made = whole(value.detach())
        return made.to("cpu", copy=True) if keep else None
    if isinstance(value, Mapping):
        return {key: copied(one, keep) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(one, keep) for one in value)
    return value


def learned_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights that training changes, and the buffers that a checkpoint would hold, by name; not copied."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    frozen = {name for name, _ in model.named_parameters(remove_duplicate=False)} - weights.keys()
    # `state_dict` leaves out buffers that are not persistent.
    kept = model.state_dict()
    buffers = {name: kept[name] for name, _ in model.named_buffers() if name in kept and name not in frozen}
    return weights | buffers


@torch.no_grad()
def relearn(model: PreTrainedModel, saved: object) -> None:
    """Load weights that `learned_of` returned into `model`.

    Raises:
        ConfigError: the model trains other weights.
    """
    assert isinstance(saved, dict)
    own = learned_of(model)
    if other := sorted(own.keys() ^ saved.keys()):
        raise ConfigError("model", type(model).__name__, f"the saved run trains other weights, {other[0]} first")
    for name, weight in own.items():
        weight.copy_(parted(saved[name], weight))


def different(mine: object, saved: object, name: str = "") -> str:
    """Return the dotted name of the first bitwise difference between `mine` and `saved`, or "" if they are equal.

    `saved` is on the CPU; one tensor of `mine` at a time is copied there. With sharded tensors, all processes call this
    together.
    """
    if isinstance(mine, torch.Tensor) and isinstance(saved, torch.Tensor):
        here = whole(mine.detach()).cpu()
        same = here.dtype == saved.dtype and here.shape == saved.shape
        return "" if same and torch.equal(_bits(here), _bits(saved)) else name
    if isinstance(mine, Mapping) and isinstance(saved, Mapping) and mine.keys() == saved.keys():
        below = ((mine[key], saved[key], key) for key in mine)
    elif isinstance(mine, list | tuple) and isinstance(saved, list | tuple) and len(mine) == len(saved):
        below = ((one, other, number) for number, (one, other) in enumerate(zip(mine, saved, strict=True)))
    else:
        return "" if mine == saved else name
    found = (different(one, other, f"{name}.{key}".lstrip(".")) for one, other, key in below)
    return next((where for where in found if where), "")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, because a NaN is not equal to itself, but its bytes are."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
