"""Tasks, seeded task families, loaders for files and data sets, and a curriculum."""

from repl_rl.tasks.curriculum import Curriculum, CurriculumConfig, assigned
from repl_rl.tasks.drawing import Family, Sketch
from repl_rl.tasks.families import EASY, FAMILIES, HARD
from repl_rl.tasks.generate import BUILTIN, families_of, generate, sketch, task_of
from repl_rl.tasks.graded import GRADED, LEVELS, TOPICS
from repl_rl.tasks.loaders import load_tasks, refuse_source
from repl_rl.tasks.model import FollowUp, Split, Task, split_of
from repl_rl.tasks.weights import judged_by
from repl_rl.tasks.workspace import Workspace

__all__ = [
    "BUILTIN",
    "EASY",
    "FAMILIES",
    "GRADED",
    "HARD",
    "LEVELS",
    "TOPICS",
    "Curriculum",
    "CurriculumConfig",
    "Family",
    "FollowUp",
    "Sketch",
    "Split",
    "Task",
    "Workspace",
    "assigned",
    "families_of",
    "generate",
    "judged_by",
    "load_tasks",
    "refuse_source",
    "sketch",
    "split_of",
    "task_of",
]
