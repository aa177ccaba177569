"""Trajectories on disk, readable without torch or a tokenizer, and their other forms: notebooks and console text."""

from repl_rl.store.credited import Credited, LineCredit, ratios
from repl_rl.store.files import Store, append, read, write_step, write_tokens
from repl_rl.store.members import Damage
from repl_rl.store.records import from_record, to_record
from repl_rl.store.text import Exchange, Turn, exchanges, from_text, guarded, marked, printable, to_text

__all__ = [
    "Credited",
    "Damage",
    "Exchange",
    "LineCredit",
    "Store",
    "Turn",
    "append",
    "exchanges",
    "from_record",
    "from_text",
    "guarded",
    "marked",
    "printable",
    "ratios",
    "read",
    "to_record",
    "to_text",
    "write_step",
    "write_tokens",
]
