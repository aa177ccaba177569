"""Trajectories on disk, readable without torch or a tokenizer, with export to notebooks and console text."""

from repl_rl.runs.store.files import Store, append, is_step_file, read, step_file, write_step, write_tokens
from repl_rl.runs.store.members import Damage
from repl_rl.runs.store.records import from_record, to_record
from repl_rl.runs.store.schema import SCHEMA_VERSION
from repl_rl.runs.store.text import Transition, Turn, from_text, guarded, marked, printable, to_text, transitions

__all__ = [
    "SCHEMA_VERSION",
    "Damage",
    "Store",
    "Transition",
    "Turn",
    "append",
    "from_record",
    "from_text",
    "guarded",
    "is_step_file",
    "marked",
    "printable",
    "read",
    "step_file",
    "to_record",
    "to_text",
    "transitions",
    "write_step",
    "write_tokens",
]
