"""Flags of a settings dataclass: help texts with bounds, and per registry a name and one table per kind."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Annotated, TypeVar, get_args, get_origin, get_type_hints

import tyro

from repl_rl.errors import ConfigError
from repl_rl.settings.bounds import bound_of
from repl_rl.settings.pretrained import format_default, pretrained_of
from repl_rl.settings.scalars import is_table, literal, said
from repl_rl.settings.seams import Kind, Seam

T = TypeVar("T")


def typed(kind: type) -> Mapping[str, object]:
    """Return the annotations of a dataclass, `Annotated` included."""
    return get_type_hints(kind, include_extras=True)


def seam_of(hint: object) -> Seam[Kind] | None:
    """Return the registry in an annotation, or None if it has none."""
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Seam)), None)


def mirrored(kind: type, default: object = None) -> type:
    """Build the class whose fields are the flags of `kind`, for tyro.

    Args:
        kind: a dataclass of settings.
        default: an instance whose values are the defaults. None means the defaults of the class.
    """
    # tyro cannot read registries and open tables, so each field becomes one or more fields of plain types.
    specs: list[tuple[str, object, object]] = []
    for one in fields(kind):
        specs.extend(_flags(kind, one, default))
    told = [name for name, _, _ in specs]
    for name in told:
        if told.count(name) > 1:
            raise ConfigError("table of settings", name, "two kinds have that name; rename one")
    return make_dataclass(kind.__name__, specs, kw_only=True)


def assembled(kind: type[T], flags: object) -> T:
    """Build the settings from an instance of the mirrored class.

    Raises:
        ConfigError: options were given for a kind that was not chosen, or a setting is out of bounds.
    """
    hints = typed(kind)
    values: dict[str, object] = {}
    assert is_dataclass(kind)
    for one in fields(kind):
        hint, given = hints[one.name], getattr(flags, one.name)
        seam = seam_of(hint)
        if seam is not None:
            values[one.name] = _chosen(seam, given, flags)
        elif is_table(hint):
            values[one.name] = said(given)
        elif isinstance(hint, type) and is_dataclass(hint):
            values[one.name] = assembled(hint, given)
        else:
            values[one.name] = given
    return kind(**values)


def names(mirror: type) -> Iterator[str]:
    """Yield the dotted names of the flags of a mirrored class."""
    yield from collect_annotations(mirror)


def collect_annotations(mirror: type, prefix: str = "") -> dict[str, object]:
    """Return the annotations of the flags of a mirrored class, by dotted name."""
    hints, found = typed(mirror), dict[str, object]()
    for one in fields(mirror):
        hint = hints[one.name]
        if isinstance(hint, type) and is_dataclass(hint):
            found |= collect_annotations(hint, f"{prefix}{one.name}.")
        else:
            found[prefix + one.name] = hint
    return found


def _chosen(seam: Seam[Kind], name: str, flags: object) -> Kind:
    tables = {other: assembled(options, getattr(flags, other)) for other, options in seam.tables().items()}
    chosen = tables.pop(name) if name in tables else seam.chosen(name)
    # Options of the other kinds have no effect, so a value that is not the default is an error.
    for other, table in tables.items():
        if table != type(table)():
            raise ConfigError(other, table, f"it has no effect without --{seam.thing} {other}; leave it out")
    return chosen


def _flags(kind: type, one: "Field[object]", default: object) -> Iterator[tuple[str, object, object]]:
    """Yield name, annotation and default of each flag of a field: one flag, or tables of flags."""
    hint = typed(kind)[one.name]
    value = _default(one) if default is None else getattr(default, one.name)
    about = documented(kind).get(one.name, "")
    seam = seam_of(hint)
    if seam is not None:
        # A registry becomes a flag for the name, and one table per kind that has options.
        choice = seam.chosen(value)
        about = f"{about} One of: {seam.described()}."
        yield one.name, Annotated[str, tyro.conf.arg(help=about)], choice.kind
        for name, options in seam.tables().items():
            start = choice if name == choice.kind else options()
            yield _table(name, options, start)
    elif isinstance(hint, type) and is_dataclass(hint):
        yield _table(one.name, hint, hint() if value is MISSING else value)
    elif is_table(hint):
        # An open table becomes a list of words KEY=VALUE, since its keys are unknown here.
        words = tuple(f"{key}={literal(each)}" for key, each in value.items()) if isinstance(value, Mapping) else ()
        told = tyro.conf.arg(help=f"{about} Given as --{one.name}.KEY VALUE.", metavar="KEY=VALUE ...")
        yield one.name, Annotated[tuple[str, ...], told], words
    else:
        # Any other field stays one flag. Its help ends with the bound and the defaults that depend on the model.
        bound = bound_of(hint)
        told = f"{about} ({bound})" if bound is not None and str(bound) not in about else about
        if (other := pretrained_of(hint)) is not None:
            told += f" Default of the bundled policy: {format_default(value)}; of any other model: {other.told}."
        yield one.name, Annotated[hint, tyro.conf.arg(help=told)], MISSING if value is MISSING else value


def _table(name: str, kind: type, start: object) -> tuple[str, object, object]:
    mirror = mirrored(kind, start)
    return name, mirror, field(default_factory=mirror)


def _default(one: "Field[object]") -> object:
    if one.default is not MISSING:
        return one.default
    return MISSING if one.default_factory is MISSING else one.default_factory()


@cache
def documented(kind: type) -> Mapping[str, str]:
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
