"""What a rollout starts from: the prompt templates that are shipped, and text files of a user's own."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from repl_rl.errors import ConfigError
from repl_rl.machine.assets import asset
from repl_rl.record.console import PS1

TEMPLATES = ("bare", "base", "few_shot", "chat", "chat_few_shot")
"""Prompt templates that are shipped: a file each in `prompts/`."""
OWN = "text:"
"""What the text of a file of one's own is recorded behind, so that a run is played again without the file."""
_QUESTION, _BANNER, _WORKSPACE = "{question}", "{banner}", "{workspace}"
_ROLE = re.compile(r"^\[(user|assistant)\]\n", re.MULTILINE)
"""Begins a turn of a worked example."""


class Example(NamedTuple):
    """A worked example that a chat begins with: a turn of the user's and one of the policy's."""

    question: str
    session: str
    """Text of the console session, from the first prompt on: lines of the policy and their output."""


@dataclass(frozen=True, slots=True)
class Start:
    """A prompt template, filled in."""

    system: str | None
    """What the model's chat template has as system message; None: there is no chat template in it."""
    head: str
    """Plain text before the console; "" where there is a system message."""
    console: str
    """How the console begins: its banner, where the template shows it, and its first prompt."""
    question: str
    """What the model's chat template has as the user's message."""
    examples: tuple[Example, ...] = ()
    """Few-shot examples: earlier turns of the conversation, between the system message and the question."""


def template(wanted: str) -> str:
    """A prompt template as it is recorded: a shipped one by its name, any other with its whole text.

    Args:
        wanted: a name of `TEMPLATES`, a text file, or what this function gave.

    Raises:
        ConfigError: it is none of them, or a file that is empty or no text.
    """
    if wanted in TEMPLATES or wanted.startswith(OWN):
        return wanted
    file = Path(wanted)
    if not file.is_file():
        raise ConfigError("prompt", wanted, f"choose one of {', '.join(TEMPLATES)}, or give a text file")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("prompt file", wanted, f"it cannot be read as UTF-8: {error}") from error
    if not text.strip():
        raise ConfigError("prompt file", wanted, "it is empty; write what the policy is told")
    return OWN + text.removesuffix("\n")


def refuse_file(thing: str, wanted: str) -> None:
    """Refuse a recorded template that names a file: a run records the text, and a stranger's run could name any file.

    Raises:
        ConfigError: it does.
    """
    if wanted not in TEMPLATES and not wanted.startswith(OWN):
        raise ConfigError(thing, wanted, f"choose one of {', '.join(TEMPLATES)}, or record the text after {OWN!r}")


def declaring(question: str, functions: Sequence[str]) -> str:
    """A question with what the policy is told of the functions of the host; () leaves it as it is."""
    if not functions:
        return question
    told = asset("prompts/host.txt").read_text().removesuffix("\n")
    listed = "\n".join(f"#   {function}" for function in functions)
    return told.replace("{functions}", listed).replace(_QUESTION, question)


def start(wanted: str, question: str, version: str, told: str = "") -> Start:
    """A template (see `template`) for a question, in the console of Python `version`.

    `told` is what is said of the task's workspace. It stands in the place of {workspace}, or else after the question.

    A text with {question} in it is plain: the question stands there, and the banner in the place of {banner}. One
    without is the system message of the model's chat template; then the console begins with its banner. Examples
    may follow it, as turns: a line `[user]` before each question, a line `[assistant]` before each console session.
    The console of the question begins as theirs do, so without a banner.

    Raises:
        ConfigError: there is no such template, or its turns do not alternate.
    """
    known = template(wanted)
    own = known.startswith(OWN)
    text = known.removeprefix(OWN) if own else asset(f"prompts/{known}.txt").read_text()
    if _WORKSPACE not in text:
        question = f"{question} {told}" if told else question
    banner = asset("prompts/banner.txt").read_text().replace("{version}", version)
    if _QUESTION not in text:
        system, examples = _split_turns(text)
        return Start(system.replace(_WORKSPACE, told), "", PS1 if examples else banner + PS1, question, examples)
    plain = text.removesuffix(PS1)
    shown = plain.endswith(_BANNER)
    console = (banner if shown else "") + text[len(plain) :]
    head = plain.removesuffix(_BANNER).replace(_BANNER, banner).replace(_WORKSPACE, told).replace(_QUESTION, question)
    return Start(None, head, console, question)


def _split_turns(text: str) -> tuple[str, tuple[Example, ...]]:
    """The system message of a chat's template, and the worked examples after it."""
    system, *turns = _ROLE.split(text)
    roles, texts = turns[::2], [turn.strip() for turn in turns[1::2]]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        remedy = "let a line [user] with its question come before each [assistant] with its console session"
        raise ConfigError("turns of the prompt", ", ".join(roles), remedy)
    # A session ends with a newline, as each of its lines does, and the end of the policy's turn comes after that.
    examples = tuple(Example(asked, f"{session}\n") for asked, session in zip(texts[::2], texts[1::2], strict=True))
    return system.strip(), examples
