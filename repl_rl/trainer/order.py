"""Task sampler: TRL's order of tasks, with a preview of later steps."""

from collections.abc import Iterator
from copy import copy
from itertools import islice

import torch
from trl.trainer.utils import RepeatSampler


class Order(RepeatSampler):
    """TRL's order of tasks, of which later steps can be read without drawing them."""

    @classmethod
    def of(cls, sampler: RepeatSampler) -> "Order":
        """Return an `Order` with the settings of `sampler`."""
        own = (sampler.data_source, sampler.mini_repeat_count, sampler.batch_size, sampler.repeat_count)
        return cls(*own, sampler.shuffle, sampler.seed)

    def __iter__(self) -> Iterator[int]:
        # `upcoming` repeats the epoch from this state of the generator.
        self._epoch = self.generator.get_state()
        epoch: Iterator[int] = super().__iter__()
        return epoch

    def upcoming(self, done: int) -> Iterator[list[int]]:
        """Return an endless iterator over the dataset rows of each step's rollouts, starting after `done` steps.

        The call must come within the epoch of the first of these steps.
        """
        # A copy draws, so that the generator of this sampler does not advance.
        later = copy(self)
        later.generator = torch.Generator()
        later.generator.set_state(self._epoch)
        return islice(later._steps(), done % (self.num_samples // self.batch_size), None)

    def _steps(self) -> Iterator[list[int]]:
        # TRL repeats each batch `repeat_count` times for its updates; one of them is enough here.
        size = self.batch_size * self.mini_repeat_count
        while True:
            epoch = list(self)
            for at in range(0, len(epoch), size * self.repeat_count):
                yield epoch[at : at + size]
