"""The order of tasks, and what of it is still to come."""

from collections.abc import Iterator
from copy import copy
from itertools import islice

import torch
from trl.trainer.utils import RepeatSampler


class Order(RepeatSampler):
    """TRL's order of tasks. What comes next can be looked at without drawing it."""

    @classmethod
    def of(cls, sampler: RepeatSampler) -> "Order":
        """The order that `sampler` gives."""
        own = (sampler.data_source, sampler.mini_repeat_count, sampler.batch_size, sampler.repeat_count)
        return cls(*own, sampler.shuffle, sampler.seed)

    def __iter__(self) -> Iterator[int]:
        self._epoch = self.generator.get_state()
        epoch: Iterator[int] = super().__iter__()
        return epoch

    def upcoming(self, done: int) -> Iterator[list[int]]:
        """The rows of the data for the rollouts of each step, from the one that follows `done` of them, without end.

        Asked for while the epoch goes on that this step is in.
        """
        later = copy(self)
        later.generator = torch.Generator()
        later.generator.set_state(self._epoch)
        return islice(later._steps(), done % (self.num_samples // self.batch_size), None)

    def _steps(self) -> Iterator[list[int]]:
        size = self.batch_size * self.mini_repeat_count
        while True:
            epoch = list(self)
            for at in range(0, len(epoch), size * self.repeat_count):
                yield epoch[at : at + size]
