"""Names whose options may be said apart from them: `--sampler.KEY VALUE` beside `--sampler NAME`, or a table of a file.

sampler = "repl(give_up_after=3)"          [sampler]
                                           name = "repl"
                                           give_up_after = 3

Both are one setting: the name with its options in parentheses.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, get_args, get_origin, get_type_hints

from repl_rl.errors import ConfigError
from repl_rl.settings.named import Named, plain, refuse_other, typed_option
from repl_rl.settings.scalars import Scalar, scalar, split

Said = Sequence[tuple[str, object]]
"""What one file says, or the command line: dotted keys and values of TOML. Words of the command line are `Word`."""


class Word(str):
    """A text that has not been read yet: the option that it is given to says what it means."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Optioned:
    """In the annotation of a field: it is a name with options."""

    options: Callable[[str], Mapping[str, object]]
    """The options of what a name stands for, by their annotation. It may import code of the user."""


def optioned(kind: type) -> Mapping[str, Optioned]:
    """The fields of a dataclass that are names with options."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, Optioned] = {}
    for one in fields(kind):
        extras = get_args(hints[one.name])[1:] if get_origin(hints[one.name]) is Annotated else ()
        found.update((one.name, extra) for extra in extras if isinstance(extra, Optioned))
    return found


def folded(kind: type, files: Iterable[Said], flags: Sequence[str]) -> tuple[list[Said], list[str]]:
    """Files and flags in which the options of each name of `kind` stand in its parentheses.

    The later wins: a name that comes later leaves the options of an earlier one behind. Within one file, and on the
    command line, options belong to the name that it says, or else to the one before.

    Raises:
        ConfigError: there is no such option, or it has a value of another type.
    """
    said, left = [list(each) for each in files], list(flags)
    for name, asked in optioned(kind).items():
        others, words = split([name], left)
        apart: list[tuple[str, object]] = [
            (f"{name}.{flag.partition('.')[2].replace('-', '_')}", Word(word))
            for flag, word in zip(words[::2], words[1::2], strict=True)
        ]
        if not apart and not any(key.startswith(f"{name}.") for each in said for key, _ in each):
            continue
        others, names = _named_by_flags(name, others)
        whole = _whole(name, _default(kind, name), asked, [*said, [*((name, text) for text in names), *apart]])
        said = [[pair for pair in each if pair[0].partition(".")[0] != name] for each in said]
        said.append([(name, whole)])
        left = others
    return [*said], left


def _default(kind: type, name: str) -> str:
    (default,) = (one.default for one in fields(kind) if one.name == name)
    return "" if default is MISSING else str(default)


def _whole(field: str, default: str, asked: Optioned, sources: Sequence[Said]) -> str:
    """The name with its options, after all that the sources say."""
    named, options = Named.read(field, default), dict[str, object]()
    for source in sources:
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
    """An option as its annotation wants it; a word is a text where a text is wanted, whatever it looks like."""
    if not isinstance(value, Scalar):
        raise ConfigError(where, value, "give true, false, a number or a text")
    if isinstance(value, Word):
        meant = scalar(value)
        value = str(value) if plain(hint) is str and not isinstance(meant, str) else meant
    typed_option(where, value, hint)
    return value


def _named_by_flags(field: str, flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """`flags` without `--field NAME` and `--field=NAME`, and these names."""
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
