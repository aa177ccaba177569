"""A trajectory as the text of a console session, and back to what was typed and shown."""

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
"""A line of its own: the output above it does not end in a newline."""


@dataclass(frozen=True, slots=True)
class Transition:
    """A line of the policy and what was spliced in after it."""

    line: Line
    observed: Observed | None
    """Next prompt included; None: nothing was spliced in after it."""
    prompt: str
    """The prompt that the line was written at: ">>> ", "... ", or "" where it was not written at a console's prompt."""
    typed: bool
    """The console was given the line as it stands; False: nothing ran, or other code, such as a block of the line."""
    asked: str
    """The console's next prompt, at the end of what was observed; "" where there is none."""

    @property
    def output(self) -> str:
        """What was observed, without the next prompt."""
        return self.observed.text.removesuffix(self.asked) if self.observed is not None else ""


@dataclass(frozen=True, slots=True)
class Turn:
    """What was typed at one prompt, and what it printed."""

    source: str
    """One physical line, without its newline."""
    output: str


def transitions(trajectory: Trajectory) -> tuple[Transition, ...]:
    """Each line with its observation, shape (L,)."""
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
                # The sampler spliced the prompt in itself, after text of its own.
                prompt = _asked(found[-1].observed.text)
                found[-1] = replace(found[-1], asked=prompt)
            observed = after if number == len(segment.lines) and isinstance(after, Observed) else None
            # Nothing is asked after the end, whatever the last output looks like.
            over = trajectory.stop in _ENDED and len(found) + 1 == len(trajectory.lines)
            asked = _asked(observed.text) if typed and observed is not None and not over else ""
            found.append(Transition(line, observed, prompt, typed, asked))
            prompt = asked
    return tuple(found)


def _asked(text: str) -> str:
    return next((prompt for prompt in (PS1, PS2) if text.endswith(prompt)), "")


def printable(text: str) -> str:
    """`text` with everything that could steer a terminal made visible; newlines and tabs stay."""
    return _UNUSUAL.sub(lambda found: found[0] if found[0].isprintable() else repr(found[0])[1:-1], text)


def guarded(output: str, prompt: bool = False) -> str:
    """`output` safe to print, with a backslash before whatever looks like a prompt: no program can fake a typed line.

    With `prompt`, one at its very end is the console's own and stays.
    """
    body = output.removesuffix(_asked(output)) if prompt else output
    return _AMBIGUOUS.sub(r"\\", printable(body)) + output[len(body) :]


def to_text(trajectory: Trajectory) -> str:
    """The session as text: the prompt, then each physical line at its prompt, then what it printed.

    It is safe to print: control characters are made visible. Output that looks like a prompt gets a backslash before
    it, so that no program can fake a line of the policy; a last line of only a backslash ends output without newline.
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
    """What follows the prompt, with ⟦ and ⟧ around what was observed. It is safe to print, and output has no marks."""
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
    """What was typed and printed, from the text that `to_text` or a real console gives; text before it is left out."""
    return tuple(_turns(text))


def _ended(output: str) -> str:
    return output if not output or output.endswith("\n") else f"{output}\n{_NO_NEWLINE}\n"


def _turns(text: str) -> Iterator[Turn]:
    source: str | None = None
    output: list[str] = []
    for row in text.split("\n"):
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
