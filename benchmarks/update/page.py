"""Publish the results of `repl-rl bench update --json FILE` in benchmarks/results/update.md.

    python -m benchmarks.update.page FILE [FILE ...]

Every number of that page with a unit is in a generated block.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.generated_blocks import RESULTS, Block

PAGE = Block(RESULTS / "update.md", "update/page")
FIGURES = RESULTS / "update.json"
_HEAD = " token ratio | CPU time | s | memory | MiB | TRL, time | TRL, memory | gradients | rounding |\n"
_COLUMNS = 9


def block(rows: Sequence[Mapping[str, float]]) -> str:
    """Return the generated block: long rollouts, then shared prompts and steps of runs if they were measured."""
    played = [row for row in rows if "run" in row]
    prefixes = [row for row in rows if "off_update_s" in row and "run" not in row]
    text = _against_trl([row for row in rows if "off_update_s" not in row])
    return text + (f"\n{_prefixes(prefixes)}" if prefixes else "") + (f"\n{_of_runs(played)}" if played else "")


def _of_runs(rows: Sequence[Mapping[str, float]]) -> str:
    text = "Rollouts that were played, of a step of a run, with its policy; columns as above:\n\n"
    text += "| run | step | rollouts |" + _HEAD + "|---" * (3 + _COLUMNS) + "|\n"
    for row in rows:
        text += f"| `{row['run']}` | {row['step']} | {row['rollouts']} | {_shared(row)} |\n"
    return text


def _prefixes(rows: Sequence[Mapping[str, float]]) -> str:
    first = rows[0]
    text = f"Groups of rollouts of {first['tokens']} tokens, a model of {first['layers']} layers that is "
    text += f"{first['hidden']} wide, {first['vocab']:,} ids, {first['dtype']} on {first['device']}. Without shared "
    text += "prefixes over with them, and TRL over them: more is better. Gradients are apart by, relative to their "
    text += "length, with and without; and by rounding alone, with other numbers of rows a pass:\n\n"
    text += "| prompt | group |" + _HEAD + "|---" * (2 + _COLUMNS) + "|\n"
    for row in rows:
        text += f"| {row['prompt']} | {row['rollouts']} | {_shared(row)} |\n"
    return text


def _shared(row: Mapping[str, float]) -> str:
    """The cells of `_HEAD`."""
    cells = (
        f"{row['token_ratio']:.2f}",
        f"{row['off_time_ratio']:.2f}x",
        f"{row['off_update_s']:.1f} / {row['ours_update_s']:.1f}",
        f"{row['off_memory_ratio']:.1f}x",
        f"{row['off_peak_mib']:.0f} / {row['ours_peak_mib']:.0f}",
        f"{1 / row['time_ratio']:.1f}x",
        f"{1 / row['memory_ratio']:.1f}x",
        f"{row['gradient_error']:.0e}",
        f"{row['gradient_noise']:.0e}",
    )
    return " | ".join(cells)


def _against_trl(rows: Sequence[Mapping[str, float]]) -> str:
    first = rows[0]
    text = f"{first['rollouts']} rollouts of {first['tokens']} tokens, a model of {first['layers']} layers that is "
    text += f"{first['hidden']} wide, {first['dtype']} on {first['device']}. Ours over TRL's; s are seconds of "
    text += f"{'CPU time of all threads' if str(first['device']) == 'cpu' else 'wall clock'}, MiB are above the loaded "
    text += "model:\n\n"
    text += "| vocabulary | observed | an update | ours / TRL, s | loss and gradient alone | peak memory "
    text += "| ours / TRL, MiB | loss apart by | gradients apart by |\n" + "|---" * 9 + "|\n"
    for row in rows:
        cells = (
            f"{row['vocab']:,}",
            f"{row['observed_share']:.0%}",
            f"{row['time_ratio']:.2f}x",
            f"{row['ours_update_s']:.1f} / {row['trl_update_s']:.1f}",
            f"{row['loss_time_ratio']:.2f}x",
            f"{row['memory_ratio']:.2f}x",
            f"{row['ours_peak_mib']:.0f} / {row['trl_peak_mib']:.0f}",
            f"{row['max_abs_loss_diff']:.0e}",
            f"{row['max_abs_gradient_diff']:.0e} of {row['gradient_max']:.0e}",
        )
        text += f"| {' | '.join(cells)} |\n"
    return text


def main(files: Sequence[Path]) -> None:
    """Publish the figures in all of these files, in place of those that were."""
    rows = [row for file in files for row in json.loads(file.read_text())]
    FIGURES.write_text(json.dumps(rows, indent=2) + "\n")
    PAGE.write(block(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
