"""Tasks, seeded task families, loaders for files and data sets, and a curriculum."""

from repl_rl.tasks.curriculum import Curriculum, CurriculumConfig, assign_tasks
from repl_rl.tasks.generated_tasks import (
    BUILTIN,
    EASY,
    FAMILIES,
    GRADED,
    HARD,
    LEVELS,
    TOPICS,
    DrawProblem,
    Problem,
    draw_problem,
    generate,
    get_families,
    make_task,
)
from repl_rl.tasks.load_tasks import TASK_SOURCES, find_task_source, load_tasks, validate_recorded_source
from repl_rl.tasks.task import FollowUp, Split, Task, get_split, set_judges
from repl_rl.tasks.task_source import TaskRequest, TaskSource
from repl_rl.tasks.task_workspace import Workspace

__all__ = [
    "BUILTIN",
    "EASY",
    "FAMILIES",
    "GRADED",
    "HARD",
    "LEVELS",
    "TASK_SOURCES",
    "TOPICS",
    "Curriculum",
    "CurriculumConfig",
    "DrawProblem",
    "FollowUp",
    "Problem",
    "Split",
    "Task",
    "TaskRequest",
    "TaskSource",
    "Workspace",
    "assign_tasks",
    "draw_problem",
    "find_task_source",
    "generate",
    "get_families",
    "get_split",
    "load_tasks",
    "make_task",
    "set_judges",
    "validate_recorded_source",
]
