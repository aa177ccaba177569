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
        self._turns = Counter("repl_rl_turns", "Turns that came to an end", ["stop"], registry=registry)
        self.abandoned_turns = Counter(
            "repl_rl_turns_abandoned",
            "Turns that were cut: their client left, or the server stopped",
            registry=registry,
        )
        self._lines = Counter("repl_rl_lines", "Lines of the policy", ["status"], registry=registry)
        self._sampled = Counter("repl_rl_sampled_tokens", "Tokens that the policy sampled", registry=registry)
        self._observed = Counter("repl_rl_observed_tokens", "Tokens that consoles printed", registry=registry)
        self._turn_s = Histogram("repl_rl_turn_seconds", "A whole turn", buckets=_SECONDS, registry=registry)
        self._line_s = Histogram("repl_rl_line_seconds", "A line in its console", buckets=_SECONDS, registry=registry)
        self._gauges = {
            name: Gauge(f"repl_rl_{name}", about, registry=registry)
            for name, about in (
                ("running", "Turns that are played now"),
                ("waiting", "Turns that wait for a place"),
                ("conversations", "Conversations that are kept, those with a turn under way included"),
            )
        }

    def add_gauge(self, name: str, value: Callable[[], float]) -> None:
        """Read the gauge `name` from `value` at each scrape."""
        self._gauges[name].set_function(value)

    def record_line(self, ran: ExecutedLine) -> None:
        """Count a complete line."""
        self._lines.labels("not_executed" if ran.status is None else str(ran.status)).inc()
        if ran.elapsed_ms is not None:
            self._line_s.observe(ran.elapsed_ms / 1000)

    def record_turn(self, played: Trajectory) -> None:
        """Count a finished turn."""
        self._turns.labels(str(played.stop)).inc()
        self._turn_s.observe(played.wall_s)
        self._sampled.inc(played.sampled_tokens)
        self._observed.inc(played.observed_tokens)

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)
