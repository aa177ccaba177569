"""Resumable evaluation: rollouts are played in portions, and stored portions are not played again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.evaluation.study import Study, TaskResult, result
from repl_rl.machine.files import whole_file, write_whole
from repl_rl.machine.folders import remove_left_files
from repl_rl.machine.outputs import Output, contents, followed
from repl_rl.machine.refused import writing
from repl_rl.record.trajectory import Trajectory
from repl_rl.runs.store import append, read
from repl_rl.tasks import Task

Play = Callable[[Sequence[Task], float], Sequence[Trajectory]]
"""Function that plays one rollout per task at a temperature, in order."""

PORTION_TASKS = 64
"""Tasks per portion; an interruption loses at most that many."""
EVALUATION = Output(
    "eval",
    "evaluation folder",
    ("rollouts", "greedy", "config.toml", "eval.json"),
    lambda folder: (folder / "config.toml").is_file(),
    "name another folder",
)
"""Output type of an evaluation folder. It is never replaced; an interrupted evaluation is resumed."""


class EvaluationFolder:
    """Folder with `rollouts/`, `greedy/` and `config.toml`; each portion of tasks is one trajectory file."""

    def __init__(self, path: Path, config_toml: str) -> None:
        """Check an existing folder for its settings, or plan a new one; write nothing yet.

        Raises:
            ConfigError: it holds an evaluation with other settings, or something else.
        """
        self.path = path
        self._config_toml = config_toml
        self._refuse_other()

    def _refuse_other(self) -> None:
        path = followed(EVALUATION.thing, self.path)
        kept = path / "config.toml"
        said = _settings_in(kept) if kept.is_file() else self._config_toml
        if said != self._config_toml:
            differing = sorted(set(said.splitlines()) ^ set(self._config_toml.splitlines()))
            remedy = f"it holds an evaluation with other settings ({'; '.join(differing)}); name another folder"
            raise ConfigError("evaluation folder", str(path), remedy)
        if path.exists() and not path.is_dir():
            raise ConfigError("evaluation folder", str(path), "it is no folder; name another one")
        if not kept.is_file() and path.exists() and contents(path):
            raise ConfigError("evaluation folder", str(path), "it holds something else; name a new folder")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder for this process while the block lasts.

        Raises:
            ConfigError: another process holds the lock, the folder cannot be created, or it now holds another
                evaluation.
        """
        with ExitStack() as stack:
            with writing("evaluation folder", self.path, then=", then give the command again"):
                stack.enter_context(EVALUATION.claimed(self.path))
            # Check again under the lock: another process may have written settings since `__init__`.
            self._refuse_other()
            remove_left_files(self.path, EVALUATION)
            yield

    def load(self, kind: str, portion: int, tasks: Sequence[Task]) -> Sequence[Trajectory] | None:
        """Return the trajectories of a portion, or None if it is not complete.

        Raises:
            ConfigError: they belong to tasks other than `tasks`.
            StoreError: the file cannot be read.
        """
        file = self._file(kind, portion)
        if not file.exists():
            return None
        found = list(read(file))
        # The task file may have changed although the settings are equal.
        if [t.task_id for t in found] != [task.id for task in tasks]:
            remedy = "its tasks are not those of this evaluation; name another folder"
            raise ConfigError("evaluation file", str(file), remedy)
        return found

    def keep(self, kind: str, portion: int, trajectories: Sequence[Trajectory]) -> None:
        """Store a portion atomically.

        Raises:
            ConfigError: it cannot be written.
        """
        with writing("evaluation folder", self.path, then=", then give the command again"):
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / "config.toml", self._config_toml)
            with whole_file(self._file(kind, portion)) as torn:
                append(torn, trajectories)

    def _file(self, kind: str, portion: int) -> Path:
        return self.path / kind / f"{portion:06d}.jsonl.gz"


def _settings_in(file: Path) -> str:
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
    play: Play,
    samples: int = 1,
    greedy: bool = True,
    folder: EvaluationFolder | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Study:
    """Play `samples` (>= 1) rollouts of every task at temperature 1, and a greedy one. Portions in `folder` are reused.

    `progress` is called with the number of finished tasks.
    """
    if samples < 1:
        raise ConfigError("samples", samples, "play at least 1 rollout a task")
    results: list[TaskResult] = []
    for portion, start in enumerate(range(0, len(tasks), PORTION_TASKS)):
        part = tasks[start : start + PORTION_TASKS]
        # Keep all rollouts of a task in one portion, because their seeds count from the first one.
        sampled = _portion("rollouts", portion, [task for task in part for _ in range(samples)], 1.0, play, folder)
        greedily = _portion("greedy", portion, part, 0.0, play, folder) if greedy else ()
        for n, task in enumerate(part):
            results.append(result(task, sampled[n * samples : (n + 1) * samples], greedily[n : n + 1]))
        progress(len(results))
    return Study(tuple(results))


def _portion(
    kind: str, portion: int, tasks: Sequence[Task], temperature: float, play: Play, folder: EvaluationFolder | None
) -> Sequence[Trajectory]:
    kept = folder.load(kind, portion, tasks) if folder else None
    if kept is not None:
        return kept
    played = play(tasks, temperature)
    if folder:
        folder.keep(kind, portion, played)
    return played
