"""Move and merge modules, and let everything that names them follow.

    python scripts/house/move.py CHECKOUT MODULES.toml NEW_PREFIX ...

Rows of the table are {old, new}; only those whose new path begins with a prefix are moved, so that a commit can take
one room. Several old modules with one new path are concatenated: their imports are united, and their bodies are in the
order of their dependencies. Then `ruff check --fix` and `ruff format` tidy. Prints names that are defined twice,
circles, and modules that are used as names.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

TEXTS = {".py", ".pyi", ".md", ".toml", ".txt", ".ipynb", ".yml", ""}
STORED = ("docs/quickstart", "docs/pretrained/", "docs/serve/", "tests/stored", "tests/__snapshots__", "scripts/house")
"""Files of earlier versions, which keep the module names of their time."""
LOGGER = re.compile(r"^log = logging\.getLogger\(__name__\)\n+", re.MULTILINE)


def dotted(path: str) -> str:
    """Return the import path of a module's file."""
    return path.removesuffix(".py").removesuffix("/__init__").removeprefix("sandbox/").replace("/", ".")


def rewrite_imports(text: str, moved: Mapping[str, str], own: str | None) -> tuple[str, list[str]]:
    """Return the text with imports of moved modules at their new places, and notes on what needs a look.

    Imports from `own`, the module that the text becomes a part of, are dropped.
    """
    lines, notes = text.split("\n"), list[str]()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: -node.lineno):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        if isinstance(node, ast.Import):
            notes += [f"import {alias.name}" for alias in node.names if alias.name in moved]
            continue
        if node.level or node.module is None:
            continue
        module = moved.get(node.module, node.module)
        parts: list[str] = []
        members: list[str] = []
        for alias in node.names:
            written = alias.name + (f" as {alias.asname}" if alias.asname else "")
            target = moved.get(f"{node.module}.{alias.name}")
            if target is not None:  # a module that is used as a name
                package, _, last = target.rpartition(".")
                used = alias.asname or alias.name
                parts.append(f"from {package} import {last}" + (f" as {used}" if used != last else ""))
                notes.append(f"the module {node.module}.{alias.name} is used as a name")
            elif module != own:
                members.append(written)
            elif alias.asname:
                notes.append(f"{alias.name} is used as {alias.asname} in what becomes its own module")
        if members:
            parts.insert(0, f"from {module} import {', '.join(members)}")
        before = [f"from {node.module} import " + ", ".join(ast.unparse(alias) for alias in node.names)]
        if parts == before:
            continue
        indent = lines[node.lineno - 1][: node.col_offset]
        comment = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        new = [indent + part for part in parts]
        if new:
            new[-1] += comment
        lines[node.lineno - 1 : node.end_lineno] = new
    return "\n".join(lines), notes


def top_level_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
    return found


def order_by_dependencies(olds: Sequence[str], originals: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return modules so that each follows those it imports, and a note for each circle."""
    needs: dict[str, set[str]] = {}
    for old in olds:
        modules = {n.module for n in ast.walk(ast.parse(originals[old])) if isinstance(n, ast.ImportFrom)}
        needs[old] = {other for other in olds if other != old and dotted(other) in modules}
    ordered, left, notes = list[str](), list(olds), list[str]()
    while left:
        free = [old for old in left if not needs[old] & set(left)]
        if not free:
            notes.append(f"circle: {', '.join(left)}")
            free = left
        ordered.append(free[0])
        left.remove(free[0])
    return ordered, notes


def merge(olds: Sequence[str], texts: Mapping[str, str]) -> str:
    """Return one module made of several, in this order."""
    documents: list[str] = []
    imports: list[str] = []
    bodies: list[str] = []
    for old in olds:
        lines, tree, end = texts[old].split("\n"), ast.parse(texts[old]), 0
        for node in tree.body:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            if isinstance(node, ast.Expr) and node is tree.body[0] and isinstance(node.value, ast.Constant):
                documents.append(str(node.value.value).strip())
            elif isinstance(node, ast.Import | ast.ImportFrom):
                # A comment above an import stays with it.
                first = node.lineno - 1
                while lines[first - 1].startswith("#"):
                    first -= 1
                imports += [line for line in lines[first : node.lineno - 1] if line not in imports]
                written = ast.unparse(node) + lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
                imports += [written] if written not in imports else []
            else:
                break
            end = node.end_lineno
        bodies.append("\n".join(lines[end:]).strip("\n"))
    body = "\n\n\n".join(part for part in bodies if part)
    if LOGGER.search(body):
        body = "log = logging.getLogger(__name__)\n\n\n" + LOGGER.sub("", body)
    document = "\n\n".join(documents)
    close = '\n"""' if "\n" in document else '"""'
    return f'"""{document}{close}\n\n' + "\n".join(imports) + "\n\n" + body.rstrip() + "\n"


def replace_names(text: str, moved: Mapping[str, str], paths: Mapping[str, str]) -> str:
    """Return the text with import paths and file paths of moved modules replaced, wherever they stand."""
    for table, pattern in ((moved, r"(?<![\w.])({})(?!\w)"), (paths, r"(?<![\w/])({})")):
        changed = sorted((old for old, new in table.items() if old != new), key=len, reverse=True)
        if changed:
            found = re.compile(pattern.format("|".join(map(re.escape, changed))))
            text = found.sub(lambda match, table=table: table[match.group(1)], text)  # type: ignore[misc]
    return text


def read_texts(root: Path) -> dict[str, str]:
    """Return the files of a checkout that may name a module."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    texts: dict[str, str] = {}
    for name in listed:
        file = root / name
        if file.suffix in TEXTS and not name.startswith(STORED) and file.is_file():
            try:
                texts[name] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return texts


def move(root: Path, rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Move the modules of the table, and return notes on what needs a look."""
    paths = {row["old"]: row["new"] for row in rows}
    moved = {dotted(old): dotted(new) for old, new in paths.items()}
    changed = {old: new for old, new in moved.items() if old != new}
    texts, notes, written = read_texts(root), list[str](), dict[str, str]()
    for name, text in texts.items():
        new = text
        if name.endswith((".py", ".pyi")):
            new, found = rewrite_imports(text, changed, moved.get(dotted(name)) if name in paths else None)
            notes += [f"{name}: {note}" for note in found]
        written[name] = replace_names(new, changed, paths)
    groups: dict[str, list[str]] = defaultdict(list)
    for old, new in paths.items():
        groups[new].append(old)
    for new, olds in groups.items():
        if olds == [new]:
            continue
        seen: dict[str, str] = {}
        for old in olds:
            for name in top_level_names(ast.parse(written[old])) - {"log"}:
                if name in seen:
                    notes.append(f"{new}: {name} is defined in {seen[name]} and in {old}")
                seen[name] = old
        ordered, circles = order_by_dependencies(olds, texts)
        notes += [f"{new}: {circle}" for circle in circles]
        text = merge(ordered, written) if len(olds) > 1 else written[olds[0]]
        # History follows the longest of them.
        kept = new if new in olds else max(olds, key=lambda old: len(written[old]))
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        for old in olds:
            del written[old]
            if old not in (kept, new):
                subprocess.run(["git", "rm", "-q", old], cwd=root, check=True)
        if kept != new:
            subprocess.run(["git", "mv", kept, new], cwd=root, check=True)
        written[new] = text
    for name, text in written.items():
        if texts.get(name) != text:
            (root / name).write_text(text, encoding="utf-8")
    return notes


def main(arguments: Sequence[str]) -> None:
    """See the top of this file."""
    root, table, *prefixes = arguments
    rows = tomllib.loads(Path(table).read_text(encoding="utf-8"))["module"]
    chosen = [row for row in rows if row["new"].startswith(tuple(prefixes)) and (Path(root) / row["old"]).exists()]
    print("\n".join(move(Path(root).resolve(), chosen)))


if __name__ == "__main__":
    main(sys.argv[1:])
