"""Grading on the host. An answer is untrusted text: no judge ever evaluates it in this process.

A task names its judge, or several with weights (`repl_rl.tasks.task`). `exact` and `numeric` take microseconds and run
here. `math`, `regex` and the user's own `module:function` run in a limited process (`judge_subprocess`). `tests` runs
in a separate console (`unit_tests`). Group judges see all rollouts of a task (`apply_group_judges`).
"""

from repl_rl.judges.apply_judges import (
    JUDGES,
    GroupJudge,
    Judge,
    apply_group_judges,
    check_judges,
    find_judge,
    grade_answer,
    grade_async,
    grade_exact,
    grade_numeric,
    grade_trajectory,
    grade_with_first_judge,
    load_group_judges,
    parse_number,
)
from repl_rl.judges.judge_subprocess import JudgeLimits, JudgeProcesses
from repl_rl.judges.unit_test_judge import run_tests

__all__ = [
    "JUDGES",
    "GroupJudge",
    "Judge",
    "JudgeLimits",
    "JudgeProcesses",
    "apply_group_judges",
    "check_judges",
    "find_judge",
    "grade_answer",
    "grade_async",
    "grade_exact",
    "grade_numeric",
    "grade_trajectory",
    "grade_with_first_judge",
    "load_group_judges",
    "parse_number",
    "run_tests",
]
