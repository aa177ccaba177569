"""Write the table of defaults that follow the model into docs/pretrained.md.

python -m benchmarks.models.defaults

Every value comes from the settings themselves: the default of the field, and the one in its annotation.
"""

from collections.abc import Iterator
from functools import reduce

from benchmarks.generated_blocks import ROOT, Block
from repl_rl.cli.eval import EvalConfig
from repl_rl.cli.sft import SftConfig
from repl_rl.cli.train import TrainConfig
from repl_rl.cli.transcripts import TranscriptsConfig
from repl_rl.engine import ENGINES
from repl_rl.rollout_config import RolloutConfig
from repl_rl.settings.model_defaults import PretrainedDefault, format_default, get_model_dependent_fields

PAGE = Block(ROOT / "docs" / "pretrained.md", "models/defaults")


def block() -> str:
    """The generated block."""
    text = "| setting | the bundled policy | any other model |\n|---|---|---|\n"
    return text + "".join(
        f"| {name} | {format_default(usual)} | {other.description} |\n" for name, usual, other in rows()
    )


def rows() -> Iterator[tuple[str, object, PretrainedDefault]]:
    """Each setting once, with the defaults of the bundled policy and of any other model."""
    told = set[str]()
    commands: dict[str, object] = {
        "train": TrainConfig(),
        "sft": SftConfig(samples=1),
        "eval": EvalConfig(),
        "transcripts": TranscriptsConfig(from_tasks=("builtin:quickstart",)),
    }
    for command, config in commands.items():
        for name, other in get_model_dependent_fields(type(config)).items():
            if name not in told:
                alone = "." not in name and command != "train" and not hasattr(RolloutConfig, name)
                yield f"{name} of {command}" if alone else name, _value(config, name), other
            told.add(name)


def _value(config: object, name: str) -> object:
    """The value of a setting, by its dotted name."""
    table, _, option = name.partition(".")
    # Options of an engine are a table of its name.
    return (
        getattr(ENGINES.get(table)(), option) if table in ENGINES.entries else reduce(getattr, name.split("."), config)
    )


if __name__ == "__main__":
    PAGE.write(block())
