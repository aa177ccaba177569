"""Interface of a source of tasks, which the prefix of `--tasks` selects from the registry `TASK_SOURCES`."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from repl_rl.tasks.task import Split, Task


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """Arguments of `load_tasks` for a source."""

    split: Split = Split.ALL
    count: int | None = None
    """Largest number of tasks (>= 1). None means all; a source without an end then chooses a number."""
    seed: int = 0
    """Seed of generated tasks."""
    allowed_judges: Collection[str] | None = None
    """Judges that a row may name as `module:function`. None permits any."""


class TaskSource(ABC):
    """Source of tasks, selected by `--tasks KIND:PLACE`.

    An installed package declares its class by an entry point of the group `repl_rl.task_sources`. Keep that module
    cheap to import, because every command imports it.
    """

    kind: ClassVar[str]
    """Prefix that selects the source."""
    about: ClassVar[str]
    """Description of a few words, for the help."""
    sampler: ClassVar[str | None] = None
    """Name of the sampler that plays these tasks and no others. None means that any sampler plays them."""

    @abstractmethod
    def load(self, place: str, request: TaskRequest) -> Iterable[Task]:
        """Return the tasks of `place`, which is the text after the prefix.

        Tasks in another split and tasks beyond the count are dropped by the caller, so a source may ignore the request.
        The result has to end.

        Raises:
            ConfigError: names what is wrong with the place, and the remedy.
        """

    def runs_code(self, place: str) -> bool:
        """Return True if loading imports or runs code that `place` names. A stranger's run then needs `--trust`."""
        return True

    def get_sampler_options(self, place: str) -> Mapping[str, object]:
        """Return the options that `sampler` needs to play the tasks of `place`."""
        return {}
