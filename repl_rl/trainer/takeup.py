"""How a resumed run takes up each sink: so that it has no point twice, and none of a step that is made again."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib import import_module
from typing import Protocol

from transformers.integrations import TensorBoardCallback

from repl_rl.machine.files import Json


class TakeUp(Protocol):
    """How a run goes on in one sink."""

    def begin(self) -> None:
        """Training is about to begin at its beginning."""

    def memory(self) -> Json:
        """What `back` needs to come back to this moment. What was sent before is kept by then, if that can be had."""

    def back(self, policy_step: int, memory: Json) -> str | None:
        """Cut off what was sent after `memory` was asked for, at `policy_step`; None: `memory` is of another run.

        Returns what the sink does instead, where that cannot be done: the run must then have another name.
        """


class Board:
    """TensorBoard: a new file says from which step on the older ones are void. Each step is flushed when it is told.

    The first file must say so too: its reader takes the first such word for the start of a run, and heeds the others.
    """

    def __init__(self, callback: TensorBoardCallback) -> None:
        self._callback = callback

    def begin(self) -> None:
        """See `TakeUp.begin`."""
        self.back(0, None)

    def memory(self) -> Json:
        """See `TakeUp.memory`."""
        return None

    def back(self, policy_step: int, memory: Json) -> str | None:
        """See `TakeUp.back`."""
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._callback.tb_writer = writer(log_dir=self._callback.logging_dir, purge_step=policy_step + 1)
        return None


class Trackio:
    """trackio: a run counts what it is given; its database on this machine can be cut back, a server's cannot."""

    def __init__(self, project: str) -> None:
        self._project = project

    def begin(self) -> None:
        """See `TakeUp.begin`."""

    def memory(self) -> Json:
        """See `TakeUp.memory`."""
        run = import_module("trackio").context_vars.current_run.get()
        if run is None or not run._is_local or run._storage_mode != "sqlite":
            return None
        with run._client_lock:  # a thread of its own writes twice a second; who is killed before loses what waits
            run._flush_queues_inline()
        return {"run": run.id, "next": run._next_step}

    def back(self, policy_step: int, memory: Json) -> str | None:
        """See `TakeUp.back`."""
        if not isinstance(memory, Mapping):
            return "keeps what it was sent after the state that is gone on from, if there is any"
        base = import_module("trackio.sqlite_storage").SQLiteStorage.get_project_db_path(self._project)
        with closing(sqlite3.connect(base, timeout=60)) as opened, opened:
            opened.execute("DELETE FROM metrics WHERE run_id = ? AND step >= ?", (memory["run"], memory["next"]))
        return None


class Wandb:
    """wandb: what it was sent stays."""

    def begin(self) -> None:
        """See `TakeUp.begin`."""

    def memory(self) -> Json:
        """See `TakeUp.memory`."""
        return None

    def back(self, policy_step: int, memory: Json) -> str | None:
        """See `TakeUp.back`."""
        return "keeps what it was sent after the state that is gone on from"


def take_up(names: Sequence[str], boards: Sequence[TensorBoardCallback], project: str) -> dict[str, TakeUp]:
    """How each of the sinks `names` is taken up."""
    ways: dict[str, TakeUp] = {"trackio": Trackio(project), "wandb": Wandb()}
    for board in boards:
        ways["tensorboard"] = Board(board)
    return {name: ways[name] for name in names}
