"""Evaluation of a policy on a set of tasks: results per task, comparison of two evaluations, and the runs themselves.

An evaluation is resumable: its rollouts are played in portions, and stored portions are not played again.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TypedDict

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError
from repl_rl.evaluation.confidence_intervals import (
    Interval,
    compute_bounded_mean_interval,
    compute_sign_test,
    pass_at_k,
    wilson,
)
from repl_rl.rollout import RolloutClient
from repl_rl.runs.store import append_records, read_trajectories
from repl_rl.settings.bounded_toml import parse_toml
from repl_rl.settings.migrate_run_settings import get_judge_order, rename_recorded
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import (
    OutputFolder,
    list_contents,
    remove_left_files,
    replace_file_atomically,
    resolve_link,
    write_text_atomically,
)
from repl_rl.utils.describe_os_errors import catch_os_errors

_SCHEMA_VERSION = 1
"""Version of the JSON that `write_study` writes."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Counts of one task's solved rollouts. Rollouts that failed on our side count only in `faults`."""

    task_id: str
    family: str
    rollouts: int
    """Graded rollouts at temperature 1 (>= 0)."""
    solved: int
    """Graded rollouts with an outcome of at least 1."""
    greedy: bool | None
    """True if greedy decoding solves it; None means that no greedy rollout was graded."""
    lines: int
    """Executed lines in the rollouts at temperature 1."""
    error_lines: int
    """Part of `lines` that ended in an error."""
    faults: int
    """Number of rollouts with a recorded failure, which are not graded: those at temperature 1 and the greedy ones."""
    mean_outcome: float | None = None
    """Mean outcome of the graded rollouts at temperature 1. None without any, and in files of older releases."""

    @property
    def solve_rate(self) -> float:
        """Share of its graded rollouts that are right; undefined without any."""
        return self.solved / self.rollouts


def build_task_result(task: Task, sampled: Sequence[Trajectory], greedy: Sequence[Trajectory]) -> TaskResult:
    """Return the result of one task from its sampled and greedy rollouts."""
    # A rollout that failed on our side says nothing about the policy.
    valid = [t for t in sampled if t.failure is None]
    greedy_rollout = next((t for t in greedy if t.failure is None), None)
    return TaskResult(
        task_id=task.id,
        family=task.family,
        rollouts=len(valid),
        solved=sum(t.solved for t in valid),
        greedy=greedy_rollout.solved if greedy_rollout is not None else None,
        lines=sum(1 for t in valid for _ in t.executions),
        error_lines=sum(e.status.is_error for t in valid for e in t.executions),
        faults=len(sampled) + len(greedy) - len(valid) - sum(t.failure is None for t in greedy),
        mean_outcome=fmean(t.outcome or 0.0 for t in valid) if valid else None,
    )


@keeps_old_names
@dataclass(frozen=True)
class Study:
    """Results of one evaluation, at least one of them graded."""

    results: tuple[TaskResult, ...]

    def __post_init__(self) -> None:
        if not self.graded_results:
            raise ConfigError("graded tasks", 0, "every rollout failed on our side; see `repl-rl doctor`")

    @cached_property
    def graded_results(self) -> tuple[TaskResult, ...]:
        """Results with at least one graded rollout."""
        return tuple(r for r in self.results if r.rollouts)

    @property
    def faults(self) -> int:
        """Number of rollouts that failed on our side; no metric includes them."""
        return sum(r.faults for r in self.results)

    @cached_property
    def solve_rate(self) -> Interval:
        """pass@1: mean solve rate of a task.

        Its interval is Wilson's with one rollout per task, else that of `compute_bounded_mean_interval`.
        """
        return compute_bounded_mean_interval([r.solve_rate for r in self.graded_results])

    def pass_at(self, k: int) -> Interval | None:
        """Return mean pass@k (k >= 1) over the tasks with at least `k` graded rollouts.

        It is None if no task has that many.
        """
        if k == 1:
            return self.solve_rate
        enough = [pass_at_k(r.solved, r.rollouts, k) for r in self.graded_results if r.rollouts >= k]
        return compute_bounded_mean_interval(enough) if enough else None

    @cached_property
    def greedy(self) -> Interval | None:
        """Share of tasks that greedy decoding solves; None means that it was not tried."""
        tried = [r.greedy for r in self.results if r.greedy is not None]
        return wilson(sum(tried), len(tried)) if tried else None

    @cached_property
    def mean_outcome(self) -> float | None:
        """Mean over tasks of the mean outcome at temperature 1. It differs from `solve_rate` if outcomes have parts.

        None means that a result is from a file of an older release.
        """
        outcomes = [r.mean_outcome for r in self.graded_results if r.mean_outcome is not None]
        return fmean(outcomes) if len(outcomes) == len(self.graded_results) else None

    @property
    def line_error_rate(self) -> float:
        """Share of executed lines in error at temperature 1."""
        return sum(r.error_lines for r in self.results) / max(1, sum(r.lines for r in self.results))

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics for a curve: `greedy` only if it was tried, `solve_rate/FAMILY` only with several families."""
        greedy = {"greedy": self.greedy.value} if self.greedy else {}
        # With one family its rate would repeat the total.
        families = {f"solve_rate/{name}": part.solve_rate.value for name, part in self.families.items()}
        return {
            "solve_rate": self.solve_rate.value,
            **greedy,
            "line_error_rate": self.line_error_rate,
            "faults": float(self.faults),
            **(families if len(families) > 1 else {}),
        }

    def __str__(self) -> str:
        greedy = f", {self.greedy.value:.1%} greedy" if self.greedy else ""
        return (
            f"solved {self.solve_rate.value:.1%} at temperature 1{greedy}, {self.line_error_rate:.1%} of lines in error"
        )

    @cached_property
    def families(self) -> Mapping[str, "Study"]:
        """Study of each family with a graded task, by name."""
        names = sorted({r.family for r in self.graded_results})
        return {name: Study(tuple(r for r in self.results if r.family == name)) for name in names}


class IntervalJson(TypedDict):
    """JSON form of an `Interval`."""

    value: float
    low: float
    high: float


def format_interval(interval: Interval | None) -> IntervalJson | None:
    """Return an estimate in its JSON form."""
    return IntervalJson(value=interval.value, low=interval.low, high=interval.high) if interval else None


def write_study(path: Path, study: Study, k: int, about: Mapping[str, str | int]) -> None:
    """Write metrics and results as JSON, atomically. `about` describes the evaluated policy and tasks."""
    # Counts per task are enough to compute every metric again; the metrics are there for other programs.
    record: dict[str, object] = {
        "schema_version": _SCHEMA_VERSION,
        **about,
        "tasks": len(study.results),
        "sandbox_faults": study.faults,
        "solve_rate": format_interval(study.solve_rate),
        f"pass@{k}": format_interval(study.pass_at(k)),
        "greedy": format_interval(study.greedy),
        "line_error_rate": study.line_error_rate,
        "mean_outcome": study.mean_outcome,
        "families": {name: format_interval(part.solve_rate) for name, part in study.families.items()},
        "results": [{name: getattr(r, name) for name in TaskResult.__slots__} for r in study.results],
    }
    write_text_atomically(path, json.dumps(record, indent=1) + "\n")


def read_study(path: Path) -> Study:
    """Read the results in a file that `write_study` wrote.

    Raises:
        ConfigError: it cannot be read, or is not such a file.
    """
    try:
        record = json.loads(path.read_text())
        if record["schema_version"] != _SCHEMA_VERSION:
            raise ValueError(f"schema_version is {record['schema_version']!r}")
        return Study(tuple(TaskResult(**fields) for fields in record["results"]))
    except OSError as error:
        raise ConfigError("evaluation file", str(path), f"it cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # A file of an older schema, with fields of another release, ends here as well.
        remedy = f"give a file that `repl-rl eval --json` of this release wrote: {error!r}"
        raise ConfigError("evaluation file", str(path), remedy) from error


def is_study(path: Path) -> bool:
    """Return True for a file that `write_study` of this or another release wrote."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and {"schema_version", "results"} <= record.keys()


@keeps_old_names
@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference of the first evaluation from the second."""

    difference: Interval
    """Mean over tasks of first minus second solve rate, with the interval of `compute_bounded_mean_interval`."""
    better_tasks: int
    """Number of tasks that the first solves more often."""
    worse_tasks: int
    """Number of tasks that the second solves more often."""
    p_value: float
    """p-value of the exact sign test over these tasks."""
    families: Mapping[str, Interval]
    """Difference within each family."""

    def __str__(self) -> str:
        d = self.difference
        return (
            f"{100 * d.value:+.1f} points ({100 * d.low:+.1f} to {100 * d.high:+.1f}), "
            f"better on {self.better_tasks} tasks, worse on {self.worse_tasks}, p = {self.p_value:.2g}"
        )


def validate_same_tasks(study: Study, task_ids: Iterable[str]) -> None:
    """Raise ConfigError for two evaluations on different tasks, before any rollout is played.

    Raises:
        ConfigError: the study does not have exactly these tasks.
    """
    # Tasks of exactly one of the two evaluations.
    only = sorted({r.task_id for r in study.results} ^ set(task_ids))
    if only:
        remedy = "evaluate both with the same --tasks, --count and --seed"
        raise ConfigError("tasks in one of the two evaluations only", (len(only), only[:3]), remedy)


def compare(first: Study, second: Study) -> Comparison:
    """Compare solve rates task by task. A task that lacks a graded rollout in one of the evaluations is left out.

    Pairing removes the variance between tasks, so it detects smaller differences than two separate intervals.

    Raises:
        ConfigError: they have different tasks, or share no graded one.
    """
    mine, other = ({r.task_id: r for r in study.results} for study in (first, second))
    validate_same_tasks(second, mine)
    # A task without a graded rollout on one side has no solve rate there.
    pairs = [(r, other[task_id]) for task_id, r in mine.items() if r.rollouts and other[task_id].rollouts]
    if not pairs:
        raise ConfigError("tasks graded in both evaluations", 0, "every pair has a rollout that failed on our side")
    # One difference per task; with one rollout each it is -1, 0 or 1.
    differences = {a.task_id: a.solve_rate - b.solve_rate for a, b in pairs}
    by_family: dict[str, list[float]] = {}
    for a, _ in pairs:
        by_family.setdefault(a.family, []).append(differences[a.task_id])
    better, worse = (sum(sign * d > 0 for d in differences.values()) for sign in (1, -1))
    return Comparison(
        difference=compute_bounded_mean_interval(list(differences.values()), -1.0),
        better_tasks=better,
        worse_tasks=worse,
        p_value=compute_sign_test(better, worse),
        families={name: compute_bounded_mean_interval(values, -1.0) for name, values in sorted(by_family.items())},
    )


PlayTasks = Callable[[Sequence[Task], float], Sequence[Trajectory]]
"""Function that plays one rollout per task at a temperature, in order."""

PORTION_TASKS = 64
"""Tasks per portion; an interruption loses at most that many."""
EVALUATION = OutputFolder(
    "eval",
    "evaluation folder",
    ("rollouts", "greedy", "config.toml", "eval.json"),
    lambda folder: (folder / "config.toml").is_file(),
    "name another folder",
)
"""Output type of an evaluation folder. It is never replaced; an interrupted evaluation is resumed."""


def run_evaluation(source: RolloutClient, tasks: Sequence[Task]) -> Study:
    """Play every task once at temperature 1 and once greedily; nothing is stored.

    Raises:
        ConfigError: every rollout failed on our side.
    """
    sampled, greedy = source.sample(tasks), source.sample(tasks, temperature=0.0)
    return Study(
        tuple(
            build_task_result(task, [sampled_rollout], [greedy_rollout])
            for task, sampled_rollout, greedy_rollout in zip(tasks, sampled, greedy, strict=True)
        )
    )


class EvaluationFolder:
    """Folder with `rollouts/`, `greedy/` and `config.toml`; each portion of tasks is one trajectory file."""

    def __init__(self, path: Path, config_toml: str) -> None:
        """Check an existing folder for its settings, or plan a new one; write nothing yet.

        Raises:
            ConfigError: it holds an evaluation with other settings, or something else.
        """
        self.path = path
        self._config_toml = config_toml
        self._validate_same_evaluation()

    def _validate_same_evaluation(self) -> None:
        # A link is followed, because the folder behind it is the one that is written.
        path = resolve_link(EVALUATION.name, self.path)
        config_file = path / "config.toml"
        settings = _read_settings(config_file) if config_file.is_file() else self._config_toml
        if settings != self._config_toml and not _is_renamed(settings, self._config_toml):
            differing = sorted(set(settings.splitlines()) ^ set(self._config_toml.splitlines()))
            remedy = f"it holds an evaluation with other settings ({'; '.join(differing)}); name another folder"
            raise ConfigError("evaluation folder", str(path), remedy)
        if path.exists() and not path.is_dir():
            raise ConfigError("evaluation folder", str(path), "it is no folder; name another one")
        if not config_file.is_file() and path.exists() and list_contents(path):
            raise ConfigError("evaluation folder", str(path), "it holds something else; name a new folder")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this process while the block lasts.

        Raises:
            ConfigError: another process holds the lock, the folder cannot be created, or it now holds another
                evaluation.
        """
        with ExitStack() as stack:
            with catch_os_errors("evaluation folder", self.path, then=", then give the command again"):
                stack.enter_context(EVALUATION.claim(self.path))
            # Check again under the lock: another process may have written settings since `__init__`.
            self._validate_same_evaluation()
            remove_left_files(self.path, EVALUATION)
            yield

    def load_chunk(self, kind: str, portion: int, tasks: Sequence[Task]) -> Sequence[Trajectory] | None:
        """Return the trajectories of a portion, or None if it is not complete.

        Raises:
            ConfigError: they belong to tasks other than `tasks`.
            StoreError: the file cannot be read.
        """
        file = self._get_chunk_path(kind, portion)
        if not file.exists():
            return None
        trajectories = list(read_trajectories(file))
        # The task file may have changed although the settings are equal.
        if [t.task_id for t in trajectories] != [task.id for task in tasks]:
            remedy = "its tasks are not those of this evaluation; name another folder"
            raise ConfigError("evaluation file", str(file), remedy)
        return trajectories

    def store_chunk(self, kind: str, portion: int, trajectories: Sequence[Trajectory]) -> None:
        """Store a portion atomically.

        Raises:
            ConfigError: it cannot be written.
        """
        with catch_os_errors("evaluation folder", self.path, then=", then give the command again"):
            self.path.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self.path / "config.toml", self._config_toml)
            with replace_file_atomically(self._get_chunk_path(kind, portion)) as unfinished:
                append_records(unfinished, trajectories)

    def _get_chunk_path(self, kind: str, portion: int) -> Path:
        return self.path / kind / f"{portion:06d}.jsonl.gz"


def _is_renamed(before: str, now: str) -> bool:
    """Return True if settings differ only in names that an older version wrote."""
    try:
        old, new = rename_recorded(parse_toml(before)), rename_recorded(parse_toml(now))
        return old == new and get_judge_order(old) == get_judge_order(new)
    except (ConfigError, ValueError, RecursionError):
        return False


def _read_settings(file: Path) -> str:
    """Return the text of an evaluation's settings.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        remedy = f"its {file.name} cannot be read: {error}; name another folder"
        raise ConfigError("evaluation folder", str(file.parent), remedy) from error


def play_all(
    tasks: Sequence[Task],
    play: PlayTasks,
    samples: int = 1,
    greedy: bool = True,
    folder: EvaluationFolder | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Study:
    """Play `samples` (>= 1) rollouts of every task at temperature 1, and a greedy one. Portions in `folder` are reused.

    `progress` is called with the number of finished tasks.
    """
    if samples < 1:
        raise ConfigError("samples", samples, "play at least 1 rollout per task")
    results: list[TaskResult] = []
    for portion, start in enumerate(range(0, len(tasks), PORTION_TASKS)):
        portion_tasks = tasks[start : start + PORTION_TASKS]
        # Keep all rollouts of a task in one portion, because their seeds count from the first one.
        sampled = _play_or_load_chunk(
            "rollouts", portion, [task for task in portion_tasks for _ in range(samples)], 1.0, play, folder
        )
        greedy_rollouts = _play_or_load_chunk("greedy", portion, portion_tasks, 0.0, play, folder) if greedy else ()
        for n, task in enumerate(portion_tasks):
            results.append(
                build_task_result(task, sampled[n * samples : (n + 1) * samples], greedy_rollouts[n : n + 1])
            )
        progress(len(results))
    return Study(tuple(results))


def _play_or_load_chunk(
    kind: str, portion: int, tasks: Sequence[Task], temperature: float, play: PlayTasks, folder: EvaluationFolder | None
) -> Sequence[Trajectory]:
    """Return a stored portion, or play it and store it. Without a folder, nothing is stored."""
    # A stored portion is complete, because it is written atomically.
    stored = folder.load_chunk(kind, portion, tasks) if folder else None
    if stored is not None:
        return stored
    trajectories = play(tasks, temperature)
    if folder:
        folder.store_chunk(kind, portion, trajectories)
    return trajectories
