"""Replay of stored trajectories in a fresh console: step, verify, edit, branch."""

from repl_rl.runs.replay.branch import Branches, Continue, Start, branch, start_at, start_of
from repl_rl.runs.replay.compare import Cause, Difference, Shown
from repl_rl.runs.replay.session import Replay, Step, open_replay
from repl_rl.runs.replay.verify import Determinism, Verification, verify, verify_all

__all__ = [
    "Branches",
    "Cause",
    "Continue",
    "Determinism",
    "Difference",
    "Replay",
    "Shown",
    "Start",
    "Step",
    "Verification",
    "branch",
    "open_replay",
    "start_at",
    "start_of",
    "verify",
    "verify_all",
]
