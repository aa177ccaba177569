"""Trajectory files: one per step, appended record by record, read in order or by id."""

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from repl_rl.credit.credited_trajectory import CreditedTrajectory, LineCredit
from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import StoreError
from repl_rl.runs.run_metadata import read_text
from repl_rl.runs.store.appendable_gzip import (
    DamagedRegion,
    RecordLocation,
    is_plain_gzip,
    pack_member,
    read_plain_lines,
    scan_members,
    unpack_member,
)
from repl_rl.runs.store.trajectory_json import dump_record, parse_record, store_workspace
from repl_rl.tasks.bounded_decompression import compute_max_unpacked_bytes, describe_size_error
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import is_inside

_TOKENS = "tokens.json"
"""File with the text of each token id."""


def get_step_path(folder: Path, step: int) -> Path:
    """Return the path of a step's file (step >= 0) in a `trajectories/` folder."""
    return folder / f"{step:06d}.jsonl.gz"


def write_step(
    folder: Path, step: int, trajectories: Sequence[Trajectory], credit: Sequence[Sequence[LineCredit]] = ()
) -> Path:
    """Write the trajectories of one step as `folder/NNNNNN.jsonl.gz`, replacing an older file of that step.

    `credit` has one entry per trajectory, or is empty. Each record goes to the operating system before the next one is
    packed. A process that is killed here loses only the current record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = get_step_path(folder, step)
    path.unlink(missing_ok=True)
    rows = credit or [()] * len(trajectories)
    append_records(path, (CreditedTrajectory(t, tuple(row)) for t, row in zip(trajectories, rows, strict=True)))
    return path


def is_step_file(path: Path) -> bool:
    """Return True if the file begins with a trajectory record of this or an older version."""
    try:
        item = next(_scan_plain_file(path) if is_plain_gzip(path) else scan_members(path), None)
    except (StoreError, OSError):
        return False
    return isinstance(item, RecordLocation)


def append_records(path: Path, entries: Iterable[CreditedTrajectory | Trajectory]) -> None:
    """Append records to a trajectory file, which may not exist yet; store their workspaces in the same folder.

    Raises:
        StoreError: the file is damaged or has another format, so appended records could not be found later.
    """
    if path.exists():
        damage = next((region for region in scan_members(path) if isinstance(region, DamagedRegion)), None)
        if damage is not None:
            raise StoreError(f"{damage}; remove or replace the file, because records after the damage cannot be found")
    with path.open("ab") as file:
        for entry in entries:
            credited = entry if isinstance(entry, CreditedTrajectory) else CreditedTrajectory(entry)
            store_workspace(path.parent, credited.trajectory.workspace)
            file.write(pack_member(credited.trajectory.id, dump_record(credited)))
            # An unbuffered file may write only a part and report success, so a buffer is flushed per record.
            file.flush()
        os.fsync(file.fileno())


def write_tokens(folder: Path, texts: Sequence[str]) -> None:
    """Store the text of each token id next to the trajectories, as captions for readers without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _TOKENS).write_text(json.dumps(list(texts)))


@keeps_old_names
class Store:
    """Trajectories of a run folder, a `trajectories/` folder, or one file. Opening it reads only the index.

    Raises:
        StoreError: the file or folder does not exist.
    """

    def __init__(self, source: Path) -> None:
        if (source / "trajectories").is_dir():
            if not is_inside(source, source / "trajectories"):
                raise StoreError(
                    f"{str(source / 'trajectories')!r} is a link that leads out of its folder; name its target"
                )
            source = source / "trajectories"
        if not source.exists():
            raise StoreError(f"no trajectories at {str(source)!r}; give a run's folder or one of its trajectory files")
        self.source = source
        self.damaged_regions: list[DamagedRegion] = []
        """Unreadable parts that were found so far. Reading can continue after one."""
        self._locations: list[RecordLocation] = []
        self._total_bytes = 0
        # Build the index: the position of each record, without unpacking any.
        for path in sorted(source.glob("*.jsonl.gz")) if source.is_dir() else [source]:
            if not path.is_file() or (path != source and not is_inside(source, path)):
                self.damaged_regions.append(
                    DamagedRegion(path, 0, "it is a link that leads out of its folder, or no file")
                )
                continue
            self._total_bytes += path.stat().st_size
            for item in _scan_plain_file(path) if is_plain_gzip(path) else scan_members(path):
                if isinstance(item, RecordLocation):
                    self._locations.append(item)
                else:
                    self.damaged_regions.append(item)
        self._by_id: dict[str, RecordLocation] = {}
        # The first trajectory of an id wins.
        for location in self._locations:
            self._by_id.setdefault(location.id, location)

    def __len__(self) -> int:
        return len(self._locations)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the trajectories, in order."""
        return tuple(location.id for location in self._locations)

    def __getitem__(self, id: str) -> CreditedTrajectory:
        """Return the trajectory of that id, the first one if there are several.

        A child trajectory, whose id is PARENT/NAME, is read from the record of its parent.

        Raises:
            StoreError: it does not exist, or is damaged.
        """
        if id not in self._by_id:
            child = self._find_child(id)
            if child is not None:
                return child
            matches = difflib.get_close_matches(id, self._by_id, n=1)
            prefix = "did you mean" if matches else "the first one is"
            hint = "".join(f"; {prefix} {name!r}" for name in (matches or self.ids)[:1])
            raise StoreError(f"no trajectory {id!r} in {self.source}{hint}")
        return _load_record(self._by_id[id])

    def _find_child(self, id: str) -> CreditedTrajectory | None:
        """Return a child trajectory, which was sampled for a host function call of another one."""
        parent = id.rpartition("/")[0]
        if not parent:
            return None
        parent_entry = self[parent] if parent in self._by_id else self._find_child(parent)
        children = parent_entry.trajectory.children if parent_entry is not None else ()
        return next((CreditedTrajectory(child) for child in children if child.id == id), None)

    def __iter__(self) -> Iterator[CreditedTrajectory]:
        """Yield all readable trajectories in order. A damaged one is skipped and added to `damaged_regions`."""
        plain_path: Path | None = None
        unpacked, max_bytes = 0, compute_max_unpacked_bytes(self._total_bytes)
        for location in self._locations:
            # A plain file can only be read from its beginning, so all its entries come at its first place.
            if location.is_plain:
                if location.path != plain_path:
                    plain_path = location.path
                    yield from _read_plain_entries(plain_path)
                continue
            try:
                record = unpack_member(location)
                # Limit the total, so that a hostile file cannot fill the memory.
                unpacked += len(record)
                if unpacked > max_bytes:
                    self._record_damage(DamagedRegion(location.path, location.offset, describe_size_error(max_bytes)))
                    return
                entry = _parse_record(location, record)
            except StoreError as error:
                self._record_damage(DamagedRegion(location.path, location.offset, str(error)))
            else:
                yield entry

    def _record_damage(self, region: DamagedRegion) -> None:
        if region not in self.damaged_regions:
            self.damaged_regions.append(region)

    def read_tokens(self) -> tuple[str, ...]:
        """Return the text of each token id, or () if the run did not store it.

        Raises:
            StoreError: the file is a link that leads out of the folder, or holds something else.
        """
        path = (self.source if self.source.is_dir() else self.source.parent) / _TOKENS
        if (text := read_text(path)) is None:
            return ()
        try:
            texts = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path} holds no texts of tokens: {error}") from error
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise StoreError(f"{path} holds no texts of tokens; remove it, or copy it from its run")
        return tuple(texts)


def read_trajectories(source: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a step's file, a run folder or a `trajectories/` folder, in order.

    Raises:
        StoreError: the file is missing; or a part is damaged, raised after everything readable.
    """
    store = Store(source)
    for entry in store:
        yield entry.trajectory
    if store.damaged_regions:
        raise StoreError("; ".join(map(str, store.damaged_regions)))


def _load_record(location: RecordLocation) -> CreditedTrajectory:
    return _parse_record(location, unpack_member(location))


def _parse_record(location: RecordLocation, record: bytes) -> CreditedTrajectory:
    position = f"line {location.offset + 1}" if location.is_plain else f"byte {location.offset}"
    return parse_record(record, f"{location.path}, {position}", location.path.parent)


def _read_plain_entries(path: Path) -> Iterator[CreditedTrajectory]:
    """Yield the trajectories of an ordinary gzip file without stored record sizes, up to its damaged part."""
    for number, line in enumerate(read_plain_lines(path), 1):
        if not isinstance(line, DamagedRegion):
            yield parse_record(line, f"{path}, line {number}", path.parent)


def _scan_plain_file(path: Path) -> Iterator[RecordLocation | DamagedRegion]:
    """Yield the position of each record of an ordinary gzip file. It stores no record sizes, so it is unpacked."""
    for number, line in enumerate(read_plain_lines(path)):
        if isinstance(line, DamagedRegion):
            yield line
        else:
            yield RecordLocation(path, number, 0, parse_record(line, f"{path}, line {number + 1}").trajectory.id)
