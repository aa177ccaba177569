"""Checkpoints of the full training state: everything that a run needs to resume exactly at the end of a step.

- States on disk: `StepSnapshot` and `TrainingState`, and functions that copy and restore their parts.
- `CheckpointManager` saves while a run trains, and restores when it resumes.
- `CheckpointCallback` connects it to the trainer.
"""

import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.runs.run_folder import RunFolder, check_same_settings
from repl_rl.trainer.checkpoint_schedule import CheckpointSchedule, CheckpointTimer
from repl_rl.trainer.plugins.fsdp import (
    gather_full_tensor,
    shard_like,
    shard_optimizer_state,
)
from repl_rl.trainer.trl_arguments import GRPOTrainer
from repl_rl.utils.atomic_files import Json, find_newest_intact, remove_all_but_newest, write_folder_durably
from repl_rl.utils.describe_os_errors import catch_os_errors
from repl_rl.utils.installed_versions import collect_versions
from repl_rl.utils.stop_signals import defer_signals, hold_signals, release_signals
from repl_rl.utils.timeouts import DaemonThread

log = logging.getLogger(__name__)

METADATA_FILE, TRAINER_STATE_FILE, TENSORS_FILE = "state.json", "trainer_state.json", "tensors.pt"
"""Files of a state: metadata of repl_rl, trainer state of transformers (which reads this name), and tensors.

The tensors are weights, optimizer, learning rate schedule and random generators.
"""
TensorTree = Mapping[str, object]
"""Values that `torch.save` accepts: tensors, numbers and texts, in dictionaries, lists and tuples."""


@runtime_checkable
class Stateful(Protocol):
    """Part of a run with state that a checkpoint must hold, besides the policy's weights."""

    def state_dict(self) -> str:
        """Return the state as JSON."""

    def load_state_dict(self, memory: str) -> None:
        """Restore a state that `state_dict` returned, possibly in another process."""


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """Snapshot at the end of a step, without weights and optimizer; a copy that the next step does not change."""

    step: int
    """Number of steps done, >= 0."""
    metadata: Mapping[str, Json]
    """Metadata for `state.json`."""
    trainer_state: TrainerState
    """Trainer state of transformers."""
    scheduler_state: object
    rng_states: list[TensorTree]
    """States of the random generators, one entry per process."""
    task_sampler_state: torch.Tensor
    """State of the task sampler's generator, at the start of the epoch of the next step."""

    def save(self, folder: Path, trained_tensors: TensorTree) -> None:
        """Write the snapshot, with weights and optimizer in `trained_tensors`, as `folder/NNNNNN`.

        Raises:
            ConfigError: the state cannot be written.
        """
        catch_errors = partial(catch_os_errors, "folder", folder, "the run's state", ", then --resume")

        def fill_folder(target: Path) -> None:
            other_tensors = {
                "schedule": self.scheduler_state,
                "randoms": self.rng_states,
                "order": self.task_sampler_state,
            }
            # Errors of torch are explained here, because the search for their cause needs the unfinished folder.
            with catch_errors():
                torch.save({**trained_tensors, **other_tensors}, target / TENSORS_FILE)
            (target / METADATA_FILE).write_text(json.dumps(self.metadata) + "\n", encoding="utf-8")
            (target / TRAINER_STATE_FILE).write_text(json.dumps(asdict(self.trainer_state)) + "\n", encoding="utf-8")

        with catch_errors():
            write_folder_durably(folder / f"{self.step:06d}", fill_folder)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """State on disk, with complete files."""

    folder: Path
    metadata: Mapping[str, str]
    """Two JSON texts: `parts`, the states of all stateful parts, and `run`, what the caller needs to resume."""
    step: int
    policy_step: int
    processes: int

    def load_tensors(self) -> dict[str, object]:
        """Load weights, optimizer, learning rate schedule and random generators to the CPU."""
        tensors: dict[str, object] = torch.load(self.folder / TENSORS_FILE, map_location="cpu", weights_only=True)
        return tensors


def find_newest_state(folder: Path, warn: Callable[[str], None] = log.warning) -> TrainingState | None:
    """Return the newest complete state in `folder`, or None. The warning callback receives a line per damaged state."""
    path = find_newest_intact(list_states(folder), warn)
    return None if path is None else _read_state(path)


@contextmanager
def open_run(folder: RunFolder, settings: str, resume: bool, main: bool = True) -> Iterator[TrainingState | None]:
    """Open a run's folder for this process, and yield its newest complete state, or None if there is none.

    A new folder is created. In an existing folder, everything of steps after that state is removed. Only the main
    process of a training locks and changes the folder; the others read it.

    Raises:
        ConfigError: another process has locked the folder, or its content may not be replaced or resumed.
    """
    if not main:
        yield find_newest_state(folder.states_folder) if resume and folder.exists else None
        return
    # Lock the folder before anything in it is read or removed.
    with folder.lock():
        resuming = resume and folder.exists
        if not resuming:
            folder.create(settings)
        else:
            check_same_settings(folder.path, settings)
        state = find_newest_state(folder.states_folder) if resuming else None
        # Without a state, the run was stopped before its first one was saved, and starts at step 0.
        if resuming:
            folder.open_at_step(settings, state.step if state else 0, state.policy_step if state else 0)
        yield state


def list_states(folder: Path) -> list[Path]:
    """Return the folders of states, oldest first."""
    return sorted(path for path in folder.glob("[0-9]" * 6) if path.is_dir())


def read_part_states(folder: Path, part: str) -> Iterator[str]:
    """Yield the saved state of a part of the main process from each readable state, oldest first, as JSON."""
    for path in list_states(folder):
        # A state may be damaged, or another thread may be removing it.
        with suppress(OSError, ValueError, KeyError):
            metadata = json.loads((path / METADATA_FILE).read_text(encoding="utf-8"))["said"]
            yield json.loads(metadata["parts"])[part][0]


def remove_old_states(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` states."""
    remove_all_but_newest(list_states(folder), keep)


def _read_state(path: Path) -> TrainingState:
    """Read the metadata of a state, and warn if packages have changed since it was saved."""
    metadata = json.loads((path / METADATA_FILE).read_text(encoding="utf-8"))
    # Other packages are allowed, but they may round differently.
    current = collect_versions()
    if (saved := metadata["versions"]) != current:
        changed = ", ".join(f"{name} {saved.get(name)} -> {current.get(name)}" for name in sorted({*saved, *current})
                            if saved.get(name) != current.get(name))  # fmt: skip
        log.warning("the run resumes with other packages than it was saved with (%s): metrics can differ", changed)
    return TrainingState(path, metadata["said"], metadata["step"], metadata["policy_step"], metadata["processes"])


def get_rng_state() -> TensorTree:
    """Return a copy of the states of this process's random generators."""
    # `torch.load` with `weights_only` accepts no array of numpy, so its keys become a tensor.
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "devices": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: TensorTree) -> None:
    """Restore the random generators of this process to the states that `get_rng_state` returned."""
    # Loaded values have no static type, so check each before use.
    python, cpu, devices, numbers = (state[name] for name in ("python", "torch", "devices", "numpy"))
    assert isinstance(python, tuple)
    assert isinstance(numbers, tuple)
    assert isinstance(cpu, torch.Tensor)
    assert isinstance(devices, list)
    random.setstate(python)
    np.random.set_state((numbers[0], numbers[1].numpy().astype(np.uint32), *numbers[2:]))
    torch.set_rng_state(cpu)
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(devices)


def copy_tensors(value: object, keep: bool = True) -> object:
    """Return `value` with each tensor in it copied to CPU memory, gathered from its shards.

    With sharded tensors, all processes call this together. Without `keep`, tensors become None, which saves memory if
    another process keeps them.
    """
    if isinstance(value, torch.Tensor):
        full = gather_full_tensor(value.detach())
        return full.to("cpu", copy=True) if keep else None
    if isinstance(value, Mapping):
        return {key: copy_tensors(item, keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_tensors(item, keep) for item in value)
    return value


def get_trained_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights that training changes, and the buffers that a checkpoint would hold, by name; not copied."""
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    frozen = {name for name, _ in model.named_parameters(remove_duplicate=False)} - weights.keys()
    # `state_dict` leaves out buffers that are not persistent.
    state = model.state_dict()
    buffers = {name: state[name] for name, _ in model.named_buffers() if name in state and name not in frozen}
    return weights | buffers


@torch.no_grad()
def load_trained_weights(model: PreTrainedModel, saved: object) -> None:
    """Load weights that `get_trained_weights` returned into `model`.

    Raises:
        ConfigError: the model trains other weights.
    """
    assert isinstance(saved, dict)
    weights = get_trained_weights(model)
    if differing := sorted(weights.keys() ^ saved.keys()):
        remedy = f"its trained weights differ from those of the saved run, first at {differing[0]}; use the same model"
        raise ConfigError("model", type(model).__name__, remedy)
    for name, weight in weights.items():
        weight.copy_(shard_like(saved[name], weight))


def find_difference(current: object, saved: object, name: str = "") -> str:
    """Return the dotted name of the first bitwise difference between `current` and `saved`, or "" if they are equal.

    `saved` is on the CPU; one tensor of `current` at a time is copied there. With sharded tensors, all processes call
    this together.
    """
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        full = gather_full_tensor(current.detach()).cpu()
        same = full.dtype == saved.dtype and full.shape == saved.shape
        return "" if same and torch.equal(_view_as_bits(full), _view_as_bits(saved)) else name
    # Compare containers entry by entry, and everything else by value.
    if isinstance(current, Mapping) and isinstance(saved, Mapping) and current.keys() == saved.keys():
        entries = ((current[key], saved[key], key) for key in current)
    elif isinstance(current, list | tuple) and isinstance(saved, list | tuple) and len(current) == len(saved):
        entries = ((left, right, number) for number, (left, right) in enumerate(zip(current, saved, strict=True)))
    else:
        return "" if current == saved else name
    differences = (find_difference(left, right, f"{name}.{key}".lstrip(".")) for left, right, key in entries)
    return next((difference for difference in differences if difference), "")


def _view_as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, because a NaN is not equal to itself, but its bytes are."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


_OTHER_PROCESSES = (
    "tasks, weights and optimizer state are the same; metrics differ by rounding, and engines sample anew"
)
"""Warning about a run that resumes with another number of processes."""


class CheckpointManager:
    """Checkpoint manager: saves all that `repl-rl train --resume` needs, and restores it.

    At the end of a step, the manager copies the state that decides the next step, and a thread writes it. Weights and
    optimizer do not change until the next optimizer step. So a run that stops before that can still save its last step.
    """

    def __init__(
        self,
        folder: Path,
        schedule: CheckpointSchedule,
        state: TrainingState | None = None,
        describe_run: Callable[[], str] = lambda: "null",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            folder: folder of the saved states, which may not exist yet.
            schedule: interval between saves, and the number of states to keep.
            state: state to resume from. None starts at the beginning.
            describe_run: returns what the caller needs to resume, as JSON.
            clock: returns a time in seconds.
        """
        self.folder = folder
        self.state = state
        self._schedule, self._describe_run = schedule, describe_run
        self._timer = CheckpointTimer(schedule, clock)
        self._versions = collect_versions()
        self._parts: dict[str, Stateful] = {}
        self._snapshot: StepSnapshot | None = None
        # Numbers of the last step that was saved, and of the last one that was handled.
        self._saved_step = self._handled_step = -1
        # True from the first optimizer step of a step until the step has ended.
        self._in_step = False
        self._save_thread: DaemonThread[float] | None = None
        self._tensors: dict[str, object] = {}

    def attach_trainer(self, trainer: GRPOTrainer, parts: Mapping[str, object]) -> None:
        """Attach the trainer and its stateful parts: they are saved from now on, and the parts are restored.

        The number of processes may differ from that of the saved run. A process restores the state of its rank. A new
        rank restores that of rank 0, because parts that play or draw for the whole step must continue from it.

        Raises:
            ConfigError: a part cannot restore its saved state.
        """
        self._parts = {name: part for name, part in parts.items() if isinstance(part, Stateful)}
        if self.state is None:
            return
        processes, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        if self.state.processes != processes and trainer.accelerator.is_main_process:
            log.warning("saved by %d processes, resumed by %d: %s", self.state.processes, processes, _OTHER_PROCESSES)
        self._tensors = self.state.load_tensors()
        states: dict[str, list[str]] = json.loads(self.state.metadata["parts"])
        for name, part in self._parts.items():
            if saved := states.get(name):
                part.load_state_dict(saved[rank if rank < len(saved) else 0])

    def on_train_begin(self, trainer: GRPOTrainer) -> None:
        """Save the initial state, or check the restored one; called when training begins.

        Raises:
            ReplRLError: weights or optimizer differ from the restored state.
        """
        self._handled_step = trainer.steps_done
        # The first epoch of a resumed run repeats the order of the saved one.
        if self.state is not None:
            order = self._tensors["order"]
            assert isinstance(order, torch.Tensor)
            trainer.task_sampler.generator.set_state(order)
        self.on_epoch_begin(trainer)
        if self.state is None:
            self._save_snapshot(trainer, self._take_snapshot(trainer))
        else:
            self._verify_loaded_state(trainer, self.state)
            # Free the memory of all other tensors, which the trainer has copied by now.
            self._tensors = {"randoms": self._tensors["randoms"]}

    def on_epoch_begin(self, trainer: GRPOTrainer) -> None:
        """Copy the random generator of the task order; called before an epoch, which draws its whole order at once."""
        self._task_order = trainer.task_sampler.generator.get_state()

    def on_pre_optimizer_step(self) -> None:
        """Delay interrupts until the step is reported and saved; called before each optimizer step."""
        if not self._in_step:
            hold_signals()
        self._in_step = True

    def on_step_end(self, trainer: GRPOTrainer) -> None:
        """Save the state if a step has ended and a save is due; called after each optimizer step and its callbacks."""
        # Skip optimizer steps inside a step, and a step that has been handled.
        if trainer.state.global_step % trainer.args.logging_steps or trainer.steps_done == self._handled_step:
            return
        self._handled_step = trainer.steps_done
        last = trainer.state.global_step >= trainer.args.max_steps
        if self._broadcast_decision(trainer, self._timer.is_due() or last):
            self._save_snapshot(trainer, self._take_snapshot(trainer), wait=last)
        # No save is due, but `save_on_exit` may need a copy, which only a run of one process can save.
        elif trainer.accelerator.num_processes == 1:
            self._snapshot = self._take_snapshot(trainer)
        # The step is complete, so an interrupt may end the run again.
        if self._in_step:
            self._in_step = False
            release_signals()

    def save_on_exit(self, trainer: GRPOTrainer) -> None:
        """Save the last completed step, if possible; called when training stops for any reason."""
        with defer_signals():
            if self._in_step:
                release_signals()
            if self._snapshot is None or trainer.accelerator.num_processes > 1:
                return
            try:
                self.wait()
                # After an optimizer step, the weights no longer belong to the copied state.
                if self._snapshot.step != self._saved_step and not self._in_step:
                    self._snapshot.save(self.folder, _copy_trained_tensors(trainer))
                    remove_old_states(self.folder, self._schedule.keep_last)
            except ConfigError as error:
                log.warning("%s", error)  # raising would hide the reason for the stop

    def wait(self) -> None:
        """Wait until the current save is on disk.

        Raises:
            ConfigError: the state could not be written.
        """
        if self._save_thread is not None:
            writing, self._save_thread = self._save_thread, None
            try:
                self._timer.record_cost(writing.future.result())
            except ConfigError:
                # `save_on_exit` may try to write this step again.
                self._saved_step = -1
                raise

    def load_model_state(self, trainer: GRPOTrainer) -> None:
        """Load the saved weights into the trainer's model."""
        load_trained_weights(trainer.accelerator.unwrap_model(trainer.model), self._tensors["weights"])

    def load_optimizer_state(self, trainer: GRPOTrainer) -> None:
        """Load the saved states of optimizer and schedule into the trainer."""
        optimizer = self._tensors["optimizer"]
        assert isinstance(optimizer, dict)
        trainer.optimizer.load_state_dict(shard_optimizer_state(trainer.optimizer, optimizer))
        trainer.lr_scheduler.load_state_dict(self._tensors["schedule"])

    def load_rng_state(self, trainer: GRPOTrainer) -> None:
        """Restore the random generators of this process; a rank that the saved run did not have keeps its own."""
        randoms = self._tensors.pop("randoms")
        assert isinstance(randoms, list)
        if (rank := trainer.accelerator.process_index) < len(randoms):
            set_rng_state(randoms[rank])

    def _verify_loaded_state(self, trainer: GRPOTrainer, state: TrainingState) -> None:
        """Check weights and optimizer against the saved state; under FSDP, all processes check each tensor together."""
        for name, tensors in _get_trained_tensors(trainer).items():
            if difference := find_difference(tensors, self._tensors[name], name):
                raise ReplRLError(
                    f"{difference} differs from the saved state {state.folder}; no step was trained from it"
                )
        log.info("restored the state of step %d: weights and optimizer equal the saved ones, bit for bit", state.step)

    def _broadcast_decision(self, trainer: GRPOTrainer, due: bool) -> bool:
        """Return the main process's decision, because clocks differ between processes."""
        if trainer.accelerator.num_processes == 1:
            return due
        decision = [due]
        broadcast_object_list(decision)
        return decision[0]

    def _take_snapshot(self, trainer: GRPOTrainer) -> StepSnapshot:
        """Copy the state at the end of a step, without weights and optimizer."""
        step, trainer_state = trainer.steps_done, trainer.state
        parts = {name: gather_object([part.state_dict()]) for name, part in self._parts.items()}
        metadata = {
            "step": step,
            "policy_step": trainer_state.global_step,
            "processes": trainer.accelerator.num_processes,
            "versions": self._versions,
            "said": {"parts": json.dumps(parts), "run": self._describe_run()},
        }
        trainer_state = replace(trainer_state, log_history=[], stateful_callbacks={})  # metrics.jsonl has the metrics
        schedule = copy_tensors(trainer.lr_scheduler.state_dict())
        # Inside an epoch, a resumed run draws the order of this epoch again, from the generator at its beginning.
        inside_epoch = not float(trainer_state.epoch or 0).is_integer()
        order = self._task_order if inside_epoch else trainer.task_sampler.generator.get_state()
        return StepSnapshot(step, metadata, trainer_state, schedule, gather_object([get_rng_state()]), order)

    def _save_snapshot(self, trainer: GRPOTrainer, snapshot: StepSnapshot, wait: bool = False) -> None:
        """Copy weights and optimizer, and let a thread of the main process write the whole state."""
        # Wait for the previous save, so that only one thread writes.
        self.wait()
        start_s = time.perf_counter()
        self._snapshot, self._saved_step = snapshot, snapshot.step
        trained_tensors = _copy_trained_tensors(trainer)
        if trainer.accelerator.is_main_process:
            copied_s = time.perf_counter() - start_s

            def write_snapshot() -> float:
                snapshot.save(self.folder, trained_tensors)
                remove_old_states(self.folder, self._schedule.keep_last)
                # Cost of the save: wall clock time of the copy, and processor time of the thread.
                return copied_s + time.thread_time()

            self._save_thread = DaemonThread(write_snapshot, "state of the run")
        self._timer.mark_saved()
        if wait:
            self.wait()


def _get_trained_tensors(trainer: GRPOTrainer) -> TensorTree:
    """Return the states of weights and optimizer, not copied."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {"weights": get_trained_weights(model), "optimizer": trainer.optimizer.state_dict()}


def _copy_trained_tensors(trainer: GRPOTrainer) -> TensorTree:
    """Copy the states of weights and optimizer on the main process; under FSDP, all processes contribute their shards.

    Other processes get no copy.
    """
    main = trainer.accelerator.is_main_process
    if not (main or trainer.is_fsdp_enabled):
        return {}
    return {name: copy_tensors(value, main) for name, value in _get_trained_tensors(trainer).items()}


class CheckpointCallback(TrainerCallback):
    """Trainer callback that calls the checkpoint manager."""

    def __init__(self, manager: CheckpointManager, trainer: GRPOTrainer) -> None:
        self._manager, self._trainer = manager, trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        # Intervals of logging and saving may change when a run resumes, so take those of the current settings.
        state.compute_steps(args, state.max_steps)
        # A checkpoint of transformers overwrites the entry of each callback, and fails without one. A saved state has
        # no entries, because callbacks may change, too, when a run resumes.
        state.stateful_callbacks = TrainerState(stateful_callbacks=self._trainer.stateful_callbacks).stateful_callbacks
        self._manager.on_train_begin(self._trainer)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._manager.on_epoch_begin(self._trainer)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._manager.on_pre_optimizer_step()
