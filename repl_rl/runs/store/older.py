"""What records of older schema versions do not say, guessed from their texts: the one place where that is done.

What was executed at a console's prompt was typed there as it stands; of whatever else was executed nothing is known, so
nothing of it can be executed again. An observation that holds a marker was cut there.
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
    """A record of an older version as this release would have written it, as far as that can be told."""
    newer = record.copy()
    newer["workspace"] = None
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
            if line["execution"] is not None:
                newer["ran"] = list(buffer.feed(line["text"])) if _PROMPT.search(before) else []
            lines.append(newer)
            before = ""
        yield SegmentRecord(sampled=lines)
