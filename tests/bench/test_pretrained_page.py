"""The commands of docs/pretrained.md are those of `make pretrained`."""

import re
import shlex

from benchmarks.pages import ROOT
from tests.documents import blocks


def _words(text: str) -> list[list[str]]:
    """The words of each `repl-rl` command of a script or a block."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line) for line in joined.splitlines() if line.startswith("repl-rl ")]


def test_the_steps_of_the_page_are_those_of_the_script() -> None:
    script = (ROOT / "scripts" / "pretrained").read_text()
    arrays = dict(re.findall(r"(\w+)=\(([^)]*)\)", script.partition('if [ "${1:-}" = small ]')[0]))
    arrays |= dict(re.findall(r"^(\w+)=\(([^)]*)\)", script, re.MULTILINE))
    arrays["threads"] = arrays["run"] = ""
    values = {"gguf": "smollm2.gguf", "out": "runs"}
    for name, words in arrays.items():
        script = script.replace(f'"${{{name}[@]}}"', words)
    for name, value in values.items():
        script = script.replace(f'"${name}"', value).replace(f"${name}", value)
    steps = [sorted(words) for words in _words(script)]
    page = [sorted(words) for words in _words("".join(blocks("sh", "docs/pretrained.md")))]
    # Where the script names the usual folder, the page leaves that to the default.
    assert [[w for w in words if w not in ("--out", "runs")] for words in steps[-1:]] == page[-1:]
    assert steps[:-1] == page[:-1]
