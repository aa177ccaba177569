"""`repl-rl sft`: fine-tune a policy on demonstrations and on its own best rollouts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from rich.console import Console

from repl_rl.cli.defaults import Update, apply_model_defaults
from repl_rl.cli.terminal import terminal
from repl_rl.cli.unread import refuse_unread
from repl_rl.coldstart.selection import POLICY, FinetuneConfig, Selection, select
from repl_rl.engine.checkpoint import refuse_incomplete
from repl_rl.errors import ConfigError
from repl_rl.judges import check_judges
from repl_rl.machine.folders import open_output_folder
from repl_rl.machine.outputs import refuse_inputs
from repl_rl.machine.refused import writing
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout import RolloutThread
from repl_rl.rollout.renderer import Renderer
from repl_rl.runs.store import read, write_step
from repl_rl.settings.arguments import Parsed, parse_with_sources
from repl_rl.settings.bounds import AtLeast, check_fields
from repl_rl.tasks import Split, Task
from repl_rl.world import World

_ROLLOUTS = "rollouts"
_OF_FRESH = frozenset({"fresh", "seed", "out", "overwrite"})
"""Settings that --fresh reads."""
_OF_PLAYING = (
    "tasks",
    "judge",
    "group_judge",
    "engine",
    "sandbox",
    "preload",
    "sampler",
    "host_functions",
    "context_tokens",
    "dtype",
    "concurrency",
    "trust",
    "rollout",
    "limits",
    "train_tasks",
)
"""Settings that only --samples reads, because only it plays rollouts."""


@dataclass(frozen=True)
class SftConfig(World):
    """Fine-tune a policy on stored trajectories and on rollouts that it plays first. The loss is on its own lines."""

    data: tuple[Path, ...] = ()
    """Folders or files of trajectories: of `repl-rl transcripts`, or of a training run."""
    samples: Annotated[int, AtLeast(0)] = 0
    """Rollouts per training task that the policy plays before it learns, >= 0. 0 plays none."""
    train_tasks: Annotated[int, AtLeast(1)] = 512
    """Training tasks that it plays, >= 1."""
    per_task: Annotated[int, AtLeast(1)] = 1
    """Rollouts per task to learn from, the best among the right ones, >= 1."""
    learn_errors: bool = False
    """Also learn lines that ended in an error. Otherwise they are context."""
    fresh: bool = False
    """Learn nothing: write a new small policy with random weights, drawn with --seed, for a cold start."""
    out: Path = Path("policy")
    """New folder for the fine-tuned policy. Its rollouts are stored in OUT/rollouts."""
    overwrite: bool = False
    """Replace an older policy that this command made. Anything else is refused."""
    learning: FinetuneConfig = field(default_factory=FinetuneConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if not self.data and not self.samples and not self.fresh:
            raise ConfigError("data", (), "name --data FOLDER, or let the policy play with --samples 8")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    asked = parse_with_sources(SftConfig, "sft", argv)
    refuse_without_effect(asked)
    config = asked.config
    console = terminal()
    if config.fresh:
        return _begin(config, console)
    # Find what cannot be learned before anything slow starts.
    refuse_incomplete(config.model_folder)
    refuse_untrainable(config.model_folder)
    update = Update(rows=config.learning.batch_size)
    config = apply_model_defaults(asked, update=update).resolve_prompt_settings()
    renderer = config.renderer()
    if config.overwrite:
        data = (("data", str(source)) for source in config.data)
        refuse_inputs("output folder", config.out, [("model", config.model), ("tasks", config.tasks), *data])
    tasks = config.drawn(Split.TRAIN, config.train_tasks) if config.samples else ()
    check_judges(tasks)
    with open_output_folder(config.out, POLICY, config.overwrite) as made:
        # Learn from stored trajectories and from the best rollouts that the policy plays now.
        stored = [trajectory for source in config.data for trajectory in _stored(source, renderer)]
        played = _play(config, tasks, console) if tasks else []
        chosen = select([*stored, *played], config.per_task, renderer.forbidden_ids)
        _show(chosen, console)
        with writing("output folder", config.out, then=", then give the command again"):
            _learn(config, renderer, chosen, made, console)
            if played:
                write_step(made / _ROLLOUTS, 0, played)
    console.print(f"fine-tuned policy {config.out}")
    return 0


def refuse_without_effect(asked: Parsed[SftConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    usual = SftConfig(fresh=True)
    if asked.config.fresh:
        unread = [field.name for field in fields(SftConfig) if field.name not in _OF_FRESH]
        remedy = "a new policy learns nothing; leave it out, and give the policy as --model to a further sft"
        refuse_unread(asked, usual, unread, remedy)
    if not asked.config.samples:
        remedy = "only rollouts that the policy plays read it; add --samples 8, or leave it out"
        refuse_unread(asked, usual, _OF_PLAYING, remedy)
    refuse_unread(asked, usual, ["kv_on_sync"], "weights do not change while this command plays; leave it out")


def refuse_untrainable(model: Path) -> None:
    """Reject a model that computes differently in training and in sampling, before anything is played.

    Raises:
        ConfigError: the model is one of these.
    """
    # This imports torch, which is slow.
    from repl_rl.engine.dropout import refuse_random
    from repl_rl.engine.names import read_config

    refuse_random(read_config(model))


def _begin(config: SftConfig, console: Console) -> int:
    # This imports torch, which is slow.
    from repl_rl.coldstart.fresh import write_fresh_policy

    with (
        open_output_folder(config.out, POLICY, config.overwrite) as made,
        writing("output folder", config.out, then=", then give the command again"),
    ):
        write_fresh_policy(made, config.seed)
    console.print(f"new policy {config.out}, random weights")
    return 0


def _stored(source: Path, renderer: Renderer) -> Iterator[Trajectory]:
    """Yield the trajectories of a folder or file, after checking that this policy's tokenizer encoded them.

    Raises:
        ConfigError: the path does not exist, or another tokenizer encoded them, so that their ids mean other text here.
    """
    if not source.exists():
        raise ConfigError("data", str(source), "there is no such folder or file; give one with trajectories")
    for number, trajectory in enumerate(read(source)):
        # One tokenizer encodes all trajectories of a source, so the first one is enough.
        if number == 0:
            _refuse_other_tokens(trajectory, renderer, source)
        yield trajectory


def _refuse_other_tokens(trajectory: Trajectory, renderer: Renderer, source: Path) -> None:
    """Reject trajectories whose ids mean other text here, or whose prompt space differs from this policy's."""
    # A prompt whose last space is not among its ids leaves that space to the policy.
    text, shown = trajectory.prompt.text, renderer.decode(trajectory.prompt.token_ids)
    withheld = text == f"{shown} "
    if shown != text and not withheld:
        remedy = "they were made with another tokenizer; make them with this policy's --model"
        raise ConfigError("trajectories", str(source), remedy)
    if text.endswith(" ") and withheld != renderer.samples_space:
        theirs = "sampled" if withheld else "observed"
        remedy = f"their prompts end as with --prompt-space {theirs}; say that here too, or make them again"
        raise ConfigError("trajectories", str(source), remedy)


def _play(config: SftConfig, tasks: Sequence[Task], console: Console) -> Sequence[Trajectory]:
    """Play rollouts with the policy. Only training tasks are played, so that held-out ones stay unseen."""
    console.print(f"playing {config.samples} rollouts of each of {len(tasks)} tasks ...")
    with RolloutThread(config.rollouts, {task.id: task for task in tasks}) as source:
        return source.sample([task for task in tasks for _ in range(config.samples)])


def _show(chosen: Selection, console: Console) -> None:
    console.print(f"{len(chosen.kept)} trajectories to learn from")
    for reason, count in chosen.left_out.items():
        console.print(f"  left out {count}: {reason}")


def _learn(config: SftConfig, renderer: Renderer, chosen: Selection, out: Path, console: Console) -> None:
    # This imports torch and TRL, which are slow.
    from repl_rl.coldstart.finetune import context_tokens, finetune, labelled

    room = context_tokens(config.model_folder)
    examples = [labelled(trajectory, config.learn_errors) for trajectory in chosen.kept]
    fitting = [example for example in examples if len(example["input_ids"]) <= room]
    if len(fitting) < len(examples):
        console.print(f"  left out {len(examples) - len(fitting)}: longer than the policy's context of {room} tokens")
    every = max(1, config.learning.steps // 10)

    def on_step(step: int, loss: float) -> None:
        if step == 1 or step % every == 0:
            console.print(f"step {step:>5}/{config.learning.steps}  loss {loss:.4f} nats a token")

    finetune(config.model_folder, renderer, fitting, out, config.learning, config.seed, on_step)
