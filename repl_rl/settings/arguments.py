"""Parser of settings: typed dataclass fields, read from TOML files and flags. An unknown key is an error."""

import difflib
import inspect
import io
import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import tyro

from repl_rl.errors import ConfigError
from repl_rl.settings.flags import assembled, collect_annotations, mirrored
from repl_rl.settings.named import plain
from repl_rl.settings.optioned import folded, optioned
from repl_rl.settings.removed import REMOVED
from repl_rl.settings.scalars import gathered, open_tables, split
from repl_rl.settings.toml import flatten, load

T = TypeVar("T")
_STYLE = (tyro.conf.EnumChoicesFromValues,)
_RULER = re.compile(r"(?m)^[\s│]*[-─]{8,}[\s│]*$")
"""Ruler between the parts of tyro's error message, which may be in a box."""
_ONE: Mapping[object, str] = {int: "give one whole number", float: "give one number"}
"""Type of a setting -> remedy for a value of another type."""
_HELP = ("Argument helptext", "For full helptext")
"""First words of the parts of an error message that repeat the help."""


@dataclass(frozen=True, slots=True)
class Parsed(Generic[T]):
    """Parsed settings and their sources."""

    config: T
    """The settings. An unset field has the default of its class."""
    files: Sequence[tuple[Path, Mapping[str, object]]]
    """Dotted keys and values per file, the preset first. A name whose options were given apart from it is left out."""
    flags: frozenset[str]
    """Dotted names of the settings that flags set."""
    over: Callable[[Mapping[str, object]], T]
    """Function from other defaults, by dotted name, to the settings. Files and flags win. It raises as `parse`."""

    @property
    def explicit_names(self) -> Set[str]:
        """Dotted names of the settings that files or flags set."""
        return self.flags.union(*(said for _, said in self.files))


def parse(kind: type[T], verb: str, argv: Sequence[str], presets: Path | None = None, called: str = "preset") -> T:
    """Return the settings alone. Arguments and errors are those of `parse_with_sources`."""
    return parse_with_sources(kind, verb, argv, presets, called).config


def parse_with_sources(
    kind: type[T], verb: str, argv: Sequence[str], presets: Path | None = None, called: str = "preset"
) -> Parsed[T]:
    """Parse `kind` from `--preset NAME`, `--config FILE` (TOML; a table is a flag prefix) and flags. Later ones win.

    `presets` is the folder of the presets, one NAME.toml each. None means that the command has no presets. `called`
    replaces `preset` as the name of that option.

    Raises:
        ConfigError: a file cannot be read, a preset, key or flag is unknown, a value has the wrong type, or a required
            value is missing. The message of an unknown name helps to find the known ones.
        SystemExit: 0 after `--help`.
    """
    for word in argv:
        _refuse_surrogates(word)
    # Collect the files in the order of their precedence: the preset, then the file of --config.
    flags, config = _without(argv, "config", "a TOML file")
    files = [Path(config)] if config is not None else []
    if presets is not None:
        flags, preset = _without(flags, called, f"one of {', '.join(_presets(presets))}")
        files = ([_preset(presets, preset, called)] if preset is not None else []) + files
    mirror = mirrored(kind)
    # Keys of open tables and options of names are free, so tyro cannot know them as flags. Both are taken out here.
    hints, theirs = collect_annotations(mirror), open_tables(kind)
    known = set(hints)
    apart = (*theirs, *optioned(kind))
    loaded = [_known(list(flatten(load(file, linked=True))), known, apart, str(file)) for file in files]
    of_files, flags = folded(kind, loaded, flags)
    from_files = [pair for pairs in of_files for pair in pairs]
    flags, of_tables = split(theirs, flags)
    # Check the flags before tyro does, for error messages that name a similar setting.
    by_flags = set[str]()
    for flag in flags:
        if flag.startswith("--") and flag != "--help":
            # tyro negates a switch with `no-` before the last part of its name.
            name = re.sub(r"(^|\.)no_(?=[^.]*$)", r"\1", flag[2:].partition("=")[0].replace("-", "_"))
            _check("option", name, known)
            by_flags.add(name)

    def over(defaults: Mapping[str, object]) -> T:
        # tyro keeps the last value of a repeated flag: defaults come first, then files, then flags.
        words = [*_all_words([*defaults.items(), *from_files], hints, theirs, of_tables), *flags]
        return _typed(kind, mirror, words, f"repl-rl {verb}", _about(kind, presets, called), " ".join(argv))

    said_by = [(file, dict(pairs)) for file, pairs in zip(files, of_files, strict=False)]
    return Parsed(over({}), said_by, frozenset(by_flags), over)


def _known(
    pairs: list[tuple[str, object]], known: set[str], theirs: Sequence[str], where: str
) -> list[tuple[str, object]]:
    for key, value in pairs:
        if key.partition(".")[0] not in theirs or "." not in key:
            _check(f"key in {where}", key, known)
        # A recorded prompt is the text of a file, which may hold anything.
        if isinstance(value, str) and "\0" in value and key != "prompt":
            raise ConfigError(key, value, f"it holds a NUL character, which no name can; leave it out of {where}")
    return pairs


def _all_words(
    pairs: list[tuple[str, object]],
    hints: Mapping[str, object],
    theirs: Sequence[str],
    flags: Sequence[str] = (),
) -> list[str]:
    """Return the pairs of files as flags. Open tables are merged from files and `flags`."""
    of_files = [(key, value) for key, value in pairs if key.partition(".")[0] in theirs]
    said = gathered(theirs, flags, of_files)
    words = [word for pair in pairs if pair not in of_files for word in _words(*pair, hints[pair[0]])]
    return [*words, *(word for name, given in said.items() if given for word in (f"--{name}", *given))]


def _typed(kind: type[T], mirror: type, words: Sequence[str], program: str, about: str, given: str) -> T:
    """Parse the words with tyro into `kind`, each as the type of its field."""
    # tyro prints its errors and exits. Catch both, and raise a ConfigError of one line instead.
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            flags: object = tyro.cli(mirror, prog=program, description=about, args=words, config=_STYLE)
        return assembled(kind, flags)
    except SystemExit as end:
        if not end.code:
            raise
    # tyro draws its message as boxes. Keep the text, without the parts that repeat the help.
    parts = [" ".join(re.sub("[╭╮╰╯│─]+", " ", part).split()) for part in _RULER.split(said.getvalue())]
    reason = " ".join(part for part in parts if part and not part.startswith(_HELP))
    remedy = f"{reason.rstrip('.')}; {program} --help lists the options"
    raise ConfigError("input", given, remedy)


def read(kind: type[T], table: Mapping[str, object], where: str) -> T:
    """Parse `kind` from a TOML table, with the checks of `parse`. Messages name `where` as the source.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is out of bounds.
    """
    mirror = mirrored(kind)
    hints, theirs = collect_annotations(mirror), open_tables(kind)
    pairs = _known(list(flatten(table)), set(hints), (*theirs, *optioned(kind)), where)
    words = _all_words([pair for each in folded(kind, [pairs], [])[0] for pair in each], hints, theirs)
    try:
        return _typed(kind, mirror, words, where, "", where)
    except SystemExit as end:
        # Only a command line may ask for help.
        raise ConfigError("settings", where, "they hold an option of the command line; leave it out") from end


def _about(kind: type, presets: Path | None, called: str) -> str:
    """Return the text that `--help` prints before the options."""
    about = f"{inspect.getdoc(kind)}\n--config FILE: settings from a TOML file; options win over it."
    if presets is None:
        return about
    return f"{about}\n--{called} NAME: shipped settings, {' or '.join(_presets(presets))}; --config and options win."


def _without(argv: Sequence[str], option: str, what: str) -> tuple[list[str], str | None]:
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


def _presets(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.toml"))


def _preset(folder: Path, name: str, called: str) -> Path:
    known = _presets(folder)
    if name not in known:
        raise ConfigError(called, name, f"choose {' or '.join(known)}, or give a file of your own as --config FILE")
    return folder / f"{name}.toml"


def _words(key: str, value: object, hint: object) -> list[str]:
    """Return the flag of a TOML value, which may come from a stranger and so must not become another flag.

    Raises:
        ConfigError: the value has another type than its setting, or is a list with an item that would be a flag.
    """
    flag, wanted = "--" + key.replace("_", "-"), plain(hint)
    if wanted is bool:
        if not isinstance(value, bool):
            raise ConfigError(key, value, "give true or false")
        head, _, tail = flag[2:].rpartition(".")
        return [flag] if value else [f"--{head}{'.' if head else ''}no-{tail}"]
    # The form --flag=value takes any text as the value, also one that begins with a hyphen.
    if wanted is not tuple or not isinstance(value, list):
        return [f"{flag}={_word(key, value, _ONE.get(wanted, 'give one text'))}"]
    items = [_word(key, item, "give texts or numbers in one list") for item in value]
    for item in items:
        if item.startswith("-"):
            raise ConfigError(key, item, "an item begins with no hyphen; give another (./-name for a file)")
    return [flag, *items]


def _word(key: str, value: object, remedy: str) -> str:
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


def _check(what: str, name: str, known: set[str]) -> None:
    if name in known:
        return
    if removed := REMOVED.get(name):
        raise ConfigError(what, name, f"it was removed: {removed.reason}")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else "see --help for the known ones"
    raise ConfigError(f"unknown {what}", name, remedy)
