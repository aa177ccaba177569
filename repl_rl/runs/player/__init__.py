"""Notebook widget that plays stored trajectories. It needs the extra `notebooks` (anywidget)."""

from repl_rl.runs.player.widget import TrajectoryPlayer

__all__ = ["TrajectoryPlayer"]
