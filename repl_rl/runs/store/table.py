"""Export of trajectories to a table with one row each, in the format of the library `datasets`, and lossless import.

Columns are those that other trainers read: ids, loss mask, log probabilities, rewards. A further column holds the exact
record, as a line of JSON. Only that column is read back, and rows whose other columns contradict it are refused.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from repl_rl.credit.credited import Credited, LineCredit
from repl_rl.errors import ReplRLError, StoreError
from repl_rl.machine.files import is_stream, write_named
from repl_rl.machine.folders import private_folder, whole_folder
from repl_rl.machine.outputs import UNFINISHED, Output, followed, refuse_other_file
from repl_rl.record.trajectory import Sampled, Trajectory, spread
from repl_rl.runs.store.records import dump, parse
from repl_rl.tasks import Workspace
from repl_rl.tasks.unpacked import Record, beyond, most_claimed, most_unpacked, parquet_records, size_of_record

Cell = str | int | float | bool | list[str] | list[str | None] | list[int] | list[float] | list[bool] | None
Row = Mapping[str, Cell]
PARQUET = ".parquet"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table."""

    kind: str
    """Arrow type, and the shape of its lists; a column without a shape holds no lists."""
    about: str
    of: Callable[[Trajectory, Sequence[LineCredit]], Cell]
    """Function that computes the cell from a trajectory and the credit of its lines."""


COLUMNS: Mapping[str, Column] = {
    "id": Column("string", "name of the trajectory", lambda t, _: t.id),
    "task_id": Column("string", "its task; rows of one task and one policy step are a group", lambda t, _: t.task_id),
    "policy_step": Column("int64", "optimizer steps that the policy had seen", lambda t, _: t.policy_step),
    "prompt": Column("string", "caption of `prompt_ids`", lambda t, _: t.prompt.text),
    "prompt_ids": Column("int64 (P,)", "what it starts from", lambda t, _: list(t.prompt.token_ids)),
    "completion": Column("string", "caption of `completion_ids`", lambda t, _: _completion(t)),
    "completion_ids": Column("int64 (T,)", "what follows", lambda t, _: list(t.completion_ids)),
    "loss_mask": Column("bool (T,)", "true where the policy sampled the token", lambda t, _: list(t.loss_mask)),
    "logprobs": Column(
        "float64 (T,)", "of the sampling policy, nats; 0 where masked", lambda t, _: list(t.logprobs_T())
    ),
    "advantages": Column(
        "float64 (T,)",
        "what each token was trained with, 0 where masked; null: nothing was learned from it",
        lambda t, credit_L: list(spread([c.advantage for c in credit_L], t)) if credit_L else None,
    ),
    "lines": Column(
        "int64 (T,)",
        "the line that the token belongs to, from 0; -1: it was observed",
        lambda t, _: [int(number) for number in spread(range(len(t.lines)), t, -1)],
    ),
    "line_texts": Column("string (L,)", "what was written", lambda t, _: [line.text for line in t.lines]),
    "line_statuses": Column(
        "string (L,)",
        "how the console took it; null: it was not run",
        lambda t, _: [line.execution.status.value if line.execution else None for line in t.lines],
    ),
    "line_given": Column(
        "float64 (L,)",
        "sum of the rewards that the sampler gave it",
        lambda t, _: [math.fsum(reward.value for reward in line.rewards) for line in t.lines],
    ),
    "line_rewards": Column(
        "float64 (L,)",
        "its reward as the estimator saw it; null: nothing was learned from it",
        lambda _, credit_L: [c.reward for c in credit_L] or None,
    ),
    "outcome": Column("float64", "reward of the whole rollout; null: nobody graded it", lambda t, _: t.outcome),
    "solved": Column("bool", "whether its answer is right", lambda t, _: t.solved),
    "answer": Column("string", "what was submitted; null: nothing", lambda t, _: t.answer),
    "stop": Column("string", "who decided that it was over", lambda t, _: t.stop.value),
    "failure": Column(
        "string",
        "what failed on our side; null: nothing. Such a row is no sample",
        lambda t, _: f"{t.failure.kind}: {t.failure.message}" if t.failure else None,
    ),
    "record": Column(
        "string", "the exact record, JSON", lambda t, credit_L: dump(Credited(t, tuple(credit_L))).decode()
    ),
    "workspace": Column(
        "string",
        "what its console began with, JSON; null: nothing",
        lambda t, _: t.workspace.content.decode() if t.workspace is not None else None,
    ),
}
"""Columns in order. Shapes: P tokens of the prompt, T tokens after it, L lines."""


def row_of(entry: Credited) -> Row:
    """Return the row of an entry. Characters that UTF-8 cannot encode are replaced in texts, and kept in the record.

    Raises:
        StoreError: its workspace is no longer stored.
    """
    return {name: _sayable(column.of(entry.trajectory, entry.credit_L)) for name, column in COLUMNS.items()}


def entry_of(row: Mapping[str, object], where: str) -> Credited:
    """Return the entry of a row of `row_of`. Columns other than `record` may be missing; unknown ones are ignored.

    Raises:
        StoreError: it has no record, or a column contradicts the record; `where` begins the message.
    """
    record = row.get("record")
    if not isinstance(record, str):
        raise StoreError(f"{where}: it has no column 'record'; give a table that `repl-rl export` wrote")
    entry = parse(record.encode(), where)
    setup = row.get("workspace")
    if isinstance(setup, str) and entry.trajectory.workspace is not None:
        workspace = Workspace.read(setup.encode())
        if workspace != entry.trajectory.workspace:
            raise StoreError(f"{where}: its workspace is not the one of its record; export it again")
        entry = replace(entry, trajectory=replace(entry.trajectory, workspace=workspace))
    # Compute all columns again, so that an edited cell is refused instead of ignored.
    for name, said in row_of(entry).items():
        if name in row and row[name] != said:
            told = f"column {name!r} is {row[name]!r:.80}, its record says {said!r:.80}"
            raise StoreError(f"{where}: {told}; rows may be left out, not changed")
    return entry


def write_table(entries: Iterable[Credited], out: Path) -> int:
    """Write a Parquet file, or else a folder for `datasets.load_from_disk`. The write is atomic.

    An older table in `out` is replaced; anything else there is refused. A pipe gets the Parquet file. Rows are written
    as they arrive, so only a few of them are in memory.

    Returns:
        The number of rows.
    """
    # Takes seconds to import.
    from datasets import Dataset, Features, List, Value

    refuse_other_table(out)
    stream = out.suffix == PARQUET and is_stream(out, "out")
    if not stream:
        out = Path(os.path.realpath(out)) if out.suffix == PARQUET else followed("out", out)
        out.parent.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, object] = {}
    for name, column in COLUMNS.items():
        kind, _, shape = column.kind.partition(" ")
        kinds[name] = List(Value(kind)) if shape else Value(kind)

    def rows() -> Iterator[Row]:
        yield from map(row_of, entries)

    place = Path(tempfile.gettempdir()) if stream else out.parent
    # `datasets` caches its results by the code that made them; a fresh cache folder can hold nothing stale.
    with private_folder(place, UNFINISHED) as folder, _plain_link(folder) as cache:
        with _unwrapped():
            table = Dataset.from_generator(rows, features=Features(kinds), cache_dir=str(cache))
        if out.suffix == PARQUET:
            with write_named(out, "out") as torn, torn.open("wb") as file:
                table.to_parquet(file)
        else:
            with whole_folder(out, TABLE) as made, _plain_link(made) as link:
                table.save_to_disk(str(link))
        return int(table.num_rows)


def refuse_other_table(out: Path) -> None:
    """Raise ConfigError for a path that holds something other than a table of `write_table`.

    Raises:
        ConfigError: it may not be replaced.
    """
    if out.suffix == PARQUET:
        refuse_other_file("out", out, _is_own_parquet)
    else:
        TABLE.refuse_other(out)


def _are_own(columns: Iterable[str]) -> bool:
    """Return True if all columns are ours; a table with a user's column is not replaced."""
    return "record" in (names := set(columns)) and names <= COLUMNS.keys()


def _is_own_parquet(file: Path) -> bool:
    # Takes a second to import.
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    try:
        return _are_own(read_schema(file).names)
    except (ArrowException, OSError):
        return False


def _is_own_folder(folder: Path) -> bool:
    """Return True for a table folder of version 0.2, by its columns."""
    try:
        said = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        return _are_own(said["features"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


TABLE = Output("export", "out", ("data-*.arrow", "dataset_info.json", "state.json"), _is_own_folder, "choose another")
"""Output type of a table folder: its file names, and the test that recognizes one of version 0.2."""


def is_table(source: Path) -> bool:
    """Return True if `source` is a table of `write_table`, and not a run or trajectory file."""
    return source.suffix == PARQUET or (source / "state.json").is_file() or (source / "dataset_dict.json").is_file()


@dataclass(frozen=True, slots=True)
class Table:
    """Table that is open for reading."""

    entries: Iterator[Credited]
    """Trajectories, read row by row. Reading raises the errors of `entry_of`."""
    rows: int
    others: tuple[str, ...]
    """Names of columns that `COLUMNS` does not have."""


@contextmanager
def open_table(source: Path) -> Iterator[Table]:
    """Open a table that `write_table` wrote, for the length of a `with`.

    Raises:
        StoreError: it cannot be read, has several parts, or is a Parquet file that unpacks to too much.
    """
    if source.suffix == PARQUET:
        with _open_parquet(source) as opened:
            yield opened
        return
    # Takes seconds to import.
    from datasets import load_from_disk

    with _plain_link(source) as link:
        try:
            table = load_from_disk(str(link))
        # The library raises many types of errors, which have no common base class.
        except Exception as error:
            reason = " ".join(str(error).replace(str(link), str(source)).split())[:200]
            raise StoreError(f"{source} cannot be read as a table: {reason}") from error
        if isinstance(table, Mapping):
            raise StoreError(f"{source} has the parts {', '.join(table)}; give the folder of one of them")
        entries = (entry_of(row, f"{source}, row {number}") for number, row in enumerate(table, 1))
        yield Table(entries, int(table.num_rows), tuple(name for name in table.column_names if name not in COLUMNS))


@contextmanager
def _open_parquet(source: Path) -> Iterator[Table]:
    # Takes a second to import.
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(source)
        most = most_unpacked(source.stat().st_size)
    # The library raises many types of errors, which have no common base class.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise StoreError(f"{source} cannot be read as a table: {reason}") from error
    with file:
        if most_claimed(file.metadata) > most:
            raise StoreError(f"{source} cannot be read as a table: {beyond(most)}")
        names = file.schema_arrow.names
        entries = _limit_entries(source, parquet_records(file, most), most)
        yield Table(entries, file.metadata.num_rows, tuple(name for name in names if name not in COLUMNS))


def _limit_entries(source: Path, records: Iterable[Record], most: int) -> Iterator[Credited]:
    """Yield the trajectories of rows until these take more than `most` bytes.

    Raises:
        StoreError: they take more, a row cannot be read, or `entry_of` refuses it.
    """
    rows, taken, number = iter(records), 0, 0
    while True:
        number += 1
        where = f"{source}, row {number}"
        try:
            row = next(rows, None)
        # As in `_open_parquet`.
        except Exception as error:
            raise StoreError(f"{where} cannot be read: {' '.join(str(error).split())[:200]}") from error
        if row is None:
            return
        taken += size_of_record(row)
        if taken > most:
            raise StoreError(f"{source} cannot be read as a table: {beyond(most)}")
        yield entry_of(row, where)


@contextmanager
def _plain_link(path: Path) -> Iterator[Path]:
    """Yield a link to `path` with a plain name, because `datasets` reads `[`, `*` and `::` in a path as patterns."""
    with tempfile.TemporaryDirectory(prefix="repl-rl-") as folder:
        link = Path(folder, "table").with_suffix(path.suffix if path.suffix == PARQUET else "")
        link.symlink_to(os.path.realpath(path))
        yield link


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the ReplRLError or OSError that the library wrapped in errors of other types."""
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, ReplRLError | OSError):
            found = found.__cause__ or found.__context__
        raise (error if found is None else found) from error


def _completion(t: Trajectory) -> str:
    parts = (segment.lines if isinstance(segment, Sampled) else (segment,) for segment in t.segments)
    return "".join(part.text for segment in parts for part in segment)


def _sayable(value: Cell) -> Cell:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list) and any(isinstance(each, str) for each in value):
        return [each.encode(errors="replace").decode() if isinstance(each, str) else None for each in value]
    return value
