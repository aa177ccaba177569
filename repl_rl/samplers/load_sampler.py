"""Lookup of samplers by the name that a user gives."""

import warnings
from collections.abc import Callable, Mapping

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.rollout import ReplSampler, RolloutSampler
from repl_rl.rollout.sampler_base import API_VERSION
from repl_rl.samplers.chat_tool_sampler import JudgeToolSampler
from repl_rl.samplers.feedback_sampler import FeedbackSampler
from repl_rl.samplers.fenced_code_sampler import FencedCodeSampler
from repl_rl.samplers.fenced_line_sampler import FencedLineSampler
from repl_rl.samplers.verifiers import VerifiersSampler
from repl_rl.settings.component_registry import NameWithOptions, find_or_import, get_options, search_working_folder_for
from repl_rl.tasks.environments import VERIFIERS

SHIPPED: dict[str, Callable[..., RolloutSampler]] = {
    "repl": ReplSampler,
    "fenced": FencedCodeSampler,
    "fenced_lines": FencedLineSampler,
    "feedback": FeedbackSampler,
    "judge_tool": JudgeToolSampler,
    VERIFIERS: VerifiersSampler,
}
"""Samplers that need no arguments, and the one that belongs to its tasks. All others are given as `module:name`."""


def choose_sampler(tasks: str, sampler: str) -> str:
    """Return the sampler for `tasks` if `sampler` was chosen.

    For an environment of `verifiers`, its own sampler replaces `repl`.

    Raises:
        ConfigError: another sampler was chosen for such an environment, or its sampler for other tasks.
    """
    kind, _, place = tasks.partition(":")
    named = NameWithOptions.parse("sampler", sampler)
    if (kind == VERIFIERS) != (named.name == VERIFIERS) and (kind != VERIFIERS or sampler != "repl"):
        remedy = f"it plays --tasks {VERIFIERS}:NAME alone, and nothing else plays those; leave it out"
        raise ConfigError("sampler", sampler, remedy)
    # The environment may be a module of the working folder instead of an installed package.
    if kind == VERIFIERS:
        search_working_folder_for(
            place.partition("?")[0].rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
        )
    return str(NameWithOptions(VERIFIERS, {**named.options, "environment": place})) if kind == VERIFIERS else sampler


def get_sampler_options(name: str) -> Mapping[str, object]:
    """Return the options of a sampler, each with its annotation. `name` is without parentheses.

    Raises:
        ConfigError, UserCodeError: as `load_sampler`.
    """
    thing = find_or_import("sampler", name, SHIPPED)
    return {} if isinstance(thing, RolloutSampler) or not callable(thing) else get_options(thing, positional=True)


def load_sampler(name: str) -> RolloutSampler:
    """Load a shipped sampler by name, or one of the user as `module:name`. `name(option=value)` sets its options.

    `module:name` is a `RolloutSampler`, a subclass of it, or a function that returns one. Options are the arguments of
    the class or function. An option that is a function is given as `module:function`.

    Raises:
        ConfigError: there is no such sampler or option, it is not a sampler, or it was written for another API version.
        UserCodeError: importing or calling it raised.
    """
    named = NameWithOptions.parse("sampler", name)
    thing = find_or_import("sampler", named.name, SHIPPED)
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
