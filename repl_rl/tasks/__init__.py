"""Tasks: what they are, seeded families of them, and loaders for files."""

from repl_rl.tasks.families import EASY, FAMILIES, HARD, Sketch, generate, sketch
from repl_rl.tasks.loaders import load_tasks
from repl_rl.tasks.model import Split, Task, split_of

__all__ = ["EASY", "FAMILIES", "HARD", "Sketch", "Split", "Task", "generate", "load_tasks", "sketch", "split_of"]
