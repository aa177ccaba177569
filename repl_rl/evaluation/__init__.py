"""Held-out evaluation: solve rates with intervals, comparison of two runs, and a test of reading console output."""

from repl_rl.evaluation.confidence_intervals import (
    Interval,
    compute_bootstrap_interval,
    compute_bounded_mean_interval,
    compute_sign_test,
    pass_at_k,
    wilson,
)
from repl_rl.evaluation.evaluate import (
    Comparison,
    EvaluationFolder,
    Study,
    TaskResult,
    compare,
    is_study,
    play_all,
    read_study,
    run_evaluation,
    validate_same_tasks,
    write_study,
)
from repl_rl.evaluation.observation_ablation import (
    TamperingSandbox,
    alter_text,
    compute_tampering_follow_rate,
    evaluate_with_tampering,
)

__all__ = [
    "Comparison",
    "EvaluationFolder",
    "Interval",
    "Study",
    "TamperingSandbox",
    "TaskResult",
    "alter_text",
    "compare",
    "compute_bootstrap_interval",
    "compute_bounded_mean_interval",
    "compute_sign_test",
    "compute_tampering_follow_rate",
    "evaluate_with_tampering",
    "is_study",
    "pass_at_k",
    "play_all",
    "read_study",
    "run_evaluation",
    "validate_same_tasks",
    "wilson",
    "write_study",
]
