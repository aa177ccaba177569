"""One process of `test_groups`: python -m tests.support.trainer.group_process OUT"""

import json
import os
import sys
from pathlib import Path

from accelerate import Accelerator

from repl_rl.trainer.config import DynamicSamplingOptions
from repl_rl.trainer.dynamic_sampling import GroupSampler
from tests.integration.trainer.test_groups import IDS, Told

RANK = int(os.environ.get("RANK", "0"))
SLOTS = ["task 0", "task 0", "task 1", "task 1", "task 7", "task 7"]
"""Three groups of two on two processes of three rollouts: the second one straddles them."""


def outcome(task: str, number: int) -> float:
    """The first two tasks are dull. The two halves of a group that straddles differ by their process."""
    return 1.0 if task in IDS[:2] else float((RANK + number) % 2)


def main(out: Path) -> None:
    accelerator = Accelerator(cpu=True)
    groups = GroupSampler(Told(outcome), IDS, 2, accelerator, DynamicSamplingOptions(3))
    share = len(SLOTS) // accelerator.num_processes
    played = groups.collect(SLOTS[accelerator.process_index * share :][:share], 0)
    told = {"tasks": [t.task_id for t in played], "metrics": groups.metrics}
    (out / f"{RANK}.json").write_text(json.dumps(told))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
