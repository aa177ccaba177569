"""Help of a command at two levels: `--help` shows the common options, and `--help-all` shows every option.

A marker in the annotation puts a setting at the first level, so a new setting is not there by default:

    seed: Annotated[int, AtLeast(0), COMMON] = 0
"""

import shutil
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from itertools import pairwise
from typing import Annotated, NoReturn, get_args, get_origin, get_type_hints

import tyro

TYRO_CONFIG = (tyro.conf.EnumChoicesFromValues,)
MOST_SHOWN = 30
"""Largest number of options at the first level. A command with at most that many options shows all of them there."""
_HELP = ("-h", "--help")
_HELP_ALL = ("--help-all", "--help_all")


@dataclass(frozen=True, slots=True)
class Common:
    """Marker in the annotation of a field: `--help` shows the setting."""


COMMON = Common()


@dataclass(frozen=True, slots=True)
class HelpSuffix:
    """Marker in the annotation of a field whose help ends with a computed text, such as the names in a registry."""

    get_text: Callable[[], str]


def get_common_names(kind: type, prefix: str = "") -> frozenset[str]:
    """Return the settings of a dataclass that are marked as common, by dotted name."""
    found = set[str]()
    hints = get_type_hints(kind, include_extras=True)
    assert is_dataclass(kind)
    for one in fields(kind):
        hint = hints[one.name]
        if isinstance(hint, type) and is_dataclass(hint):
            found |= get_common_names(hint, f"{prefix}{one.name}.")
        elif get_origin(hint) is Annotated and COMMON in get_args(hint)[1:]:
            found.add(prefix + one.name)
    return frozenset(found)


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return True if the command line asks for help."""
    return not {*_HELP, *_HELP_ALL}.isdisjoint(argv)


def print_help(
    mirror: type, names: Sequence[str], common: Collection[str], argv: Sequence[str], program: str, about: str
) -> NoReturn:
    """Print the help that the command line asks for, and exit.

    `--help TABLE` shows the options of one table.

    Args:
        mirror: the class whose fields are the flags, for tyro.
        names: dotted names of all flags.
        common: dotted names of the flags at the first level.
        argv: the command line.
        program: the command in full.
        about: text before the options.

    Raises:
        SystemExit: 0.
    """
    tables = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    asked = [after for word, after in pairwise(argv) if word in _HELP and after in tables]
    if asked:
        shown = [name for name in names if name.startswith(f"{asked[0]}.")]
    elif len(names) <= MOST_SHOWN or not {*_HELP_ALL}.isdisjoint(argv):
        shown = [*names]
    else:
        shown = [name for name in names if name in common]
    try:
        tyro.cli(select_flags(mirror, shown), prog=program, description=about, args=["--help"], config=TYRO_CONFIG)
    except SystemExit:
        if not asked and len(shown) < len(names):
            print(_list_others(tables, [name for name in names if name not in shown], program))
    raise SystemExit(0)


def select_flags(mirror: type, shown: Collection[str], prefix: str = "") -> type:
    """Return a class with those fields of `mirror` whose dotted names are in `shown`."""
    hints = get_type_hints(mirror, include_extras=True)
    specs: list[tuple[str, object, object]] = []
    assert is_dataclass(mirror)
    for one in fields(mirror):
        hint = hints[one.name]
        if isinstance(hint, type) and is_dataclass(hint):
            table = select_flags(hint, shown, f"{prefix}{one.name}.")
            if fields(table):
                specs.append((one.name, table, field(default_factory=table)))
        elif prefix + one.name in shown:
            specs.append((one.name, hint, one.default))
    return make_dataclass(mirror.__name__, specs, kw_only=True)


def _list_others(tables: Sequence[str], hidden: Sequence[str], program: str) -> str:
    """Return a line per table that names its options which are not at the first level."""
    lines = [f"more options: {program} --help-all shows them, and {program} --help TABLE those of one table"]
    width = shutil.get_terminal_size().columns
    for table in tables:
        own = [last.replace("_", "-") for head, _, last in (name.rpartition(".") for name in hidden) if head == table]
        if own:
            text = f"{table or 'of no table'}: {', '.join(own)}"
            lines.append(
                textwrap.fill(text, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
            )
    return "\n".join(lines)
