"""docs/host_functions.md: its example runs, its limits are the code's, and its figures are measured."""

import asyncio
import json
from dataclasses import asdict
from typing import get_type_hints

from benchmarks.console.host_functions import FIGURES, PAGE, text
from repl_rl import HostFunction, HostLimits
from repl_rl.rollout.host_functions import SHIPPED, HostCallSession, load_host_functions
from repl_rl.rollout_config import RolloutConfig
from repl_rl.settings.argument_parser import parse
from tests.support import documents

TEXT = documents.PAGES["docs/host_functions.md"]


def test_the_functions_of_the_page_are_described_and_answer() -> None:
    namespace: dict[str, object] = {}
    for block in documents.blocks("python", "docs/host_functions.md"):
        exec(block, namespace)
    limited = namespace["limited"]
    assert isinstance(limited, HostFunction)
    assert limited.limits == HostLimits(timeout_s=5.0, max_calls=8)
    session = HostCallSession([limited])
    call = b'{"name": "search", "args": ["primes", 1], "kwargs": {}}'
    assert json.loads(asyncio.run(session.answer_call(call))) == {"answer": ["page 0 about primes"]}


def test_the_table_of_limits_has_each_with_its_default() -> None:
    for name, value in asdict(HostLimits()).items():
        assert any(row.startswith(f"| `{name}`") and f"| {value:,g} |" in row for row in TEXT.splitlines()), name


def test_the_options_of_shipped_functions_are_those_that_the_page_names() -> None:
    said = [set(part.replace("`", "").replace(" and", ",").replace("\n", " ").split(", ")) for part in _options()]
    assert said == [set(get_type_hints(SHIPPED[name])) - {"return"} for name in ("llm_query", "rollout")]


def _options() -> list[str]:
    return [part.partition(".")[0] for part in TEXT.split("Its options are ")[1:]]


def test_what_the_page_names_on_the_command_line_is_taken() -> None:
    world = parse(
        RolloutConfig, "train", ["--host-functions", "rollout", "--host-functions.llm_query.max-tokens", "32"]
    )
    assert [function.name for function in load_host_functions(world.host_functions)] == ["rollout", "llm_query"]


def test_the_figures_of_the_page_are_those_of_its_file() -> None:
    assert PAGE.text == text(json.loads(FIGURES.read_text()))
