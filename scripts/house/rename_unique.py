"""Rename symbols of a checkout in one pass: uses are found by scope, import and annotation, without a language server.

    python scripts/house/rename_unique.py CHECKOUT NAMES.toml [--tier 1] [--dry | --apply] [--report FILE]

Each row of NAMES.toml gets one class:

- unique: the old identifier has one definition in the whole checkout; texts, comments and pages are renamed too;
- private: the name begins with an underscore and only its own module uses it, although other modules define it too;
- resolved: the name has other definitions, but each use was resolved to one of them;
- ambiguous: left for `rename.py`, with a reason in the report;
- gone: the symbol is not in the checkout any more;
- done: the symbol has its new name already.

A use that cannot be resolved may belong to any definition of its name. It is renamed if all these definitions get the
same new name, else their rows are ambiguous. A new name that is still taken by a symbol which this run renames waits
for a second run of the same command. After `--apply` the checkout is parsed and resolved again: both trees must
be equal up to the renames, and each name must refer to what it referred to before.
"""

import argparse
import ast
import builtins
import importlib
import io
import json
import keyword
import pkgutil
import re
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDERS = ("repl_rl", "sandbox", "tests", "benchmarks", "examples", "website", "scripts")
PACKAGES = ("repl_rl/", "sandbox/")
"""Folders whose definitions have rows; classes elsewhere are doubles and helpers."""
PAGES = (".md", ".toml", ".txt", ".ipynb")
SKIPPED = ("scripts/house/",)
SKIPPED_PAGES = (*SKIPPED, "CHANGELOG.md", "docs/design.md")

Key = tuple[str | int, ...]
"""("g", module, name), ("m", module, class, name), ("l", scope, name), ("b", name), ("mod", name), ("x",)."""
Atom = tuple[object, ...]
"""("cls" | "inst", class), ("mod", name), ("func", function, class or None), ("app", name, arguments), ("ext",)."""
Type = tuple[Atom, ...] | None
"""Possible types of an expression; None means unknown."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
EXTERNAL: Type = (("ext",),)
SAFE_BASES = {"object", "Protocol", "Generic", "ABC", "Enum", "StrEnum", "IntEnum", "NamedTuple"}
KEYED_BASES = {"TypedDict", "BaseModel", "Struct"}
GETTERS = {"getattr", "setattr", "hasattr", "delattr"}
WORD = re.compile(r"[^\W\d]\w*")
SPECIFIC = re.compile(r"\w*[^\W_]_+[^\W_]\w*|_\w+|\w*[a-z\d][A-Z]\w*")
"""Identifiers that no prose has: two words, or an underscore first."""


@dataclass(eq=False)
class Class:
    """A class of the checkout, with the members that its body and its methods define."""

    module: "Module"
    number: int
    qualname: str
    node: ast.ClassDef
    scope: "Scope"
    members: dict[str, list[ast.AST]] = field(default_factory=dict)
    bases: list["Class"] = field(default_factory=list)
    external: set[str] = field(default_factory=set)
    children: list["Class"] = field(default_factory=list)
    dataclass: bool = False

    def key(self, name: str) -> Key:
        """Return the key of a member that this class defines."""
        return ("m", self.module.name, self.number, name)

    def ancestors(self) -> Iterator["Class"]:
        """Yield this class and its bases, nearest first."""
        yield self
        for base in self.bases:
            yield from base.ancestors()

    def family(self) -> set["Class"]:
        """Return this class with its bases and with all classes that inherit from it."""
        found: set[Class] = set()
        left = [self]
        while left:
            one = left.pop()
            if one not in found:
                found.add(one)
                left.extend(one.children)
        return found | set(self.ancestors())

    def find(self, name: str) -> "Class | None":
        """Return the class that defines a member, following the bases."""
        return next((one for one in self.ancestors() if name in one.members), None)

    def is_protocol(self) -> bool:
        """Return True if `Protocol` is a direct base."""
        return "Protocol" in self.external

    def outside(self) -> set[str]:
        """Return bases from libraries that may define members."""
        return {base for one in self.ancestors() for base in one.external} - SAFE_BASES


@dataclass(eq=False)
class Scope:
    """A module, class, function or comprehension, with the names that it binds."""

    kind: str
    parent: "Scope | None"
    module: "Module"
    number: int
    owner: Class | None = None
    names: set[str] = field(default_factory=set)
    escaping: set[str] = field(default_factory=set)
    values: dict[str, list[tuple[str, ast.AST | None]]] = field(default_factory=lambda: defaultdict(list))
    types: dict[str, Type] = field(default_factory=dict)
    first: str | None = None

    def bind(self, name: str, how: str, node: ast.AST | None) -> None:
        """Record a binding; `how` says what `node` means for the type of the name."""
        self.names.add(name)
        self.values[name].append((how, node))


@dataclass(eq=False)
class Module:
    """A file of the checkout."""

    path: str
    name: str
    text: str
    tree: ast.Module
    lines: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    scope: Scope = field(init=False)
    bindings: dict[str, list[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(list))
    classes: list[Class] = field(default_factory=list)
    functions: dict[ast.AST, Scope] = field(default_factory=dict)
    scopes: int = 0

    def __post_init__(self) -> None:
        self.lines = self.text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    def offset(self, line: int, column: int) -> int:
        """Return the offset in characters of a line, from 1, and a column in bytes."""
        text = self.lines[line - 1]
        return self.starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def span(self, node: ast.expr) -> tuple[int, int]:
        """Return where the text of a node starts and ends."""
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno or 0, node.end_col_offset or 0)


@dataclass(frozen=True, slots=True)
class Use:
    """An occurrence of an identifier. No keys means unresolved; no start means that it was not located."""

    module: Module
    text: str
    kind: str
    start: int | None
    keys: tuple[Key, ...]
    scope: Scope
    immediate: bool = False


@dataclass
class Row:
    """A row of the table of names, and what became of it."""

    tier: int
    kind: str
    file: str
    old: str
    new: str
    key: Key | None = None
    label: str = ""
    reason: str = ""

    @property
    def last(self) -> str:
        """Identifier that is renamed."""
        return self.old.rpartition(".")[2]


class Checkout:
    """All files of a checkout, with every use of the wanted identifiers."""

    def __init__(self, root: Path, wanted: set[str], types: Path | None = None) -> None:
        self.root = root
        self.wanted = wanted
        self.checked = checked_types(root) if types is None else json.loads(types.read_text(encoding="utf-8"))
        self.modules: dict[str, Module] = {}
        self.paths: dict[str, Module] = {}
        self.uses: list[Use] = []
        self.strings: dict[str, list[tuple[Module, ast.Constant]]] = defaultdict(list)
        self.words: dict[str, list[tuple[Module, ast.Constant]]] = defaultdict(list)
        self.reflecting: dict[str, set[int]] = defaultdict(set)
        self.asdict: list[tuple[Module, int, Type]] = []
        self.external_keywords: set[str] = set()
        self.parameters: dict[str, list[set[str]]] = defaultdict(list)
        self.problems: list[str] = []
        self.split: dict[str, str] = {}
        self.by_module: dict[Module, list[Use]] = defaultdict(list)
        for folder in FOLDERS:
            for path in sorted([*(root / folder).rglob("*.py"), *(root / folder).rglob("*.pyi")]):
                name = path.relative_to(root).as_posix()
                if not name.startswith(SKIPPED):
                    self._load(name, path.read_text(encoding="utf-8"))
        for module in self.paths.values():
            Collector(self, module).run()
        for module in self.paths.values():
            for one in module.classes:
                self._inherit(one)
        self.defined = {text for m in self.paths.values() for c in m.classes for text in c.members}
        for module in list(self.paths.values()):
            Resolver(self, module).run()
        self.pages: dict[str, Module] = {}
        found = [
            *root.glob("*"),
            *(p for f in (*FOLDERS, "docs", "notebooks", "prompts") for p in (root / f).rglob("*")),
        ]
        for path in sorted(path for path in found if path.suffix in PAGES):
            name = path.relative_to(root).as_posix()
            if not name.startswith(SKIPPED_PAGES):
                self._page(name, path.read_text(encoding="utf-8"))

    def _page(self, path: str, text: str) -> None:
        """Resolve the Python blocks of a page, or the cells of a notebook, and the dotted paths in it."""
        module = Module(path, f"page:{path}", text, ast.Module([], []))
        module.scope = scope = Scope("function", None, module, 0)
        self.modules[module.name] = self.pages[path] = module
        resolver = Resolver(self, module)
        for numbers, codes in blocks(module):
            if any(code.startswith(">>> ") for code in codes):
                pairs = [(n, c[4:]) for n, c in zip(numbers, codes, strict=True) if c.startswith((">>> ", "... "))]
                numbers, codes = [n for n, _ in pairs], [c for _, c in pairs]
            inner = resolver.run_embedded(Embedded(codes, numbers), scope)
            scope = inner if inner is not None else scope
        for match in re.finditer(r"\b(?:repl_rl|repl_kernel)(?:\.\w+)+(?::\w+)?", text):
            resolver.path(match.group(), match.start())

    def _load(self, path: str, text: str) -> None:
        parts = path.rpartition(".")[0].split("/")
        if parts[0] == "sandbox" and len(parts) > 1:
            parts = parts[1:]
        if parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts) + (":stub" if path.endswith(".pyi") else "")
        module = Module(path, name, text, ast.parse(text))
        module.scope = Scope("module", None, module, 0)
        self.modules[name] = self.paths[path] = module

    def _inherit(self, one: Class) -> None:
        for base in one.node.bases:
            node = base.value if isinstance(base, ast.Subscript) else base
            parent = one.scope.parent
            assert parent is not None
            atoms = Inference(self).infer(node, parent) or ()
            classes = [atom[1] for atom in atoms if atom[0] == "cls"]
            for found in classes:
                assert isinstance(found, Class)
                one.bases.append(found)
                found.children.append(one)
            if not classes:
                one.external.add(ast.unparse(node).rpartition(".")[2])
        decorators = [ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in one.node.decorator_list]
        one.dataclass = "dataclass" in decorators or bool({"NamedTuple", "TypedDict", "BaseModel"} & one.external)

    def checked_base(self, module: Module, node: ast.Attribute) -> Type:
        """Return the type of the object of an attribute, as mypy infers it."""
        found = self.checked.get(module.path, {}).get(f"{node.end_lineno}:{node.end_col_offset}")
        if found is None:
            return None
        atoms: list[Atom] = []
        for place in found:
            home = self.paths.get(place[0]) if place is not None else None
            if place is None:
                atoms.append(("ext",))
                continue
            one = next((c for c in home.classes if c.qualname == place[1]), None) if home is not None else None
            if one is None:
                return None
            atoms.append(("inst", one))
        return tuple(atoms)

    def uses_of(self, module: Module) -> list[Use]:
        """Return the uses of one file."""
        if not self.by_module:
            for use in self.uses:
                self.by_module[use.module].append(use)
        return self.by_module[module]

    def canonical(self, module: Module, name: str, depth: int = 0) -> Key | None:
        """Follow imports to where a module-level name is defined."""
        found = module.bindings.get(name)
        if not found or depth > 20:
            return None
        first = found[0]
        if any(each[0] == "def" for each in found):
            return ("g", module.name, name)
        if first[0] == "module":
            return ("mod", first[1]) if first[1] in self.modules else ("x",)
        source, original = first[1], first[2]
        if source not in self.modules:
            return ("x",)
        key = self.canonical(self.modules[source], original, depth + 1)
        if key is None:
            dotted = f"{source}.{original}"
            return ("mod", dotted) if dotted in self.modules else ("x",)
        return key

    def member_of_module(self, name: str, text: str) -> Key | None:
        """Return what an attribute of a module refers to."""
        key = self.canonical(self.modules[name], text)
        if key is None and f"{name}.{text}" in self.modules:
            return ("mod", f"{name}.{text}")
        return key

    def class_at(self, key: Key) -> Class | None:
        """Return the class that a module-level key names."""
        if key[0] != "g":
            return None
        module = self.modules[str(key[1])]
        return next((one for one in module.classes if one.qualname == key[2]), None)


def checked_types(root: Path) -> dict[str, dict[str, list[list[str] | None]]]:
    """Run checked_types.py in a separate process and return its result."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        program = Path(__file__).with_name("checked_types.py").absolute()
        subprocess.run([sys.executable, program, file.name], cwd=root, check=True)
        found: dict[str, dict[str, list[list[str] | None]]] = json.loads(Path(file.name).read_text(encoding="utf-8"))
    return found


class Collector(ast.NodeVisitor):
    """Find scopes, bindings, classes and members of a module."""

    def __init__(self, checkout: Checkout, module: Module) -> None:
        self.checkout = checkout
        self.module = module
        self.scope = module.scope
        self.names: list[str] = []

    def run(self) -> None:
        """Visit the module."""
        module = self.module
        self.visit(module.tree)
        package = module.name.partition(":")[0]
        homes = next(
            (
                n.value
                for n in module.tree.body
                if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and n.targets[0].id == "_HOMES"
            ),
            None,
        )
        if isinstance(homes, ast.Dict):
            for key, value in zip(homes.keys, homes.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    module.bindings[str(key.value)].append(("from", f"{package}.{value.value}", str(key.value)))

    def _new(self, kind: str, node: ast.AST, owner: Class | None = None) -> Scope:
        self.module.scopes += 1
        scope = Scope(kind, self.scope, self.module, self.module.scopes, owner)
        self.module.functions[node] = scope
        return scope

    def bind(self, name: str, how: str, node: ast.AST | None, binding: tuple[str, ...] = ("def",)) -> None:
        """Bind a name in the scope that owns it."""
        scope = self.scope
        while scope.kind == "comprehension" and scope.parent is not None and how == "walrus":
            scope = scope.parent
        if name in scope.escaping:
            scope = self.module.scope
        scope.bind(name, how, node)
        if scope.kind == "module":
            self.module.bindings[name].append(binding)
        if scope.kind == "class" and scope.owner is not None and node is not None:
            scope.owner.members.setdefault(name, []).append(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bind(node.name, "class", node)
        for each in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(each)
        scope = self._new("class", node)
        one = Class(self.module, len(self.module.classes), ".".join([*self.names, node.name]), node, scope)
        scope.owner = one
        self.module.classes.append(one)
        self._inside(scope, node.name, node.body)

    def visit_FunctionDef(self, node: Function) -> None:
        self.bind(node.name, "function", node)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self.checkout.parameters[node.name].append({a.arg for a in every} | ({"**"} if arguments.kwarg else set()))
        for each in (*node.decorator_list, *arguments.defaults, *filter(None, arguments.kw_defaults)):
            self.visit(each)
        owner = self.scope.owner if self.scope.kind == "class" else None
        scope = self._new("function", node, owner)
        for one in every:
            scope.bind(one.arg, "annotation", one.annotation)
        for extra, how in ((arguments.vararg, "several"), (arguments.kwarg, "unknown")):
            if extra is not None:
                scope.bind(extra.arg, how, extra.annotation)
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
        if owner is not None and every and not static:
            by_class = any(isinstance(d, ast.Name) and d.id == "classmethod" for d in node.decorator_list)
            scope.first = every[0].arg
            how = "cls" if by_class or node.name in {"__new__", "__init_subclass__", "__class_getitem__"} else "self"
            scope.values[every[0].arg] = [(how, owner.node)]
        self._inside(scope, f"{node.name}.<locals>", node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for each in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(each)
        scope = self._new("function", node)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for one in filter(None, (*every, node.args.vararg, node.args.kwarg)):
            scope.bind(one.arg, "unknown", None)
        self._inside(scope, "<lambda>", [node.body])

    def _comprehension(self, node: Comprehension) -> None:
        self.visit(node.generators[0].iter)
        scope = self._new("comprehension", node)
        before, self.scope = self.scope, scope
        for number, generator in enumerate(node.generators):
            self._target(generator.target, "element", generator.iter)
            for each in ([generator.iter] if number else []) + generator.ifs:
                self.visit(each)
        for each in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            self.visit(each)
        self.scope = before

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    def _inside(self, scope: Scope, name: str, body: Sequence[ast.AST]) -> None:
        before, self.scope = self.scope, scope
        self.names.append(name)
        for each in body:
            self.visit(each)
        self.names.pop()
        self.scope = before

    def _target(self, target: ast.AST, how: str, value: ast.AST | None) -> None:
        if isinstance(target, ast.Name):
            self.bind(target.id, how, value if value is not None else target)
        elif isinstance(target, ast.Tuple | ast.List):
            pairs = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) and how == "value"
            for number, each in enumerate(target.elts):
                inner = each.value if isinstance(each, ast.Starred) else each
                if pairs and isinstance(value, ast.Tuple):
                    self._target(inner, how, value.elts[number])
                elif isinstance(inner, ast.Name) and not isinstance(each, ast.Starred):
                    self.bind(inner.id, f"{how} {number}", value)
                else:
                    self._target(inner, "unknown", inner)
        elif isinstance(target, ast.Starred):
            self._target(target.value, "unknown", target)
        else:
            self._stored(target, value if how == "value" else None)
            self.visit(target)

    def _stored(self, target: ast.AST, value: ast.AST | None, annotation: ast.AST | None = None) -> None:
        """Record `self.NAME = ...` as a member of the class."""
        if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
            return
        scope: Scope | None = self.scope
        while scope is not None and scope.kind != "module":
            if scope.first == target.value.id and scope.owner is not None:
                stored = Stored(target, value, annotation, self.scope)
                scope.owner.members.setdefault(target.attr, []).append(stored)
                return
            if target.value.id in scope.names:
                return
            scope = scope.parent

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._target(target, "value", node.value)
            if isinstance(target, ast.Name) and target.id == "__slots__" and self.scope.owner is not None:
                for each in ast.walk(node.value):
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        self.scope.owner.members.setdefault(each.value, []).append(each)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.bind(node.target.id, "annotation", node.annotation)
        else:
            self._stored(node.target, node.value, node.annotation)
            self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.bind(node.target.id, "same", node.target)
        self.visit(node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.bind(node.target.id, "walrus", node.value)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._target(node.target, "element", node.iter)
        for each in (*node.body, *node.orelse):
            self.visit(each)

    visit_AsyncFor = visit_For

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self._target(item.optional_vars, "entered", item.context_expr)
        for each in node.body:
            self.visit(each)

    visit_AsyncWith = visit_With

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.bind(node.name, "caught", node.type)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bind(node.id, "unknown", node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name:
            self.bind(node.name, "matched" if node.pattern is not None else "unknown", node.pattern or node)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self.bind(node.name, "unknown", node)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.bind(node.rest, "unknown", node)
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        self.scope.escaping.update(node.names)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.bind(name, "import", alias, ("module", alias.name if alias.asname else name))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = source_of(self.module, node)
        for alias in node.names:
            self.bind(alias.asname or alias.name, "import", Imported(source, alias), ("from", source, alias.name))


class Imported(ast.AST):
    """An imported name inside a function, with its module."""

    def __init__(self, source: str, alias: ast.alias) -> None:
        super().__init__()
        self.source = source
        self.alias = alias


class Stored(ast.AST):
    """An assignment to `self.NAME`, with its value, its annotation and its scope."""

    def __init__(self, target: ast.Attribute, value: ast.AST | None, annotation: ast.AST | None, scope: Scope) -> None:
        super().__init__()
        self.target = target
        self.value = value
        self.annotation = annotation
        self.scope = scope


def source_of(module: Module, node: ast.ImportFrom) -> str:
    """Return the module that an import names, relative ones resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.partition(":")[0].split(".")
    package = parts if "/__init__." in module.path else parts[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def find_scope(scope: Scope, name: str) -> Scope | None:
    """Return the scope that a name refers to, as Python looks it up."""
    one: Scope | None = scope
    while one is not None:
        if name in one.escaping:
            one = one.module.scope
        if name in one.names and (one.kind != "class" or one is scope):
            return one
        one = one.parent
    return None


ITERABLES = {
    "list",
    "List",
    "set",
    "frozenset",
    "Sequence",
    "Iterable",
    "Iterator",
    "Collection",
    "deque",
    "Set",
    "AbstractSet",
    "MutableSequence",
    "Generator",
    "AsyncIterator",
    "AsyncIterable",
    "AsyncGenerator",
    "Counter",
    "KeysView",
    "ValuesView",
    "MutableSet",
}
MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"}
UNKNOWN_NAMES = {"object", "Any", "TypeVar", "ParamSpec", "type"}
TRANSPARENT = {"Final", "ClassVar", "Annotated", "Required", "NotRequired", "Optional", "Union", "InitVar"}
PLAIN = {
    "property",
    "cached_property",
    "staticmethod",
    "classmethod",
    "override",
    "abstractmethod",
    "cache",
    "lru_cache",
    "overload",
    "final",
    "wraps",
    "setter",
    "no_type_check",
    "inference_mode",
    "no_grad",
    "runtime_checkable",
}


class Inference:
    """Infer the type of an expression from annotations, constructors and returned types."""

    def __init__(self, checkout: Checkout) -> None:
        self.checkout = checkout
        self.depth = 0

    def key_of(self, name: str, scope: Scope) -> tuple[Key | None, Scope | None]:
        """Return what a name refers to, and the scope that binds it."""
        found = find_scope(scope, name)
        if found is None:
            return (("b", name) if hasattr(builtins, name) else None), None
        if found.kind == "module":
            return self.checkout.canonical(found.module, name), found
        if found.kind == "class" and found.owner is not None:
            return found.owner.key(name), found
        for how, node in found.values.get(name, ()):
            if how == "import" and isinstance(node, Imported):
                source = self.checkout.modules.get(node.source)
                if source is None:
                    return ("x",), found
                return self.checkout.member_of_module(node.source, node.alias.name), found
            if how == "import" and isinstance(node, ast.alias):
                name = node.name if node.asname else node.name.partition(".")[0]
                return (("mod", name) if name in self.checkout.modules else ("x",)), found
        return ("l", found.module.name, found.number, name), found

    def infer(self, node: ast.AST | None, scope: Scope) -> Type:
        """Return the type of an expression."""
        if node is None or self.depth > 40:
            return None
        self.depth += 1
        try:
            return self._infer(node, scope)
        finally:
            self.depth -= 1

    def _infer(self, node: ast.AST, scope: Scope) -> Type:
        if isinstance(node, ast.Name):
            return self.name(node.id, scope)
        if isinstance(node, ast.Attribute):
            return self.attribute(self.infer(node.value, scope), node.attr)
        if isinstance(node, ast.Call):
            return self.call(node, scope)
        if isinstance(node, ast.Await):
            return self.argument(self.infer(node.value, scope), {"Coroutine", "Awaitable", "Task", "Future"}, -1)
        if isinstance(node, ast.Subscript):
            return self.item(self.infer(node.value, scope), node.slice)
        if isinstance(node, ast.NamedExpr):
            return self.infer(node.value, scope)
        if isinstance(node, ast.IfExp):
            return join([self.infer(node.body, scope), self.infer(node.orelse, scope)])
        if isinstance(node, ast.BoolOp):
            return join([self.infer(each, scope) for each in node.values])
        if isinstance(node, ast.Constant):
            return () if node.value is None else EXTERNAL
        if isinstance(node, ast.List | ast.Set):
            parts = [self.infer(e.value if isinstance(e, ast.Starred) else e, scope) for e in node.elts]
            return (("app", "list", (join(parts) if parts else None,)),)
        if isinstance(node, ast.Tuple):
            return (("app", "tuple", tuple(self.infer(each, scope) for each in node.elts)),)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return (("app", "list", (self.infer(node.elt, self.scope_of(node, scope)),)),)
        if isinstance(node, ast.DictComp):
            inner = self.scope_of(node, scope)
            return (("app", "dict", (self.infer(node.key, inner), self.infer(node.value, inner))),)
        if isinstance(node, ast.Dict):
            keys = [self.infer(each, scope) if each is not None else None for each in node.keys]
            values = [self.infer(each, scope) for each in node.values]
            return (("app", "dict", (join(keys), join(values)) if keys else (None, None)),)
        if isinstance(node, ast.JoinedStr | ast.Compare):
            return EXTERNAL
        return None

    def scope_of(self, node: ast.AST, scope: Scope) -> Scope:
        """Return the scope of a comprehension or function."""
        return scope.module.functions.get(node, scope)

    def name(self, name: str, scope: Scope) -> Type:
        """Return the type of a name."""
        key, found = self.key_of(name, scope)
        if key is None:
            return None
        if key[0] == "b":
            return (("ext", name),)
        return self.of_key(key, found, name)

    def of_key(self, key: Key, found: Scope | None, name: str) -> Type:
        """Return the type of what a key refers to."""
        if key[0] == "x":
            return (("ext", name),)
        if key[0] == "mod":
            return (("mod", key[1]),)
        if key[0] == "g":
            one = self.checkout.class_at(key)
            if one is not None:
                return (("cls", one),)
            home = self.checkout.modules[str(key[1])].scope
            return self.variable(str(key[2]), home)
        if key[0] in "lm" and found is not None:
            return self.variable(name, found)
        return None

    def variable(self, name: str, scope: Scope) -> Type:
        """Return the joined type of all bindings of a name in a scope."""
        if name in scope.types:
            return scope.types[name]
        scope.types[name] = None
        values = scope.values.get(name, [])
        annotated = [(how, node) for how, node in values if how == "annotation" and node is not None]
        scope.types[name] = result = join(
            [self.bound(how, node, scope) for how, node in annotated or values if how != "same"]
        )
        return result

    def bound(self, how: str, node: ast.AST | None, scope: Scope) -> Type:
        """Return the type that one binding gives."""
        if how in {"self", "cls"} and isinstance(node, ast.ClassDef):
            one = next(each for each in scope.module.classes if each.node is node)
            return (("inst" if how == "self" else "cls", one),)
        if how == "annotation":
            return self.annotation(node, scope)
        if how == "class" and isinstance(node, ast.ClassDef):
            return tuple(("cls", each) for each in scope.module.classes if each.node is node)
        if how == "function" and isinstance(node, Function):
            return (("func", node, scope),)
        if how in {"value", "walrus"}:
            return self.infer(node, scope)
        if how == "element":
            return self.element(
                self.infer(
                    node,
                    scope.parent
                    if scope.kind == "comprehension" and scope.parent and self.is_first(node, scope)
                    else scope,
                )
            )
        if how == "entered":
            return self.entered(self.infer(node, scope))
        if how.startswith(("value ", "element ", "entered ")):
            kind, number = how.split()
            return self.tuple_part(self.bound(kind, node, scope), int(number))
        if how == "several":
            return (("app", "tuple", (self.annotation(node, scope), "...")),)
        if how == "caught" and node is not None:
            kinds = [self.infer(each, scope) for each in (node.elts if isinstance(node, ast.Tuple) else [node])]
            return join([tuple(("inst", a[1]) if a[0] == "cls" else ("ext",) for a in k) if k else None for k in kinds])
        if how == "matched" and isinstance(node, ast.MatchClass):
            found = self.infer(node.cls, scope)
            return tuple(("inst", a[1]) if a[0] == "cls" else ("ext",) for a in found) if found else None
        return None

    def is_first(self, node: ast.AST | None, scope: Scope) -> bool:
        """Return True if an expression is the outermost iterable of a comprehension."""
        return any(
            inner is scope and isinstance(owner, Comprehension) and owner.generators[0].iter is node
            for owner, inner in scope.module.functions.items()
            if inner is scope
        )

    def annotation(self, node: ast.AST | None, scope: Scope) -> Type:
        """Return the type of an annotation."""
        if node is None or self.depth > 40:
            return None
        self.depth += 1
        try:
            return self._annotation(node, scope)
        finally:
            self.depth -= 1

    def _annotation(self, node: ast.AST, scope: Scope) -> Type:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                try:
                    return self.annotation(ast.parse(node.value, mode="eval").body, scope)
                except SyntaxError:
                    return None
            return () if node.value is None else EXTERNAL
        if isinstance(node, ast.BinOp):
            return join([self.annotation(node.left, scope), self.annotation(node.right, scope)])
        if isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            origin = ast.unparse(node.value).rpartition(".")[2]
            if origin in TRANSPARENT:
                return join([self.annotation(each, scope) for each in (parts[:1] if origin == "Annotated" else parts)])
            if origin in {"Literal", "LiteralString"}:
                return EXTERNAL
            base = self.annotation(node.value, scope)
            if origin in {"type", "Type"}:
                inner = self.annotation(parts[0], scope)
                return tuple(("cls", a[1]) if a[0] == "inst" else ("ext",) for a in inner) if inner else None
            if base and base[0][0] == "inst":
                return base
            arguments = tuple(
                "..." if isinstance(e, ast.Constant) and e.value is ... else self.annotation(e, scope) for e in parts
            )
            return (("app", origin, arguments),)
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        last = node.id if isinstance(node, ast.Name) else node.attr
        if last == "Self":
            one: Scope | None = scope
            while one is not None and one.owner is None:
                one = one.parent
            return (("inst", one.owner),) if one is not None else None
        found = self.infer(node, scope)
        if found is None:
            return self.alias(node, scope)
        if found == (("ext", last),):
            if last in ITERABLES | MAPPINGS | {"tuple"}:
                return (("app", last, (None, None) if last in MAPPINGS else (None,)),)
            return None if last in UNKNOWN_NAMES else EXTERNAL
        if any(atom[0] not in {"cls", "ext"} for atom in found):
            return self.alias(node, scope)
        return tuple(("inst", atom[1]) if atom[0] == "cls" else ("ext",) for atom in found) or None

    def alias(self, node: ast.Name | ast.Attribute, scope: Scope) -> Type:
        """Return the type of a type alias of the checkout."""
        key: Key | None = None
        if isinstance(node, ast.Name):
            key, _ = self.key_of(node.id, scope)
        else:
            base = self.infer(node.value, scope)
            if base and base[0][0] == "mod":
                key = self.checkout.member_of_module(str(base[0][1]), node.attr)
        if key is None or key[0] != "g":
            return None
        home = self.checkout.modules[str(key[1])].scope
        values = [value for how, value in home.values.get(str(key[2]), ()) if how == "value"]
        if len(values) == 1 and isinstance(values[0], ast.Name | ast.Attribute | ast.Subscript | ast.BinOp):
            return self.annotation(values[0], home)
        return None

    def attribute(self, base: Type, name: str) -> Type:
        """Return the type of an attribute."""
        if base is None:
            return None
        parts: list[Type] = []
        for atom in base:
            kind = atom[0]
            if kind == "mod":
                key = self.checkout.member_of_module(str(atom[1]), name)
                parts.append(None if key is None else self.of_key(key, None, name))
            elif kind in {"inst", "cls", "super"}:
                assert isinstance(atom[1], Class)
                parts.append(self.member(atom[1], name))
            elif kind == "app":
                parts.append((("method", atom, name),))
            else:
                parts.append((("ext", name),) if len(atom) > 1 and kind == "ext" else None)
        return join(parts)

    def member(self, one: Class, name: str) -> Type:
        """Return the type of a member of a class or of its instance."""
        home = one.find(name)
        if home is None:
            return None
        nodes = home.members[name]
        for node in nodes:
            if isinstance(node, Function):
                decorators = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
                if decorators & {"property", "cached_property"}:
                    return self.returned(node, home.scope)
                return (("func", node, home.scope),)
            if isinstance(node, ast.ClassDef):
                return tuple(("cls", each) for each in home.module.classes if each.node is node)
        stored = [node for node in nodes if isinstance(node, Stored)]
        for node in stored:
            if node.annotation is not None:
                return self.annotation(node.annotation, node.scope)
        if name in home.scope.values:
            return self.variable(name, home.scope)
        if not stored:
            return None
        cached = home.scope.types.get(f"self.{name}", ())
        if f"self.{name}" in home.scope.types:
            return cached
        home.scope.types[f"self.{name}"] = None
        result = join([self.infer(node.value, node.scope) for node in stored])
        home.scope.types[f"self.{name}"] = result
        return result

    def returned(self, node: Function, scope: Scope) -> Type:
        """Return the type of a call of a function."""
        decorators = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
        result = self.annotation(node.returns, scope.module.functions.get(node, scope))
        if decorators & {"contextmanager", "asynccontextmanager"}:
            return (("app", "Manager", (self.element(result),)),)
        if decorators - PLAIN:
            return None
        generator = (
            bool(result)
            and result is not None
            and result[0][:2] in {("app", "AsyncIterator"), ("app", "AsyncGenerator")}
        )
        if isinstance(node, ast.AsyncFunctionDef) and not generator:
            return (("app", "Coroutine", (result,)),)
        return result

    def call(self, node: ast.Call, scope: Scope) -> Type:
        """Return the type of a call."""
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            one: Scope | None = scope
            while one is not None and one.owner is None:
                one = one.parent
            return (("super", one.owner),) if one is not None else None
        text = ast.unparse(node.func).rpartition(".")[2]
        if text == "import_module" and node.args and isinstance(node.args[0], ast.Constant):
            name = str(node.args[0].value)
            return (("mod", name),) if name in self.checkout.modules else EXTERNAL
        if text == "cast" and len(node.args) == 2:
            return self.annotation(node.args[0], scope)
        if text == "replace" and len(node.args) == 1 and node.keywords:
            return self.infer(node.args[0], scope)
        if isinstance(node.func, ast.Name) and node.args and find_scope(scope, text) is None:
            first = node.args[0]
            if text in {"list", "sorted", "tuple", "set", "reversed", "iter", "frozenset"}:
                return (("app", "list", (self.element(self.infer(first, scope)),)),)
            if text in {"next", "max", "min"}:
                return self.element(self.infer(first, scope)) if len(node.args) == 1 or text == "next" else None
            if text == "enumerate":
                pair: Type = (("app", "tuple", (EXTERNAL, self.element(self.infer(first, scope)))),)
                return (("app", "list", (pair,)),)
            if text == "zip":
                both = tuple(self.element(self.infer(each, scope)) for each in node.args)
                return (("app", "list", ((("app", "tuple", both),),)),)
            if text in {"getattr", "vars", "type", "map", "filter", "anext", "sum"}:
                return None
        function = self.infer(node.func, scope)
        if function is None:
            return None
        parts: list[Type] = []
        for atom in function:
            if atom[0] == "cls":
                parts.append((("inst", atom[1]),))
            elif atom[0] == "func":
                assert isinstance(atom[1], Function)
                assert isinstance(atom[2], Scope)
                parts.append(self.returned(atom[1], atom[2]))
            elif atom[0] == "method":
                parts.append(self.method(atom))
            elif atom[0] == "app" and atom[1] == "Callable":
                arguments = atom[2]
                assert isinstance(arguments, tuple)
                parts.append(arguments[-1] if arguments else None)
            elif atom[0] == "inst":
                assert isinstance(atom[1], Class)
                called = self.member(atom[1], "__call__")
                parts.append(self.returned(called[0][1], called[0][2]) if called and called[0][0] == "func" else None)
            else:
                parts.append(None)
        return join(parts)

    def method(self, atom: Atom) -> Type:
        """Return the type of a call of a method of a container."""
        _, container, name = atom
        assert isinstance(container, tuple)
        arguments = container[2]
        if container[1] in MAPPINGS and len(arguments) == 2:
            if name in {"get", "pop", "setdefault"}:
                return arguments[1]
            if name == "values":
                return (("app", "list", (arguments[1],)),)
            if name == "items":
                return (("app", "list", ((("app", "tuple", arguments),),)),)
            if name == "copy":
                return (container,)
        if container[1] in ITERABLES and arguments:
            if name in {"pop", "popleft"}:
                return arguments[0]
            if name in {"copy", "union", "difference"}:
                return (container,)
        return None

    def item(self, base: Type, index: ast.AST) -> Type:
        """Return the type of a subscript."""
        if not base or base[0][0] != "app" or len(base) > 1:
            return EXTERNAL if base == EXTERNAL else None
        name, arguments = base[0][1], base[0][2]
        assert isinstance(arguments, tuple)
        if isinstance(index, ast.Slice):
            return base
        if name in MAPPINGS and len(arguments) == 2:
            return arguments[1]
        if name == "tuple" and isinstance(index, ast.Constant) and isinstance(index.value, int):
            return self.tuple_part(base, index.value)
        return self.element(base) if name in ITERABLES or name == "tuple" else None

    def tuple_part(self, base: Type, number: int) -> Type:
        """Return the type of one element of a tuple."""
        if not base or len(base) > 1 or base[0][0] != "app":
            return None
        arguments = base[0][2]
        assert isinstance(arguments, tuple)
        if base[0][1] != "tuple" or "..." in arguments:
            return self.element(base)
        return arguments[number] if -len(arguments) <= number < len(arguments) else None

    def element(self, base: Type) -> Type:
        """Return the type of what iteration yields."""
        if base is None:
            return None
        parts: list[Type] = []
        for atom in base:
            if atom[0] == "app":
                arguments = [a for a in atom[2] if a != "..."]  # type: ignore[attr-defined]
                if atom[1] in ITERABLES | MAPPINGS:
                    parts.append(arguments[0] if arguments else None)
                elif atom[1] == "tuple":
                    parts.append(join(arguments))
                else:
                    parts.append(None)
            elif atom[0] == "inst":
                assert isinstance(atom[1], Class)
                found = self.member(atom[1], "__iter__") or self.member(atom[1], "__aiter__")
                parts.append(
                    self.element(self.returned(found[0][1], found[0][2])) if found and found[0][0] == "func" else None
                )
            else:
                parts.append(None)
        return join(parts)

    def entered(self, base: Type) -> Type:
        """Return the type that a `with` statement binds."""
        if not base or len(base) > 1:
            return None
        if base[0][0] == "app" and base[0][1] in {"Manager", "AbstractContextManager", "AbstractAsyncContextManager"}:
            return base[0][2][0]  # type: ignore[index]
        if base[0][0] == "inst":
            assert isinstance(base[0][1], Class)
            for name in ("__enter__", "__aenter__"):
                found = self.member(base[0][1], name)
                if found and found[0][0] == "func":
                    result = self.returned(found[0][1], found[0][2])
                    return self.argument(result, {"Coroutine"}, -1) if name == "__aenter__" else result
        return None

    def argument(self, base: Type, origins: set[str], number: int) -> Type:
        """Return a type argument of a generic type."""
        if not base or len(base) > 1 or base[0][0] != "app" or base[0][1] not in origins:
            return None
        return base[0][2][number]  # type: ignore[index]


def join(parts: Iterable[Type]) -> Type:
    """Return the union of types, unknown if one is."""
    found: dict[Atom, None] = {}
    for part in parts:
        if part is None:
            return None
        found.update(dict.fromkeys(part))
    return tuple(found)


class Resolver(ast.NodeVisitor):
    """Record each use of a wanted identifier in a module, with what it refers to."""

    def __init__(self, checkout: Checkout, module: Module) -> None:
        self.checkout = checkout
        self.module = module
        self.scope = module.scope
        self.inference = Inference(checkout)
        self.docstrings: set[ast.AST] = set()
        self.known: set[ast.AST] = set()
        self.formatted: list[tuple[str, str, tuple[Key, ...], Scope, bool]] | None = None
        self.embedded: Embedded | None = None
        self.outer: ast.JoinedStr | None = None

    def run(self) -> None:
        """Visit the module, then the examples of its docstrings."""
        self.visit(self.module.tree)
        for node in ast.walk(self.module.tree):
            body = getattr(node, "body", None)
            if (
                isinstance(body, list)
                and body
                and isinstance(body[0], ast.Expr)
                and isinstance(node, ast.Module | ast.ClassDef | Function)
            ):
                text = body[0].value
                if isinstance(text, ast.Constant) and isinstance(text.value, str) and ">>> " in text.value:
                    self._examples(text)

    # -- recording

    def use(
        self,
        text: str,
        kind: str,
        keys: Iterable[Key | None],
        position: tuple[int, int] | None,
        immediate: bool = False,
    ) -> None:
        """Record a use at a line and a column in bytes."""
        if text not in self.checkout.wanted:
            return
        found = tuple(key for key in keys if key is not None)
        if self.formatted is not None:
            self.formatted.append((text, kind, found, self.scope, immediate))
            return
        start = None
        if position is not None and self.embedded is not None:
            start = self.embedded.locate(self.module, position, text)
        elif position is not None:
            start = self.module.offset(*position)
        if start is None or self.module.text[start : start + len(text)] != text:
            self.checkout.problems.append(f"not located: {self.module.path}: {text} {position}")
            start = None
        self.checkout.uses.append(Use(self.module, text, kind, start, found, self.scope, immediate))

    def keys_of(self, base: Type, name: str) -> list[Key]:
        """Return the keys of an attribute, none if the type is unknown."""
        if base is None:
            return []
        keys: list[Key] = []
        for atom in base:
            if atom[0] == "mod":
                keys.append(self.checkout.member_of_module(str(atom[1]), name) or ("x",))
            elif atom[0] in {"inst", "cls", "super"}:
                assert isinstance(atom[1], Class)
                home = atom[1].find(name)
                if home is None:
                    if atom[1].outside() and name not in self.checkout.defined:
                        keys.append(("x",))
                        continue
                    return []
                keys.append(home.key(name))
            else:
                keys.append(("x",))
        return keys

    def located(self, node: ast.AST, text: str) -> tuple[int, int] | None:
        """Return the first place of a word after the start of a node."""
        lines = self.embedded.codes if self.embedded is not None else self.module.lines
        first, last = node.lineno, node.end_lineno or node.lineno  # type: ignore[attr-defined]
        for number in range(first, last + 1):
            line = lines[number - 1].encode()
            begin = node.col_offset if number == first else 0  # type: ignore[attr-defined]
            match = re.search(rb"\b" + text.encode() + rb"\b", line[begin:])
            if match:
                return number, begin + match.start()
        return None

    # -- scopes

    def _inside(self, node: ast.AST, body: Iterable[ast.AST]) -> None:
        before, self.scope = self.scope, self.module.functions.get(node, self.scope)
        for each in body:
            self.visit(each)
        self.scope = before

    def _docstring(self, node: ast.Module | ast.ClassDef | Function) -> None:
        if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            self.docstrings.add(node.body[0].value)

    def visit_Module(self, node: ast.Module) -> None:
        self._docstring(node)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring, also one below a field
            self.docstrings.add(node.value)
        self.generic_visit(node)

    def binding(
        self, name: str, node: ast.AST, kind: str = "definition", position: tuple[int, int] | None = None
    ) -> None:
        """Record a binding of a name in the scope it belongs to."""
        if name in self.checkout.wanted:
            key, found = self.inference.key_of(name, self.scope)
            self.use(name, kind, [key], position or self.located(node, name), found is self.scope)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in node.decorator_list:
            self.visit(each)
        self.binding(node.name, node)
        for base in (*node.bases, *node.keywords):
            self.visit(base)
        self._docstring(node)
        self._inside(node, node.body)

    def visit_FunctionDef(self, node: Function) -> None:
        for each in node.decorator_list:
            self.visit(each)
        self.binding(node.name, node)
        arguments = node.args
        self._docstring(node)
        for value in (*arguments.defaults, *filter(None, arguments.kw_defaults)):
            self.visit(value)
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for one in filter(None, every):
            if one.annotation is not None:
                self.hint(one.annotation)
        if node.returns is not None:
            self.hint(node.returns)
        before, self.scope = self.scope, self.module.functions.get(node, self.scope)
        for one in filter(None, every):
            self.binding(one.arg, one)
        for each in node.body:
            self.visit(each)
        self.scope = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for value in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(value)
        before, self.scope = self.scope, self.module.functions.get(node, self.scope)
        for one in filter(None, (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)):
            self.binding(one.arg, one)
        self.visit(node.body)
        self.scope = before

    def _comprehension(self, node: Comprehension) -> None:
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        inner = self.module.functions.get(node, self.scope)
        before = self.scope
        self.scope = inner
        for each in parts:
            self.visit(each)
        for number, generator in enumerate(node.generators):
            self.visit(generator.target)
            self.scope = inner if number else before
            self.visit(generator.iter)
            self.scope = inner
            for each in generator.ifs:
                self.visit(each)
        self.scope = before

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension

    # -- names

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.checkout.wanted:
            key, found = self.inference.key_of(node.id, self.scope)
            kind = "name" if isinstance(node.ctx, ast.Load) else "definition"
            self.use(node.id, kind, [key], (node.lineno, node.col_offset), found is self.scope)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        if node.attr in self.checkout.wanted:
            keys = self.keys_of(self.inference.infer(node.value, self.scope), node.attr)
            if not keys and self.embedded is None:
                keys = self.keys_of(self.checkout.checked_base(self.module, node), node.attr)
            end = (node.end_lineno or 0, (node.end_col_offset or 0) - len(node.attr.encode()))
            self.use(node.attr, "attribute", keys, end)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        self.hint(node.annotation)
        if node.value is not None:
            self.visit(node.value)

    def hint(self, node: ast.AST) -> None:
        """Visit an annotation, with the names in its texts."""
        literal = isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.known.add(node)
            try:
                inner = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return
            for each in ast.walk(inner):
                if isinstance(each, ast.Name):
                    key, _ = self.inference.key_of(each.id, self.scope)
                    self.use(each.id, "name", [key], self.located(node, each.id))
        elif isinstance(node, ast.Name | ast.Attribute) or literal:
            self.visit(node)
        else:
            for each in ast.iter_child_nodes(node):
                self.hint(each)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.binding(name, alias)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = source_of(self.module, node)
        for alias in node.names:
            key = self.checkout.member_of_module(source, alias.name) if source in self.checkout.modules else ("x",)
            self.use(alias.name, "import", [key], (alias.lineno, alias.col_offset))
            if alias.asname:
                position = (alias.end_lineno or 0, (alias.end_col_offset or 0) - len(alias.asname.encode()))
                self.binding(alias.asname, alias, "alias", position)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        for name in node.names:
            self.binding(name, node)

    visit_Nonlocal = visit_Global

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name and node.type is not None:
            after = ast.Pass(
                lineno=node.type.end_lineno, col_offset=node.type.end_col_offset, end_lineno=node.end_lineno
            )
            self.binding(node.name, after)
        for each in node.body:
            self.visit(each)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.pattern is not None:
            self.visit(node.pattern)
        if node.name and node.name in self.checkout.wanted:
            position = (node.end_lineno, node.end_col_offset - len(node.name.encode()))
            self.binding(node.name, node, position=position)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.visit(node.cls)
        found = self.inference.infer(node.cls, self.scope)
        for name, pattern in zip(node.kwd_attrs, node.kwd_patterns, strict=True):
            if name in self.checkout.wanted:
                line = (self.embedded.codes if self.embedded else self.module.lines)[pattern.lineno - 1].encode()
                before = line[: pattern.col_offset]
                place = before.rfind(name.encode())
                self.use(name, "keyword", self.keys_of(found, name), (pattern.lineno, place) if place >= 0 else None)
        for each in (*node.patterns, *node.kwd_patterns):
            self.visit(each)

    # -- calls

    def visit_Call(self, node: ast.Call) -> None:
        self.visit(node.func)
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in GETTERS and len(node.args) > 1:
            self._getter(node)
        if name in {"asdict", "astuple", "fields", "vars"} and node.args:
            infer = self.inference.infer(node.args[0], self.scope)
            self.checkout.asdict.append((self.module, node.lineno, infer))
        if name in {"attrgetter", "methodcaller", "collective_rpc"}:
            self.checkout.reflecting[self.module.path].add(node.lineno)
        if name in {"cast", "TypeVar", "NewType"} and node.args:
            self.hint(node.args[0])
        for each in node.args:
            self.visit(each)
        if any(each.arg is None for each in node.keywords):
            found = self.inference.infer(node.func, self.scope)
            if name == "replace" and node.args:
                found = self.inference.infer(node.args[0], self.scope)
            self.checkout.asdict.append((self.module, node.lineno, found))
        wanted = any(each.arg in self.checkout.wanted for each in node.keywords)
        callee = self.inference.infer(node.func, self.scope) if wanted else None
        for each in node.keywords:
            if each.arg is not None:
                self._keyword(node, name, callee, each.arg, (each.lineno, each.col_offset))
            self.visit(each.value)

    def _getter(self, node: ast.Call) -> None:
        text = node.args[1]
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            if text.value.isidentifier():
                self.known.add(text)
                keys = self.keys_of(self.inference.infer(node.args[0], self.scope), text.value)
                if text.value in self.checkout.wanted:
                    self.use(text.value, "attribute", keys, self.located(text, text.value))
        else:
            self.checkout.reflecting[self.module.path].add(node.lineno)

    def _keyword(self, node: ast.Call, name: str, callee: Type, text: str, position: tuple[int, int]) -> None:
        if text not in self.checkout.wanted:
            return
        base = callee
        first = self.inference.infer(node.args[0], self.scope) if node.args else None
        if name in {"replace", "_replace"}:
            if name == "_replace" and isinstance(node.func, ast.Attribute):
                first = self.inference.infer(node.func.value, self.scope)
            self.use(text, "keyword", self.keys_of(first, text), position)
            return
        if name in {"partial", "partialmethod"}:
            base = first
        if base is None and any("**" in found or text in found for found in self.checkout.parameters.get(name, ())):
            return
        if base is None:
            if name in {"SimpleNamespace", "Namespace", "Mock", "MagicMock"}:
                self.checkout.external_keywords.add(text)
            else:
                self.use(text, "keyword", [], position)
            return
        for atom in base:
            if atom[0] in {"ext", "method", "app"}:
                if name in {"SimpleNamespace", "Namespace", "Mock", "MagicMock", "make_dataclass"}:
                    self.checkout.external_keywords.add(text)
            elif atom[0] == "cls":
                assert isinstance(atom[1], Class)
                home = atom[1].find(text)
                if (
                    atom[1].find("__init__") is None
                    and home is not None
                    and any(c.dataclass for c in atom[1].ancestors())
                ):
                    self.use(text, "keyword", [home.key(text)], position)
                    return

    # -- texts

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str) or node in self.docstrings or node in self.known:
            return
        if node.value.isidentifier():
            if node.value in self.checkout.wanted:
                self.checkout.strings[node.value].append((self.module, node))
            return
        if self.embedded is None and self.outer is None:
            if re.fullmatch(r"[\w.]+(:[\w.]+)?", node.value) and self._path(node):
                return
            if re.search(r"\b(from|import) (repl_rl|repl_kernel|tests|benchmarks)\b", node.value) and self._code(node):
                return
        for word in set(WORD.findall(node.value)) & self.checkout.wanted:
            if self.embedded is None:
                self.checkout.words[word].append((self.module, self.outer or node))

    def _code(self, node: ast.Constant) -> bool:
        """Resolve a text that is a program; False if it is none."""
        codes = textwrap.dedent(str(node.value)).split("\n")
        start = self.module.offset(node.lineno, node.col_offset)
        end = self.module.offset(node.end_lineno or 0, node.end_col_offset or 0)
        embedded = Embedded(codes, start=start, region=re.sub(r"\\[nt]", "  ", self.module.text[start:end]))
        if self.run_embedded(embedded, None) is None:
            return False
        tree = ast.parse("\n".join(codes))
        used = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
        for each in ast.walk(tree):
            if isinstance(each, ast.ImportFrom):
                for alias in each.names:  # a name that is not used here is used by another piece of the program
                    if (alias.asname or alias.name) not in used:
                        self.checkout.split[alias.name] = f"{self.module.path}:{node.lineno}"
        return True

    def _path(self, node: ast.Constant) -> bool:
        """Resolve `package.module:name` or `package.module.name`; False if the text is no such path."""
        start = self.module.offset(node.lineno, node.col_offset)
        return self.path(str(node.value), self.module.text.find(str(node.value), start))

    def path(self, text: str, start: int) -> bool:
        """Resolve a dotted path at an offset of the file; False if it names no module of the checkout."""
        parts = re.split(r"[.:]", text)
        for size in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:size])
            if name in self.checkout.modules:
                base: Type = (("mod", name),)
                for number in range(size, len(parts)):
                    part, place = parts[number], start + len(".".join(parts[:number])) + 1
                    if part in self.checkout.wanted and start >= 0:
                        found = tuple(self.keys_of(base, part))
                        self.checkout.uses.append(Use(self.module, part, "path", place, found, self.scope))
                    base = self.inference.attribute(base, part)
                return True
        return False

    def visit_Dict(self, node: ast.Dict) -> None:
        homes = self.scope.kind == "module" and any(
            isinstance(each, ast.Assign) and each.value is node and ast.unparse(each.targets[0]) == "_HOMES"
            for each in self.module.tree.body
        )
        for key, value in zip(node.keys, node.values, strict=True):
            if homes and isinstance(key, ast.Constant):
                self.known.add(key)
                name = str(key.value)
                self.use(name, "import", [self.checkout.canonical(self.module, name)], self.located(key, name))
            elif key is not None:
                self.visit(key)
            self.visit(value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {each.id for each in node.targets if isinstance(each, ast.Name)}
        for target in node.targets:
            self.visit(target)
        if names & {"__all__", "__slots__", "__match_args__"}:
            for each in ast.walk(node.value):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    self.known.add(each)
                    key, _ = self.inference.key_of(each.value, self.scope)
                    if "__all__" not in names and self.scope.owner is not None:
                        home = self.scope.owner.find(each.value)
                        key = home.key(each.value) if home is not None else None
                    if each.value in self.checkout.wanted:
                        self.use(each.value, "slot", [key], self.located(each, each.value))
        self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        if self.formatted is not None or sys.version_info >= (3, 12):
            self.generic_visit(node)
            return
        self.formatted, self.outer = [], node
        self.generic_visit(node)
        found, self.formatted, self.outer = self.formatted, None, None
        if not found:
            return
        lines = self.embedded.codes if self.embedded is not None else self.module.lines
        places = defaultdict(list)
        for line, column, text in formatted_words(lines, node):
            places[text].append((line, column))
        counts = Counter(text for text, *_ in found)
        taken: Counter[str] = Counter()
        for text, kind, keys, scope, immediate in found:
            position = places[text][taken[text]] if counts[text] == len(places[text]) else None
            taken[text] += 1
            before, self.scope = self.scope, scope
            self.use(text, kind, keys, position, immediate)
            self.scope = before

    # -- code in texts

    def _examples(self, node: ast.Constant) -> None:
        numbers: list[int] = []
        codes: list[str] = []
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            match = re.match(r"\s*(?:>>>|\.\.\.) ?(.*)", self.module.lines[number - 1])
            if match:
                numbers.append(number)
                codes.append(match.group(1))
        self.run_embedded(Embedded(codes, numbers), self.module.scope)

    def run_embedded(self, embedded: "Embedded", parent: Scope | None) -> Scope | None:
        """Resolve code inside a text of the file."""
        try:
            tree = ast.parse("\n".join(embedded.codes))
        except SyntaxError:
            return None
        self.module.scopes += 1
        scope = Scope("function", parent, self.module, self.module.scopes)
        collector = Collector(self.checkout, self.module)
        collector.scope = scope
        for each in tree.body:
            collector.visit(each)
        before = self.scope, self.embedded
        self.scope, self.embedded = scope, embedded
        for each in tree.body:
            self.visit(each)
        self.scope, self.embedded = before
        return scope


@dataclass
class Embedded:
    """Code in a text of a file: either its lines stand on lines of the file, or its words stand in one region of it."""

    codes: list[str]
    numbers: list[int] = field(default_factory=list)
    start: int = 0
    region: str = ""

    def locate(self, module: Module, position: tuple[int, int], text: str) -> int | None:
        """Return the offset in the file of a word at a line and a column of the code."""
        before = self.codes[position[0] - 1].encode()[: position[1]].decode()
        if self.numbers:
            number = self.numbers[position[0] - 1]
            start, region = module.starts[number - 1], module.lines[number - 1]
        else:
            start, region = self.start, self.region
            before = "\n".join([*self.codes[: position[0] - 1], before])
        nth = sum(match.group() == text for match in WORD.finditer(before))
        places = [match.start() for match in WORD.finditer(region) if match.group() == text]
        return start + places[nth] if nth < len(places) else None


def formatted_words(lines: Sequence[str], node: ast.JoinedStr) -> Iterator[tuple[int, int, str]]:
    """Yield line, column in bytes and text of each identifier in the fields of f-strings."""
    first, last = node.lineno, node.end_lineno or node.lineno
    part = [line.encode() for line in lines[first - 1 : last]]
    part[-1] = part[-1][: node.end_col_offset]
    part[0] = part[0][node.col_offset :]
    text = b"\n".join(part).decode()
    for start, word in field_words(text, 0):
        before = text[:start]
        line = before.count("\n")
        column = len(before.rpartition("\n")[2].encode())
        yield first + line, column + (node.col_offset if line == 0 else 0), word


STRING = re.compile(r"""(?P<prefix>\b[rRbBuUfF]{1,2}|)(?P<quote>\"\"\"|'''|"|')""")


def field_words(code: str, shift: int) -> Iterator[tuple[int, str]]:
    """Yield identifiers of the fields of f-strings in a piece of code; `shift` is added to each place."""
    place = 0
    while match := STRING.search(code, place):
        quote, raw = match["quote"], "f" not in match["prefix"].lower()
        place = match.end()
        end = place
        while not code.startswith(quote, end):
            end += 2 if code[end] == "\\" else 1
        if not raw:
            yield from literal_words(code[place:end], shift + place)
        place = end + len(quote)


def literal_words(body: str, shift: int) -> Iterator[tuple[int, str]]:
    """Yield identifiers of the fields in the body of an f-string or in a format specification."""
    place = 0
    while place < len(body):
        if body.startswith(("{{", "}}"), place):
            place += 2
        elif body[place] == "{":
            begin, depth, place, colon = place + 1, 0, place + 1, None
            quote = ""
            while depth or body[place] != "}" or quote:
                letter = body[place]
                if quote:
                    if body.startswith(quote, place):
                        place += len(quote) - 1
                        quote = ""
                elif colon is None and letter in "\"'":
                    quote = letter * 3 if body.startswith(letter * 3, place) else letter
                    place += len(quote) - 1
                elif letter in "([{":
                    depth += 1
                elif letter in ")]}":
                    depth -= 1
                elif letter == ":" and not depth and colon is None:
                    colon = place
                place += 1
            code = body[begin : colon if colon is not None else place]
            code = re.sub(r"!([rsa])$", "  ", code)
            yield from expression_words(code, shift + begin)
            if colon is not None:
                yield from literal_words(body[colon + 1 : place], shift + colon + 1)
            place += 1
        else:
            place += 1


def expression_words(code: str, shift: int) -> Iterator[tuple[int, str]]:
    """Yield identifiers of an expression, with those of f-strings in it."""
    blank = list(code)
    place = 0
    while match := STRING.search(code, place):
        end = match.end()
        while not code.startswith(match["quote"], end):
            end += 2 if code[end] == "\\" else 1
        end += len(match["quote"])
        blank[match.start() : end] = " " * (end - match.start())
        place = end
    found = [(match.start(), match.group()) for match in WORD.finditer("".join(blank))]
    yield from sorted([(shift + start, word) for start, word in found] + list(field_words(code, shift)))


def blocks(page: Module) -> Iterator[tuple[list[int], list[str]]]:
    """Yield line numbers and lines of each Python block of a page, or of each code cell of a notebook."""
    if page.path.endswith(".ipynb"):
        number = 0
        for cell in json.loads(page.text)["cells"]:
            numbers, codes = [], []
            for line in cell["source"]:
                wanted = (json.dumps(line), json.dumps(line, ensure_ascii=False))
                while number < len(page.lines) and page.lines[number].strip().removesuffix(",") not in wanted:
                    number += 1
                number += 1
                numbers.append(number)
                codes.append(line.removesuffix("\n") if not line.startswith(("%", "!")) else "")
            if cell["cell_type"] == "code" and numbers and number <= len(page.lines):
                yield numbers, codes
    elif page.path.endswith(".md"):
        numbers, codes, indent = [], [], None
        for number, line in enumerate(page.lines, 1):
            fence = re.match(r"(\s*)```(\S*)", line)
            if fence and indent is None and fence[2] in {"python", "py", "pycon"}:
                indent, numbers, codes = fence[1], [], []
            elif fence and indent is not None:
                yield numbers, codes
                indent = None
            elif indent is not None:
                numbers.append(number)
                codes.append(line.removeprefix(indent))


LIBRARY_NAME = re.compile(rb"(?:\bdef |\bself\.|^ {4}|^\t)(\w+)", re.MULTILINE)


def library_names(checkout: Checkout) -> set[str]:
    """Return names of members of builtins, of the standard library and of libraries that the checkout imports."""
    site, standard = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))
    imported = {
        name.split(".")[0]
        for module in checkout.paths.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    files = [
        path for path in standard.rglob("*.py") if not {"site-packages", "test", "tests", "idlelib"} & {*path.parts}
    ]
    for name in sorted(imported | {"_pytest"}):
        files += [*(site / name).rglob("*.py"), *(site / name).rglob("*.pyi"), *site.glob(f"{name}.py")]
    found: set[bytes] = set()
    for path in files:
        if not {"tests", "models"} & {*path.parts}:
            found.update(LIBRARY_NAME.findall(path.read_bytes()))
    names = {name.decode(errors="ignore") for name in found}
    compiled = [name for name in sys.builtin_module_names if not name.startswith("_x")]
    compiled += [each.name for each in pkgutil.iter_modules([sysconfig.get_path("platstdlib") + "/lib-dynload"])]
    for name in compiled:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        names.update(dir(module))
        for value in vars(module).values():
            names.update(dir(value) if isinstance(value, type) else ())
    return names


@dataclass
class Plan:
    """Renamed rows, and the reasons for the others."""

    checkout: Checkout
    rows: list[Row]
    library: set[str]
    bold: bool = False
    doubts: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    planned: dict[Key, set[str]] = field(default_factory=lambda: defaultdict(set))
    parents: dict[Key, Key] = field(default_factory=dict)
    renames: dict[Key, str] = field(default_factory=dict)
    reasons: dict[Key, str] = field(default_factory=dict)
    by_text: dict[str, set[Key]] = field(default_factory=lambda: defaultdict(set))
    owners: dict[Key, Class] = field(default_factory=dict)
    counts: dict[str, set[Key]] = field(default_factory=lambda: defaultdict(set))
    edits: dict[str, dict[int, tuple[str, str]]] = field(default_factory=lambda: defaultdict(dict))
    concerned: list[Use] = field(default_factory=list)

    def make(self) -> None:
        """Decide for each row, then collect the edits."""
        self._define()
        self._locate()
        self._link()
        self._components()
        self._block_texts()
        olds = {row.last for row in self.rows if row.key is not None}
        self.concerned = [use for use in self.checkout.uses if use.text in olds]
        for _ in range(60):
            before = dict(self.renames)
            self._conflicts()
            self._collisions()
            if self.renames == before:
                break
        self._label()
        self._collect()

    def root(self, key: Key) -> Key:
        """Return the key of all members that are renamed together."""
        while key in self.parents:
            key = self.parents[key]
        return key

    def union(self, one: Key, other: Key) -> None:
        """Rename two members together."""
        first, second = self.root(one), self.root(other)
        if first != second:
            news = self.planned[first] | self.planned[second]
            if self.bold and len(news) > 1:
                self.doubts["not joined"].append(f"{first[1]} {first[-1]} and {second[1]}: {sorted(news)}")
                return
            self.planned[second] = news
            self.parents[first] = second

    def block(self, key: Key, reason: str) -> None:
        """Leave a symbol to the other tool."""
        root = self.root(key)
        if root in self.renames:
            del self.renames[root]
            self.reasons[root] = reason

    def text(self, key: Key, reason: str) -> None:
        """Leave a symbol whose name is a text too; a bold plan renames it and lists the text."""
        if self.bold:
            self.doubts["texts"].append(f"{key[1]} {key[-1]} -> {self.new(key)}: {reason}")
        else:
            self.block(key, reason)

    def new(self, key: Key) -> str | None:
        """Return the new name of what a key refers to."""
        return self.renames.get(self.root(key))

    def _define(self) -> None:
        """List the definitions of each wanted identifier."""
        for module in (*self.checkout.paths.values(), *self.checkout.pages.values()):
            for name, found in module.bindings.items():
                if ("def",) in found:
                    self.counts[name].add(("g", module.name, name))
            for one in module.classes:
                for name in one.members:
                    self.by_text[name].add(one.key(name))
                    self.owners[one.key(name)] = one
                    self.counts[name].add(one.key(name))
        for use in self.checkout.uses:
            self.counts[use.text].update(key for key in use.keys if key[0] == "l")

    def _locate(self) -> None:
        for row in self.rows:
            module = self.checkout.paths.get(row.file)
            parts = row.old.split(".")
            fresh = row.new.rpartition(".")[2]
            row.new = fresh
            if row.kind in {"metric", "flag"} or not fresh.isidentifier() or keyword.iskeyword(fresh):
                row.label, row.reason = "ambiguous", f"a {row.kind} is a text"
                continue
            if module is None:
                row.label = "gone"
                continue
            if "<locals>" in row.old:
                scope = local_scope(module, row.old)
                if scope is not None and row.last in scope.names:
                    row.key = ("l", module.name, scope.number, row.last)
                else:
                    row.label = "gone" if scope is None or fresh not in scope.names else "done"
                continue
            if len(parts) == 1:
                key, then = ("g", module.name, row.old), ("g", module.name, fresh)
                known = {("g", module.name, name) for name, found in module.bindings.items() if ("def",) in found}
            else:
                owner = ".".join(parts[:-1])
                new_owners = {r.new for r in self.rows if r.file == row.file and r.old == owner} | {owner}
                classes = [one for one in module.classes if one.qualname in new_owners]
                known = {one.key(name) for one in classes for name in one.members}
                number = classes[0].number if classes else -1
                key, then = ("m", module.name, number, row.last), ("m", module.name, number, fresh)
            if key in known:
                row.key = key
            else:
                row.label = "done" if then in known else "gone"

    def _link(self) -> None:
        """Link members that must keep one name: overrides, and what satisfies a protocol."""
        for row in self.rows:
            if row.key is not None:
                self.planned[row.key].add(row.new)
        for text, keys in self.by_text.items():
            if text not in self.checkout.wanted:
                continue
            for key in keys:
                for one in self.owners[key].ancestors():
                    if text in one.members:
                        self.union(key, one.key(text))
            for key in keys:
                protocol = self.owners[key]
                if not protocol.is_protocol() or (self.bold and key not in self.planned):
                    continue
                needed = {name for one in protocol.ancestors() for name in one.members} - {"__slots__"}
                for other in keys:
                    if all(self.owners[other].find(name) is not None for name in needed):
                        self.union(other, key)
        wanted: dict[str, set[str]] = defaultdict(set)
        sample: dict[str, Key] = {}
        for row in self.rows:
            if row.key is not None and row.key[0] == "m":
                wanted[row.last].add(row.new)
                sample[row.last] = row.key
        for text, news in wanted.items():
            for key in self.by_text[text]:
                owner = self.owners[key]
                double = not owner.module.path.startswith(PACKAGES) and not text.startswith("_")
                if double and self.bold and not self._alike(owner, text):
                    self.doubts["doubles"].append(f"{owner.module.path} {owner.qualname}.{text} keeps its name")
                    continue
                if double and len(news) == 1 and not (owner.outside() and text in self.library):
                    self.union(key, sample[text])

    def _alike(self, double: Class, text: str) -> bool:
        """Return True if a test class is a fake of a renamed class: it shares most of its public members."""
        public = {name for name in double.members if not name.startswith("_")}
        for key in self.by_text[text]:
            owner = self.owners[key]
            if key not in self.planned or not owner.module.path.startswith(PACKAGES):
                continue
            shared = sum(owner.find(name) is not None for name in public)
            if owner in double.ancestors() or 2 * shared > len(public):
                return True
        return False

    def _components(self) -> None:
        news: dict[Key, set[str]] = defaultdict(set)
        covered: dict[Key, set[Class]] = defaultdict(set)
        settings: set[Key] = set()
        for row in self.rows:
            if row.key is None:
                continue
            root = self.root(row.key)
            news[root].add(row.new)
            if row.key in self.owners:
                covered[root] |= self.owners[row.key].family()
            if row.kind == "setting":
                settings.add(root)
        for root, found in news.items():
            self.renames[root] = sorted(found)[0]
            if len(found) > 1 and not self.bold:
                self.block(root, f"one family of members gets several names: {sorted(found)}")
            if root in settings:
                self.block(root, "a setting is a text too")
        for text, keys in self.by_text.items():
            if text not in self.checkout.wanted:
                continue
            for key in keys:
                owner = self.owners[key]
                root = self.root(key)
                if root not in self.renames:
                    continue
                if not self.bold and owner.module.path.startswith(PACKAGES) and owner not in covered[root]:
                    self.block(root, f"{owner.module.path} {owner.qualname}.{text} has no row and looks alike")
                if owner.outside() & KEYED_BASES:
                    self.block(root, f"{owner.qualname} has keys that are texts")
                elif owner.outside() and text in self.library and not self.bold:
                    self.block(root, f"{owner.qualname} may override a member of {sorted(owner.outside())}")

    def _block_texts(self) -> None:
        """Leave names that occur as texts, or whose fields are written by name."""
        rows = {row.key: row for row in self.rows if row.key is not None}
        dumped: set[Class] = set()
        for _, _, found in self.checkout.asdict:
            dumped |= {a[1] for a in found or () if a[0] in {"inst", "cls"} and isinstance(a[1], Class)}
        dumped |= {self.owners[r.key] for r in self.rows if r.kind == "setting" and r.key in self.owners}
        grown = True
        inference = Inference(self.checkout)
        while grown:
            inner = {
                atom[1]
                for one in dumped
                for base in one.ancestors()
                for name in base.members
                for atom in flatten(inference.member(one, name))
                if atom[0] == "inst" and isinstance(atom[1], Class) and atom[1].dataclass
            }
            grown = not inner <= dumped
            dumped |= inner
        for key, row in rows.items():
            text = row.last
            strings = self.checkout.strings.get(text, [])
            specific = SPECIFIC.fullmatch(text) is not None
            place = f"{strings[0][0].path}:{strings[0][1].lineno}" if strings else ""
            if key[0] == "m" and self.owners[key].dataclass and key[-1] in self.owners[key].scope.names:
                is_field = any(how == "annotation" for how, _ in self.owners[key].scope.values[text])
                if is_field and set(self.owners[key].family()) & dumped:
                    self.block(key, "its class is written by the names of its fields")
            if strings and specific:
                self.text(key, f"a text at {place}")
            elif key[0] == "m" and any(self._reflected(*each) for each in strings):
                self.text(key, f"a text at {place}, where attributes are got by name")
            if text in self.checkout.external_keywords:
                self.block(key, "a keyword of SimpleNamespace or of a mock")
            alone = {self.root(each) for each in self.counts[text]} == {self.root(key)}
            if text in self.checkout.split and not (alone and specific):
                self.text(key, f"in a part of a program at {self.checkout.split[text]}")
            for module, node in self.checkout.words.get(text, ()):
                start, end = module.span(node)
                source = module.text[start:end]
                about = re.search(r"\b(repl_rl|repl_kernel)\b", source) is not None
                called = re.search(rf"\bimport [\w, ]*\b{text}\b|\b{text}\(|[.:]{text}\b", source) is not None
                if (not alone and about) or (alone and not specific and called):
                    self.text(key, f"in a text at {module.path}:{node.lineno}")
        for module in self.checkout.paths.values():
            for name, found in module.bindings.items():
                kinds = {each[0] for each in found}
                if name in self.checkout.wanted and len(set(found)) > 1 and "def" in kinds:
                    self.block(("g", module.name, name), "defined and imported in one module")

    def _reflected(self, module: Module, node: ast.Constant) -> bool:
        """Return True for a text near a computed attribute name: in one statement of a module with it."""
        lines = self.checkout.reflecting.get(module.path)
        if not lines:
            return False
        home = next(
            s
            for s in module.tree.body
            if s.lineno <= node.lineno <= (s.end_lineno or 0)
            or (
                isinstance(s, ast.ClassDef | Function)
                and s.decorator_list
                and s.decorator_list[0].lineno <= node.lineno <= (s.end_lineno or 0)
            )
        )
        inside = isinstance(home, ast.ClassDef | Function)
        return not inside or any(home.lineno <= line <= (home.end_lineno or 0) for line in lines)

    def candidates(self, use: Use) -> tuple[set[Key], bool]:
        """Return what an unresolved use may refer to, and whether it may be a library's."""
        keys = set(self.by_text.get(use.text, ()))
        if use.kind == "keyword":
            keys = {key for key in keys if self.owners[key].dataclass}
            return {self.root(key) for key in keys}, self.bold and use.text in self.library
        own = {key for key in keys if key[1] == use.module.name}
        if use.text.startswith("_") and own:
            return {self.root(key) for key in own}, False
        if not keys:
            keys = {key for key in self.counts[use.text] if key[0] == "g"}
        return {self.root(key) for key in keys}, use.text in self.library

    def target(self, use: Use) -> tuple[str | None, set[Key]]:
        """Return the new name of a use, and the keys that disagree about it."""
        if use.keys:
            found, outside = {self.root(key) for key in use.keys}, False
        elif use.kind in {"attribute", "keyword"}:
            found, outside = self.candidates(use)
        else:
            return None, set()
        news = {self.renames.get(key) for key in found} | ({None} if outside else set())
        if len(news) == 1:
            return news.pop(), set()
        return None, {key for key in found if key in self.renames}

    def _conflicts(self) -> None:
        for use in self.concerned:
            new, disagreeing = self.target(use)
            line = use.module.text.count("\n", 0, use.start) + 1 if disagreeing and use.start is not None else 0
            if disagreeing and self.bold and use.kind in {"attribute", "keyword"} and not use.keys:
                news = sorted({str(self.renames.get(key)) for key in self.candidates(use)[0]})
                self.doubts["uses"].append(f"{use.module.path}:{line}: {use.text} ({use.kind}), perhaps {news}")
                continue
            for key in disagreeing:
                self.block(key, f"unresolved {use.kind} at {use.module.path}:{line}")
            if new is not None and use.start is None:
                for key in use.keys:
                    self.block(key, f"a use in {use.module.path} was not located")

    def _collisions(self) -> None:
        taken: dict[tuple[object, str], Key] = {}
        builtin_uses = {(use.module.name, use.text) for use in self.checkout.uses if use.keys and use.keys[0][0] == "b"}
        in_class = {
            (id(use.scope), use.text)
            for use in self.checkout.uses
            if use.scope.kind == "class" and use.immediate is False and use.kind == "name"
        }
        for use in self.concerned:
            for key in use.keys:
                new = self.new(key)
                if new is None or key[0] not in {"g", "l"} or use.kind in {"attribute", "path"}:
                    continue
                scope: Scope | None = use.scope
                while scope is not None:
                    if new in scope.names:
                        self.block(key, f"{new} is bound at {use.module.path}, scope {scope.kind}")
                    scope = scope.parent
                if (use.module.name, new) in builtin_uses:
                    self.block(key, f"{new} is a builtin that {use.module.path} uses")
                if use.module.scope.kind == "module" and self.checkout.canonical(use.module, use.text) == key:
                    if f"{use.module.name}.{new}" in self.checkout.modules:
                        self.block(key, f"{new} is a module of {use.module.name}")
                    if taken.setdefault((use.module.name, new), self.root(key)) != self.root(key):
                        self.block(key, f"two symbols of {use.module.path} become {new}")
        for text, keys in self.by_text.items():
            if text not in self.checkout.wanted:
                continue
            for key in keys:
                new = self.new(key)
                if new is None:
                    continue
                for one in self.owners[key].family():
                    if new in one.members:
                        self.block(key, f"{one.qualname} has a member {new}")
                    if taken.setdefault((one, new), self.root(key)) != self.root(key):
                        self.block(key, f"two members of {one.qualname} become {new}")
                    if (id(one.scope), new) in in_class:
                        self.block(key, f"the body of {one.qualname} uses another {new}")

    def _label(self) -> None:
        users: dict[Key, set[str]] = defaultdict(set)
        for use in self.checkout.uses:
            for key in use.keys:
                users[self.root(key)].add(use.module.name)
        for row in self.rows:
            if row.key is None:
                continue
            root = self.root(row.key)
            if root not in self.renames:
                row.label, row.reason = "ambiguous", self.reasons.get(root, "?")
            elif {self.root(key) for key in self.counts[row.last]} == {root}:
                row.label = "unique"
            elif row.last.startswith("_") and users[root] <= {row.key[1]}:
                row.label = "private"
            else:
                row.label = "resolved"

    def _collect(self) -> None:
        for use in self.concerned:
            new, _ = self.target(use)
            if new is not None and use.start is not None:
                self.edits[use.module.path][use.start] = (use.text, new)
        unique = {row.last: row.new for row in self.rows if row.label == "unique"}
        for text, places in self.checkout.words.items():
            for module, node in places if text in unique and SPECIFIC.fullmatch(text) else ():
                start = module.offset(node.lineno, node.col_offset)
                end = module.offset(node.end_lineno or 0, node.end_col_offset or 0)
                for match in re.finditer(rf"\b{text}\b", re.sub(r"\\[nt]", "  ", module.text[start:end])):
                    self.edits[module.path].setdefault(start + match.start(), (text, unique[text]))
        for module in self.checkout.paths.values():
            known = dict(unique)
            local: dict[str, set[str | None]] = defaultdict(set)
            for use in self.checkout.uses_of(module):
                local[use.text].add(self.target(use)[0])
            for text, news in local.items():
                new = next(iter(news))
                if len(news) == 1 and new is not None:
                    known[text] = new
            for start, text in prose(module):
                self._mentions(module, start, text, known)
        for page in self.checkout.pages.values():
            self._mentions(page, 0, page.text, {k: v for k, v in unique.items() if not k.startswith("_")})

    def _mentions(self, module: Module, start: int, text: str, known: Mapping[str, str]) -> None:
        """Rename text in backticks, if it is the name alone, a call of it or a dotted path that ends with it."""
        for quoted in re.finditer(r"(`+)([^`\n]+)\1", text):
            for match in re.finditer(r"(?<![-\w/\"'])[^\W\d]\w*(?![-\w/\"'])", quoted[2]):
                word = match.group()
                specific = SPECIFIC.fullmatch(word) is not None
                whole = re.fullmatch(rf"([A-Z]\w*\.|self\.)?{word}(\(.*\))?", quoted[2]) is not None
                # A plain word that is a text too is a value of a setting or a key, no symbol.
                if word in known and (specific or (whole and word not in self.checkout.strings)):
                    place = start + quoted.start(2) + match.start()
                    self.edits[module.path].setdefault(place, (word, known[word]))


def local_scope(module: Module, path: str) -> Scope | None:
    """Return the scope of the function that holds a local name, given as `Class.method.<locals>.name`."""
    nodes: Iterable[ast.AST] = [module.tree]
    for part in path.split(".")[:-1]:
        if part != "<locals>":
            inside = (each for node in nodes for each in ast.walk(node) if each is not node)
            nodes = [each for each in inside if isinstance(each, ast.ClassDef | Function) and each.name == part]
    found = [module.functions[node] for node in nodes if node in module.functions]
    return found[0] if len(found) == 1 else None


def flatten(kind: Type) -> Iterator[Atom]:
    """Yield the atoms of a type, with those of its arguments."""
    for atom in kind or ():
        yield atom
        if atom[0] == "app" and isinstance(atom[2], tuple):
            for argument in atom[2]:
                if isinstance(argument, tuple):
                    yield from flatten(argument)


def prose(module: Module) -> Iterator[tuple[int, str]]:
    """Yield offset and text of each comment, and of each docstring."""
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield module.starts[token.start[0] - 1] + token.start[1], token.string
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            start = module.offset(node.value.lineno, node.value.col_offset)
            yield start, module.text[start : module.offset(node.value.end_lineno or 0, node.value.end_col_offset or 0)]


def write(root: Path, edits: Mapping[str, Mapping[int, tuple[str, str]]]) -> None:
    """Write all edits, each file from its end."""
    for path, places in edits.items():
        text = (root / path).read_text(encoding="utf-8")
        for start, (old, new) in sorted(places.items(), reverse=True):
            assert text[start : start + len(old)] == old, (path, start, old)
            text = text[:start] + new + text[start + len(old) :]
        (root / path).write_text(text, encoding="utf-8")


def differences(before: ast.AST, after: ast.AST, pairs: set[tuple[str, str]]) -> Iterator[str]:
    """Yield where two trees differ by more than the renames of their file."""
    left = [(before, after)]
    while left:
        one, other = left.pop()
        if type(one) is not type(other):
            yield f"{type(one).__name__} became {type(other).__name__} at line {getattr(one, 'lineno', 0)}"
            continue
        for name in one._fields:
            first, second = getattr(one, name, None), getattr(other, name, None)
            firsts, seconds = ((v if isinstance(v, list) else [v]) for v in (first, second))
            if len(firsts) != len(seconds):
                yield f"{name} has another length at line {getattr(one, 'lineno', 0)}"
                continue
            for a, b in zip(firsts, seconds, strict=True):
                if isinstance(a, ast.AST) and isinstance(b, ast.AST):
                    left.append((a, b))
                elif a != b and not same_text(a, b, pairs):
                    yield f"{a!r} became {b!r} at line {getattr(one, 'lineno', 0)}"


def same_text(before: object, after: object, pairs: set[tuple[str, str]]) -> bool:
    """Return True if two texts are equal, word by word, up to renames."""
    if not isinstance(before, str) or not isinstance(after, str):
        return False
    if WORD.sub("", before) != WORD.sub("", after):
        return False
    words = zip(WORD.findall(before), WORD.findall(after), strict=True)
    return all(a == b or (a, b) in pairs for a, b in words)


def check(plan: Plan, root: Path) -> list[str]:
    """Compare the changed checkout with the one that the plan was made for."""
    problems: list[str] = []
    old = plan.checkout
    new = Checkout(root, old.wanted)
    for path, module in old.paths.items():
        pairs = set(plan.edits.get(path, {}).values())
        problems += [f"{path}: {each}" for each in differences(module.tree, new.paths[path].tree, pairs)]
    if len(old.uses) != len(new.uses):
        problems.append(f"{len(old.uses)} uses became {len(new.uses)}")
    for one, other in zip(old.uses, new.uses, strict=False):
        expected = tuple((*key[:-1], plan.new(key) or key[-1]) if key[0] in "gml" else key for key in one.keys)
        if expected != other.keys:
            line = one.module.text.count("\n", 0, one.start or 0) + 1
            problems.append(f"{one.module.path}:{line}: {one.text} was {one.keys}, {other.text} is {other.keys}")
    return problems


def main(arguments: Sequence[str]) -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", type=Path)
    parser.add_argument("--tier", type=int, default=3, help="rename rows up to this tier")
    parser.add_argument("--report", type=Path, default=Path("rename_unique.txt"), help="file for rows that are left")
    parser.add_argument("--apply", action="store_true", help="write the files; without it, only count")
    parser.add_argument("--dry", action="store_true", help="only count")
    parser.add_argument("--unchecked", action="store_true", help="do not resolve the changed checkout again")
    parser.add_argument("--bold", action="store_true", help="rename names that are texts too, and list what to look at")
    parser.add_argument("--types", type=Path, help="what checked_types.py found in the checkout; else it is run")
    parser.add_argument("--library-names", type=Path, help="file that keeps the names of libraries between runs")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    root = given.checkout.resolve()
    table = tomllib.loads(given.names.read_text(encoding="utf-8"))["rename"]
    rows = [Row(*row) for row in table if row[0] <= given.tier]
    wanted = {row.last for row in rows} | {row.new.rpartition(".")[2] for row in rows}
    checkout = Checkout(root, {word for word in wanted if word.isidentifier()}, given.types)
    print(f"{len(checkout.paths)} files, {len(checkout.uses)} uses, {time.monotonic() - begun:.0f} s", flush=True)
    if given.library_names and given.library_names.exists():
        library = set(given.library_names.read_text(encoding="utf-8").split())
    else:
        library = library_names(checkout)
        if given.library_names:
            given.library_names.write_text("\n".join(sorted(library)), encoding="utf-8")
    print(f"{len(library)} names of libraries, {time.monotonic() - begun:.0f} s", flush=True)
    plan = Plan(checkout, rows, library, given.bold)
    plan.make()
    counts = Counter(row.label for row in rows)
    print(", ".join(f"{label} {count}" for label, count in counts.most_common()))
    lines = [
        f"{row.label}\t{row.kind}\t{row.file}\t{row.old}\t{row.new}\t{row.reason}"
        for row in rows
        if row.label in {"ambiguous", "gone"}
    ]
    for module, line, found in checkout.asdict:
        text = module.lines[line - 1]
        if found is None and module.path.startswith(PACKAGES) and re.search(r"\b(asdict|astuple|fields|vars)\(", text):
            lines.append(f"fields of an unknown class are read by name: {module.path}:{line}: {text.strip()}")
    for module in checkout.paths.values():
        for number, text in enumerate(module.lines, 1):
            if re.search(r"\w\)?\.__(qual)?name__\b", text):
                lines.append(f"a text is made of a name: {module.path}:{number}: {text.strip()}")
    lines += [f"{kind}: {one}" for kind, found in plan.doubts.items() for one in sorted(set(found))]
    given.report.write_text("\n".join([*lines, *sorted(set(checkout.problems))]) + "\n", encoding="utf-8")
    print(f"{sum(map(len, plan.edits.values()))} edits in {len(plan.edits)} files, {time.monotonic() - begun:.0f} s")
    if not given.apply or given.dry:
        return 0
    write(root, plan.edits)
    if given.unchecked:
        return 0
    problems = check(plan, root)
    print("\n".join(problems[:200]))
    print(f"{len(problems)} differences, {time.monotonic() - begun:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
