"""Trajectory files: one per step, appended record by record, read in order or by id."""

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from repl_rl.credit.credited import Credited, LineCredit
from repl_rl.errors import StoreError
from repl_rl.machine.files import lies_in
from repl_rl.record.trajectory import Trajectory
from repl_rl.runs.store.members import (
    Damage,
    Place,
    is_plain,
    pack,
    plain_lines,
    scan,
    unpack,
)
from repl_rl.runs.store.records import dump, parse
from repl_rl.runs.store.workspaces import keep
from repl_rl.runs.told import text_of
from repl_rl.tasks.unpacked import beyond, most_unpacked

_TOKENS = "tokens.json"


def step_file(folder: Path, step: int) -> Path:
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
    path = step_file(folder, step)
    path.unlink(missing_ok=True)
    rows = credit or [()] * len(trajectories)
    append(path, (Credited(t, tuple(row)) for t, row in zip(trajectories, rows, strict=True)))
    return path


def is_step_file(path: Path) -> bool:
    """Return True if the file begins with a trajectory record of this or an older version."""
    try:
        found = next(_plain_places(path) if is_plain(path) else scan(path), None)
    except (StoreError, OSError):
        return False
    return isinstance(found, Place)


def append(path: Path, entries: Iterable[Credited | Trajectory]) -> None:
    """Append records to a trajectory file, which may not exist yet; store their workspaces in the same folder.

    Raises:
        StoreError: the file is damaged or has another format; appended records could not be found.
    """
    if path.exists():
        last = next((found for found in scan(path) if isinstance(found, Damage)), None)
        if last is not None:
            raise StoreError(f"{last}; nothing can be appended behind it")
    with path.open("ab") as file:
        for entry in entries:
            credited = entry if isinstance(entry, Credited) else Credited(entry)
            keep(path.parent, credited.trajectory.workspace)
            file.write(pack(credited.trajectory.id, dump(credited)))
            # An unbuffered file may write only a part and report success: hence the buffer, flushed per record.
            file.flush()
        os.fsync(file.fileno())


def write_tokens(folder: Path, texts: Sequence[str]) -> None:
    """Store the text of each token id next to the trajectories, as captions for readers without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _TOKENS).write_text(json.dumps(list(texts)))


class Store:
    """Trajectories of a run folder, a `trajectories/` folder, or one file. Opening it reads only the index.

    Raises:
        StoreError: the file or folder does not exist.
    """

    def __init__(self, source: Path) -> None:
        if (source / "trajectories").is_dir():
            if not lies_in(source, source / "trajectories"):
                raise StoreError(
                    f"{str(source / 'trajectories')!r} is a link that leads out of its folder; name its target"
                )
            source = source / "trajectories"
        if not source.exists():
            raise StoreError(f"no trajectories at {str(source)!r}; give a run's folder or one of its trajectory files")
        self.source = source
        self.damage: list[Damage] = []
        """Unreadable parts noticed so far. Reading on after one is safe."""
        self._places: list[Place] = []
        self._size = 0
        # Build the index: the position of each record, without unpacking any.
        for path in sorted(source.glob("*.jsonl.gz")) if source.is_dir() else [source]:
            if not path.is_file() or (path != source and not lies_in(source, path)):
                self.damage.append(Damage(path, 0, "it is a link that leads out of its folder, or no file"))
                continue
            self._size += path.stat().st_size
            for found in _plain_places(path) if is_plain(path) else scan(path):
                if isinstance(found, Place):
                    self._places.append(found)
                else:
                    self.damage.append(found)
        self._by_id: dict[str, Place] = {}
        # The first trajectory of an id wins.
        for place in self._places:
            self._by_id.setdefault(place.id, place)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the trajectories, in order."""
        return tuple(place.id for place in self._places)

    def __getitem__(self, id: str) -> Credited:
        """Return the trajectory of that id, the first one if there are several. A child is found below its parent.

        Raises:
            StoreError: it does not exist, or is damaged.
        """
        if id not in self._by_id:
            child = self._child(id)
            if child is not None:
                return child
            near = difflib.get_close_matches(id, self._by_id, n=1)
            known = "did you mean" if near else "the first one is"
            hint = "".join(f"; {known} {name!r}" for name in (near or self.ids)[:1])
            raise StoreError(f"no trajectory {id!r} in {self.source}{hint}")
        return _load(self._by_id[id])

    def _child(self, id: str) -> Credited | None:
        """Return a child trajectory, which was sampled for a host function call of another one."""
        parent = id.rpartition("/")[0]
        if not parent:
            return None
        found = self[parent] if parent in self._by_id else self._child(parent)
        children = found.trajectory.children if found is not None else ()
        return next((Credited(child) for child in children if child.id == id), None)

    def __iter__(self) -> Iterator[Credited]:
        """Yield all readable trajectories in order. A damaged one is skipped and added to `damage`."""
        plain: Path | None = None
        unpacked, most = 0, most_unpacked(self._size)
        for place in self._places:
            # A plain file can only be read from its beginning, so all its entries come at its first place.
            if place.plain:
                if place.path != plain:
                    plain = place.path
                    yield from _plain_entries(plain)
                continue
            try:
                record = unpack(place)
                # Limit the total, so that a hostile file cannot fill the memory.
                unpacked += len(record)
                if unpacked > most:
                    self._note(Damage(place.path, place.offset, beyond(most)))
                    return
                entry = _parse(place, record)
            except StoreError as error:
                self._note(Damage(place.path, place.offset, str(error)))
            else:
                yield entry

    def _note(self, found: Damage) -> None:
        if found not in self.damage:
            self.damage.append(found)

    def tokens(self) -> tuple[str, ...]:
        """Return the text of each token id, or () if the run did not store it.

        Raises:
            StoreError: the file is a link that leads out of the folder, or holds something else.
        """
        path = (self.source if self.source.is_dir() else self.source.parent) / _TOKENS
        if (text := text_of(path)) is None:
            return ()
        try:
            texts = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path} holds no texts of tokens: {error}") from error
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise StoreError(f"{path} holds no texts of tokens; remove it, or copy it from its run")
        return tuple(texts)


def read(source: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a step's file, a run folder or a `trajectories/` folder, in order.

    Raises:
        StoreError: the file is missing; or a part is damaged, raised after everything readable.
    """
    store = Store(source)
    for entry in store:
        yield entry.trajectory
    if store.damage:
        raise StoreError("; ".join(map(str, store.damage)))


def _load(place: Place) -> Credited:
    return _parse(place, unpack(place))


def _parse(place: Place, record: bytes) -> Credited:
    where = f"line {place.offset + 1}" if place.plain else f"byte {place.offset}"
    return parse(record, f"{place.path}, {where}", place.path.parent)


def _plain_entries(path: Path) -> Iterator[Credited]:
    for number, line in enumerate(plain_lines(path), 1):
        if not isinstance(line, Damage):
            yield parse(line, f"{path}, line {number}", path.parent)


def _plain_places(path: Path) -> Iterator[Place | Damage]:
    for number, line in enumerate(plain_lines(path)):
        if isinstance(line, Damage):
            yield line
        else:
            yield Place(path, number, 0, parse(line, f"{path}, line {number + 1}").trajectory.id)
