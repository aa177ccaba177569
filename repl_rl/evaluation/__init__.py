"""Held-out evaluation: solve rates with intervals, comparison of two runs, and a test of reading console output."""

from repl_rl.evaluation.comparison import Comparison, check_same_tasks, compare
from repl_rl.evaluation.intervals import Interval, bootstrap, mean_within, pass_at_k, sign_test, wilson
from repl_rl.evaluation.resumable import EvaluationFolder, play_all
from repl_rl.evaluation.study import Study, TaskResult, evaluate, is_study, read_study, write_study
from repl_rl.evaluation.tampering import TamperedSandbox, evaluate_tampered, tamper, tamper_followed

__all__ = [
    "Comparison",
    "EvaluationFolder",
    "Interval",
    "Study",
    "TamperedSandbox",
    "TaskResult",
    "bootstrap",
    "check_same_tasks",
    "compare",
    "evaluate",
    "evaluate_tampered",
    "is_study",
    "mean_within",
    "pass_at_k",
    "play_all",
    "read_study",
    "sign_test",
    "tamper",
    "tamper_followed",
    "wilson",
    "write_study",
]
