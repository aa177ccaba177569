"""Groups of rollouts that are compared with each other."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from repl_rl.record.line import refuse


class Member(Protocol):
    """Member of a group: a `Trajectory`, or a summary of one from another process."""

    @property
    def task_id(self) -> str: ...

    @property
    def prompt_key(self) -> str: ...


M = TypeVar("M", bound=Member)


@dataclass(frozen=True, slots=True)
class Group(Generic[M]):
    """Rollouts of one task from one prompt, which share the baseline of an advantage."""

    members: tuple[M, ...]

    def __post_init__(self) -> None:
        if len(self.members) < 2:
            refuse("Group.members", f"{len(self.members)} long", "a group needs at least 2 rollouts for an advantage")
        first = self.members[0]
        for number, other in enumerate(self.members):
            if other.task_id != first.task_id:
                refuse("Group.members", other.task_id, f"a group shares one task, here {first.task_id!r}")
            if other.prompt_key != first.prompt_key:
                where = f"rollout {number} of task {first.task_id!r}"
                refuse("Group.members", where, "it starts from another prompt; a group shares one prompt")
