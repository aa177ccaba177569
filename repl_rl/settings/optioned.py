"""Names whose options may be given apart from them: `--sampler.KEY VALUE` after `--sampler NAME`, or a table of a file.

sampler = "repl(give_up_after=3)"          [sampler]
                                           name = "repl"
                                           give_up_after = 3

Both forms are one setting: the name with its options in parentheses.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, get_args, get_origin, get_type_hints

from repl_rl.errors import ConfigError
from repl_rl.settings.named import Named, plain, refuse_other, typed_option
from repl_rl.settings.scalars import Scalar, scalar, split

Said = Sequence[tuple[str, object]]
"""Dotted keys and TOML values of one file, or of the command line, whose values are `Word`."""


class Word(str):
    """Unparsed text of the command line. The annotation of its option decides its type."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Optioned:
    """Marker in the annotation of a field that holds a name with options."""

    options: Callable[[str], Mapping[str, object]]
    """Function from a name to its options with their annotations. It may import user code."""


def optioned(kind: type) -> Mapping[str, Optioned]:
    """Return the fields of a dataclass that are names with options."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, Optioned] = {}
    for one in fields(kind):
        extras = get_args(hints[one.name])[1:] if get_origin(hints[one.name]) is Annotated else ()
        found.update((one.name, extra) for extra in extras if isinstance(extra, Optioned))
    return found


def folded(kind: type, files: Iterable[Said], flags: Sequence[str]) -> tuple[list[Said], list[str]]:
    """Move the options of each name of `kind` into its parentheses, in files and flags.

    The later source wins, and a later name drops the options of an earlier one. Within one file, and on the command
    line, options belong to the name given there. Without a name there, they belong to the name of the source before.

    Raises:
        ConfigError: an option is unknown, or its value has another type.
    """
    said, left = [list(each) for each in files], list(flags)
    for name, asked in optioned(kind).items():
        others, words = split([name], left)
        apart: list[tuple[str, object]] = [
            (f"{name}.{flag.partition('.')[2].replace('-', '_')}", Word(word))
            for flag, word in zip(words[::2], words[1::2], strict=True)
        ]
        if not apart and not any(key.startswith(f"{name}.") for each in said for key, _ in each):
            # No options are given apart from the name, so it stays in its file or flag.
            continue
        others, names = _named_by_flags(name, others)
        whole = _whole(name, _default(kind, name), asked, [*said, [*((name, text) for text in names), *apart]])
        # Replace all that the sources hold of this name by one last source with the whole.
        said = [[pair for pair in each if pair[0].partition(".")[0] != name] for each in said]
        said.append([(name, whole)])
        left = others
    return [*said], left


def _default(kind: type, name: str) -> str:
    (default,) = (one.default for one in fields(kind) if one.name == name)
    return "" if default is MISSING else str(default)


def _whole(field: str, default: str, asked: Optioned, sources: Sequence[Said]) -> str:
    """Return the name with its options in parentheses, from all sources in order."""
    named, options = Named.read(field, default), dict[str, object]()
    for source in sources:
        # Apply the name before the options of this source, because it resets all earlier options.
        for key, value in source:
            if key in (field, f"{field}.name"):
                named, options = Named.read(field, str(value)), {}
        options |= {key.partition(".")[2]: value for key, value in source if key.startswith(f"{field}.")}
        options.pop("name", None)
    hints = asked.options(named.name)
    for key, value in options.items():
        refuse_other(field, named.name, key, value, tuple(hints))
    read = {key: _read(f"{field}.{key}", value, hints[key]) for key, value in options.items()}
    return str(Named(named.name, {**named.options, **read}))


def _read(where: str, value: object, hint: object) -> object:
    """Return an option in the type of its annotation. A word stays text for a text option, even if it is a number."""
    if not isinstance(value, Scalar):
        raise ConfigError(where, value, "give true, false, a number or a text")
    if isinstance(value, Word):
        meant = scalar(value)
        value = str(value) if plain(hint) is str and not isinstance(meant, str) else meant
    typed_option(where, value, hint)
    return value


def _named_by_flags(field: str, flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return `flags` without `--field NAME` and `--field=NAME`, and the names."""
    others, names = list[str](), list[str]()
    left = iter(flags)
    for flag in left:
        if flag == f"--{field}":
            names += [word] if (word := next(left, None)) is not None else []
        elif flag.startswith(f"--{field}="):
            names.append(flag.partition("=")[2])
        else:
            others.append(flag)
    return others, names
