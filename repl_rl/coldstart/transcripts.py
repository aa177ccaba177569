"""Transcripts: plans that were executed for real, line by line, and their JSONL file."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from repl_rl.coldstart.demonstrations import ECHO, Mix, Plan, plan
from repl_rl.console import prompt
from repl_rl.errors import ConfigError
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Split, sketch


@dataclass(frozen=True, slots=True)
class Turn:
    """A line as the policy would write it, and what the console then showed."""

    line: str
    """With its newline; it may close a block with a second one."""
    observed: str
    """Output and next prompt; "" where the rollout ended with this line."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """One executed demonstration."""

    question: str
    turns: tuple[Turn, ...]
    gives_up: bool
    """The policy's end token follows the last turn."""
    given: int = 0
    """So many turns at the beginning are context: their lines are not learned."""


async def play(question: str, planned: Plan, sandbox: Sandbox) -> Transcript:
    """Type a plan into a fresh console and record what it shows. Ends early where the console ends."""
    turns: list[Turn] = []
    echo = ""
    async with sandbox.session() as console:
        for template in planned.lines:
            line = template.replace(ECHO, echo)
            results = [await console.push(physical) for physical in line.removesuffix("\n").split("\n")]
            output = "".join(result.text for result in results)
            turns.append(Turn(line, "" if console.ended else output + prompt(results[-1].more)))
            if console.ended:
                break
            echo = output.removesuffix("\n")
    return Transcript(question, tuple(turns), planned.gives_up, planned.given)


async def write_transcripts(
    path: Path, sandbox: Sandbox, families: Sequence[str], mix: Mix, count: int, seed: int
) -> None:
    """Write `count` executed demonstrations of the families' training questions, one JSON object a line.

    No held-out question is ever among them. Equal arguments give equal files where the Python is the same.

    Raises:
        ConfigError: an unknown family, or `count` below 1.
    """
    if count < 1:
        raise ConfigError("number of transcripts", count, "ask for at least 1")
    rng = random.Random(f"{seed}/transcripts")
    with path.open("w") as file:
        for n in range(count):
            drawn = sketch(families[n % len(families)], rng, Split.TRAIN)
            transcript = await play(drawn.question, plan(drawn, mix, rng), sandbox)
            file.write(json.dumps(asdict(transcript)) + "\n")


def read_transcripts(path: Path) -> Iterator[Transcript]:
    """The transcripts of a file, in order.

    Raises:
        ConfigError: the file is missing, or a line is not a transcript; names the line.
    """
    if not path.is_file():
        raise ConfigError("transcripts file", str(path), "write one first")
    with path.open() as file:
        for n, text in enumerate(file, start=1):
            try:
                record = json.loads(text)
                turns = tuple(Turn(line=turn["line"], observed=turn["observed"]) for turn in record["turns"])
                yield Transcript(record["question"], turns, record["gives_up"], record.get("given", 0))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}:{n}", text[:80], f"each line is one transcript: {error!r}") from error
