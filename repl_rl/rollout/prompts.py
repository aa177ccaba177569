"""What a rollout starts from: the prompt templates that are shipped, and text files of a user's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.machine.assets import asset
from repl_rl.record.console import PS1

TEMPLATES = ("bare", "base", "few_shot", "chat", "chat_few_shot")
"""Prompt templates that are shipped: a file each in `prompts/`."""
OWN = "text:"
"""What the text of a file of one's own is recorded behind, so that a run is played again without the file."""
_QUESTION, _BANNER, _WORKSPACE = "{question}", "{banner}", "{workspace}"


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
    without is the system message of the model's chat template; then the console begins with its banner.

    Raises:
        ConfigError: there is no such template.
    """
    known = template(wanted)
    own = known.startswith(OWN)
    text = known.removeprefix(OWN) if own else asset(f"prompts/{known}.txt").read_text()
    if _WORKSPACE not in text:
        question = f"{question} {told}" if told else question
    banner = asset("prompts/banner.txt").read_text().replace("{version}", version)
    if _QUESTION not in text:
        return Start(text.strip().replace(_WORKSPACE, told), "", banner + PS1, question)
    plain = text.removesuffix(PS1)
    shown = plain.endswith(_BANNER)
    console = (banner if shown else "") + text[len(plain) :]
    head = plain.removesuffix(_BANNER).replace(_BANNER, banner).replace(_WORKSPACE, told).replace(_QUESTION, question)
    return Start(None, head, console, question)
