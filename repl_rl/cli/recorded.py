"""The world that a stored trajectory was played in, as the `config.toml` of its run tells it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from repl_rl.rollout.limits import RolloutLimits
from repl_rl.sandbox import DockerOptions, Limits
from repl_rl.tasks import Split, Task, load_tasks
from repl_rl.world import Setup


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run's folder and settings; without a folder, everything is as it is by default."""

    folder: Path | None
    settings: Mapping[str, object]

    @classmethod
    def of(cls, file: Path) -> "RecordedRun":
        """The run that a file of trajectories, or a folder of them, belongs to."""
        places = (file, *file.resolve().parents[:2])
        folder = next((place for place in places if (place / "config.toml").is_file()), None)
        return cls(folder, tomllib.loads((folder / "config.toml").read_text()) if folder else {})

    def setup(self, sandbox: str | None = None, engine: str | None = None, model: str | None = None) -> Setup:
        """The run's own, but for what is given; the policy is the one that it trained, where there is one."""
        asked = {"sandbox": sandbox, "engine": engine}
        given = {**self.settings, **{name: value for name, value in asked.items() if value is not None}}
        tables: dict[str, type] = {"rollout": RolloutLimits, "limits": Limits}
        if given.get("sandbox") == "docker":
            tables["docker"] = DockerOptions
        plain = {
            f.name: given[f.name] for f in fields(Setup) if f.name in given and not isinstance(given[f.name], dict)
        }
        nested = {name: _table(kind, given[name]) for name, kind in tables.items() if name in given}
        setup = Setup(**plain, **nested)  # type: ignore[arg-type]
        trained = self.folder / "checkpoints" / "final" if self.folder else None
        policy = model or (trained if trained and trained.is_dir() else setup.model)
        return replace(setup, model=str(policy))

    def task(self, id: str) -> Task | None:
        """The task of that id among those that the run drew; None: it is not there."""
        setup = self.setup()
        for split, name in ((Split.TRAIN, "train_tasks"), (Split.HELD_OUT, "eval_tasks")):
            count = self.settings.get(name)
            most = count if isinstance(count, int) else None
            drawn = load_tasks(setup.tasks, split=split, count=most, seed=setup.seed)
            found = next((task for task in drawn if task.id == id), None)
            if found is not None:
                return found
        return None


def _table(kind: type, given: object) -> object:
    assert isinstance(given, dict)
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in given.items() if name in known})
