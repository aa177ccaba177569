"""Where a verb prints."""

from rich.console import Console


def terminal(*, quiet: bool = False) -> Console:
    """The terminal, in which every text is what it says: `repl_rl[ray]` names an extra, and is no markup.

    What has a style is a `Text`. Numbers and paths get no colours of their own.

    Args:
        quiet: nothing is printed.
    """
    return Console(highlight=False, markup=False, quiet=quiet)
