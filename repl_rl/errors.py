"""The exception tree. Everything that repl_rl raises on purpose is drawn here::

    ReplRLError                 a bug or a bad configuration; it rises to the caller
    ├── ConfigError             input that a person can mend: thing, value, remedy; exit code 2
    │   └── SetupError          a task's workspace cannot be made in a console
    ├── SandboxUnavailable      no isolation can be had on this machine; exit code 2
    ├── EngineError             the inference engine failed; the step ends
    │   ├── EngineDied          its process is gone
    │   ├── WeightSyncError     sampler and trainer disagree about the policy
    │   └── NodeLost            a node of a fleet is gone or frozen; its groups are played elsewhere
    ├── BrokenDown              the engine or the consoles died again and again; exit code 3
    ├── StoreError              a stored trajectory cannot be read
    ├── InvariantError          a record would break an invariant of `trajectory`
    └── UserCodeError           a sampler, judge or reward of the user raised or misbehaved
    RolloutFailure              data, recorded on one trajectory; never trained on
    └── SandboxFault            our console failed, not the policy's code
        └── SandboxLost         what makes consoles died or cannot be reached; the rollout is played again

Cancellation (`asyncio.CancelledError`, `KeyboardInterrupt`) is neither and always passes through.
"""


class ReplRLError(Exception):
    """A bug or a bad configuration."""

    exit_code = 1

    def __reduce__(self) -> tuple[object, ...]:
        return _as_it_was, (type(self), str(self), self.__dict__)


def _as_it_was(kind: type[ReplRLError], message: str, attributes: dict[str, object]) -> ReplRLError:
    """An error from another process: its message is made already."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(attributes)
    return error


class ConfigError(ReplRLError):
    """Input that a person can mend. `thing` is what is wrong, `value` what it is, `remedy` what to do."""

    exit_code = 2

    def __init__(self, thing: str, value: object, remedy: str) -> None:
        super().__init__(f"{thing} is {value!r}; {remedy}")
        self.thing = thing
        self.value = value
        self.remedy = remedy


class SetupError(ConfigError):
    """A task's workspace cannot be made in a console. `thing` says where: one of its files, modules or lines."""


class SandboxUnavailable(ReplRLError):
    """No isolation of the asked-for kind can be had here; the message names the fix."""

    exit_code = 2


class EngineError(ReplRLError):
    """The inference engine failed; the training step ends."""


class EngineDied(EngineError):
    """The engine's process is gone."""


class WeightSyncError(EngineError):
    """The engine's log probabilities differ from the trainer's: its weights are not the policy's."""


class NodeLost(EngineError):
    """A node of a fleet is gone, frozen, or of no use."""


class BrokenDown(ReplRLError):
    """What a run cannot do without died again and again. Once the cause is gone, `--resume` goes on."""

    exit_code = 3

    def __init__(self, thing: str, value: object, remedy: str) -> None:
        super().__init__(f"{thing} is {value!r}; {remedy}, then go on with --resume")


class StoreError(ReplRLError):
    """A stored trajectory cannot be read."""

    exit_code = 2


class InvariantError(ReplRLError, ValueError):
    """A record would break an invariant of `repl_rl.record.trajectory`. Names the field, the value and the remedy."""


class UserCodeError(ReplRLError):
    """A sampler, judge or reward function supplied by the user raised or returned something unusable."""


class RolloutFailure(Exception):
    """Why one rollout has no usable outcome. It is recorded on its trajectory and never trained on."""


class SandboxFault(RolloutFailure):
    """Our console failed (a lost kernel, a broken protocol), as opposed to the policy's code."""


class SandboxLost(SandboxFault):
    """What makes consoles died, such as a fork server, or cannot be reached. No line of the policy's did that."""
