"""Failure of a dropped rollout, as data on its trajectory, which is never rewarded and never trained on."""

from dataclasses import dataclass
from enum import StrEnum

from repl_rl.errors import SandboxFault, UserCodeError
from repl_rl.record.line import refuse


class FailureKind(StrEnum):
    """Source of a failure. The list is closed."""

    SANDBOX_FAULT = "sandbox_fault"
    """Our console failed."""
    USER_ERROR = "user_error"
    """A sampler or a judge of the user raised or misbehaved."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The task's prompt fills the context."""
    OTHER = "other"
    """Any other `RolloutFailure`."""

    @property
    def is_users(self) -> bool:
        """True if the sampler or the task is to blame, and no part of ours."""
        return self in (FailureKind.USER_ERROR, FailureKind.PROMPT_TOO_LONG)


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason for which a rollout was dropped."""

    kind: FailureKind
    message: str

    def __post_init__(self) -> None:
        if type(self.kind) is not FailureKind:
            refuse("Failure.kind", self.kind, f"choose a FailureKind: {', '.join(FailureKind)}")

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Return the failure of a rollout that `error` ended."""
        kinds = ((SandboxFault, FailureKind.SANDBOX_FAULT), (UserCodeError, FailureKind.USER_ERROR))
        kind = next((kind for cause, kind in kinds if isinstance(error, cause)), FailureKind.OTHER)
        return cls(kind, str(error))
