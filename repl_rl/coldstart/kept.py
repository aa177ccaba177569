"""A fine-tuning that goes on where it was stopped: its states, whole or not at all, by transformers' own means."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTTrainer

from repl_rl.machine.durable import keep_newest, newest_whole, write_durably
from repl_rl.machine.refused import writing

log = logging.getLogger(__name__)

KEEP = 2
"""Newest states that are kept: a second one, in case the newest is damaged."""
_OUTPUT = "output_dir"


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where the states of a fine-tuning are kept, and how often."""

    folder: Path
    seconds: float = 60.0
    """At most so much work is lost, or one step where that takes longer."""
    share: float = 0.01
    """Largest share of the wall clock that saving may take; where that is too little, more is lost."""


class KeptTrainer(SFTTrainer):
    """TRL's trainer, which saves its state where `keeping` says, and goes on with the newest whole one.

    What transformers saves is all that decides what comes next: weights, optimizer, schedule, random generators, and
    how many batches were learned from; the order of the examples follows from the seed.
    """

    keeping: Keeping | None = None

    def go_on(self) -> None:
        """Train to the end, from the beginning or from the newest whole state."""
        found = None
        if self.keeping is not None:
            found = newest_whole(_places(self.keeping.folder), log.warning)
            self.add_callback(Paced(self.keeping))
        self.train(resume_from_checkpoint=None if found is None else str(found))

    def _save_checkpoint(self, model: object, trial: object) -> None:
        assert self.keeping is not None
        folder = self.keeping.folder

        def fill(made: Path) -> None:
            before = self.args.output_dir
            setattr(self.args, _OUTPUT, str(made))
            try:
                super(KeptTrainer, self)._save_checkpoint(model, trial)
            finally:
                setattr(self.args, _OUTPUT, before)
            (saved,) = made.glob("checkpoint-*")  # TRL writes a card beside it
            for file in saved.iterdir():
                file.rename(made / file.name)
            saved.rmdir()

        with writing("folder", folder, "the state of the fine-tuning", ", then give the command again"):
            write_durably(folder / f"{self.state.global_step:06d}", fill)
        keep_newest(_places(folder), KEEP)


class Paced(TrainerCallback):
    """Has a state saved as often as it is to be, but not after the last step."""

    def __init__(self, keeping: Keeping, clock: Callable[[], float] = time.monotonic) -> None:
        self._keeping, self._clock = keeping, clock
        self._since_s, self._cost_s = clock(), 0.0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        passed_s, keeping = self._clock() - self._since_s, self._keeping
        if state.global_step >= state.max_steps:
            return
        if passed_s >= keeping.seconds and passed_s * keeping.share >= self._cost_s:
            control.should_save = True
            self._since_s = self._clock()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._cost_s = self._clock() - self._since_s


def _places(states: Path) -> list[Path]:
    return sorted(place for place in states.glob("[0-9]" * 6) if place.is_dir())
