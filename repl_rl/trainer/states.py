"""States of a run on disk: all that decides what comes next, at the end of a step."""

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
"""What a state's folder holds: what repl_rl says, what transformers counts (it reads a file of this name), and weights,
optimizer, schedule and random generators."""
Tensors = Mapping[str, object]
"""What `torch.save` takes: tensors, numbers and texts, in dictionaries, lists and tuples."""


@runtime_checkable
class Remembering(Protocol):
    """Something that carries more than the policy's weights from one step to the next."""

    def memory(self) -> str:
        """All of that, as JSON."""

    def remember(self, memory: str) -> None:
        """Take up where `memory` was asked for, maybe in another process."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The end of a step: everything but weights and optimizer, copied, so that it outlives the next step."""

    step: int
    """Steps behind it, >= 0."""
    said: Mapping[str, Json]
    """For `state.json`."""
    counted: TrainerState
    """Of transformers."""
    schedule: object
    randoms: list[Tensors]
    """The random generators of each process."""
    order: torch.Tensor
    """Of the generator that orders the tasks, where the epoch begins in which the next step is."""

    def write(self, folder: Path, learned: Tensors) -> None:
        """Write it with `learned`, weights and optimizer, as `folder/NNNNNN`.

        Raises:
            ConfigError: that cannot be written.
        """

        telling = partial(writing, "folder", folder, "the run's state", ", then --resume")

        def fill(made: Path) -> None:
            own = {"schedule": self.schedule, "randoms": self.randoms, "order": self.order}
            with telling():  # before what is torn is removed: the cause of torch's error is looked for there
                torch.save({**learned, **own}, made / TENSORS)
            (made / SAID).write_text(json.dumps(self.said) + "\n", encoding="utf-8")
            (made / STEPS).write_text(json.dumps(asdict(self.counted)) + "\n", encoding="utf-8")

        with telling():
            write_durably(folder / f"{self.step:06d}", fill)


@dataclass(frozen=True, slots=True)
class State:
    """One that was found whole."""

    folder: Path
    said: Mapping[str, str]
    """What the run said of itself, by who said it: JSON."""
    step: int
    policy_step: int
    processes: int

    def tensors(self) -> dict[str, object]:
        """Weights, optimizer, schedule and random generators, on the CPU."""
        found: dict[str, object] = torch.load(self.folder / TENSORS, map_location="cpu", weights_only=True)
        return found


def newest(folder: Path, tell: Callable[[str], None] = log.warning) -> State | None:
    """The newest whole state in `folder`; None: there is none. `tell` is given a line about each that is damaged."""
    found = newest_whole(states_in(folder), tell)
    return None if found is None else _read(found)


@contextmanager
def taken(folder: RunFolder, settings: str, resume: bool, main: bool = True) -> Iterator[State | None]:
    """Have a run's folder for this process, new or cut back to its newest whole state; and that state, None where the
    run begins. Processes that train together have the main one's folder; the others only read.

    Raises:
        ConfigError: another process is at work on it, or it holds what may not be replaced or resumed.
    """
    if not main:
        yield newest(folder.states) if resume and folder.begun else None
        return
    with folder.held():  # before anything in it is removed, or believed
        going_on = resume and folder.begun
        if not going_on:
            folder.create(settings)
        else:
            check_same_settings(folder.path, settings)
        state = newest(folder.states) if going_on else None
        if going_on:  # without a state it was stopped before it saved the first
            folder.reopen(settings, state.step if state else 0, state.policy_step if state else 0)
        yield state


def states_in(folder: Path) -> list[Path]:
    """The folders of states, oldest first."""
    return sorted(place for place in folder.glob("[0-9]" * 6) if place.is_dir())


def memories(folder: Path, part: str) -> Iterator[str]:
    """What a part of the main process remembers in each state that can be read, oldest first, as JSON."""
    for place in states_in(folder):
        with suppress(OSError, ValueError, KeyError):  # it is being removed, or damaged
            said = json.loads((place / SAID).read_text(encoding="utf-8"))["said"]
            yield json.loads(said["parts"])[part][0]


def prune(folder: Path, keep: int) -> None:
    """Leave the newest `keep` states."""
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
    """The random generators of this process, copied."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "devices": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_generators(saved: Tensors) -> None:
    """Put the random generators of this process where `generators` found them."""
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
    """`value` with every tensor in it copied to the CPU's memory, whole; where some are in parts, all processes call
    this together. Without `keep`, which spares memory where another process keeps them, none is."""
    if isinstance(value, torch.Tensor):
        made = whole(value.detach())
        return made.to("cpu", copy=True) if keep else None
    if isinstance(value, Mapping):
        return {key: copied(one, keep) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(one, keep) for one in value)
    return value


def learned_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights that training changes, by name, and the buffers that a checkpoint would have: not copied."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    frozen = {name for name, _ in model.named_parameters(remove_duplicate=False)} - weights.keys()
    kept = model.state_dict()
    buffers = {name: kept[name] for name, _ in model.named_buffers() if name in kept and name not in frozen}
    return weights | buffers


@torch.no_grad()
def relearn(model: PreTrainedModel, saved: object) -> None:
    """Give `model` the weights of `learned_of`.

    Raises:
        ConfigError: it has others.
    """
    assert isinstance(saved, dict)
    own = learned_of(model)
    if other := sorted(own.keys() ^ saved.keys()):
        raise ConfigError("model", type(model).__name__, f"the saved run trains other weights, {other[0]} first")
    for name, weight in own.items():
        weight.copy_(parted(saved[name], weight))


def different(mine: object, saved: object, name: str = "") -> str:
    """Where `mine` is not `saved`, bit for bit, in names with dots between; "": nowhere. `saved` is on the CPU; one
    tensor at a time is copied there. Where some are in parts, all processes call this together."""
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
    """A NaN is not equal to itself, its bits are."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
