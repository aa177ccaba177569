"""Export formats of trajectories: console text, table of the library `datasets`, and Jupyter notebook (nbformat 4.5).

- Text: `to_text` writes a console session, and `parse_session` reads one.
- Table: one row per trajectory, with the columns that other trainers read: ids, loss mask, log probabilities, rewards.
- Notebook: each line is a code cell with its output. Cells are for people, and their text is escaped.

Tables and notebooks also hold the exact record, as a line of JSON, and the workspace. Only these are read back. A table
row whose other columns contradict its record is refused; edited cells of a notebook have no effect.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from repl_rl.credit.credited_trajectory import CreditedTrajectory, LineCredit
from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ReplRLError, StoreError
from repl_rl.runs.store.trajectory_json import dump_record, parse_record
from repl_rl.tasks import Workspace
from repl_rl.tasks.bounded_decompression import (
    Record,
    compute_claimed_bytes,
    compute_max_unpacked_bytes,
    describe_size_error,
    estimate_record_bytes,
    read_parquet_records,
)
from repl_rl.trajectory.console_text import PS1, PS2, TypedLineTracker
from repl_rl.trajectory.trajectory import Line, LineEnd, Observed, Sampled, Stop, Trajectory, spread
from repl_rl.utils.atomic_files import (
    UNFINISHED,
    OutputFolder,
    is_stream,
    open_private_folder,
    replace_folder_atomically,
    resolve_link,
    validate_replaceable_file,
    write_named,
)

_PROMPT_LIKE = re.compile(r"^(?=>>>|\.\.\.|\\)", re.MULTILINE)
_UNUSUAL_CHAR = re.compile(r"[^\x20-\x7e\n\t]")
_OBSERVATION_MARK = re.compile("[⟦⟧]")
_FINAL_STOPS = (Stop.ANSWERED, Stop.EXITED, Stop.EOS)
"""Stops after which the console shows no further prompt."""
_NO_NEWLINE = "\\"
"""Marks that the output above it does not end in a newline; it is a line by itself."""


@keeps_old_names
@dataclass(frozen=True, slots=True)
class LineTransition:
    """Line of the policy and the observation after it."""

    line: Line
    observed: Observed | None
    """Observation with the next prompt; None means that nothing was inserted after the line."""
    prompt: str
    """Prompt before the line: ">>> ", "... ", or "" if the line was not written at a console's prompt."""
    was_typed: bool
    """True if the console received the line unchanged.

    False if nothing ran, or other code, such as a block of the line.
    """
    next_prompt: str
    """Next prompt of the console, at the end of the observation; "" if it has none."""

    @property
    def output(self) -> str:
        """Observation without the next prompt."""
        return self.observed.text.removesuffix(self.next_prompt) if self.observed is not None else ""


@dataclass(frozen=True, slots=True)
class ConsoleTurn:
    """Line that was typed at one prompt, and its output."""

    source: str
    """One physical line, without its newline."""
    output: str


def build_transitions(trajectory: Trajectory) -> tuple[LineTransition, ...]:
    """Return each line with its observation, shape (L,)."""
    transitions: list[LineTransition] = []
    tracker = TypedLineTracker()
    prompt = PS1 if trajectory.prompt.text.endswith(PS1) else ""
    for index, segment in enumerate(trajectory.segments):
        if not isinstance(segment, Sampled):
            continue
        # Only the last line of a segment can have an observation, which is the next segment.
        next_segment = trajectory.segments[index + 1] if index + 1 < len(trajectory.segments) else None
        for number, line in enumerate(segment.lines, 1):
            execution = line.execution
            typed = execution is not None and tracker.check_typed(line.text, execution.ran, line.end is LineEnd.EOS)
            if typed and transitions and not prompt and transitions[-1].observed is not None:
                # The sampler inserted the prompt itself, after its own text.
                prompt = _find_next_prompt(transitions[-1].observed.text)
                transitions[-1] = replace(transitions[-1], next_prompt=prompt)
            observed = next_segment if number == len(segment.lines) and isinstance(next_segment, Observed) else None
            # No prompt follows the end, even if the last output looks like one.
            is_final = trajectory.stop in _FINAL_STOPS and len(transitions) + 1 == len(trajectory.lines)
            next_prompt = _find_next_prompt(observed.text) if typed and observed is not None and not is_final else ""
            transitions.append(LineTransition(line, observed, prompt, typed, next_prompt))
            prompt = next_prompt
    return tuple(transitions)


def _find_next_prompt(text: str) -> str:
    """Return the console's prompt at the end of `text`, or "" without one."""
    return next((prompt for prompt in (PS1, PS2) if text.endswith(prompt)), "")


def escape_control_characters(text: str) -> str:
    """Return `text` with control and other unprintable characters escaped; newlines and tabs are kept."""
    return _UNUSUAL_CHAR.sub(lambda match: match[0] if match[0].isprintable() else repr(match[0])[1:-1], text)


def escape_output(output: str, prompt: bool = False) -> str:
    """Return `output` safe to print.

    Lines of output that begin like a prompt get a backslash, so that no program can fake a typed line.

    If `prompt` is True, a prompt at the very end of `output` comes from the console, and is not escaped.
    """
    body = output.removesuffix(_find_next_prompt(output)) if prompt else output
    return _PROMPT_LIKE.sub(r"\\", escape_control_characters(body)) + output[len(body) :]


def to_text(trajectory: Trajectory) -> str:
    """Return the session as text: the prompt, then each physical line at its prompt, then its output.

    The text is safe to print, because control characters are escaped. Output that looks like a prompt gets a backslash
    before it, so that no program can fake a line of the policy. A last line of only a backslash means that the output
    does not end in a newline.
    """
    head = trajectory.prompt.text.removesuffix(PS1)
    parts = [_add_final_newline(escape_output(head))] if head else []
    # A line of several physical lines shows continuation prompts, as in a console.
    for transition in build_transitions(trajectory):
        first, *continuation = escape_control_characters(transition.line.text).removesuffix("\n").split("\n")
        parts.append(f"{transition.prompt or PS1}{first}\n")
        parts += [f"{PS2}{physical}\n" for physical in continuation]
        parts.append(_add_final_newline(escape_output(transition.output)))
    return "".join(parts)


def _add_final_newline(output: str) -> str:
    """Return `output` with a newline at its end, and with a mark if it had none."""
    return output if not output or output.endswith("\n") else f"{output}\n{_NO_NEWLINE}\n"


def mark_observations(trajectory: Trajectory) -> str:
    """Return the text after the prompt, safe to print, with ⟦ and ⟧ around observations. Output has no such marks."""
    texts = [
        f"⟦{_remove_marks(segment.text)}⟧"
        if isinstance(segment, Observed)
        else "".join(_remove_marks(line.text) for line in segment.lines)
        for segment in trajectory.segments
    ]
    return "".join(texts)


def _remove_marks(text: str) -> str:
    """Escape control characters and the marks of observations, so that no output can fake one."""
    return _OBSERVATION_MARK.sub(lambda match: f"\\u{ord(match[0]):x}", escape_control_characters(text))


def parse_session(text: str) -> tuple[ConsoleTurn, ...]:
    """Parse typed lines and outputs from `to_text` or a real console; text before the first prompt is skipped."""
    return tuple(_iterate_turns(text))


def _iterate_turns(text: str) -> Iterator[ConsoleTurn]:
    """Yield each typed line once its output is complete: at the next prompt, or at the end."""
    source: str | None = None
    output: list[str] = []
    for row in text.split("\n"):
        # A prompt without text may have lost its trailing space, for example in pasted text.
        typed = row.startswith((PS1, PS2)) or row in (PS1.rstrip(), PS2.rstrip())
        if typed:
            if source is not None:
                yield ConsoleTurn(source, _join_output(output))
            source, output = row[len(PS1) :], []
        else:
            output.append(row)
    if source is not None:
        yield ConsoleTurn(source, _join_output(output[:-1] if output and not output[-1] else output))


def _join_output(rows: list[str]) -> str:
    """Join rows of output, without the backslashes that `to_text` adds."""
    lacks_newline = bool(rows) and rows[-1] == _NO_NEWLINE
    text = "".join(f"{row.removeprefix(_NO_NEWLINE)}\n" for row in (rows[:-1] if lacks_newline else rows))
    return text.removesuffix("\n") if lacks_newline else text


TableCell = str | int | float | bool | list[str] | list[str | None] | list[int] | list[float] | list[bool] | None
TableRow = Mapping[str, TableCell]
PARQUET = ".parquet"
"""Suffix that selects a Parquet file. A path without it is a folder in the format of the library `datasets`."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of the table."""

    kind: str
    """Arrow type of the values. If a shape such as `(T,)` follows it, each cell is a list of that shape."""
    description: str
    compute: Callable[[Trajectory, Sequence[LineCredit]], TableCell]
    """Function that computes the cell from a trajectory and the credit of its lines."""


COLUMNS: Mapping[str, TableColumn] = {
    "id": TableColumn("string", "name of the trajectory", lambda t, _: t.id),
    "task_id": TableColumn(
        "string", "its task; rows of one task and one policy step are a group", lambda t, _: t.task_id
    ),
    "policy_step": TableColumn("int64", "optimizer steps behind the policy", lambda t, _: t.policy_step),
    "prompt": TableColumn("string", "caption of `prompt_ids`", lambda t, _: t.prompt.text),
    "prompt_ids": TableColumn("int64 (P,)", "ids of the prompt", lambda t, _: list(t.prompt.token_ids)),
    "completion": TableColumn("string", "caption of `completion_ids`", lambda t, _: _join_completion(t)),
    "completion_ids": TableColumn("int64 (T,)", "ids after the prompt", lambda t, _: list(t.completion_ids)),
    "loss_mask": TableColumn("bool (T,)", "true where the policy sampled the token", lambda t, _: list(t.loss_mask)),
    "logprobs": TableColumn(
        "float64 (T,)", "of the sampling policy, nats; 0 where masked", lambda t, _: list(t.logprobs_T())
    ),
    "advantages": TableColumn(
        "float64 (T,)",
        "advantage of each token in training, 0 where masked; null if it was not trained on",
        lambda t, credit_L: list(spread([c.advantage for c in credit_L], t)) if credit_L else None,
    ),
    "lines": TableColumn(
        "int64 (T,)",
        "line of each token, from 0; -1 if it was observed",
        lambda t, _: [int(number) for number in spread(range(len(t.lines)), t, -1)],
    ),
    "line_texts": TableColumn("string (L,)", "text of each line", lambda t, _: [line.text for line in t.lines]),
    "line_statuses": TableColumn(
        "string (L,)",
        "status of each line in the console; null if it was not run",
        lambda t, _: [line.execution.status.value if line.execution else None for line in t.lines],
    ),
    "line_given": TableColumn(
        "float64 (L,)",
        "sum of the sampler's rewards for each line",
        lambda t, _: [math.fsum(reward.value for reward in line.rewards) for line in t.lines],
    ),
    "line_rewards": TableColumn(
        "float64 (L,)",
        "reward of each line as the estimator saw it; null if it was not trained on",
        lambda _, credit_L: [c.reward for c in credit_L] or None,
    ),
    "outcome": TableColumn("float64", "reward of the whole rollout; null if it was not graded", lambda t, _: t.outcome),
    "solved": TableColumn("bool", "true if its answer is right", lambda t, _: t.solved),
    "answer": TableColumn("string", "submitted answer; null if there is none", lambda t, _: t.answer),
    "stop": TableColumn("string", "reason for the end of the rollout", lambda t, _: t.stop.value),
    "failure": TableColumn(
        "string",
        "failure on our side; null if there is none. Such a row is no sample",
        lambda t, _: f"{t.failure.kind}: {t.failure.message}" if t.failure else None,
    ),
    "record": TableColumn(
        "string",
        "the exact record, JSON",
        lambda t, credit_L: dump_record(CreditedTrajectory(t, tuple(credit_L))).decode(),
    ),
    "workspace": TableColumn(
        "string",
        "initial content of its console, JSON; null if it was empty",
        lambda t, _: t.workspace.content.decode() if t.workspace is not None else None,
    ),
}
"""Columns in order. Shapes: P tokens of the prompt, T tokens after it, L lines."""


def build_table_row(entry: CreditedTrajectory) -> TableRow:
    """Return the row of an entry. Characters that UTF-8 cannot encode are replaced, except in the column `record`.

    Raises:
        StoreError: the stored workspace of the trajectory cannot be read.
    """
    return {
        name: _replace_surrogates(column.compute(entry.trajectory, entry.credit_L)) for name, column in COLUMNS.items()
    }


def parse_table_row(row: Mapping[str, object], where: str) -> CreditedTrajectory:
    """Return the entry of a row of `build_table_row`.

    Columns other than `record` may be missing; unknown ones are ignored.

    Raises:
        StoreError: it has no record, or a column contradicts the record; `where` begins the message.
    """
    record = row.get("record")
    if not isinstance(record, str):
        raise StoreError(f"{where}: it has no column 'record'; give a table that `repl-rl export` wrote")
    entry = parse_record(record.encode(), where)
    content = row.get("workspace")
    if isinstance(content, str) and entry.trajectory.workspace is not None:
        workspace = Workspace.from_content(content.encode())
        if workspace != entry.trajectory.workspace:
            raise StoreError(f"{where}: its workspace is not the one of its record; export it again")
        entry = replace(entry, trajectory=replace(entry.trajectory, workspace=workspace))
    # Compute all columns again, so that an edited cell is refused instead of ignored.
    for name, computed in build_table_row(entry).items():
        if name in row and row[name] != computed:
            contradiction = f"column {name!r} is {row[name]!r:.80}, its record has {computed!r:.80}"
            raise StoreError(f"{where}: {contradiction}; rows may be left out, not changed")
    return entry


def write_table(entries: Iterable[CreditedTrajectory], out: Path) -> int:
    """Write a Parquet file, or else a folder for `datasets.load_from_disk`. The write is atomic.

    An older table in `out` is replaced; anything else there is refused. A pipe gets the Parquet file. Rows are written
    as they arrive, so only a few of them are in memory.

    Returns:
        The number of rows.
    """
    from datasets import Dataset, Features, List, Value  # takes seconds to import

    # A stream gets the bytes of a Parquet file; every other target is replaced at the end.
    validate_table_target(out)
    stream = out.suffix == PARQUET and is_stream(out, "out")
    if not stream:
        out = Path(os.path.realpath(out)) if out.suffix == PARQUET else resolve_link("out", out)
        out.parent.mkdir(parents=True, exist_ok=True)
    # Arrow cannot guess the type of a column whose first cells are empty, so give all types.
    kinds: dict[str, object] = {}
    for name, column in COLUMNS.items():
        kind, _, shape = column.kind.partition(" ")
        kinds[name] = List(Value(kind)) if shape else Value(kind)

    def iterate_rows() -> Iterator[TableRow]:
        yield from map(build_table_row, entries)

    parent = Path(tempfile.gettempdir()) if stream else out.parent
    # `datasets` caches its results by the code that made them; a fresh cache folder can hold nothing stale.
    with open_private_folder(parent, UNFINISHED) as folder, _make_plain_link(folder) as cache:
        # The library wraps errors of our generator in its own.
        with _unwrap_errors():
            table = Dataset.from_generator(iterate_rows, features=Features(kinds), cache_dir=str(cache))
        if out.suffix == PARQUET:
            with write_named(out, "out") as unfinished, unfinished.open("wb") as file:
                table.to_parquet(file)
        else:
            with replace_folder_atomically(out, TABLE) as target, _make_plain_link(target) as link:
                table.save_to_disk(str(link))
        return int(table.num_rows)


def validate_table_target(out: Path) -> None:
    """Raise ConfigError for a path that holds something other than a table of `write_table`.

    Raises:
        ConfigError: it may not be replaced.
    """
    if out.suffix == PARQUET:
        validate_replaceable_file("out", out, _is_own_parquet)
    else:
        TABLE.validate_replaceable(out)


def _has_only_own_columns(columns: Iterable[str]) -> bool:
    """Return True if all columns are ours; a table with a user's column is not replaced."""
    return "record" in (names := set(columns)) and names <= COLUMNS.keys()


def _is_own_parquet(file: Path) -> bool:
    """Return True if `file` is a Parquet file with our columns only."""
    from pyarrow import ArrowException  # takes a second to import
    from pyarrow.parquet import read_schema  # takes a second to import

    try:
        return _has_only_own_columns(read_schema(file).names)
    except (ArrowException, OSError):
        return False


def _is_legacy_table(folder: Path) -> bool:
    """Return True for a table folder of version 0.2, by its columns."""
    try:
        info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        return _has_only_own_columns(info["features"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


TABLE = OutputFolder(
    "export", "out", ("data-*.arrow", "dataset_info.json", "state.json"), _is_legacy_table, "choose another"
)
"""Output type of a table folder: its file names, and the test that recognizes one of version 0.2."""


def is_table(source: Path) -> bool:
    """Return True if `source` is a table of `write_table`, and not a run or trajectory file."""
    return source.suffix == PARQUET or (source / "state.json").is_file() or (source / "dataset_dict.json").is_file()


@dataclass(frozen=True, slots=True)
class TrajectoryTable:
    """Table that is open for reading."""

    entries: Iterator[CreditedTrajectory]
    """Trajectories, read row by row. Reading raises the errors of `parse_table_row`."""
    row_count: int
    extra_columns: tuple[str, ...]
    """Names of columns that `COLUMNS` does not have."""


@contextmanager
def open_table(source: Path) -> Iterator[TrajectoryTable]:
    """Open a table that `write_table` wrote, for the length of a `with`.

    Raises:
        StoreError: the table cannot be read, has several splits, or is a Parquet file that is too large when unpacked.
    """
    if source.suffix == PARQUET:
        with _open_parquet(source) as parquet_table:
            yield parquet_table
        return
    from datasets import load_from_disk  # takes seconds to import

    with _make_plain_link(source) as link:
        try:
            table = load_from_disk(str(link))
        # The library raises many types of errors, which have no common base class.
        except Exception as error:
            reason = " ".join(str(error).replace(str(link), str(source)).split())[:200]
            raise StoreError(f"{source} cannot be read as a table: {reason}") from error
        if isinstance(table, Mapping):
            raise StoreError(f"{source} has the parts {', '.join(table)}; give the folder of one of them")
        entries = (parse_table_row(row, f"{source}, row {number}") for number, row in enumerate(table, 1))
        yield TrajectoryTable(
            entries, int(table.num_rows), tuple(name for name in table.column_names if name not in COLUMNS)
        )


@contextmanager
def _open_parquet(source: Path) -> Iterator[TrajectoryTable]:
    """Open a Parquet file that unpacks to a bounded size; see `open_table`."""
    from pyarrow.parquet import ParquetFile  # takes a second to import

    try:
        file = ParquetFile(source)
        max_bytes = compute_max_unpacked_bytes(source.stat().st_size)
    # The library raises many types of errors, which have no common base class.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise StoreError(f"{source} cannot be read as a table: {reason}") from error
    with file:
        if compute_claimed_bytes(file.metadata) > max_bytes:
            raise StoreError(f"{source} cannot be read as a table: {describe_size_error(max_bytes)}")
        names = file.schema_arrow.names
        entries = _limit_entries(source, read_parquet_records(file, max_bytes), max_bytes)
        yield TrajectoryTable(entries, file.metadata.num_rows, tuple(name for name in names if name not in COLUMNS))


def _limit_entries(source: Path, records: Iterable[Record], max_bytes: int) -> Iterator[CreditedTrajectory]:
    """Yield the trajectories of rows until these take more than `max_bytes` bytes.

    Raises:
        StoreError: they take more, a row cannot be read, or `parse_table_row` refuses it.
    """
    rows, total_bytes, number = iter(records), 0, 0
    while True:
        number += 1
        location = f"{source}, row {number}"
        try:
            row = next(rows, None)
        # As in `_open_parquet`.
        except Exception as error:
            raise StoreError(f"{location} cannot be read: {' '.join(str(error).split())[:200]}") from error
        if row is None:
            return
        total_bytes += estimate_record_bytes(row)
        if total_bytes > max_bytes:
            raise StoreError(f"{source} cannot be read as a table: {describe_size_error(max_bytes)}")
        yield parse_table_row(row, location)


@contextmanager
def _make_plain_link(path: Path) -> Iterator[Path]:
    """Yield a link to `path` with a plain name, because `datasets` reads `[`, `*` and `::` in a path as patterns."""
    with tempfile.TemporaryDirectory(prefix="repl-rl-") as folder:
        link = Path(folder, "table").with_suffix(path.suffix if path.suffix == PARQUET else "")
        link.symlink_to(os.path.realpath(path))
        yield link


@contextmanager
def _unwrap_errors() -> Iterator[None]:
    """Raise the ReplRLError or OSError that the library wrapped in errors of other types."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ReplRLError | OSError):
            cause = cause.__cause__ or cause.__context__
        raise (error if cause is None else cause) from error


def _join_completion(t: Trajectory) -> str:
    parts = (segment.lines if isinstance(segment, Sampled) else (segment,) for segment in t.segments)
    return "".join(part.text for segment in parts for part in segment)


def _replace_surrogates(value: TableCell) -> TableCell:
    """Replace lone surrogates in texts, which Arrow cannot store."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list) and any(isinstance(text, str) for text in value):
        return [text.encode(errors="replace").decode() if isinstance(text, str) else None for text in value]
    return value


_RECORD_KEY = "repl_rl"
_WORKSPACE_KEY = "repl_rl_workspace"
"""Keys in the notebook's metadata: `_RECORD_KEY` of the record, `_WORKSPACE_KEY` of the workspace content."""


def write_notebook(entry: CreditedTrajectory, path: Path) -> None:
    """Write the trajectory as a notebook to `path`."""
    path.write_text(to_notebook(entry), encoding="utf-8")


def to_notebook(entry: CreditedTrajectory) -> str:
    """Return the notebook as JSON."""
    t = entry.trajectory
    answer = "none" if t.answer is None else repr(t.answer)
    outcome = "not graded" if t.outcome is None else f"{t.outcome:g}"
    head = f"trajectory {t.id}\nended: {t.stop}; outcome: {outcome}; answer: {answer}\n\n{t.prompt.text}"
    credit_L = entry.credit_L or (None,) * len(t.lines)
    # The prompt becomes a raw cell, which Jupyter does not execute.
    prompt_cell: dict[str, object] = {
        "cell_type": "raw",
        "id": "prompt",
        "metadata": {},
        "source": escape_control_characters(head),
    }
    pairs = zip(build_transitions(t), credit_L, strict=True)
    workspace_metadata = {_WORKSPACE_KEY: t.workspace.content.decode()} if t.workspace is not None else {}
    notebook = {
        "cells": [
            prompt_cell,
            *(_build_notebook_cell(transition, credit, number) for number, (transition, credit) in enumerate(pairs, 1)),
        ],
        "metadata": {
            _RECORD_KEY: dump_record(entry).decode(),
            **workspace_metadata,
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1) + "\n"


def read_notebook(path: Path) -> CreditedTrajectory:
    """Return the trajectory that `write_notebook` wrote; edited cells have no effect on it.

    Raises:
        StoreError: it is not a notebook, or holds no trajectory.
    """
    try:
        metadata = json.loads(path.read_text())["metadata"]
        record, content = metadata.get(_RECORD_KEY), metadata.get(_WORKSPACE_KEY)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path} is no notebook: {error!r}") from error
    if record is None:
        raise StoreError(f"{path} holds no trajectory; give a notebook that was exported from one")
    entry = parse_record(str(record).encode("utf-8", "surrogatepass"), str(path))
    # A record names its workspace only by digest; the metadata holds its content.
    if entry.trajectory.workspace is None or content is None:
        return entry
    workspace = Workspace.from_content(str(content).encode("utf-8", "surrogatepass"))
    if workspace != entry.trajectory.workspace:
        raise StoreError(f"{path}: its workspace is not the one of its trajectory; export it again")
    return replace(entry, trajectory=replace(entry.trajectory, workspace=workspace))


def _build_notebook_cell(transition: LineTransition, credit: LineCredit | None, number: int) -> dict[str, object]:
    line, execution = transition.line, transition.line.execution
    shown = escape_control_characters(transition.output)
    metadata = {
        "status": execution.status.value if execution else None,
        "elapsed_s": execution.elapsed_s if execution else None,
        "rewards": {reward.name: reward.value for reward in line.rewards},
        "reward": credit.reward if credit else None,
        "advantage": credit.advantage if credit else None,
    }
    return {
        "cell_type": "code",
        "id": f"line-{number}",
        "execution_count": number,
        "metadata": {_RECORD_KEY: metadata},
        "source": escape_control_characters(line.text).removesuffix("\n"),
        "outputs": [{"output_type": "stream", "name": "stdout", "text": shown}] if shown else [],
    }
