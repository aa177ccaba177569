"""Offline report of a run: one self-contained HTML file."""

from repl_rl.runs.report.compared import Differing, compared, told_apart, write_comparison
from repl_rl.runs.report.data import MAX_TRAJECTORIES, entries_payload, payload
from repl_rl.runs.report.page import PLAYER_SCRIPTS, is_page, page, player_page, read, scripts, write_report
from repl_rl.runs.report.rollouts import legible, pack, whole
from repl_rl.runs.report.server import ReportServer

__all__ = [
    "MAX_TRAJECTORIES",
    "PLAYER_SCRIPTS",
    "Differing",
    "ReportServer",
    "compared",
    "entries_payload",
    "is_page",
    "legible",
    "pack",
    "page",
    "payload",
    "player_page",
    "read",
    "scripts",
    "told_apart",
    "whole",
    "write_comparison",
    "write_report",
]
