"""Hand-made transcripts for the corners of a console. Every line is one push."""

from pathlib import Path

from repl_rl.sandbox.conformance.harvest import Transcript

_SESSIONS = Path(__file__).with_name("edges.txt")
"""Sessions, separated by lines of four dashes."""

_FORM_FEED = ("x = 1\x0c", "x", "if True:\r    1", "1\x00", "\x0c1", "'a\x85b'", "'line\u2028end'", "1\r")
_LONG = ("x = " + "+".join(["1"] * 500), "x", "(" * 150 + ")" * 150, "-" * 50 + "1", "[" * 90 + "]" * 90)


def edge_transcripts() -> list[Transcript]:
    """All of them."""
    sessions = [tuple(text.strip("\n").split("\n")) for text in _SESSIONS.read_text("utf-8").split("----\n")]
    sessions += [_FORM_FEED, _LONG]
    return [Transcript(f"edge {number}", lines, len(lines)) for number, lines in enumerate(sessions)]
