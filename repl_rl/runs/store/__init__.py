"""Store of trajectories on disk, readable without torch or a tokenizer, and its export formats."""

from repl_rl.runs.store.appendable_gzip import DamagedRegion
from repl_rl.runs.store.export_formats import (
    ConsoleTurn,
    LineTransition,
    build_transitions,
    escape_control_characters,
    escape_output,
    mark_observations,
    parse_session,
    to_text,
)
from repl_rl.runs.store.trajectory_files import (
    Store,
    append_records,
    get_step_path,
    is_step_file,
    read_trajectories,
    write_step,
    write_tokens,
)
from repl_rl.runs.store.trajectory_json import SCHEMA_VERSION, from_record, to_record

__all__ = [
    "SCHEMA_VERSION",
    "ConsoleTurn",
    "DamagedRegion",
    "LineTransition",
    "Store",
    "append_records",
    "build_transitions",
    "escape_control_characters",
    "escape_output",
    "from_record",
    "get_step_path",
    "is_step_file",
    "mark_observations",
    "parse_session",
    "read_trajectories",
    "to_record",
    "to_text",
    "write_step",
    "write_tokens",
]
