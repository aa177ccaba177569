"""Grading on the host. An answer is untrusted text: no judge ever evaluates it in this process.

A task names its judge, or several with weights (`repl_rl.tasks.weights`). `exact` and `numeric` take microseconds and
run here. `math`, `regex` and the user's own `module:function` run in a limited process (`limited`). `tests` runs in a
separate console (`unit_tests`). Group judges see all rollouts of a task (`together`).
"""

from repl_rl.judges.limited import JudgeLimits, JudgeProcesses
from repl_rl.judges.plain import exact, numeric, parse_number
from repl_rl.judges.router import JUDGES, Judge, check_judges, find_judge, grade, graded, settled, verdict
from repl_rl.judges.together import GroupJudge, group_judges, judged_together
from repl_rl.judges.unit_tests import run_tests

__all__ = [
    "JUDGES",
    "GroupJudge",
    "Judge",
    "JudgeLimits",
    "JudgeProcesses",
    "check_judges",
    "exact",
    "find_judge",
    "grade",
    "graded",
    "group_judges",
    "judged_together",
    "numeric",
    "parse_number",
    "run_tests",
    "settled",
    "verdict",
]
