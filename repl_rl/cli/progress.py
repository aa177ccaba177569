"""Live progress of training: one line per step, and the time left."""

import time
from collections.abc import Mapping

from rich.console import Console


class Progress:
    """Display of steps, solve rate, error rate, sampled tokens per second, and time left."""

    def __init__(self, console: Console, steps: int, done: int = 0) -> None:
        """Start at `done` steps, which a resumed run has made before."""
        self._console = console
        self._steps = steps
        self._done = self._before = done

    def __enter__(self) -> "Progress":
        self._started = time.monotonic()
        self._status = self._console.status("sampling the first rollouts ...")
        self._status.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._status.stop()

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Show one finished step."""
        self._done += 1
        # Estimate the time left from the steps of this process alone.
        left_s = (time.monotonic() - self._started) / (self._done - self._before) * (self._steps - self._done)
        rate = metrics["sampled_tokens"] / max(metrics["rollout_s"], 1e-9)
        text = (
            f"step {self._done:>4}/{self._steps}  solved {metrics['solve_rate']:6.1%}  "
            f"lines in error {metrics['line_error_rate']:6.1%}  {rate:7.0f} tokens/s  "
            f"rollout {metrics['rollout_s']:5.2f} s  update {metrics['update_s']:5.2f} s  "
            f"{left_s / 60:4.1f} min left"
        )
        if self._console.is_terminal:
            self._status.update(text)
        # A terminal shows every step in its status line, and keeps every tenth. A log file keeps all.
        if not self._console.is_terminal or self._done % 10 == 0 or self._done == self._steps:
            self._console.print(text)
