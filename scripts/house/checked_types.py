"""Types of the objects whose attributes a checkout reads, as mypy infers them.

    python scripts/house/checked_types.py OUT

Run it in the checkout. OUT is JSON: file, then "line:column" of the attribute's end, then the classes of the object,
each as [file, qualified name], or null for a class of a library. An object of unknown type has no entry.
"""

import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import GetSetDescriptorType

from mypy.build import build
from mypy.config_parser import parse_config_file
from mypy.find_sources import create_source_list
from mypy.fscache import FileSystemCache
from mypy.nodes import Expression, MemberExpr, Node, TypeInfo
from mypy.options import Options
from mypy.types import (
    AnyType,
    CallableType,
    Instance,
    LiteralType,
    NoneType,
    Overloaded,
    TupleType,
    Type,
    TypedDictType,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)

Found = list[list[str] | None]


def classes_of(kind: Type, paths: dict[str, str]) -> Iterator[list[str] | None]:
    """Yield the classes of a type, None for those of a library.

    Raises:
        LookupError: the type is unknown.
    """
    proper = get_proper_type(kind)
    if isinstance(proper, UnionType):
        for item in proper.items:
            if not isinstance(get_proper_type(item), NoneType):
                yield from classes_of(item, paths)
    elif isinstance(proper, Instance):
        yield class_at(proper.type, paths)
    elif isinstance(proper, TupleType):
        yield class_at(proper.partial_fallback.type, paths)
    elif isinstance(proper, LiteralType | TypedDictType):
        yield class_at(proper.fallback.type, paths)
    elif isinstance(proper, TypeType):
        yield from classes_of(proper.item, paths)
    elif isinstance(proper, CallableType) and proper.is_type_obj():
        yield class_at(proper.type_object(), paths)
    elif isinstance(proper, CallableType | Overloaded):
        yield None
    elif isinstance(proper, TypeVarType):
        yield from classes_of(proper.upper_bound, paths)
    else:
        raise LookupError(str(proper))


def class_at(info: TypeInfo, paths: dict[str, str]) -> list[str] | None:
    """Return the file and the qualified name of a class of the checkout."""
    if info.fallback_to_any and info.module_name not in paths:
        raise LookupError(info.fullname)
    if info.module_name not in paths:
        return None
    return [paths[info.module_name], info.fullname.removeprefix(f"{info.module_name}.").partition("@")[0]]


SKIPPED = {"node", "info", "def_var", "names", "type", "unanalyzed_type", "alias_deps", "path", "analyzed"}
"""Attributes of nodes that lead to other files, or to types."""


@cache
def fields_of(kind: type) -> tuple[str, ...]:
    """Return the attributes of a compiled class of nodes."""
    found = {
        name for one in kind.__mro__ for name, value in vars(one).items() if isinstance(value, GetSetDescriptorType)
    }
    return tuple(sorted(found - SKIPPED))


def members_of(tree: Node) -> Iterator[MemberExpr]:
    """Yield the attributes below a node. mypy's own visitors are compiled and have no subclasses."""
    seen: set[int] = set()
    left: list[object] = [tree]
    while left:
        one = left.pop()
        if isinstance(one, list | tuple):
            left += one
        elif isinstance(one, Node) and id(one) not in seen and not isinstance(one, TypeInfo):
            seen.add(id(one))
            if isinstance(one, MemberExpr):
                yield one
            left += [getattr(one, name, None) for name in fields_of(type(one))]


def attributes_of(tree: Node, types: dict[Expression, Type], paths: dict[str, str]) -> dict[str, Found]:
    """Return the classes of the objects of a file's attributes."""
    result: dict[str, Found] = {}
    for member in members_of(tree):
        kind = types.get(member.expr)
        if kind is None or isinstance(get_proper_type(kind), AnyType):
            continue
        try:
            found = list(classes_of(kind, paths))
        except LookupError:
            continue
        if found:
            known = result.setdefault(f"{member.end_line}:{member.end_column}", found)
            # A function that is checked twice, for the values of a type variable, has each value's type.
            known += [one for one in found if one not in known]
    return result


def checked(root: Path) -> dict[str, dict[str, Found]]:
    """Return the attributes of all files below `root` that mypy checks."""
    os.chdir(root)
    options = Options()
    parse_config_file(options, lambda: None, "pyproject.toml")
    options.export_types = options.preserve_asts = True
    options.incremental = False
    options.local_partial_types = False
    sources = create_source_list(options.files or [], options)
    result = build(sources, options=options, fscache=FileSystemCache())
    for line in result.errors[:20]:
        print(line, file=sys.stderr)
    trees = {name: tree for name, tree in result.files.items() if not os.path.isabs(tree.path)}
    paths = {name: tree.path for name, tree in trees.items()}
    found: dict[str, dict[str, Found]] = {}
    for tree in trees.values():
        found[tree.path] = attributes_of(tree, result.types, paths)
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(checked(Path.cwd())), encoding="utf-8")
