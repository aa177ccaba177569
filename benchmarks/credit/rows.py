"""File of rows: a header, then one row per finished run. Runs in the file are not played again."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.credit.conditions import Way
from repl_rl.errors import ConfigError
from repl_rl.utils.atomic_files import write_text_atomically

POINTS = ("start", "middle", "end")
"""Points of a run where gradients are compared: before it, after half of its tokens, and after it."""


@dataclass(frozen=True, slots=True)
class Start:
    """Evaluation on held-out tasks of the policy that the runs of a way start from."""

    way: Way
    figures: Mapping[str, float]
    wall_s: float
    """Wall clock, with the fine-tuning that made the policy, if any."""
    transcripts: Sequence[str] = field(default_factory=list)
    """Texts of the first held-out tasks' greedy rollouts."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training run. Lists have one entry per step."""

    condition: str
    seed: int
    tokens: Sequence[int]
    """Cumulative tokens sampled in training."""
    solve: Sequence[float]
    """Solve rate of the step's rollouts."""
    error: Sequence[float]
    """Share of the step's executed lines in error."""
    lines: Sequence[float]
    """Lines per rollout."""
    after: Mapping[str, float]
    """Metrics on held-out tasks after training."""
    gap: float
    """Largest difference of a log probability between sampler and trainer, nats."""
    rollout_s: float
    update_s: float
    wall_s: float
    """Wall clock with the evaluation."""
    learning_rate: float = 0.0
    """Learning rate of the training; 0 in rows that did not record it."""
    agreement: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Agreement of gradients at the start, in the middle and at the end; {} if not measured.

    See `agreement.Agreement`.
    """
    transcripts: Sequence[str] = field(default_factory=list)
    """Texts of the first held-out tasks' greedy rollouts after training."""
    staleness: float = 0.0
    """Mean number of steps between the policy that wrote a token and the one that learned from it."""
    kept: float = 1.0
    """Share of tokens whose importance sampling ratio was not clipped, mean over steps."""


Row = Start | Run


class RowFile:
    """Rows of one experiment, in `path`."""

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        """Open the file, or plan a new one.

        Raises:
            ConfigError: it holds rows of another experiment, or something else.
        """
        self.path = path
        self._texts = path.read_text().splitlines() if path.exists() else []
        if not self._texts:
            self._texts = [json.dumps(header)]
        else:
            # A round trip through JSON turns tuples into lists, as in the file.
            self._check(json.loads(json.dumps(header)))

    @property
    def rows(self) -> list[Row]:
        """Every row so far.

        Raises:
            ConfigError: one of them is not a row.
        """
        return [parse(text) for text in self._texts[1:]]

    def add(self, row: Row) -> None:
        """Append a row atomically."""
        self._texts.append(json.dumps(record(row)))
        write_text_atomically(self.path, "\n".join((*self._texts, "")))

    def _check(self, header: Mapping[str, object]) -> None:
        try:
            found = json.loads(self._texts[0])
            changed = sorted(_changed(header, found))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError("file of rows", str(self.path), f"it holds something else: {error!r}") from error
        if changed:
            remedy = f"it holds runs with another {' and '.join(changed)}; give theirs, or name another --out"
            raise ConfigError("file of rows", str(self.path), remedy)


def _changed(header: Mapping[str, object], found: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of different values, with both values, shortened."""
    for key, value in header.items():
        other = found[key]
        if isinstance(value, Mapping) and isinstance(other, Mapping) and value.keys() == other.keys():
            yield from _changed(value, other, f"{prefix}{key}.")
        elif value != other:
            yield f"{prefix}{key} ({other!r:.40}, here {value!r:.40})"


def record(row: Row) -> dict[str, object]:
    """Return the JSON form of a row."""
    return {"kind": "start" if isinstance(row, Start) else "run", **asdict(row)}


def parse(text: str) -> Row:
    """Parse a line of the file.

    Raises:
        ConfigError: it is not a row.
    """
    try:
        fields = json.loads(text)
        kind: type[Start] | type[Run] = {"start": Start, "run": Run}[fields.pop("kind")]
        return kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("row", text[:80], f"each row is a start or a run: {error!r}") from error
