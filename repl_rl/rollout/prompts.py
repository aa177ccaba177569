"""Prompt templates: shipped ones, and text files of a user."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from repl_rl.errors import ConfigError
from repl_rl.trajectory.console_text import PS1
from repl_rl.utils.package_data import find_asset

TEMPLATES = ("bare", "base", "few_shot", "chat", "chat_few_shot")
"""Names of the shipped prompt templates, which are files in `prompts/`."""
OWN = "text:"
"""Prefix of a recorded user template. A run records the whole text, so that a replay does not need the file."""
QUESTION, BANNER, WORKSPACE, VERSION = "{question}", "{banner}", "{workspace}", "{version}"
"""Placeholders of templates. The version of Python is in the banner."""
_ROLE = re.compile(r"^\[(user|assistant)\]\n", re.MULTILINE)
"""Header of a turn in a worked example."""


class FewShotExample(NamedTuple):
    """Worked example at the beginning of a chat: one turn of the user and one of the policy."""

    question: str
    session: str
    """Text of the console session from the first prompt on: lines of the policy and their output."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Prompt template with its placeholders. `Renderer.fill_template` fills them in."""

    system: str | None
    """System message for the model's chat template; None means plain text without a chat template."""
    head: str
    """Plain text before the console; empty if there is a system message."""
    console: str
    """Beginning of the console: the banner, if the template shows it, and the first prompt."""
    banner: str
    """Text of the banner."""
    has_workspace: bool
    """True if the template has a place for the description of the task's workspace."""
    examples: tuple[FewShotExample, ...] = ()
    """Few-shot examples: turns between the system message and the question."""


@dataclass(frozen=True, slots=True)
class FilledTemplate:
    """Prompt template with its placeholders filled in."""

    system: str | None
    """System message for the model's chat template; None means plain text without a chat template."""
    head: str
    """Plain text before the console; empty if there is a system message."""
    console: str
    """Beginning of the console: the banner, if the template shows it, and the first prompt."""
    question: str
    """User message for the model's chat template."""
    examples: tuple[FewShotExample, ...] = ()
    """Few-shot examples: turns between the system message and the question."""


def load_template(template: str) -> str:
    """Return a prompt template as a run records it: a shipped one by name, any other with its whole text.

    Args:
        template: name of `TEMPLATES`, text file, or result of this function.

    Raises:
        ConfigError: `template` is none of these, or the file is empty or not text.
    """
    if is_recorded_template(template):
        return template
    file = Path(template)
    if not file.is_file():
        raise ConfigError("prompt", template, f"choose one of {', '.join(TEMPLATES)}, or give a text file")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("prompt file", template, f"it cannot be read as UTF-8: {error}") from error
    if not text.strip():
        raise ConfigError("prompt file", template, "it is empty; write the text of the prompt")
    return OWN + text.removesuffix("\n")


def validate_recorded_template(thing: str, template: str) -> None:
    """Refuse a recorded template that names a file.

    A run records the text. A run from someone else could name any file on this machine.

    Raises:
        ConfigError: the template names a file.
    """
    if not is_recorded_template(template):
        raise ConfigError(thing, template, f"choose one of {', '.join(TEMPLATES)}, or record the text after {OWN!r}")


def add_function_declarations(question: str, functions: Sequence[str]) -> str:
    """Return a question with the declarations of host functions; () leaves it unchanged."""
    if not functions:
        return question
    template = find_asset("prompts/host.txt").read_text().removesuffix("\n")
    declarations = "\n".join(f"#   {function}" for function in functions)
    return template.replace("{functions}", declarations).replace(QUESTION, question)


def is_recorded_template(template: str) -> bool:
    """Return True for a template as a run records it; False for one that names a file, which may change."""
    return template in TEMPLATES or template.startswith(OWN)


def read_template(template: str) -> PromptTemplate:
    """Read the text of a template, which is a name or a text as for `load_template`.

    The description of the task's workspace replaces {workspace}. It follows the question if the template has no such
    placeholder.

    A text with {question} is plain: the question and the banner replace {question} and {banner}. A text without it is
    the system message of the model's chat template, and the console begins with its banner.

    Examples may follow the system message as turns: a line `[user]` before each question, a line `[assistant]` before
    each console session. The console of the question then begins as theirs do, without a banner.

    Raises:
        ConfigError: the template does not exist, or its turns do not alternate.
    """
    recorded = load_template(template)
    is_user_text = recorded.startswith(OWN)
    text = recorded.removeprefix(OWN) if is_user_text else find_asset(f"prompts/{recorded}.txt").read_text()
    banner = find_asset("prompts/banner.txt").read_text()
    has_workspace = WORKSPACE in text
    # Without a place for the question, the text is the system message of a chat.
    if QUESTION not in text:
        system, examples = _split_turns(text)
        return PromptTemplate(system, "", PS1 if examples else BANNER + PS1, banner, has_workspace, examples)
    # Plain text: split off the first prompt and a banner before it, which belong to the console.
    body = text.removesuffix(PS1)
    console = (BANNER if body.endswith(BANNER) else "") + text[len(body) :]
    return PromptTemplate(None, body.removesuffix(BANNER), console, banner, has_workspace)


def _split_turns(text: str) -> tuple[str, tuple[FewShotExample, ...]]:
    """Split a chat template's text into its system message and its worked examples."""
    system, *turns = _ROLE.split(text)
    roles, texts = turns[::2], [turn.strip() for turn in turns[1::2]]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        remedy = "let a line [user] with its question come before each [assistant] with its console session"
        raise ConfigError("turns of the prompt", ", ".join(roles), remedy)
    # Each line of a session ends with a newline, and so does the text; the end of the policy's turn follows it.
    examples = tuple(
        FewShotExample(question, f"{session}\n") for question, session in zip(texts[::2], texts[1::2], strict=True)
    )
    return system.strip(), examples
