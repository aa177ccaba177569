"""Parser of settings: typed dataclass fields, read from TOML files and flags. An unknown key is an error.

The parts, in order:

- the parser (`parse`), which collects the files and flags and passes them to tyro;
- the flags of a settings dataclass: help texts with bounds, and per registry a name and one table per kind;
- settings as TOML: `load_toml` and `flatten` read them, `dump_toml` writes them.

Components with options are read by `repl_rl.settings.component_options`.
"""

import ast
import difflib
import inspect
import io
import logging
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import redirect_stderr
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Generic, TypeVar, get_args, get_origin, get_type_hints

import tyro

from repl_rl.deprecations import REMOVED_IN, rename_keys
from repl_rl.deprecations.old_names import OLD_SETTINGS
from repl_rl.deprecations.removed_settings import REMOVED, without_removed
from repl_rl.errors import ConfigError
from repl_rl.settings.bounded_toml import MOST_BYTES, TooLong, parse_toml
from repl_rl.settings.component_options import (
    can_be_table,
    format_table_lines,
    get_component_fields,
    has_component,
    is_in_tables,
    merge_options,
    warn_of_texts_in_file,
    warn_of_texts_in_flags,
)
from repl_rl.settings.component_registry import (
    NameWithOptions,
    Registry,
    RegistryEntry,
    has_options,
    strip_annotation,
)
from repl_rl.settings.function_tables import (
    expand_function_tables,
    format_table,
    format_table_pairs,
    is_function_table,
    parse_table_words,
)
from repl_rl.settings.help_pages import TYRO_CONFIG, HelpSuffix, asks_for_help, get_common_names, print_help
from repl_rl.settings.model_defaults import format_default, get_pretrained_default
from repl_rl.settings.toml_values import (
    collect_table_words,
    format_toml_value,
    is_open_table,
    list_open_tables,
    pop_table_words,
    split_table_flags,
)
from repl_rl.settings.value_bounds import get_bound
from repl_rl.utils.atomic_files import is_inside

T = TypeVar("T")
_log = logging.getLogger(__name__)
_RULER = re.compile(r"(?m)^[\s│]*[-─]{8,}[\s│]*$")
"""Ruler between the parts of tyro's error message, which may be in a box."""
_TYPE_REMEDIES: Mapping[object, str] = {int: "give one whole number", float: "give one number"}
"""Type of a setting -> remedy for a value of another type."""
_HELP_PARTS = ("Argument helptext", "For full helptext")
"""First words of the parts of an error message that repeat the help."""
UNRECORDED: Mapping[str, bool] = {"unrecorded": True}
"""Metadata of a field that `dump_toml` leaves out, because its permission applies to the current command only."""


@dataclass(frozen=True, slots=True)
class ParsedSettings(Generic[T]):
    """Parsed settings and their sources."""

    config: T
    """The settings. An unset field has the default of its class."""
    files: Sequence[tuple[Path, Mapping[str, object]]]
    """Dotted keys and values per file, the preset first. A component with options in keys or flags is left out."""
    flags: frozenset[str]
    """Dotted names of the settings that flags set."""
    with_defaults: Callable[[Mapping[str, object]], T]
    """Function that parses the same files and flags with other defaults, by dotted name. Errors: see `parse`."""

    @property
    def explicit_names(self) -> Set[str]:
        """Dotted names of the settings that files or flags set."""
        return self.flags.union(*(said for _, said in self.files))


def parse(kind: type[T], verb: str, argv: Sequence[str], presets: Path | None = None, called: str = "preset") -> T:
    """Return the settings alone. Arguments and errors are those of `parse_with_sources`."""
    return parse_with_sources(kind, verb, argv, presets, called).config


def parse_with_sources(
    kind: type[T], verb: str, argv: Sequence[str], presets: Path | None = None, called: str = "preset"
) -> ParsedSettings[T]:
    """Parse `kind` from `--preset NAME`, `--config FILE` (TOML; a table is a flag prefix) and flags. Later ones win.

    `presets` is the folder of the presets, one NAME.toml each. None means that the command has no presets. `called`
    replaces `preset` as the name of that option.

    Raises:
        ConfigError: a file cannot be read, a preset, key or flag is unknown, a value has the wrong type, or a required
            value is missing. The message of an unknown name helps to find the known ones.
        SystemExit: 0 after `--help` or `--help-all`.
    """
    for word in argv:
        _refuse_surrogates(word)
    mirror, about, program = build_flags_class(kind), _build_help_text(kind, presets, called), f"repl-rl {verb}"
    if asks_for_help(argv):
        print_help(mirror, [*iterate_flag_names(mirror)], get_common_names(kind), argv, program, about)
    # Collect the files in the order of their precedence: the preset, then the file of --config.
    flags, config = _pop_option(argv, "config", "a TOML file")
    files = [Path(config)] if config is not None else []
    if presets is not None:
        flags, preset = _pop_option(flags, called, f"one of {', '.join(_list_presets(presets))}")
        files = ([_find_preset(presets, preset, called)] if preset is not None else []) + files
    # Keys of open tables and options of components are free, so tyro cannot know them. Both are taken out here.
    hints, theirs, components = collect_annotations(mirror), list_open_tables(kind), get_component_fields(kind)
    known = set(hints)
    apart = (*theirs, *components)
    renamed = get_renamed_settings(known, apart)
    loaded = [_select_known_pairs(_load_pairs(file, renamed, theirs), known, apart, str(file)) for file in files]
    flags = _rename_flags(flags, renamed)
    for file, pairs in zip(files, loaded, strict=True):
        if not _is_recorded(file):
            warn_of_texts_in_file(components, pairs, str(file))
    warn_of_texts_in_flags(components, flags)
    of_files, flags = merge_options(components, loaded, flags)
    from_files = [pair for pairs in of_files for pair in pairs]
    flags, of_tables = split_table_flags(theirs, flags)
    flags, bare = pop_table_words(theirs, flags)
    # Check the flags before tyro does, for error messages that name a similar setting.
    by_flags = {*bare, *(_find_owner(theirs, flag[2:].replace("-", "_")) for flag in of_tables[::2])}
    for flag in flags:
        if flag.startswith("--"):
            # tyro negates a switch with `no-` before the last part of its name.
            name = re.sub(r"(^|\.)no_(?=[^.]*$)", r"\1", flag[2:].partition("=")[0].replace("-", "_"))
            _check_known("option", name, known)
            by_flags.add(name)

    def parse_with_defaults(defaults: Mapping[str, object]) -> T:
        # tyro keeps the last value of a repeated flag: defaults come first, then files, then flags.
        words = [*_convert_to_flags([*defaults.items(), *from_files], hints, theirs, of_tables, bare), *flags]
        return _parse_words(kind, mirror, words, program, about, " ".join(argv))

    # `merge_options` may have appended names with their options, which belong to no single file.
    said_by = [(file, dict(pairs)) for file, pairs in zip(files, of_files, strict=False)]
    return ParsedSettings(parse_with_defaults({}), said_by, frozenset(by_flags), parse_with_defaults)


def read_table(kind: type[T], table: Mapping[str, object], where: str) -> T:
    """Parse `kind` from a TOML table, with the checks of `parse`. Messages name `where` as the source.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is out of bounds.
    """
    mirror = build_flags_class(kind)
    hints, theirs, components = collect_annotations(mirror), list_open_tables(kind), get_component_fields(kind)
    pairs = expand_function_tables(list(flatten(table)), theirs, silent=True)
    pairs = _select_known_pairs(pairs, set(hints), (*theirs, *components), where)
    merged = [pair for each in merge_options(components, [pairs], [])[0] for pair in each]
    words = _convert_to_flags(merged, hints, theirs)
    try:
        return _parse_words(kind, mirror, words, where, "", where)
    except SystemExit as end:
        # Only a command line may ask for help.
        raise ConfigError("settings", where, "they hold an option of the command line; leave it out") from end


def _find_owner(tables: Collection[str], dotted: str) -> str:
    """Return the open table that a dotted key belongs to."""
    return next(name for name in tables if dotted.startswith(f"{name}."))


def get_renamed_settings(known: Collection[str], tables: Collection[str]) -> Mapping[str, str]:
    """Return the old names of this command's settings, each with its new name.

    An old name is left out if a current setting begins with its first part, unless the new name does, too.

    Args:
        known: dotted names of the settings.
        tables: settings that are tables of free keys.
    """
    heads = {name.partition(".")[0] for name in known}
    return {
        old: new
        for old, new in OLD_SETTINGS.items()
        if (new in known or new.partition(".")[0] in tables)
        and old.partition(".")[0] not in heads - {new.partition(".")[0]}
    }


def _load_pairs(file: Path, renamed: Mapping[str, str], tables: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return the dotted keys and values of a file, under their new names, and log each old one.

    `tables` are the annotations of the open tables by dotted name.
    """

    def log(old: str, new: str) -> None:
        _log.warning("%s in %s is %s now; the old name goes in %s", old, file, new, REMOVED_IN)

    pairs = list(flatten(rename_keys(load_toml(file, linked=True), renamed, str(file), log)))
    return expand_function_tables(pairs, tables, silent=_is_recorded(file))


def _is_recorded(file: Path) -> bool:
    """Return True if a run wrote the file. Its settings are in the form of the version that wrote it."""
    return file.name == "config.toml" and (file.parent / "trajectories").is_dir()


def _rename_flags(flags: Sequence[str], renamed: Mapping[str, str]) -> list[str]:
    """Return the words of the command line, with each old option under its new name, and log each old one."""
    return [_rename_flag(word, renamed) if word.startswith("--") else word for word in flags]


def _rename_flag(word: str, renamed: Mapping[str, str]) -> str:
    option, given, value = word.removeprefix("--").partition("=")
    head, dot, last = option.rpartition(".")
    # tyro negates a switch with `no-` before the last part of its name.
    negated = "no-" if last.startswith("no-") else ""
    parts = f"{head}{dot}{last.removeprefix('no-')}".replace("-", "_").split(".")
    old = next((name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in renamed), None)
    if old is None:
        return word
    # What follows the old name is a key of a table, which stays as it is.
    path = [*renamed[old].replace("_", "-").split("."), *option.split(".")[old.count(".") + 1 :]]
    path[-1] = negated + path[-1] if len(parts) == old.count(".") + 1 else path[-1]
    new = ".".join(path)
    _log.warning("--%s is --%s now; the old name goes in %s", option, new, REMOVED_IN)
    return f"--{new}{given}{value}"


def _select_known_pairs(
    pairs: list[tuple[str, object]], known: set[str], theirs: Collection[str], where: str
) -> list[tuple[str, object]]:
    """Return `pairs` unchanged, after a check that their keys are known and their texts have no NUL."""
    for key, value in pairs:
        if key in theirs or not is_in_tables(key, theirs):
            _check_known(f"key in {where}", key, known)
        # A recorded prompt is the text of a file, which may hold anything.
        if isinstance(value, str) and "\0" in value and key != "prompt":
            raise ConfigError(key, value, f"it holds a NUL character, which no name can; leave it out of {where}")
    return pairs


def _convert_to_flags(
    pairs: list[tuple[str, object]],
    hints: Mapping[str, object],
    theirs: Mapping[str, object],
    flags: Sequence[str] = (),
    bare: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[str]:
    """Return the pairs of files as flags. Open tables are merged from files, `bare` words and `flags`."""
    of_files = [(key, value) for key, value in pairs if is_in_tables(key, theirs)]
    said = collect_table_words(theirs, flags, of_files, bare)
    words = [word for pair in pairs if pair not in of_files for word in _format_flag(*pair, hints[pair[0]])]
    return [*words, *(word for name, given in said.items() if given for word in (f"--{name}", *given))]


def _parse_words(kind: type[T], mirror: type, words: Sequence[str], program: str, about: str, given: str) -> T:
    """Parse the words with tyro into `kind`, each as the type of its field."""
    # tyro prints its errors and exits. Catch both, and raise a ConfigError of one line instead.
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            flags: object = tyro.cli(mirror, prog=program, description=about, args=words, config=TYRO_CONFIG)
        return build_settings(kind, flags)
    except SystemExit as end:
        if not end.code:
            raise
    # tyro draws its message as boxes. Keep the text, without the parts that repeat the help.
    parts = [" ".join(re.sub("[╭╮╰╯│─]+", " ", part).split()) for part in _RULER.split(said.getvalue())]
    reason = " ".join(part for part in parts if part and not part.startswith(_HELP_PARTS))
    remedy = f"{reason.rstrip('.')}; {program} --help-all lists the options"
    raise ConfigError("input", given, remedy)


def _build_help_text(kind: type, presets: Path | None, called: str) -> str:
    """Return the text that `--help` prints before the options."""
    about = f"{inspect.getdoc(kind)}\n--config FILE: settings from a TOML file; options win over it."
    if presets is None:
        return about
    return (
        f"{about}\n--{called} NAME: shipped settings, {' or '.join(_list_presets(presets))}; --config and options win."
    )


def _pop_option(argv: Sequence[str], option: str, what: str) -> tuple[list[str], str | None]:
    """Return `argv` without `--option VALUE`, and the value, or None if the option is missing."""
    flags = list(argv)
    for i, flag in enumerate(flags):
        if flag == f"--{option}":
            if i + 1 == len(flags):
                raise ConfigError("option", flag, f"name {what} after it")
            return [*flags[:i], *flags[i + 2 :]], flags[i + 1]
        if flag.startswith(f"--{option}="):
            return [*flags[:i], *flags[i + 1 :]], flag.partition("=")[2]
    return flags, None


def _list_presets(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.toml"))


def _find_preset(folder: Path, name: str, called: str) -> Path:
    known = _list_presets(folder)
    if name not in known:
        raise ConfigError(called, name, f"choose {' or '.join(known)}, or give a file of your own as --config FILE")
    return folder / f"{name}.toml"


def _format_flag(key: str, value: object, hint: object) -> list[str]:
    """Return the flag of a TOML value, which may come from a stranger and so must not become another flag.

    Raises:
        ConfigError: the value has another type than its setting, or is a list with an item that would be a flag.
    """
    flag, wanted = "--" + key.replace("_", "-"), strip_annotation(hint)
    if wanted is bool:
        if not isinstance(value, bool):
            raise ConfigError(key, value, "give true or false")
        head, _, tail = flag[2:].rpartition(".")
        return [flag] if value else [f"--{head}{'.' if head else ''}no-{tail}"]
    # The form --flag=value takes any text as the value, also one that begins with a hyphen.
    if wanted is not tuple or not isinstance(value, list):
        return [f"{flag}={_format_word(key, value, _TYPE_REMEDIES.get(wanted, 'give one text'))}"]
    items = [_format_word(key, item, "give texts or numbers in one list") for item in value]
    for item in items:
        if item.startswith("-"):
            raise ConfigError(key, item, "an item begins with no hyphen; give another (./-name for a file)")
    return [flag, *items]


def _format_word(key: str, value: object, remedy: str) -> str:
    """Return a TOML value as a word of the command line.

    Raises:
        ConfigError: it is a boolean, a list or a table. The message ends with `remedy`.
    """
    if isinstance(value, bool | list | Mapping):
        raise ConfigError(key, value, remedy)
    return str(value)


def _refuse_surrogates(word: str) -> None:
    """Raise ConfigError for a word that is not UTF-8, because paths and names are printed and recorded as UTF-8."""
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("argument", word, "it is not valid UTF-8; rename the file, or give another name") from error


def _check_known(what: str, name: str, known: set[str]) -> None:
    """Refuse an unknown name, with its reason if it was removed, or the most similar known name."""
    if name in known:
        return
    # An option is shown as it is typed.
    shown = f"--{name.replace('_', '-')}" if what == "option" else name
    if removed := REMOVED.get(name):
        raise ConfigError(what, shown, f"it was removed: {removed.reason}")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near and what == "option":
        near = [f"--{near[0].replace('_', '-')}"]
    remedy = f"did you mean {near[0]!r}?" if near else "this command does not have it; --help-all lists those it has"
    raise ConfigError(f"unknown {what}", shown, remedy)


def get_typed_fields(kind: type) -> Mapping[str, object]:
    """Return the annotations of a dataclass, `Annotated` included."""
    return get_type_hints(kind, include_extras=True)


def get_registry(hint: object) -> Registry[RegistryEntry] | None:
    """Return the registry in an annotation, or None if it has none."""
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Registry)), None)


def build_flags_class(kind: type, default: object = None) -> type:
    """Build the class whose fields are the flags of `kind`, for tyro.

    Args:
        kind: a dataclass of settings.
        default: an instance whose values are the defaults. None means the defaults of the class.
    """
    # tyro cannot read registries and open tables, so each field becomes one or more fields of plain types.
    specs: list[tuple[str, object, object]] = []
    for one in fields(kind):
        specs.extend(_build_flags(kind, one, default))
    told = [name for name, _, _ in specs]
    for name in told:
        if told.count(name) > 1:
            raise ConfigError("table of settings", name, "two kinds have that name; rename one")
    return make_dataclass(kind.__name__, specs, kw_only=True)


def build_settings(kind: type[T], flags: object) -> T:
    """Build the settings from an instance of the class that `build_flags_class` built.

    Raises:
        ConfigError: options were given for a kind that was not chosen, or a setting is out of bounds.
    """
    hints = get_typed_fields(kind)
    values: dict[str, object] = {}
    assert is_dataclass(kind)
    for one in fields(kind):
        hint, given = hints[one.name], getattr(flags, one.name)
        seam = get_registry(hint)
        if seam is not None:
            values[one.name] = _build_chosen_entry(seam, given, flags)
        elif is_open_table(hint):
            values[one.name] = parse_table_words(hint, one.name, given)
        elif isinstance(hint, type) and is_dataclass(hint):
            values[one.name] = build_settings(hint, given)
        else:
            values[one.name] = given
    return kind(**values)


def iterate_flag_names(mirror: type) -> Iterator[str]:
    """Yield the dotted names of the flags in a class of `build_flags_class`."""
    yield from collect_annotations(mirror)


def collect_annotations(mirror: type, prefix: str = "") -> dict[str, object]:
    """Return the annotations of the flags in a class of `build_flags_class`, by dotted name."""
    hints, found = get_typed_fields(mirror), dict[str, object]()
    for one in fields(mirror):
        hint = hints[one.name]
        if isinstance(hint, type) and is_dataclass(hint):
            found |= collect_annotations(hint, f"{prefix}{one.name}.")
        else:
            found[prefix + one.name] = hint
    return found


def _build_flags(kind: type, one: "Field[object]", default: object) -> Iterator[tuple[str, object, object]]:
    """Yield name, annotation and default of each flag of a field: one flag, or tables of flags."""
    hint = get_typed_fields(kind)[one.name]
    value = _get_field_default(one) if default is None else getattr(default, one.name)
    about = read_field_docs(kind).get(one.name, "")
    seam = get_registry(hint)
    if seam is not None:
        # A registry becomes a flag for the name, and one table per kind that has options.
        choice = seam.resolve(value)
        about = f"{about} One of: {seam.describe()}."
        yield one.name, Annotated[str, tyro.conf.arg(help=about)], choice.kind
        for name, options in seam.get_entries_with_options().items():
            start = choice if name == choice.kind else options()
            yield _build_flag_table(name, options, start)
    elif isinstance(hint, type) and is_dataclass(hint):
        yield _build_flag_table(one.name, hint, hint() if value is MISSING else value)
    elif is_open_table(hint):
        # An open table becomes a list of words KEY=VALUE, since its keys are unknown here.
        pairs = format_table_pairs(value) if isinstance(value, Mapping) else ()
        words = tuple(f"{key}={format_toml_value(each)}" for key, each in pairs)
        if is_function_table(hint):
            told = tyro.conf.arg(help=about, metavar="NAME ...")
        else:
            about = f"{about} Given as --{one.name.replace('_', '-')}.KEY VALUE."
            told = tyro.conf.arg(help=about, metavar="KEY=VALUE ...")
        yield one.name, Annotated[tuple[str, ...], told], words
    else:
        # Any other field stays one flag. Its help ends with the bound and the defaults that depend on the model.
        bound = get_bound(hint)
        told = f"{about} ({bound})" if bound is not None and str(bound) not in about else about
        extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        told += "".join(f" {extra.get_text()}" for extra in extras if isinstance(extra, HelpSuffix))
        if (other := get_pretrained_default(hint)) is not None:
            told += f" Default of the bundled policy: {format_default(value)}; of any other model: {other.description}."
        yield one.name, Annotated[hint, tyro.conf.arg(help=told)], MISSING if value is MISSING else value


def _build_flag_table(name: str, kind: type, start: object) -> tuple[str, object, object]:
    mirror = build_flags_class(kind, start)
    return name, mirror, field(default_factory=mirror)


def _get_field_default(one: "Field[object]") -> object:
    if one.default is not MISSING:
        return one.default
    return MISSING if one.default_factory is MISSING else one.default_factory()


def _build_chosen_entry(seam: Registry[RegistryEntry], name: str, flags: object) -> RegistryEntry:
    """Return the kind that `name` selects, with the options of its table of flags."""
    tables = {
        other: build_settings(options, getattr(flags, other))
        for other, options in seam.get_entries_with_options().items()
    }
    chosen = tables.pop(name) if name in tables else seam.resolve(name)
    # Options of the other kinds have no effect, so a value that is not the default is an error.
    for other, table in tables.items():
        if table != type(table)():
            raise ConfigError(other, table, f"it has no effect without --{seam.name} {other}; leave it out")
    return chosen


@cache
def read_field_docs(kind: type) -> Mapping[str, str]:
    """Return the docstring of each field as one line."""
    # Python drops the docstrings of fields, so read them from the source. A subclass overrides its bases.
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(node, ast.ClassDef)
        for statement, following in zip(node.body, node.body[1:], strict=False):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def load_toml(file: Path, *, linked: bool = False) -> Mapping[str, object]:
    """Load a TOML file, without removed settings at their neutral values.

    Args:
        file: the file. That of a run may come from a stranger.
        linked: follow a link that leads out of the file's folder, because the user named the file.

    Raises:
        ConfigError: the file is too large, is a link that is not followed, cannot be read, or is not TOML.
    """
    thing = "config file"
    if not linked and not is_inside(file.parent, file):
        raise ConfigError(thing, str(file), "it is a link that leads out of its folder; put the file there")
    try:
        # A device has no size, so read only one byte more than is permitted.
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(thing, str(file), f"it has more than {MOST_BYTES:,} bytes; give a smaller one")
        # This recurses, so a table that is nested too deeply raises RecursionError here.
        return without_removed(parse_toml(content.decode()))
    except OSError as error:
        raise ConfigError(thing, str(file), f"it cannot be read: {error.strerror}") from error
    except TooLong as error:
        raise ConfigError(thing, str(file), f"it cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(thing, str(file), f"it is not TOML: {error}") from error


def flatten(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys and values of a nested table."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def dump_toml(config: object, table: str = "") -> str:
    """Return `config` as TOML that reads back as the same settings, below `table` unless that is empty."""
    # TOML requires the scalars of a table before its subtables, so collect the two apart.
    scalars, tables = [], []
    assert is_dataclass(config)
    hints = get_typed_fields(type(config))
    for one in fields(config):
        if one.metadata.get("unrecorded"):
            continue
        name, value = one.name, getattr(config, one.name)
        seam = get_registry(hints[name])
        if seam is not None:
            # A chosen kind is written as its name, and as a table of that name if it has options.
            choice = seam.resolve(value)
            scalars.append(f"{name} = {format_toml_value(choice.kind)}\n")
            if not has_options(type(choice)):
                continue
            name, value = choice.kind, choice
        if is_dataclass(value):
            tables.append(dump_toml(value, f"{table}.{name}" if table else name))
        elif isinstance(value, Mapping):
            tables.append(format_table(f"{table}.{name}" if table else name, value))
        elif has_component(hints[name]) and can_be_table(named := NameWithOptions.parse(name, value)):
            tables.append(
                "\n".join([f"\n[{table}.{name}]" if table else f"\n[{name}]", *format_table_lines(named), ""])
            )
        elif value is not None:
            scalars.append(f"{name} = {format_toml_value(value)}\n")
    return "".join([f"\n[{table}]\n" if table else "", *scalars, *tables])
