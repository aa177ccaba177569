"""Second part of `repl-rl bench update`: the time saved by scoring a group's shared prompt once.

The same update runs with prefix sharing, without it, and in TRL, always in a new process. A further run without
sharing has another number of rows per pass. It shows how far gradients differ by rounding alone.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.update.synthetic_rollouts import Case, Work
from benchmarks.update.trl_comparison import Gradients, against_trl, apart
from repl_rl.errors import ConfigError
from repl_rl.trajectory.trajectory import Sampled, Trajectory

PREFIXES = tuple(
    Case(12_288, 0.5, tokens=64, rollouts=rollouts, hidden=512, layers=4, prompt=prompt)
    for prompt in (64, 256, 1024)
    for rollouts in (8, 16)
)


def bench_prefixes(cases: Sequence[Case] = PREFIXES, repeats: int = 2) -> list[dict[str, float | str]]:
    """Measure each case; return one row per case, as `bench_update`, with ratios of off over on (higher is better)."""
    return [{**asdict(case), **_measured(case, repeats)} for case in cases]


@dataclass(frozen=True, slots=True)
class StoredStep:
    """Rollouts of a step of a run, and a policy."""

    policy: Path
    played: tuple[Trajectory, ...]

    def load(self) -> tuple[PreTrainedModel, Sequence[Trajectory]]:
        """See `Work.load`."""
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.policy, dtype=torch.float32)
        return model, [_as_fresh(one) for group in self.groups for one in group]

    @property
    def groups(self) -> Sequence[Sequence[Trajectory]]:
        """Graded rollouts by task; ungraded ones are not trained on. Only the largest groups are kept."""
        found: dict[str, list[Trajectory]] = {}
        for one in self.played:
            if one.outcome is not None:
                found.setdefault(one.task_id, []).append(one)
        most = max(map(len, found.values()), default=0)
        return [group for group in found.values() if len(group) == most]


def _as_fresh(played: Trajectory) -> Trajectory:
    """Return the rollout with policy step 0, like one of the initial policy."""
    segments = (
        replace(one, lines=tuple(replace(line, policy_step=0) for line in one.lines))
        if isinstance(one, Sampled)
        else one
        for one in played.segments
    )
    return replace(played, policy_step=0, segments=tuple(segments))


def bench_step(step: StoredStep, repeats: int = 2) -> dict[str, float | str]:
    """Measure the rollouts of a stored step: the savings of prefix sharing, and the cost in TRL.

    Raises:
        ConfigError: all rollouts of each task have the same outcome, or none.
    """
    # Without different outcomes in a group all advantages are 0.
    outcomes = [{one.outcome or 0.0 for one in group} for group in step.groups]
    if not any(len(found) > 1 for found in outcomes):
        remedy = "nothing is learned unless a task has two at least; choose another --step"
        raise ConfigError("outcomes of the rollouts", sorted(set().union(*outcomes)), remedy)
    return {"tasks": len(step.groups), "rollouts": sum(map(len, step.groups)), **_measured(step, repeats)}


def _measured(work: Work, repeats: int) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as folder:
        ours, gradients = apart(work, "ours", repeats, Path(folder))
        off, plain = apart(work, "off", repeats, Path(folder))
        # One repeat is enough, because only its gradients are used.
        _, other = apart(work, "other", 1, Path(folder))
        theirs, of_trl = apart(work, "trl", repeats, Path(folder))
    return {
        **against_trl(ours, gradients, theirs, of_trl),
        "off_update_s": off.update_s,
        "off_peak_mib": off.peak_mib,
        "off_time_ratio": off.update_s / ours.update_s,
        "off_memory_ratio": off.peak_mib / ours.peak_mib,
        "gradient_error": _distance(gradients, plain),
        "gradient_noise": _distance(other, plain),
    }


def _distance(one: Gradients, other: Gradients) -> float:
    """Return the distance of two gradients, relative to the length of the second."""
    mine, theirs = (torch.cat([of[name].double().flatten() for name in sorted(other)]) for of in (one, other))
    return float((mine - theirs).norm() / theirs.norm())
