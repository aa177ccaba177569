"""Regular expressions with one group, as users give them: for calls, blocks and answers."""

import re

from repl_rl.errors import ConfigError

BOXED = r"\\boxed\{([^{}]*)\}"
"""An answer as mathematicians box it; braces do not nest."""


def one_group(name: str, pattern: str, flags: re.RegexFlag = re.DOTALL) -> re.Pattern[str]:
    """Compile the option `name`.

    Raises:
        ConfigError: it is no regular expression, or has another number of groups.
    """
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise ConfigError(name, pattern, f"it is no regular expression: {error}") from error
    if compiled.groups != 1:
        raise ConfigError(name, pattern, f"it has {compiled.groups} groups; give exactly one")
    return compiled


def one_place(name: str, frame: str) -> str:
    """Check that the option `name` marks one place for a text.

    Raises:
        ConfigError: it does not.
    """
    if frame.count("{}") != 1:
        raise ConfigError(name, frame, "mark the place of the text with one {}")
    return frame


def framed(frame: str, text: str) -> str:
    """`frame` with `text` in its place. Braces in `text` stay as they are."""
    before, _, after = frame.partition("{}")
    return before + text + after


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """What the group holds in the last match, without white space around it; None: there is no match."""
    found = pattern.findall(text)
    return str(found[-1]).strip() if found else None
