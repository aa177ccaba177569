"""Checkpoints of the full training state: saving while a run trains, and restoring when it resumes."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, gather_object

from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.machine.stopping import hold, release, undisturbed
from repl_rl.machine.threads import InThread
from repl_rl.machine.versions import versions
from repl_rl.trainer.grpo_config import GRPOTrainer
from repl_rl.trainer.pace import Pace, Saving
from repl_rl.trainer.sharded import parted_optimizer
from repl_rl.trainer.states import (
    Boundary,
    Remembering,
    State,
    Tensors,
    copied,
    different,
    generators,
    learned_of,
    log,
    prune,
    relearn,
    restore_generators,
)

_OTHERS = (
    "tasks, weights and moments are the same, figures differ by rounding, and engines that draw by chance draw anew"
)


class Keeper:
    """Checkpoint manager: saves all that `repl-rl train --resume` needs, and restores it.

    At the end of a step, the manager copies the state that decides the next step, and a thread writes it. Weights and
    optimizer do not change until the next optimizer step. So a run that stops before that can still save its last step.
    """

    def __init__(
        self,
        folder: Path,
        saving: Saving,
        state: State | None = None,
        said: Callable[[], str] = lambda: "null",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            folder: folder of the saved states, which may not exist yet.
            saving: interval between saves, and the number of states to keep.
            state: state to resume from. None starts at the beginning.
            said: returns what the caller needs to resume, as JSON.
            clock: returns a time in seconds.
        """
        self.folder = folder
        self.state = state
        self._saving, self._said = saving, said
        self._pace = Pace(saving, clock)
        self._versions = versions()
        self._parts: dict[str, Remembering] = {}
        self._boundary: Boundary | None = None
        self._written = self._ended = -1
        self._moved = False
        self._writing: InThread[float] | None = None
        self._tensors: dict[str, object] = {}

    def attach(self, trainer: GRPOTrainer, parts: Mapping[str, object]) -> None:
        """Attach the trainer and its stateful parts: they are saved from now on, and the parts are restored.

        The number of processes may differ from that of the saved run. A process restores the state of its rank. A new
        rank restores that of rank 0, because parts that play or draw for the whole step must continue from it.

        Raises:
            ConfigError: a part cannot restore its saved state.
        """
        self._parts = {name: part for name, part in parts.items() if isinstance(part, Remembering)}
        if self.state is None:
            return
        here, me = trainer.accelerator.num_processes, trainer.accelerator.process_index
        if self.state.processes != here and trainer.accelerator.is_main_process:
            log.warning("saved by %d processes, gone on with by %d: %s", self.state.processes, here, _OTHERS)
        self._tensors = self.state.tensors()
        memories: dict[str, list[str]] = json.loads(self.state.said["parts"])
        for name, part in self._parts.items():
            if told := memories.get(name):
                part.remember(told[me if me < len(told) else 0])

    def began(self, trainer: GRPOTrainer) -> None:
        """Save the initial state, or check the restored one; called when training begins.

        Raises:
            ReplRLError: weights or optimizer differ from the restored state.
        """
        self._ended = trainer.steps_done
        if self.state is not None:
            order = self._tensors["order"]
            assert isinstance(order, torch.Tensor)
            trainer.order.generator.set_state(order)
        self.turned(trainer)
        if self.state is None:
            self._save(trainer, self._look(trainer))
        else:
            self._check(trainer, self.state)
            # Free the memory of all other tensors, which the trainer has copied by now.
            self._tensors = {"randoms": self._tensors["randoms"]}

    def turned(self, trainer: GRPOTrainer) -> None:
        """Copy the random generator of the task order; called before an epoch, which draws its whole order at once."""
        self._order = trainer.order.generator.get_state()

    def moving(self) -> None:
        """Delay interrupts until the step is reported and saved; called before each optimizer step."""
        if not self._moved:
            hold()
        self._moved = True

    def ended(self, trainer: GRPOTrainer) -> None:
        """Save the state if a step has ended and a save is due; called after each optimizer step and its callbacks."""
        # Skip optimizer steps inside a step, and a step that has been handled.
        if trainer.state.global_step % trainer.args.logging_steps or trainer.steps_done == self._ended:
            return
        self._ended = trainer.steps_done
        last = trainer.state.global_step >= trainer.args.max_steps
        if self._agreed(trainer, self._pace.due() or last):
            self._save(trainer, self._look(trainer), wait=last)
        # No save is due, but `rescue` may need a copy, which only a run of one process can save.
        elif trainer.accelerator.num_processes == 1:
            self._boundary = self._look(trainer)
        if self._moved:
            self._moved = False
            release()

    def rescue(self, trainer: GRPOTrainer) -> None:
        """Save the last completed step, if possible; called when training stops for any reason."""
        with undisturbed():
            if self._moved:
                release()
            if self._boundary is None or trainer.accelerator.num_processes > 1:
                return
            try:
                self.settle()
                # After an optimizer step, the weights no longer belong to the copied state.
                if self._boundary.step != self._written and not self._moved:
                    self._boundary.write(self.folder, _learned(trainer))
                    prune(self.folder, self._saving.keep)
            except ConfigError as error:
                log.warning("%s", error)  # raising would hide the reason for the stop

    def settle(self) -> None:
        """Wait until the current save is on disk.

        Raises:
            ConfigError: the state could not be written.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                self._pace.cost(writing.outcome.result())
            except ConfigError:
                # `rescue` may try to write this step again.
                self._written = -1
                raise

    def learned(self, trainer: GRPOTrainer) -> None:
        """Load the saved weights into the trainer's model."""
        relearn(trainer.accelerator.unwrap_model(trainer.model), self._tensors["weights"])

    def scheduled(self, trainer: GRPOTrainer) -> None:
        """Load the saved states of optimizer and schedule into the trainer."""
        optimizer = self._tensors["optimizer"]
        assert isinstance(optimizer, dict)
        trainer.optimizer.load_state_dict(parted_optimizer(trainer.optimizer, optimizer))
        trainer.lr_scheduler.load_state_dict(self._tensors["schedule"])

    def diced(self, trainer: GRPOTrainer) -> None:
        """Restore the random generators of this process; a rank that the saved run did not have keeps its own."""
        randoms = self._tensors.pop("randoms")
        assert isinstance(randoms, list)
        if (me := trainer.accelerator.process_index) < len(randoms):
            restore_generators(randoms[me])

    def _check(self, trainer: GRPOTrainer, state: State) -> None:
        """Check weights and optimizer against the saved state; under FSDP, all processes check each tensor together."""
        for name, mine in _learning(trainer).items():
            if where := different(mine, self._tensors[name], name):
                raise ReplRLError(f"{where} is not what the state {state.folder} holds; nothing was trained from it")
        log.info("state of step %d taken up: weights and optimizer are what was saved, bit for bit", state.step)

    def _agreed(self, trainer: GRPOTrainer, due: bool) -> bool:
        """Return the main process's decision, because clocks differ between processes."""
        if trainer.accelerator.num_processes == 1:
            return due
        told = [due]
        broadcast_object_list(told)
        return told[0]

    def _look(self, trainer: GRPOTrainer) -> Boundary:
        """Copy the state at the end of a step, without weights and optimizer."""
        step, counted = trainer.steps_done, trainer.state
        parts = {name: gather_object([part.memory()]) for name, part in self._parts.items()}
        said = {
            "step": step,
            "policy_step": counted.global_step,
            "processes": trainer.accelerator.num_processes,
            "versions": self._versions,
            "said": {"parts": json.dumps(parts), "run": self._said()},
        }
        counted = replace(counted, log_history=[], stateful_callbacks={})  # metrics.jsonl has the metrics
        schedule = copied(trainer.lr_scheduler.state_dict())
        # Inside an epoch, a resumed run draws the order of this epoch again, from the generator at its beginning.
        within = not float(counted.epoch or 0).is_integer()
        order = self._order if within else trainer.order.generator.get_state()
        return Boundary(step, said, counted, schedule, gather_object([generators()]), order)

    def _save(self, trainer: GRPOTrainer, boundary: Boundary, wait: bool = False) -> None:
        """Copy weights and optimizer, and let a thread of the main process write the whole state."""
        # Wait for the previous save, so that only one thread writes.
        self.settle()
        began_s = time.perf_counter()
        self._boundary, self._written = boundary, boundary.step
        learned = _learned(trainer)
        if trainer.accelerator.is_main_process:
            copied_s = time.perf_counter() - began_s

            def write() -> float:
                boundary.write(self.folder, learned)
                prune(self.folder, self._saving.keep)
                # Cost of the save: wall clock time of the copy, and processor time of the thread.
                return copied_s + time.thread_time()

            self._writing = InThread(write, "state of the run")
        self._pace.saved()
        if wait:
            self.settle()


def _learning(trainer: GRPOTrainer) -> Tensors:
    """Return the states of weights and optimizer, not copied."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {"weights": learned_of(model), "optimizer": trainer.optimizer.state_dict()}


def _learned(trainer: GRPOTrainer) -> Tensors:
    """Copy the states of weights and optimizer on the main process; under FSDP, all processes contribute their shards.

    Other processes get no copy.
    """
    main = trainer.accelerator.is_main_process
    if not (main or trainer.is_fsdp_enabled):
        return {}
    return {name: copied(learning, main) for name, learning in _learning(trainer).items()}
