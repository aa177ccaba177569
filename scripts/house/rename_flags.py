"""Rename flags and keys of settings in pages, by the table of `repl_rl/old_names.py`. It may run any number of times.

    python scripts/house/rename_flags.py README.md docs notebooks

Without arguments it rewrites the pages and notebooks of the repository, except for the changelog, which is history.
"""

import json
import re
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NAMES = runpy.run_path(str(ROOT / "repl_rl" / "old_names.py"))
SETTINGS: Mapping[str, str] = dict(
    sorted(
        {**NAMES["OLD_SETTINGS"], "sampler.give_up_after": "sampler.max_error_streak"}.items(),
        key=lambda pair: -len(pair[0]),
    )
)
KEYWORDS: Mapping[str, str] = {
    old: new
    for name, table in NAMES["OLD_KEYWORDS"].items()
    if name.endswith((":TrainerConfig", ":RolloutConfig", ":FinetuneConfig"))
    for old, new in table.items()
    # Other classes have these arguments too.
    if old not in ("chat", "bos")
}
"""Old arguments of classes that pages create."""
OPTIONS: Mapping[str, Mapping[str, str]] = {
    r"within": {"seconds": "every_s", "share": "max_time_share", "keep": "keep_last"},
    r"ray": {
        "nodes": "max_workers", "gpus": "gpus_per_worker", "simulate": "simulate_machines",
        "patience_s": "startup_timeout_s",
    },
    r"refill": {"most": "max_rounds"},
    r"window": {"share": "in_flight_share"},
    r"repl": {"give_up_after": "max_error_streak"},
    r"llm_query|my_tools:\w+|tests\.test_host:\w+": {
        "seconds": "timeout_s", "calls": "max_calls", "at_once": "max_concurrent",
        "at_once_in_all": "max_concurrent_total", "argument_bytes": "max_argument_bytes",
        "answer_bytes": "max_answer_bytes",
    },
}  # fmt: skip
"""Name of a component to the new names of its options in parentheses."""
TYPES = {"refill": "dynamic_sampling", "window": "fifo_window"}
"""Old names of components."""
KEPT = re.compile(r"repl-rl bench|serving/load")
"""Lines about commands whose own options have such names."""
TABLE = "## Renamed names\n"
"""Heading of the table of old names, which ends a page."""
WORDS: Mapping[str, str] = {
    old.rpartition(".")[2]: new.rpartition(".")[2]
    for old, new in NAMES["OLD_SETTINGS"].items()
    if old.rpartition(".")[2]
    in (
        "ahead",
        "fade_steps",
        "mini_batches",
        "micro_batch",
        "save_every",
        "shared_prefixes",
        "overshoot",
        "eval_every",
    )
}
"""Old keys that name a setting wherever a page has them in backticks."""
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def main(arguments: Iterable[str]) -> None:
    """Rewrite the files, and print those that changed."""
    named = [ROOT / name for name in arguments] or [ROOT]
    for file in sorted({file for place in named for file in find_pages(place)}):
        text = file.read_text(encoding="utf-8")
        if (new := rename_page(text, file.suffix)) != text:
            file.write_text(new, encoding="utf-8")
            print(file.relative_to(ROOT))


def find_pages(place: Path) -> Iterator[Path]:
    """Yield the pages and notebooks in a folder, or the file itself."""
    if place.is_file():
        yield place
        return
    for pattern in ("*.md", "*.ipynb"):
        for file in place.rglob(pattern):
            parts = file.relative_to(ROOT).parts
            history = file.name == "CHANGELOG.md" or parts[:2] == ("scripts", "house")
            if not history and not any(part.startswith(".") or part in ("node_modules", "runs") for part in parts):
                yield file


def rename_page(text: str, suffix: str = ".md") -> str:
    """Return a page with the present names. The table of renamed names keeps the old ones."""
    text, heading, table = text.partition(TABLE)
    return _rename_text(text, suffix) + heading + table


def _rename_text(text: str, suffix: str) -> str:
    text = "\n".join(line if KEPT.search(line) else rename_flags(line) for line in text.split("\n"))
    if suffix == ".ipynb":
        # The source of a cell is a list of lines, which a rename leaves as they are.
        json.loads(text)
        return re.sub(rf"\b({'|'.join(KEYWORDS)})=(?!=)", lambda found: f"{KEYWORDS[found[1]]}=", text)
    return FENCE.sub(_rename_block, text)


def rename_flags(line: str) -> str:
    """Return a line with the present names of flags and of dotted keys."""
    line = line.replace("repl-rl fleet status", "repl-rl workers status")
    for old, new in SETTINGS.items():
        head, dot, last = old.rpartition(".")
        new_head, new_dot, new_last = new.rpartition(".")
        flag = rf"--{re.escape(head + dot)}(no-)?{last.replace('_', '[-_]')}(?![\w-])"
        renamed = f"--{new_head}{new_dot}\\g<1>{new_last.replace('_', '-')}"
        line = re.sub(flag.replace("(no-)?", "(no-|)"), renamed, line)
        if dot:
            line = re.sub(rf"(?<![\w.-]){re.escape(old)}(?![\w(])", new, line)
    line = re.sub(rf"`({'|'.join(WORDS)})`", lambda found: f"`{WORDS[found[1]]}`", line)
    line = line.replace("`states`, `trainer.", "`checkpoint`, `trainer.").replace(
        "`updates` times", "`num_iterations` times"
    )
    return rename_options(line)


def rename_options(line: str) -> str:
    """Return a line with the present names of options in parentheses, and of their components."""
    for name, options in OPTIONS.items():

        def rename(found: re.Match[str], options: Mapping[str, str] = options) -> str:
            old = rf"\b({'|'.join(options)})(?==)"
            return TYPES.get(found[1], found[1]) + re.sub(old, lambda each: options[each[1]], found[2])

        line = re.sub(rf"(?<![\w.])({name})(\([a-z_]+=[^()]*\))", rename, line)
    return re.sub(r"([`\"])refill([`\"])", r"\1dynamic_sampling\2", line)


def _rename_block(found: re.Match[str]) -> str:
    kind, body = found[1], found[2]
    if kind == "toml":
        new = "\n".join(_rename_keys(body.split("\n")))
    elif kind in ("python", "py", "pycon"):
        new = re.sub(rf"\b({'|'.join(KEYWORDS)})=(?!=)", lambda each: f"{KEYWORDS[each[1]]}=", body)
    else:
        new = body
    return found[0].replace(body, new) if new != body else found[0]


def _rename_keys(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a TOML file with the present keys."""
    table = ""
    for line in lines:
        if header := re.match(r"\[([\w.]+)\]", line):
            table = header[1]
            yield line.replace(f"[{table}]", f"[{SETTINGS.get(table, table)}]")
            continue
        key = re.match(r"(# ?)?([\w.]+)( *=)", line)
        old = f"{table}.{key[2]}".lstrip(".") if key else ""
        if key and old in SETTINGS:
            yield line[: key.start(2)] + SETTINGS[old].rpartition(".")[2] + line[key.end(2) :]
        else:
            yield line


if __name__ == "__main__":
    main(sys.argv[1:])
