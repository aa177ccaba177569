"""Trajectory as the text of a console session, and a parser for such text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from repl_rl.record.console import PS1, PS2, Typist
from repl_rl.record.trajectory import Line, LineEnd, Observed, Sampled, Stop, Trajectory

_AMBIGUOUS = re.compile(r"^(?=>>>|\.\.\.|\\)", re.MULTILINE)
_UNUSUAL = re.compile(r"[^\x20-\x7e\n\t]")
_MARK = re.compile("[⟦⟧]")
_ENDED = (Stop.ANSWERED, Stop.EXITED, Stop.EOS)
_NO_NEWLINE = "\\"
"""Marks that the output above it does not end in a newline; it is a line by itself."""


@dataclass(frozen=True, slots=True)
class Transition:
    """Line of the policy and the observation after it."""

    line: Line
    observed: Observed | None
    """Observation with the next prompt; None means that nothing was inserted after the line."""
    prompt: str
    """Prompt before the line: ">>> ", "... ", or "" if the line was not written at a console's prompt."""
    typed: bool
    """True if the console received the line unchanged.

    False if nothing ran, or other code, such as a block of the line.
    """
    asked: str
    """Next prompt of the console, at the end of the observation; "" if it has none."""

    @property
    def output(self) -> str:
        """Observation without the next prompt."""
        return self.observed.text.removesuffix(self.asked) if self.observed is not None else ""


@dataclass(frozen=True, slots=True)
class Turn:
    """Line that was typed at one prompt, and its output."""

    source: str
    """One physical line, without its newline."""
    output: str


def transitions(trajectory: Trajectory) -> tuple[Transition, ...]:
    """Return each line with its observation, shape (L,)."""
    found: list[Transition] = []
    typist = Typist()
    prompt = PS1 if trajectory.prompt.text.endswith(PS1) else ""
    for at, segment in enumerate(trajectory.segments):
        if not isinstance(segment, Sampled):
            continue
        after = trajectory.segments[at + 1] if at + 1 < len(trajectory.segments) else None
        for number, line in enumerate(segment.lines, 1):
            run = line.execution
            typed = run is not None and typist.typed(line.text, run.ran, line.end is LineEnd.EOS)
            if typed and found and not prompt and found[-1].observed is not None:
                # The sampler inserted the prompt itself, after its own text.
                prompt = _asked(found[-1].observed.text)
                found[-1] = replace(found[-1], asked=prompt)
            observed = after if number == len(segment.lines) and isinstance(after, Observed) else None
            # No prompt follows the end, even if the last output looks like one.
            over = trajectory.stop in _ENDED and len(found) + 1 == len(trajectory.lines)
            asked = _asked(observed.text) if typed and observed is not None and not over else ""
            found.append(Transition(line, observed, prompt, typed, asked))
            prompt = asked
    return tuple(found)


def _asked(text: str) -> str:
    return next((prompt for prompt in (PS1, PS2) if text.endswith(prompt)), "")


def printable(text: str) -> str:
    """Return `text` with control and other unprintable characters escaped; newlines and tabs are kept."""
    return _UNUSUAL.sub(lambda found: found[0] if found[0].isprintable() else repr(found[0])[1:-1], text)


def guarded(output: str, prompt: bool = False) -> str:
    """Return `output` safe to print.

    A backslash before text that looks like a prompt keeps a program from faking a line.

    With `prompt`, a prompt at the very end is the console's own and is kept.
    """
    body = output.removesuffix(_asked(output)) if prompt else output
    return _AMBIGUOUS.sub(r"\\", printable(body)) + output[len(body) :]


def to_text(trajectory: Trajectory) -> str:
    """Return the session as text: the prompt, then each physical line at its prompt, then its output.

    The text is safe to print, because control characters are escaped. Output that looks like a prompt gets a backslash
    before it, so that no program can fake a line of the policy. A last line of only a backslash means that the output
    does not end in a newline.
    """
    head = trajectory.prompt.text.removesuffix(PS1)
    parts = [_ended(guarded(head))] if head else []
    for each in transitions(trajectory):
        first, *more = printable(each.line.text).removesuffix("\n").split("\n")
        parts.append(f"{each.prompt or PS1}{first}\n")
        parts += [f"{PS2}{physical}\n" for physical in more]
        parts.append(_ended(guarded(each.output)))
    return "".join(parts)


def marked(trajectory: Trajectory) -> str:
    """Return the text after the prompt, safe to print, with ⟦ and ⟧ around observations. Output has no such marks."""
    texts = [
        f"⟦{_unmarked(segment.text)}⟧"
        if isinstance(segment, Observed)
        else "".join(_unmarked(line.text) for line in segment.lines)
        for segment in trajectory.segments
    ]
    return "".join(texts)


def _unmarked(text: str) -> str:
    return _MARK.sub(lambda found: f"\\u{ord(found[0]):x}", printable(text))


def from_text(text: str) -> tuple[Turn, ...]:
    """Parse typed lines and outputs from `to_text` or a real console; text before the first prompt is skipped."""
    return tuple(_turns(text))


def _ended(output: str) -> str:
    return output if not output or output.endswith("\n") else f"{output}\n{_NO_NEWLINE}\n"


def _turns(text: str) -> Iterator[Turn]:
    source: str | None = None
    output: list[str] = []
    for row in text.split("\n"):
        # A prompt without text may have lost its trailing space, for example in pasted text.
        typed = row.startswith((PS1, PS2)) or row in (PS1.rstrip(), PS2.rstrip())
        if typed:
            if source is not None:
                yield Turn(source, _joined(output))
            source, output = row[len(PS1) :], []
        else:
            output.append(row)
    if source is not None:
        yield Turn(source, _joined(output[:-1] if output and not output[-1] else output))


def _joined(rows: list[str]) -> str:
    cut = bool(rows) and rows[-1] == _NO_NEWLINE
    whole = "".join(f"{row.removeprefix(_NO_NEWLINE)}\n" for row in (rows[:-1] if cut else rows))
    return whole.removesuffix("\n") if cut else whole
