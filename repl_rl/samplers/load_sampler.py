"""Lookup of samplers by the name that a user gives."""

import warnings
from collections.abc import Mapping

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.rollout import ReplSampler, RolloutSampler
from repl_rl.rollout.sampler_base import API_VERSION
from repl_rl.samplers.chat_tool_sampler import JudgeToolSampler
from repl_rl.samplers.fenced_code_sampler import FencedCodeSampler
from repl_rl.samplers.fenced_line_sampler import FencedLineSampler
from repl_rl.samplers.retry_with_feedback_sampler import FeedbackSampler
from repl_rl.settings.component_registry import NameWithOptions, Registry, find_or_import, get_options
from repl_rl.tasks import TASK_SOURCES

_SHIPPED: tuple[type[RolloutSampler], ...] = (
    ReplSampler,
    FencedCodeSampler,
    FencedLineSampler,
    FeedbackSampler,
    JudgeToolSampler,
)
SAMPLERS: Registry[RolloutSampler] = Registry("sampler", {kind.kind: kind for kind in _SHIPPED}, ["repl_rl.samplers"])
"""Registry of the samplers that a name selects. All others are given as `module:name`."""


def choose_sampler(tasks: str, sampler: str) -> str:
    """Return the name of the sampler to use for `tasks`, with its options. `sampler` is the user's choice.

    If the task source requires a sampler, it replaces the default `repl`.

    Raises:
        ConfigError: the source requires a sampler and the user chose another, or the chosen one is for other sources.
    """
    kind, _, place = tasks.partition(":")
    chosen = NameWithOptions.parse("sampler", sampler)
    source = TASK_SOURCES.entries[kind]() if kind in TASK_SOURCES.entries else None
    own = source.sampler if source is not None else None
    if source is None or own is None:
        played = [other for other, each in TASK_SOURCES.entries.items() if each.sampler == chosen.name]
        if played:
            remedy = f"it plays --tasks {' or '.join(f'{each}:NAME' for each in played)} alone; leave it out"
            raise ConfigError("sampler", sampler, remedy)
        return sampler
    if chosen.name != own and sampler != ReplSampler.kind:
        raise ConfigError("sampler", sampler, f"{own} alone plays --tasks {kind}:NAME; leave it out")
    return str(NameWithOptions(own, {**chosen.options, **source.get_sampler_options(place)}))


def get_sampler_options(name: str) -> Mapping[str, object]:
    """Return the options of a sampler, each with its annotation. `name` is without parentheses.

    Raises:
        ConfigError, UserCodeError: as `load_sampler`.
    """
    thing = find_or_import("sampler", name, SAMPLERS.entries)
    return {} if isinstance(thing, RolloutSampler) or not callable(thing) else get_options(thing, positional=True)


def load_sampler(name: str) -> RolloutSampler:
    """Load a registered sampler by name, or one of the user as `module:name`. `name(option=value)` sets its options.

    `module:name` is a `RolloutSampler`, a subclass of it, or a function that returns one. Options are the arguments of
    the class or function. An option that is a function is given as `module:function`.

    Raises:
        ConfigError: there is no such sampler or option, it is not a sampler, or it was written for another API version.
        UserCodeError: importing or calling it raised.
    """
    named = NameWithOptions.parse("sampler", name)
    thing = find_or_import("sampler", named.name, SAMPLERS.entries)
    if isinstance(thing, RolloutSampler):
        if named.options:
            raise ConfigError("sampler", name, "it is an instance already, so it takes no options; name its class")
        return _check_api_version(name, thing)
    # An unrelated class is callable too, so reject it before the call.
    if isinstance(thing, type) and not issubclass(thing, RolloutSampler):
        raise ConfigError("sampler", name, "make it a subclass of repl_rl.RolloutSampler")
    if not callable(thing):
        raise ConfigError("sampler", name, "give a RolloutSampler, its class, or a function that returns one")
    make = named.bind_options("sampler", thing, positional=True)
    try:
        made: object = make()
    except TypeError as error:
        remedy = f"it cannot be made without arguments ({error}); name an instance, or a function that makes one"
        raise ConfigError("sampler", name, remedy) from error
    # This is a readable error of the settings already.
    except ConfigError:
        raise
    except Exception as error:
        raise UserCodeError(f"sampler {name}: making it raised {error!r}") from error
    if not isinstance(made, RolloutSampler):
        raise ConfigError("sampler", name, f"it returned a {type(made).__name__}; return a RolloutSampler")
    return _check_api_version(name, made)


def _check_api_version(name: str, sampler: RolloutSampler) -> RolloutSampler:
    if sampler.api_version != API_VERSION:
        remedy = f"this is version {API_VERSION}; see the changelog, then adapt the sampler"
        raise ConfigError(f"api_version of sampler {name}", sampler.api_version, remedy)
    # Earlier releases had this attribute.
    if hasattr(sampler, "optimistic"):
        text = f"attribute `optimistic` of sampler {name} has no effect; remove it (release 0.5.0 ignores it silently)"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
    return sampler
