"""Components with options: a type and its options, as a table of a file, as flags, or in parentheses.

    [trainer.estimator]            --trainer.estimator two_stream --trainer.estimator.line-weight 0.5
    type = "two_stream"
    line_weight = 0.5              two_stream(line_weight=0.5)

A settings class holds a component as the text with parentheses, which `NameWithOptions` parses. This module converts
tables and flags into that text, and that text into a table. In files and flags, the text is deprecated.
"""

import logging
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, get_args, get_origin, get_type_hints

from repl_rl.deprecations import REMOVED_IN
from repl_rl.deprecations.old_names import OLD_TYPES
from repl_rl.errors import ConfigError
from repl_rl.settings.component_registry import (
    NameWithOptions,
    strip_annotation,
    translate_option,
    validate_option_name,
    validate_option_value,
)
from repl_rl.settings.toml_values import Scalar, format_toml_value, parse_scalar, split_table_flags

_log = logging.getLogger(__name__)
TYPE = "type"
"""Key of a component's table that holds its name."""
_OLD_TYPE = "name"
"""Former name of that key."""
DottedSettings = Sequence[tuple[str, object]]
"""Dotted keys and TOML values of one file, or of the command line, whose values are `UnparsedWord`."""


class UnparsedWord(str):
    """Unparsed text of the command line. The annotation of its option decides its type."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class HasOptions:
    """Marker in the annotation of a field that holds a component."""

    get_options: Callable[[str], Mapping[str, object]]
    """Function from a type to its options with their annotations. It may import user code."""


@dataclass(frozen=True, slots=True)
class ComponentField:
    """Field of a settings class that holds a component."""

    get_options: Callable[[str], Mapping[str, object]]
    """See `HasOptions`."""
    default: str
    """Component that is used if none is given. "" means none."""


def has_component(hint: object) -> bool:
    """Return True if the annotation is that of a component."""
    return get_origin(hint) is Annotated and any(isinstance(extra, HasOptions) for extra in get_args(hint)[1:])


def get_component_fields(kind: type, prefix: str = "") -> Mapping[str, ComponentField]:
    """Return the fields of a dataclass that hold components, and those of the tables in it, by dotted name."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, ComponentField] = {}
    assert is_dataclass(kind)
    for one in fields(kind):
        hint = hints[one.name]
        if isinstance(hint, type) and is_dataclass(hint):
            found |= get_component_fields(hint, f"{prefix}{one.name}.")
        elif has_component(hint):
            (marker,) = (extra for extra in get_args(hint)[1:] if isinstance(extra, HasOptions))
            default = "" if one.default is MISSING else str(one.default)
            found[prefix + one.name] = ComponentField(marker.get_options, default)
    return found


def merge_options(
    components: Mapping[str, ComponentField], files: Iterable[DottedSettings], flags: Sequence[str]
) -> tuple[list[DottedSettings], list[str]]:
    """Merge each component's type and options, from files and flags, into one text, which becomes the last source.

    The later source wins, and a later type drops the options of an earlier one. Within one file, and on the command
    line, options belong to the type given there. Without a type there, they belong to the type of the source before.

    Raises:
        ConfigError: an option is unknown, its value has another type, or there is no type that it belongs to.
    """
    sources, left = [list(each) for each in files], list(flags)
    for name, component in components.items():
        others, words = split_table_flags([name], left)
        apart: list[tuple[str, object]] = [
            (flag.removeprefix("--").replace("-", "_"), UnparsedWord(word))
            for flag, word in zip(words[::2], words[1::2], strict=True)
        ]
        if not apart and not any(key.startswith(f"{name}.") for each in sources for key, _ in each):
            # Only a type is given, so it stays in its file or flag.
            continue
        others, types = _split_type_flags(name, others)
        text = _build_text(name, component, [*sources, [*((name, each) for each in types), *apart]])
        # Replace all that the sources hold of this component by one last source with its text.
        sources = [[pair for pair in each if not is_in_tables(pair[0], [name])] for each in sources]
        sources.append([(name, text)])
        left = others
    return [*sources], left


def is_in_tables(key: str, tables: Iterable[str]) -> bool:
    """Return True if a dotted key is the name of one of the tables, or of a value in one."""
    return any(key == name or key.startswith(f"{name}.") for name in tables)


def _build_text(field: str, component: ComponentField, sources: Sequence[DottedSettings]) -> str:
    """Return the component as text, from all sources in order."""
    named, options = NameWithOptions.parse(field, component.default), dict[str, object]()
    type_keys = (field, f"{field}.{TYPE}", f"{field}.{_OLD_TYPE}")
    for source in sources:
        # Apply the type before the options of this source, because it resets all earlier options.
        for key, value in source:
            if key in type_keys:
                if not isinstance(value, str):
                    raise ConfigError(key, value, "give one text")
                named, options = NameWithOptions.parse(field, value), {}
            if key == type_keys[2]:
                _log.warning("%s is %s now; the old name goes in %s", key, type_keys[1], REMOVED_IN)
        start = len(field) + 1
        options |= {key[start:]: value for key, value in source if key.startswith(f"{field}.") and key not in type_keys}
    if not options:
        return str(named)
    if not named.name:
        key, value = next(iter(options.items()))
        raise ConfigError(f"{field}.{key}", value, f"it has no effect without {field}.{TYPE}; give that too")
    hints = component.get_options(named.name)
    for old in [key for key in options if translate_option(key, hints) != key]:
        new = translate_option(old, hints)
        _log.warning("%s.%s is %s.%s now; the old name goes in %s", field, old, field, new, REMOVED_IN)
        options[new] = options.pop(old)
    for key, value in options.items():
        validate_option_name(field, named.name, key, value, tuple(hints))
    read = {key: _parse_option(f"{field}.{key}", value, hints[key]) for key, value in options.items()}
    return str(NameWithOptions(named.name, {**named.options, **read}))


def _parse_option(where: str, value: object, hint: object) -> object:
    """Return an option in the type of its annotation. A word stays text for a text option, even if it is a number."""
    if not isinstance(value, Scalar):
        raise ConfigError(where, value, "give true, false, a number or a text")
    if isinstance(value, UnparsedWord):
        meant = parse_scalar(value)
        value = str(value) if strip_annotation(hint) is str and not isinstance(meant, str) else meant
    validate_option_value(where, value, hint)
    return value


def _split_type_flags(field: str, flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return `flags` without `--field TYPE` and `--field=TYPE`, and the types."""
    others, types = list[str](), list[str]()
    left = iter(flags)
    for flag in left:
        option, given, value = flag.partition("=")
        if not option.startswith("--") or option[2:].replace("-", "_") != field:
            others.append(flag)
        elif given:
            types.append(value)
        elif (word := next(left, None)) is not None:
            types.append(word)
        else:
            raise ConfigError("option", flag, "give its value after it")
    return others, types


def warn_of_texts_in_file(components: Mapping[str, ComponentField], pairs: DottedSettings, where: str) -> None:
    """Log each component of a file that is a text with options, and the table to write instead."""
    for key, value in pairs:
        name = key.removesuffix(f".{TYPE}")
        if name in components and isinstance(value, str):
            named = _parse_deprecated(name, value, components[name])
            if named is not None:
                message = "%s in %s is a table now, %s = %s; the form with parentheses goes in %s"
                _log.warning(message, key, where, name, format_inline_table(named), REMOVED_IN)


def warn_of_texts_in_flags(components: Mapping[str, ComponentField], flags: Sequence[str]) -> None:
    """Log each component of the command line that is a text with options, and the flags to give instead."""
    for name, component in components.items():
        option = f"--{name.replace('_', '-')}"
        for text in [text for field in (name, f"{name}.{TYPE}") for text in _split_type_flags(field, flags)[1]]:
            if (named := _parse_deprecated(name, text, component)) is not None:
                told = [option, shlex.quote(named.name)]
                for key, value in named.options.items():
                    word = value if isinstance(value, str) else format_toml_value(value)
                    told += [f"{option}.{key.replace('_', '-')}", shlex.quote(word)]
                message = "%s has its options as flags now, %s; the form with parentheses goes in %s"
                _log.warning(message, option, " ".join(told), REMOVED_IN)


def _parse_deprecated(field: str, text: str, component: ComponentField) -> NameWithOptions | None:
    """Return the component of a text with options, under its present names, or None if a table cannot hold it."""
    named = NameWithOptions.parse(field, text)
    if not can_be_table(named):
        return None
    name = OLD_TYPES.get(named.name, named.name)
    hints = component.get_options(name)
    return NameWithOptions(name, {translate_option(key, hints): value for key, value in named.options.items()})


def can_be_table(named: NameWithOptions) -> bool:
    """Return True if the component has options, and a table can hold them: TOML has no None, and `type` is taken."""
    values = named.options.values()
    return bool(values) and not {TYPE, _OLD_TYPE} & {*named.options} and all(isinstance(one, Scalar) for one in values)


def format_table_lines(named: NameWithOptions) -> Sequence[str]:
    """Return the lines of the component's table as TOML."""
    return [f"{key} = {format_toml_value(value)}" for key, value in {TYPE: named.name, **named.options}.items()]


def format_inline_table(named: NameWithOptions) -> str:
    """Return the component as a TOML table on one line."""
    return f"{{ {', '.join(format_table_lines(named))} }}"


def convert_table_to_text(table: Mapping[str, object]) -> str | None:
    """Return the text of a component's table, or None if the table is not one that `format_table_lines` writes."""
    options = {key: value for key, value in table.items() if key != TYPE}
    name = table.get(TYPE)
    valid = all(key.isidentifier() and isinstance(value, Scalar) for key, value in options.items())
    return str(NameWithOptions(name, options)) if valid and isinstance(name, str) and "(" not in name else None
