"""Settings that name functions, with one weight or with options per function.

    [judges]                         --judges.task 1 --judges.my_judges:polite 0.2
    task = 1.0
    "my_judges:polite" = 0.2         --judges my_judges:polite      the same as {"my_judges:polite": 1.0}

    [host_functions]                 --host-functions rollout --host-functions.llm_query.max-tokens 64
    rollout = true
    [host_functions.llm_query]
    max_tokens = 64

Settings classes hold them as mappings: `WeightTable` and `OptionTable`. A list of names gives each the weight 1.0, or
no options. The texts of older versions, such as "task + 0.2*my_judges:polite", are deprecated.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence

from repl_rl.deprecations import REMOVED_IN
from repl_rl.errors import ConfigError
from repl_rl.settings.component_registry import NameWithOptions
from repl_rl.settings.toml_values import Scalar, format_toml_key, format_toml_value, parse_pairs, parse_scalar

_log = logging.getLogger(__name__)
WeightTable = Mapping[str, float]
"""Name of each function, as in a table of functions or as module:function, and its weight."""
OptionTable = Mapping[str, Mapping[str, Scalar]]
"""Name of each function and its options by name. An empty mapping means the default options."""


def read_weight_table(setting: str, value: object, *, silent: bool = False) -> dict[str, float]:
    """Return a table of weights from a mapping, a name, or a list of names.

    Args:
        setting: dotted name of the setting, for messages.
        value: a mapping from names to weights, or names. A text of an older version is converted.
        silent: log nothing for a text of an older version.

    Raises:
        ConfigError: a weight is not a finite number, or a function is named twice.
    """
    if isinstance(value, Mapping):
        return {str(name): _read_weight(f"{setting}.{name}", weight) for name, weight in value.items()}
    pairs: list[tuple[str, float]] = []
    for item in _split_items(setting, value):
        # Older versions joined terms by + in one text, or appended the weight by =.
        pairs += [_parse_old_term(setting, item, term.strip()) for term in item.split("+")]
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        raise ConfigError(setting, value, "name each function once, with one weight")
    table = dict(pairs)
    if not silent and names != [*_split_items(setting, value)]:
        _warn_of_old_text(setting, table)
    return table


def read_option_table(setting: str, value: object, *, silent: bool = False) -> dict[str, Mapping[str, Scalar]]:
    """Return a table of options from a mapping, a name, or a list of names. Arguments are as in `read_weight_table`.

    Raises:
        ConfigError: the options of a function are not a table.
    """
    if isinstance(value, Mapping):
        return {str(name): _read_options(f"{setting}.{name}", options) for name, options in value.items()}
    table: dict[str, Mapping[str, Scalar]] = {}
    texts = [text for item in _split_items(setting, value) for text in _split_old_list(item)]
    for text in texts:
        named = NameWithOptions.parse(setting, text)
        if named.name in table:
            raise ConfigError(setting, text, "name each function once")
        table[named.name] = _read_options(f"{setting}.{named.name}", named.options)
    if not silent and [*table] != [*_split_items(setting, value)]:
        _warn_of_old_text(setting, table)
    return table


def split_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return a list of names. Each text may have several with commas between, as in older versions."""
    texts = [value] if isinstance(value, str) else value
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def is_function_table(hint: object) -> bool:
    """Return True if the annotation is that of a table of weights or of options."""
    return hint in (WeightTable, OptionTable)


def expand_function_tables(
    pairs: list[tuple[str, object]], tables: Mapping[str, object], silent: bool
) -> list[tuple[str, object]]:
    """Return the dotted keys and values of a file with each name or list of names as a table.

    Args:
        pairs: keys and values of the file.
        tables: annotation of each open table by its dotted name.
        silent: see `read_weight_table`.

    Raises:
        ConfigError: see `read_weight_table` and `read_option_table`.
    """
    expanded: list[tuple[str, object]] = []
    for key, value in pairs:
        hint = tables.get(key)
        if not is_function_table(hint):
            expanded.append((key, value))
            continue
        read = read_weight_table if hint == WeightTable else read_option_table
        expanded += [(f"{key}.{name}", each) for name, each in format_table_pairs(read(key, value, silent=silent))]
    return expanded


def parse_table_words(hint: object, setting: str, words: Iterable[str]) -> Mapping[str, object]:
    """Build the table of a setting from words of the command line. Its annotation `hint` selects the form of the words.

    Raises:
        ConfigError: see `read_weight_table` and `read_option_table`.
    """
    if hint == WeightTable:
        return parse_weight_words(setting, words)
    return parse_option_words(setting, words) if hint == OptionTable else parse_pairs(words)


def parse_weight_words(setting: str, words: Iterable[str]) -> dict[str, float]:
    """Return the table of the words `NAME` and `NAME=WEIGHT` of the command line; later ones win.

    Raises:
        ConfigError: as `read_weight_table`.
    """
    table: dict[str, float] = {}
    for word in words:
        name, given, weight = word.partition("=")
        if given:
            table[name] = _read_weight(f"{setting}.{name}", parse_scalar(weight))
        else:
            table |= read_weight_table(setting, word)
    return table


def parse_option_words(setting: str, words: Iterable[str]) -> dict[str, Mapping[str, Scalar]]:
    """Return the table of the words `NAME`, `NAME=true` and `NAME.OPTION=VALUE` of the command line; later ones win.

    Raises:
        ConfigError: a word without option has another value than true.
    """
    table: dict[str, Mapping[str, Scalar]] = {}
    for word in words:
        key, given, text = word.partition("=")
        if not given or "(" in key:
            table |= read_option_table(setting, word)
            continue
        name, option = split_option_key(key)
        if not option and parse_scalar(text) is not True:
            raise ConfigError(f"{setting}.{name}", text, "give true, or its options as a table")
        table[name] = {**table.get(name, {}), **({option: parse_scalar(text)} if option else {})}
    return table


def split_option_key(key: str) -> tuple[str, str]:
    """Return the function and the option of a dotted key. The option is "" if the key names a function alone.

    The module of a `module:function` may have dots, so its option follows the colon's part.
    """
    module, colon, rest = key.rpartition(":")
    name, _, option = rest.partition(".")
    return f"{module}{colon}{name}", option


def format_table_pairs(table: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    """Yield the dotted keys and the TOML values of a table of weights or options, in the form that files have."""
    for name, value in table.items():
        if not isinstance(value, Mapping):
            yield name, value
        elif not value:
            yield name, True
        else:
            yield from ((f"{name}.{option}", each) for option, each in value.items())


def format_table(setting: str, table: Mapping[str, object]) -> str:
    """Return the TOML of a table of weights or options, or "" if it is empty."""
    # TOML requires the scalars of a table before its subtables.
    scalars = {name: True if value == {} else value for name, value in table.items() if not _has_options(value)}
    text = _format_section(setting, scalars) if scalars else ""
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            text += _format_section(f"{setting}.{format_toml_key(name)}", value)
    return text


def _has_options(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _format_section(head: str, values: Mapping[str, object]) -> str:
    lines = [f"{format_toml_key(key)} = {format_toml_value(value)}" for key, value in values.items()]
    return "\n".join([f"\n[{head}]", *lines, ""])


def _split_items(setting: str, value: object) -> Sequence[str]:
    """Return the names in a text or a list of texts, without empty ones."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise ConfigError(setting, value, "give names of functions, or a table")
    return [str(item).strip() for item in items if str(item).strip()]


def _parse_old_term(setting: str, text: str, term: str) -> tuple[str, float]:
    """Return name and weight of `name`, `weight*name` or `name=weight`."""
    weight, star, name = term.rpartition("*")
    if not star:
        name, star, weight = term.partition("=")
    try:
        factor = float(weight) if star else 1.0
    except ValueError:
        factor = math.nan
    if not name.strip() or not math.isfinite(factor):
        raise ConfigError(setting, text, "give a table of names and weights, each a finite number")
    return name.strip(), factor


def _split_old_list(text: str) -> Sequence[str]:
    """Return the parts of a comma-separated list; commas within parentheses belong to options."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _read_weight(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(where, value, "give its weight, a finite number")
    return float(value)


def _read_options(where: str, options: object) -> Mapping[str, Scalar]:
    if not isinstance(options, Mapping):
        raise ConfigError(where, options, "give its options as a table, which may be empty")
    for key, value in options.items():
        if not isinstance(value, Scalar):
            raise ConfigError(f"{where}.{key}", value, "give true, false, a number or a text")
    return dict(options)


def _warn_of_old_text(setting: str, table: Mapping[str, object]) -> None:
    inner = ", ".join(f"{format_toml_key(key)} = {format_inline(value)}" for key, value in table.items())
    message = "%s is a table now, %s = { %s }; its form as a text goes in %s"
    _log.warning(message, setting, setting, inner, REMOVED_IN)


def format_inline(value: object) -> str:
    """Return a weight, or options as an inline table; true for none."""
    if not isinstance(value, Mapping):
        return format_toml_value(value)
    return f"{{ {', '.join(f'{k} = {format_toml_value(v)}' for k, v in value.items())} }}" if value else "true"
