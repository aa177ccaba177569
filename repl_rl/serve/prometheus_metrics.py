"""Metrics of a server for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from repl_rl.serve.turn_updates import ExecutedLine
from repl_rl.trajectory.trajectory import Trajectory

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Upper bounds of the histograms' buckets, seconds."""


class ServerMetrics:
    """Metrics of one server, in a separate registry."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("repl_rl_requests", "Answered requests", ["path", "status"], registry=registry)
        self._turns = Counter("repl_rl_turns", "Finished turns", ["stop"], registry=registry)
        self.abandoned_turns = Counter(
            "repl_rl_turns_abandoned",
            "Turns cancelled because the client disconnected or the server stopped",
            registry=registry,
        )
        self._lines = Counter("repl_rl_lines", "Lines of the policy", ["status"], registry=registry)
        self._sampled = Counter("repl_rl_sampled_tokens", "Tokens that the policy sampled", registry=registry)
        self._observed = Counter("repl_rl_observed_tokens", "Tokens that consoles printed", registry=registry)
        self._turn_s = Histogram("repl_rl_turn_seconds", "Duration of a turn", buckets=_SECONDS, registry=registry)
        self._line_s = Histogram(
            "repl_rl_line_seconds", "Duration of a line in its console", buckets=_SECONDS, registry=registry
        )
        self._gauges = {
            name: Gauge(f"repl_rl_{name}", description, registry=registry)
            for name, description in (
                ("running", "Turns in progress"),
                ("waiting", "Turns that wait for a slot"),
                ("conversations", "Kept conversations, including those with a turn in progress"),
            )
        }

    def add_gauge(self, name: str, value: Callable[[], float]) -> None:
        """Read the gauge `name` from `value` at each scrape."""
        self._gauges[name].set_function(value)

    def record_line(self, line: ExecutedLine) -> None:
        """Count a complete line."""
        self._lines.labels("not_executed" if line.status is None else str(line.status)).inc()
        if line.elapsed_ms is not None:
            self._line_s.observe(line.elapsed_ms / 1000)

    def record_turn(self, trajectory: Trajectory) -> None:
        """Count a finished turn."""
        self._turns.labels(str(trajectory.stop)).inc()
        self._turn_s.observe(trajectory.wall_s)
        self._sampled.inc(trajectory.sampled_tokens)
        self._observed.inc(trajectory.observed_tokens)

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
