"""Live status of long operations, and of rollouts that are played.

A terminal shows it in one line that changes each second. Elsewhere, it is printed at intervals.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console

from repl_rl.cli.terminal_output import format_duration
from repl_rl.engine import ENGINES
from repl_rl.rollout.rollout_stats import RolloutCounts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.sandbox import SANDBOXES

Describe = Callable[[], str]
"""Function that returns the present status, one line. Another thread calls it."""

_REFRESH_S = 1.0
"""Time between two updates in a terminal, seconds."""
_FIRST_PRINT_S, _PRINT_S = 10.0, 30.0
"""Time until the first line, and between later lines, without a terminal, seconds."""
_SURE_SHARE = 0.25
"""Share of the rollouts that must have ended before the time left is extrapolated from them. Short rollouts end first,
so an earlier estimate would be too low."""


def describe_opening(rollout_config: RolloutConfig) -> str:
    """Return the line that precedes the opening of engine and sandbox, which takes up to minutes."""
    engine, sandbox = ENGINES.resolve(rollout_config.engine), SANDBOXES.resolve(rollout_config.sandbox)
    return f"opening engine {engine.kind} and sandbox {sandbox.kind} ..."


def describe_elapsed(operation: str) -> Describe:
    """Return a description of an operation without known length: its name and the time since this call."""
    started = time.monotonic()
    return lambda: f"{operation}: {format_duration(time.monotonic() - started)} so far"


class LiveStatus:
    """Context manager that shows the status of one operation at a time."""

    def __init__(self, console: Console, *, first_print_s: float = _FIRST_PRINT_S, print_s: float = _PRINT_S) -> None:
        """`first_print_s` and `print_s` are the times until a line is printed without a terminal, seconds."""
        self._console = console
        self._first_print_s, self._print_s = first_print_s, print_s
        self._describe: Describe | None = None
        self._line = console.status("")
        self._changed = threading.Condition()
        self._closed = False
        self._next_print_s = float("inf")

    def __enter__(self) -> "LiveStatus":
        self._thread = threading.Thread(target=self._refresh, name="live status", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._line.stop()

    @contextmanager
    def show(self, describe: Describe) -> Iterator[None]:
        """Show `describe()` while the block lasts. A block within another one replaces its status for that time."""
        before = self._describe
        self._set(describe)
        try:
            yield
        finally:
            self._set(before)

    def postpone(self) -> None:
        """Restart the wait for the next printed status line. Call this after printing another line."""
        with self._changed:
            self._next_print_s = time.monotonic() + self._print_s

    def _set(self, describe: Describe | None) -> None:
        with self._changed:
            self._describe = describe
            self._next_print_s = time.monotonic() + self._first_print_s
            self._changed.notify()
        if not self._console.is_terminal:
            return
        if describe is None:
            self._line.stop()
        else:
            self._line.update(describe())
            self._line.start()

    def _refresh(self) -> None:
        """Update the line in a terminal, or print it when its time has come."""
        interval_s = _REFRESH_S if self._console.is_terminal else min(_REFRESH_S, self._first_print_s)
        with self._changed:
            while not self._closed:
                self._changed.wait(interval_s)
                if self._describe is None or self._closed:
                    continue
                # Describe at each refresh, because the progress notes when rollouts ended.
                text = self._describe()
                if self._console.is_terminal:
                    self._line.update(text)
                elif time.monotonic() >= self._next_print_s:
                    self._next_print_s = time.monotonic() + self._print_s
                    self._console.print(text)


class RolloutProgress:
    """Progress of a known number of rollouts: how many have ended, the sampling speed, and the time left."""

    def __init__(self, title: str, total: int, max_lines: int, read_counts: Callable[[], RolloutCounts]) -> None:
        """Start to count.

        Args:
            title: name of the operation, such as "evaluation".
            total: rollouts to be played, >= 1.
            max_lines: largest number of lines of one rollout, >= 1.
            read_counts: function that returns the counts of the source that plays them.
        """
        self._title, self._total, self._max_lines = title, total, max_lines
        self._read_counts, self._before = read_counts, read_counts()
        self._started = time.monotonic()
        self._completed: float | None = None
        self._newest_end = 0, self._started
        """Number of ended rollouts when it last rose, and that time."""

    @property
    def counts(self) -> RolloutCounts:
        """Counts since the start."""
        return self._read_counts().subtract(self._before)

    def get_since_completion_s(self) -> float | None:
        """Return the seconds since all rollouts were first seen to have ended, or None before that."""
        self._note_completion()
        return None if self._completed is None else time.monotonic() - self._completed

    def _note_completion(self) -> None:
        ended = self.counts.ended
        if ended > self._newest_end[0]:
            self._newest_end = ended, time.monotonic()
        if self._completed is None and ended >= self._total:
            self._completed = time.monotonic()

    def describe(self) -> str:
        """Return the progress as one line."""
        counts = self.counts
        # The update after the last rollout does not count in the speed of sampling.
        self._note_completion()
        elapsed_s = (self._completed or time.monotonic()) - self._started
        parts = [f"{counts.ended} of {self._total} rollouts ended, {counts.solved} solved"]
        if elapsed_s > 0 and counts.sampled_tokens:
            parts.append(f"{counts.sampled_tokens / elapsed_s:.0f} tokens/s")
        parts += self._estimate_left(counts, elapsed_s)
        return f"{self._title}: {', '.join(parts)}"

    def _estimate_left(self, counts: RolloutCounts, elapsed_s: float) -> list[str]:
        """Return a phrase about the time left, or none before anything was sampled."""
        open_rollouts = self._total - counts.ended
        if open_rollouts <= 0 or not counts.sampled_lines:
            return []
        if counts.ended >= _SURE_SHARE * self._total:
            # Count down from the newest end. The last rollouts are often the longest.
            ended, at = self._newest_end
            left_s = (at - self._started) / ended * open_rollouts - (time.monotonic() - at)
            return [f"about {format_duration(left_s)} left"] if left_s > 0 else ["the others take longer"]
        # Before that, the limit of lines tells what is left at the present speed. Later lines may be longer.
        most = self._total * self._max_lines - counts.sampled_lines
        return [f"up to about {format_duration(most * elapsed_s / counts.sampled_lines)} left"] if most > 0 else []
