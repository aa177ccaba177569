"""Keeps a run's state while it trains, and takes one up again: what stands between the trainer and `states`."""

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
from repl_rl.trainer.config import GRPOTrainer
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
    """What `repl-rl train --resume` needs of a run, saved beside its training.

    At the end of a step what decides the next one is copied; a thread writes it. Weights and optimizer stay what they
    are until the optimizer moves them, so a run that is stopped before that can still save its last step whole.
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
            folder: of the states, which may not exist yet.
            saving: how often, and how many are kept.
            state: where to go on; None: at the beginning.
            said: what whoever runs the training needs to go on, as JSON.
            clock: seconds.
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
        """Save `trainer` from now on, with those of `parts` that remember something; and put them where they were.

        With other processes than those that saved it, each has what was its own. One that was not there has what the
        first one knew, which is what all know alike: who plays and draws for the whole step must go on from that.
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
        """Training is about to take its first step: the beginning can be gone on from too.

        Raises:
            ReplRLError: weights and optimizer are not those of the state that was taken up.
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
            self._tensors = {"randoms": self._tensors["randoms"]}  # the others have been copied

    def turned(self, trainer: GRPOTrainer) -> None:
        """An epoch is about to begin: what orders its tasks is drawn at once."""
        self._order = trainer.order.generator.get_state()

    def moving(self) -> None:
        """The optimizer is about to step: whoever wants to interrupt waits until the step is told of and saved."""
        if not self._moved:
            hold()
        self._moved = True

    def ended(self, trainer: GRPOTrainer) -> None:
        """An optimizer step has ended; if a step has, everybody has been told of it."""
        if trainer.state.global_step % trainer.args.logging_steps or trainer.steps_done == self._ended:
            return
        self._ended = trainer.steps_done
        last = trainer.state.global_step >= trainer.args.max_steps
        if self._agreed(trainer, self._pace.due() or last):
            self._save(trainer, self._look(trainer), wait=last)
        elif trainer.accelerator.num_processes == 1:
            self._boundary = self._look(trainer)
        if self._moved:
            self._moved = False
            release()

    def rescue(self, trainer: GRPOTrainer) -> None:
        """Training ends here, whatever for: have its last step on disk, if it can still be had."""
        with undisturbed():
            if self._moved:
                release()
            if self._boundary is None or trainer.accelerator.num_processes > 1:
                return
            try:
                self.settle()
                if self._boundary.step != self._written and not self._moved:
                    self._boundary.write(self.folder, _learned(trainer))
                    prune(self.folder, self._saving.keep)
            except ConfigError as error:
                log.warning("%s", error)  # not to hide why the run stops

    def settle(self) -> None:
        """Wait until what is being written is there.

        Raises:
            ConfigError: it could not be written.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                self._pace.cost(writing.outcome.result())
            except ConfigError:
                self._written = -1
                raise

    def learned(self, trainer: GRPOTrainer) -> None:
        """Give the trainer's model the saved weights."""
        relearn(trainer.accelerator.unwrap_model(trainer.model), self._tensors["weights"])

    def scheduled(self, trainer: GRPOTrainer) -> None:
        """Give the trainer's optimizer and schedule what was saved."""
        optimizer = self._tensors["optimizer"]
        assert isinstance(optimizer, dict)
        trainer.optimizer.load_state_dict(parted_optimizer(trainer.optimizer, optimizer))
        trainer.lr_scheduler.load_state_dict(self._tensors["schedule"])

    def diced(self, trainer: GRPOTrainer) -> None:
        """Put the random generators where they were; in a process that was not there they stay as a run begins."""
        randoms = self._tensors.pop("randoms")
        assert isinstance(randoms, list)
        if (me := trainer.accelerator.process_index) < len(randoms):
            restore_generators(randoms[me])

    def _check(self, trainer: GRPOTrainer, state: State) -> None:
        """Hold what this process took up to what was saved; under FSDP all of them look at each tensor together."""
        for name, mine in _learning(trainer).items():
            if where := different(mine, self._tensors[name], name):
                raise ReplRLError(f"{where} is not what the state {state.folder} holds; nothing was trained from it")
        log.info("state of step %d taken up: weights and optimizer are what was saved, bit for bit", state.step)

    def _agreed(self, trainer: GRPOTrainer, due: bool) -> bool:
        """What the main process says: a clock differs from process to process."""
        if trainer.accelerator.num_processes == 1:
            return due
        told = [due]
        broadcast_object_list(told)
        return told[0]

    def _look(self, trainer: GRPOTrainer) -> Boundary:
        step, counted = trainer.steps_done, trainer.state
        parts = {name: gather_object([part.memory()]) for name, part in self._parts.items()}
        said = {
            "step": step,
            "policy_step": counted.global_step,
            "processes": trainer.accelerator.num_processes,
            "versions": self._versions,
            "said": {"parts": json.dumps(parts), "run": self._said()},
        }
        counted = replace(counted, log_history=[], stateful_callbacks={})  # metrics.jsonl has the figures
        schedule = copied(trainer.lr_scheduler.state_dict())
        within = not float(counted.epoch or 0).is_integer()
        order = self._order if within else trainer.order.generator.get_state()
        return Boundary(step, said, counted, schedule, gather_object([generators()]), order)

    def _save(self, trainer: GRPOTrainer, boundary: Boundary, wait: bool = False) -> None:
        """Copy weights and optimizer, and have all of it written by a thread of the main process."""
        self.settle()
        began_s = time.perf_counter()
        self._boundary, self._written = boundary, boundary.step
        learned = _learned(trainer)
        if trainer.accelerator.is_main_process:
            copied_s = time.perf_counter() - began_s

            def write() -> float:
                boundary.write(self.folder, learned)
                prune(self.folder, self._saving.keep)
                return copied_s + time.thread_time()

            self._writing = InThread(write, "state of the run")
        self._pace.saved()
        if wait:
            self.settle()


def _learning(trainer: GRPOTrainer) -> Tensors:
    """Weights and optimizer as they are, not copied."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {"weights": learned_of(model), "optimizer": trainer.optimizer.state_dict()}


def _learned(trainer: GRPOTrainer) -> Tensors:
    """Weights and optimizer, copied by the main process; under FSDP every process gives its parts of them."""
    main = trainer.accelerator.is_main_process
    if not (main or trainer.is_fsdp_enabled):
        return {}
    return {name: copied(learning, main) for name, learning in _learning(trainer).items()}
