"""Exception tree of repl_rl, with all errors that it raises on purpose::

    ReplRLError                 a bug or a bad configuration; propagates to the caller
    ├── ConfigError             input that the user can fix: thing, value, remedy; exit code 2
    │   └── SetupError          a task's workspace cannot be made in a console
    ├── SandboxUnavailable      this machine does not support the isolation; exit code 2
    ├── EngineError             the inference engine failed; the step ends
    │   ├── EngineDied          its process died
    │   ├── WeightSyncError     sampler and trainer have different weights
    │   └── WorkerLost          a worker died or froze; another worker plays its groups
    ├── UnrecoverableError      the engine or the consoles died repeatedly; exit code 3
    ├── StoreError              a stored trajectory cannot be read
    ├── InvariantError          a record would break an invariant of `trajectory`
    └── UserCodeError           a sampler, judge or reward of the user raised or misbehaved
    RolloutFailure              data, recorded on one trajectory; never trained on
    └── SandboxFault            our console failed, not the policy's code
        └── SandboxLost         the source of consoles died or cannot be reached; the rollout is retried

Cancellation (`asyncio.CancelledError`, `KeyboardInterrupt`) belongs to neither tree and always passes through.
"""


class ReplRLError(Exception):
    """Bug or bad configuration."""

    exit_code = 1

    # The default would call `__init__` with the finished message as its only argument.
    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_error, (type(self), str(self), self.__dict__)


def _rebuild_error(kind: type[ReplRLError], message: str, attributes: dict[str, object]) -> ReplRLError:
    """Rebuild an error from another process, whose message is already complete."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(attributes)
    return error


class ConfigError(ReplRLError):
    """Input that the user can fix: `thing` is wrong, has the value `value`, and `remedy` fixes it."""

    exit_code = 2

    def __init__(self, thing: str, value: object, remedy: str) -> None:
        super().__init__(f"{thing} is {value!r}; {remedy}")
        self.thing = thing
        self.value = value
        self.remedy = remedy


class SetupError(ConfigError):
    """Task's workspace that cannot be made in a console. `thing` names the file, module or line of it."""


class SandboxUnavailable(ReplRLError):
    """Isolation of the requested kind that this machine does not support; the message names the fix."""

    exit_code = 2


class EngineError(ReplRLError):
    """Failure of the inference engine; the training step ends."""


class EngineDied(EngineError):
    """Death of the engine's process."""


class WeightSyncError(EngineError):
    """Different log probabilities of engine and trainer: the engine's weights are not the policy's."""


class WorkerLost(EngineError):
    """Worker that died, froze, or cannot be used."""


class UnrecoverableError(ReplRLError):
    """Repeated death of a part that a run needs. After its cause is fixed, `--resume` continues the run."""

    exit_code = 3

    def __init__(self, thing: str, value: object, remedy: str) -> None:
        super().__init__(f"{thing} is {value!r}; {remedy}, then continue with --resume")


class StoreError(ReplRLError):
    """Stored trajectory that cannot be read."""

    exit_code = 2


class InvariantError(ReplRLError, ValueError):
    """Record that would break an invariant of `repl_rl.trajectory.trajectory`.

    Names the field, the value and the remedy.
    """


class UserCodeError(ReplRLError):
    """Sampler, judge or reward function of the user that raised an error or returned an unusable value."""


class RolloutFailure(Exception):
    """Reason for which one rollout has no usable outcome. It is recorded on its trajectory and never trained on."""


class SandboxFault(RolloutFailure):
    """Failure of our console (a lost kernel, a broken protocol), as opposed to the policy's code."""


class SandboxLost(SandboxFault):
    """Source of consoles, such as a fork server, that died or cannot be reached. No line of the policy caused it."""
