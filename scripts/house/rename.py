"""Rename symbols of a checkout by their types: a language server finds each use, and all edits are made at once.

    pip install basedpyright
    python scripts/house/rename.py CHECKOUT NAMES.toml [--tier 1] [--dry]

The checkout needs a `pyrightconfig.json` that names its folders and its environment. Prints what was not found or
clashes.
"""

import ast
import json
import subprocess
import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlparse

Message = dict[str, object]
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Name | ast.Attribute
ANSWER_S = 900.0


class LanguageServer:
    """A client of basedpyright's language server, over its standard streams."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            ["basedpyright-langserver", "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._answers: dict[int, Message] = {}
        self._changed = threading.Condition()
        self._indexed = threading.Event()
        self._last = 0
        threading.Thread(target=self._read, daemon=True).start()
        folder = {"uri": root.as_uri(), "name": "checkout"}
        abilities = {"workspace": {"configuration": True, "workspaceFolders": True}}
        self.ask(
            "initialize",
            {"processId": None, "rootUri": root.as_uri(), "workspaceFolders": [folder], "capabilities": abilities},
        )
        self.notify("initialized", {})
        # A rename that is asked for before the files are listed finds uses in its own file only.
        if not self._indexed.wait(ANSWER_S):
            raise TimeoutError("the language server lists no source files")

    def ask(self, method: str, parameters: Mapping[str, object]) -> Message:
        """Send a request and return its answer."""
        self._last += 1
        number = self._last
        self._send({"id": number, "method": method, "params": parameters})
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._answers, ANSWER_S):
                raise TimeoutError(method)
            return self._answers.pop(number)

    def notify(self, method: str, parameters: Mapping[str, object]) -> None:
        """Send a message that has no answer."""
        self._send({"method": method, "params": parameters})

    def _send(self, message: Message | dict[str, object]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            size = 0
            while line := self._process.stdout.readline().strip():
                if line.lower().startswith(b"content-length"):
                    size = int(line.split(b":")[1])
            if not size:
                return
            message = json.loads(self._process.stdout.read(size))
            if "id" in message and "method" in message:  # a request of the server
                items = message["params"]["items"] if message["method"] == "workspace/configuration" else []
                self._send({"id": message["id"], "result": [{} for _ in items] or None})
            elif "id" in message:
                with self._changed:
                    self._answers[message["id"]] = message
                    self._changed.notify_all()
            elif message.get("method") == "window/logMessage" and "source file" in message["params"]["message"]:
                self._indexed.set()


@dataclass
class Sources:
    """Files of the checkout, parsed and opened in the language server once."""

    root: Path
    server: LanguageServer
    trees: dict[str, ast.Module] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)

    def load(self, name: str) -> None:
        """Parse a file and open it in the server."""
        if name in self.trees:
            return
        text = (self.root / name).read_text(encoding="utf-8")
        self.trees[name], self.lines[name] = ast.parse(text), text.split("\n")
        document = {"uri": (self.root / name).as_uri(), "languageId": "python", "version": 1, "text": text}
        self.server.notify("textDocument/didOpen", {"textDocument": document})

    def find(self, name: str, dotted: str) -> tuple[int, int] | None:
        """Return line and UTF-16 column, from 0, of where a name is defined."""
        self.load(name)
        first, *members = dotted.split(".")
        found = list(definitions(self.trees[name].body, first))
        for member in members:
            classes = [node for node in found if isinstance(node, ast.ClassDef)]
            found = [node for each in classes for node in definitions(each.body, member)]
            found = found or [node for each in classes for node in assigned_attributes(each, member)]
        return self._position(name, found[0]) if found else None

    def _position(self, name: str, node: Definition) -> tuple[int, int]:
        lines = self.lines[name]
        if isinstance(node, ast.Attribute):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            line = lines[node.end_lineno - 1]
            before = line.encode()[: node.end_col_offset - len(node.attr.encode())].decode()
            return node.end_lineno - 1, utf16(before)
        if isinstance(node, ast.Name):
            return node.lineno - 1, utf16(lines[node.lineno - 1].encode()[: node.col_offset].decode())
        words = f"class {node.name}" if isinstance(node, ast.ClassDef) else f"def {node.name}"
        number = next(i for i in range(node.lineno - 1, len(lines)) if words in lines[i])
        line = lines[number]
        return number, utf16(line[: line.index(words) + len(words) - len(node.name)])


def utf16(text: str) -> int:
    """Return the length of a text in UTF-16 units, which the protocol counts in."""
    return len(text.encode("utf-16-le")) // 2


def definitions(body: Sequence[ast.stmt], name: str) -> Iterator[Definition]:
    """Yield definitions of a name directly in a body, and in its branches."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                yield node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (x for x in ast.walk(target) if isinstance(x, ast.Name) and x.id == name)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from definitions([*node.body, *getattr(node, "orelse", [])], name)


def assigned_attributes(node: ast.ClassDef, name: str) -> Iterator[ast.Attribute]:
    """Yield `self.NAME` where a class assigns it."""
    for x in ast.walk(node):
        stored = isinstance(x, ast.Attribute) and x.attr == name and isinstance(x.ctx, ast.Store)
        if stored and isinstance(x.value, ast.Name) and x.value.id == "self":
            yield x


Edits = dict[Path, dict[tuple[int, int, int], str]]
"""New text by file, then by line, first and last UTF-16 column."""


def gather(sources: Sources, rows: Sequence[Mapping[str, object]]) -> tuple[Edits, list[str]]:
    """Ask for the edits of every row, all against the text as it is. Return them, and what went wrong."""
    edits: Edits = defaultdict(dict)
    problems: list[str] = []
    for number, row in enumerate(rows):
        name, old, new = str(row["file"]), str(row["old"]), str(row["new"]).rpartition(".")[2]
        position = sources.find(name, old) if (sources.root / name).exists() else None
        if position is None:
            problems.append(f"not found: {name} {old}")
            continue
        line, column = position
        answer = sources.server.ask(
            "textDocument/rename",
            {
                "textDocument": {"uri": (sources.root / name).as_uri()},
                "position": {"line": line, "character": column},
                "newName": new,
            },
        )
        result = answer.get("result")
        if not isinstance(result, dict):
            problems.append(f"no edit: {name} {old}: {answer.get('error')}")
            continue
        changes = {**(result.get("changes") or {})}
        for document in result.get("documentChanges") or []:
            changes.setdefault(document["textDocument"]["uri"], []).extend(document["edits"])
        for uri, parts in changes.items():
            path = Path(unquote(urlparse(uri).path))
            if ".venv" in path.parts:
                problems.append(f"outside of the checkout: {name} {old}: {path}")
                continue
            for part in parts:
                start, end = part["range"]["start"], part["range"]["end"]
                key = (start["line"], start["character"], end["character"])
                if edits[path].setdefault(key, part["newText"]) != part["newText"]:
                    problems.append(f"clash: {name} {old} -> {new}: {path}:{key[0] + 1} is {edits[path][key]} already")
        if number % 50 == 0:
            print(f"{number} of {len(rows)}", flush=True)
    return edits, problems


def apply(edits: Edits) -> None:
    """Write all edits, each file from its end."""
    for path, parts in edits.items():
        lines = path.read_text(encoding="utf-8").split("\n")
        for (number, first, last), new in sorted(parts.items(), reverse=True):
            line = lines[number].encode("utf-16-le")
            lines[number] = line[: 2 * first].decode("utf-16-le") + new + line[2 * last :].decode("utf-16-le")
        path.write_text("\n".join(lines), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """See the top of this file."""
    root, names = Path(arguments[0]).resolve(), Path(arguments[1])
    tier = int(arguments[arguments.index("--tier") + 1]) if "--tier" in arguments else 3
    table = tomllib.loads(names.read_text(encoding="utf-8"))["rename"]
    rows = [dict(zip(("tier", "kind", "file", "old", "new"), row, strict=True)) for row in table]
    edits, problems = gather(Sources(root, LanguageServer(root)), [row for row in rows if row["tier"] <= tier])
    print("\n".join(problems))
    print(f"{sum(map(len, edits.values()))} edits in {len(edits)} files, {len(problems)} problems")
    if "--dry" not in arguments:
        apply(edits)


if __name__ == "__main__":
    main(sys.argv[1:])
