"""Count names and phrases that a reader of this field has to guess, and fail where there are more than there were.

    python scripts/words.py              counts per rule, beside the stored ones; exit code 1 where one has risen
    python scripts/words.py --list RULE  where they are
    python scripts/words.py --store      keep today's counts, which may only fall

Rules look at the names of functions, and at docstrings. `scripts/words.json` holds the stored counts.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = ("repl_rl", "sandbox")
STORED = Path(__file__).with_suffix(".json")

_MOST_WORDS = 25
_VERBS_IN_ED = frozenset({"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"})
_IRREGULAR = frozenset(
    [
        "asked",
        "begun",
        "bound",
        "built",
        "caught",
        "cut",
        "done",
        "drawn",
        "driven",
        "fallen",
        "forbidden",
        "found",
        "given",
        "gone",
        "grown",
        "heard",
        "held",
        "kept",
        "known",
        "laid",
        "left",
        "lent",
        "lost",
        "made",
        "meant",
        "met",
        "paid",
        "proven",
        "put",
        "risen",
        "said",
        "seen",
        "sent",
        "shown",
        "spent",
        "spoken",
        "sprung",
        "taken",
        "taught",
        "told",
        "thrown",
        "torn",
        "understood",
        "woken",
        "worn",
        "written",
    ]
)
_QUESTION = re.compile(r"(What|How|Where|Whether|Which|Who|Whoever|Whatever|Why|When)\b")
_IDIOMS = re.compile(
    r"\b(tells?|told|says?|said|mend(s|ed)?|whoever|whatever|under way|beside|of its own|so many|by turns|stands?|"
    r"come of|go(es)? on|taken up|where there (is|are)|where none|where nothing)\b",
    re.IGNORECASE,
)
_RATE_WITH_A = re.compile(r"\b(one|two|\d+|each) \w+ an? \w+\b", re.IGNORECASE)
_NONE = re.compile(r"\bNone: ")
_SENTENCE = re.compile(r"(?<=[.!?:])\s+|\n\s*- |\n\s*\n")  # an item of a list is a sentence


class Finding(NamedTuple):
    """One place that a rule counts."""

    rule: str
    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


RULES = {
    "participle": "function names that begin with a participle; begin with a verb",
    "question": "docstrings that begin with What, How, Where, ...; begin with a verb or a noun",
    "idiom": "words that have another meaning in this field (told, beside, stands, under way, ...)",
    "rate": "'one X a Y'; write 'per'",
    "none": "'None: ...'; write what None does in words",
    "long": f"sentences of a docstring with more than {_MOST_WORDS} words",
}


def find(file: Path) -> Iterator[Finding]:
    """Yield what the rules count in a Python file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_participle(node.name):
            yield Finding("participle", file, node.lineno, node.name)
    for line, text in docstrings(tree):
        if _QUESTION.match(text):
            yield Finding("question", file, line, text.split("\n")[0])
        for rule, pattern in (("idiom", _IDIOMS), ("rate", _RATE_WITH_A), ("none", _NONE)):
            for found in pattern.finditer(text):
                yield Finding(rule, file, line + text.count("\n", 0, found.start()), found[0])
        for sentence in _SENTENCE.split(text.split("\n    ")[0]):
            if len(sentence.split()) > _MOST_WORDS:
                yield Finding("long", file, line, " ".join(sentence.split())[:80])


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each docstring: of modules, classes and functions, and those after a field."""
    for node in ast.walk(tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for statement in body if isinstance(body, list) else []:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, value.value


def comment_rate(files: list[Path]) -> float:
    """Return comment lines per 100 lines of code; a line of a docstring is neither."""
    comments, code = 0, 0
    skipped = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
    for file in files:
        text = file.read_text(encoding="utf-8")
        documented = {n for line, doc in docstrings(ast.parse(text)) for n in range(line, line + doc.count("\n") + 1)}
        lines = set[int]()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments += token.line.lstrip().startswith("#")
            elif token.type not in skipped:
                lines.update(range(token.start[0], token.end[0] + 1))
        code += len(lines - documented)
    return 100 * comments / max(1, code)


def main(argv: list[str], root: Path = ROOT, stored_in: Path = STORED) -> int:
    """Run the command on the Python files below `FOLDERS` of `root`. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", choices=RULES, metavar="RULE", help=f"print each place; one of {', '.join(RULES)}")
    parser.add_argument("--store", action="store_true", help="keep today's counts")
    asked = parser.parse_args(argv)
    files = sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py"))
    findings = [finding for file in files for finding in find(file)]
    if asked.list:
        print(*(finding for finding in findings if finding.rule == asked.list), sep="\n")
        return 0
    counts = {rule: sum(finding.rule == rule for finding in findings) for rule in RULES}
    stored: dict[str, int] = json.loads(stored_in.read_text())
    risen = [rule for rule in RULES if counts[rule] > stored[rule]]
    for rule, meaning in RULES.items():
        print(f"{rule:<11} {counts[rule]:>5} (stored {stored[rule]:>5})  {meaning}")
    print(f"comment lines per 100 lines of code: {comment_rate(files):.1f}")
    if risen:
        print(f"risen: {', '.join(risen)}; scripts/words.py --list {risen[0]} prints each place", file=sys.stderr)
        return 1
    if asked.store:
        stored_in.write_text(json.dumps(counts, indent=2) + "\n")
    return 0


def _is_participle(name: str) -> bool:
    first = name.lstrip("_").split("_")[0]
    return first in _IRREGULAR or (first.endswith("ed") and len(first) > 3 and first not in _VERBS_IN_ED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
