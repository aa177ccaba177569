"""Code of the user by name, `module:attribute`: samplers, estimators, reward functions and judges."""

import importlib

from repl_rl.errors import ConfigError, ReplRLError, UserCodeError


def imported(thing: str, name: str) -> object:
    """What `module:attribute` names. `thing` says in messages what it was to be.

    Raises:
        ConfigError: there is no such module, or it has no such attribute.
        UserCodeError: the module raised while it was imported.
    """
    module, _, attribute = name.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except (ReplRLError, MemoryError):
        raise
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(thing, name, f"it cannot be imported: {error}; give module:name") from error
    except Exception as error:
        raise UserCodeError(f"{thing} {name}: importing {module!r} raised {error!r}") from error
    return found
