"""Trajectories on disk, readable without torch or a tokenizer, and their other forms: notebooks and console text."""

from repl_rl.runs.store.files import Store, append, read, write_step, write_tokens
from repl_rl.runs.store.members import Damage
from repl_rl.runs.store.records import from_record, to_record
from repl_rl.runs.store.text import Exchange, Turn, exchanges, from_text, guarded, marked, printable, to_text

__all__ = [
    "Damage",
    "Exchange",
    "Store",
    "Turn",
    "append",
    "exchanges",
    "from_record",
    "from_text",
    "guarded",
    "marked",
    "printable",
    "read",
    "to_record",
    "to_text",
    "write_step",
    "write_tokens",
]
