"""Upgrade of records of older schema versions; missing fields are inferred from their texts.

A line that was executed at a console's prompt counts as typed there unchanged. For other executed text the console's
input is unknown, so it cannot be executed again. An observation with a truncation marker counts as truncated.
"""

import re
from collections.abc import Iterator

from repl_rl.record.console import LineBuffer
from repl_rl.record.failure import FailureKind
from repl_rl.runs.store.schema import LineRecord, SegmentRecord, TrajectoryRecord

_PROMPT = re.compile(r"(?:>>> |\.\.\. )\Z")
_CUT = re.compile(r"\n\[\.\.\. \d+ (?:(?:tokens|characters) cut|(?:bytes|characters) of output not shown) \.\.\.\]\n")
_KINDS = {
    "SandboxFault": FailureKind.SANDBOX_FAULT,
    "UserCodeError": FailureKind.USER_ERROR,
    "ConfigError": FailureKind.PROMPT_TOO_LONG,
}


def upgraded(record: TrajectoryRecord) -> TrajectoryRecord:
    """Return a record of an older version in the current schema, as far as its fields can be inferred."""
    newer = record.copy()
    newer["workspace"] = None
    # Version 3 lacks only `workspace`.
    if record["schema_version"] == 3:
        return newer
    newer["segments"] = list(_segments(record))
    if record["schema_version"] == 1:
        newer["credit"] = []
    if record["failure"] is not None:
        kind, message = record["failure"]
        newer["failure"] = (_KINDS.get(kind, FailureKind.OTHER).value, message)
    return newer


def _segments(record: TrajectoryRecord) -> Iterator[SegmentRecord]:
    buffer = LineBuffer()
    before, _ = record["prompt"]
    for segment in record["segments"]:
        if "sampled" not in segment:
            before = segment["observed"]
            yield SegmentRecord(observed=before, token_ids=segment["token_ids"], cut=_CUT.search(before) is not None)
            continue
        lines: list[LineRecord] = []
        for line in segment["sampled"]:
            newer = line.copy()
            # Text that follows no console prompt was run by a tool, so the console's input is unknown.
            if line["execution"] is not None:
                newer["ran"] = list(buffer.feed(line["text"])) if _PROMPT.search(before) else []
            lines.append(newer)
            before = ""
        yield SegmentRecord(sampled=lines)
