"""`repl-rl sft`: fine-tune a policy on demonstrations and on its own best rollouts."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from rich.console import Console

from repl_rl.cli.apply_model_defaults import UpdateInfo, apply_model_defaults
from repl_rl.cli.live_status import LiveStatus
from repl_rl.cli.terminal_output import format_duration, make_terminal
from repl_rl.cli.unused_options import refuse_unread
from repl_rl.errors import ConfigError
from repl_rl.judges import check_judges
from repl_rl.models.safetensors_index import validate_checkpoint_complete
from repl_rl.rollout import SyncRollouts
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.store import read_trajectories, write_step
from repl_rl.settings.argument_parser import ParsedSettings, parse_with_sources
from repl_rl.settings.help_pages import COMMON
from repl_rl.settings.value_bounds import AtLeast, check_fields
from repl_rl.sft.finetune_config import POLICY, FinetuneConfig
from repl_rl.sft.select_rollouts import Selection, select_best_rollouts
from repl_rl.tasks import Split, Task
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import open_output_folder, validate_no_inputs_inside
from repl_rl.utils.describe_os_errors import catch_os_errors

_ROLLOUTS = "rollouts"
"""Folder in the output folder for the rollouts that the policy played."""
_FRESH_SETTINGS = frozenset({"fresh", "seed", "out", "overwrite"})
"""Settings that --fresh reads."""
_PLAYING_SETTINGS = (
    "tasks",
    "judges",
    "group_judges",
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
class SftConfig(RolloutConfig):
    """Fine-tune a policy on stored trajectories and on rollouts that it samples first.

    The loss covers the policy's lines, not prompts or console output.
    """

    data: Annotated[tuple[Path, ...], COMMON] = ()
    """Folders or files of trajectories: of `repl-rl transcripts`, or of a training run."""
    samples: Annotated[int, AtLeast(0), COMMON] = 0
    """Rollouts per training task that the policy plays before it learns, >= 0. 0 plays none."""
    train_tasks: Annotated[int, AtLeast(1), COMMON] = 512
    """Training tasks that the policy plays before it learns, --samples rollouts each, >= 1."""
    per_task: Annotated[int, AtLeast(1), COMMON] = 1
    """Rollouts per task to learn from, the best among the right ones, >= 1."""
    learn_errors: Annotated[bool, COMMON] = False
    """Also train on lines that ended in an error. Otherwise they are context, without loss."""
    fresh: Annotated[bool, COMMON] = False
    """Learn nothing: write a new small policy with random weights, drawn with --seed, for a cold start."""
    out: Annotated[Path, COMMON] = Path("policy")
    """New folder for the fine-tuned policy. Its rollouts are stored in OUT/rollouts."""
    overwrite: Annotated[bool, COMMON] = False
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
    console = make_terminal()
    if config.fresh:
        return _write_fresh_policy(config, console)
    # Find what cannot be learned before anything slow starts.
    validate_checkpoint_complete(config.model_folder)
    validate_trainable(config.model_folder)
    config = apply_model_defaults(
        asked, update=lambda config: UpdateInfo(rows_per_step=config.learning.batch_size, steps=config.learning.steps)
    ).resolve_prompt_settings()
    renderer = config.load_renderer()
    if config.overwrite:
        data = (("data", str(source)) for source in config.data)
        validate_no_inputs_inside(
            "output folder", config.out, [("model", config.model), ("tasks", config.tasks), *data]
        )
    tasks = config.draw_tasks(Split.TRAIN, config.train_tasks) if config.samples else ()
    check_judges(tasks)
    with open_output_folder(config.out, POLICY, config.overwrite) as made:
        # Learn from stored trajectories and from the best rollouts that the policy plays now.
        stored = [trajectory for source in config.data for trajectory in _read_stored(source, renderer)]
        played = _play_rollouts(config, tasks, console) if tasks else []
        chosen = select_best_rollouts([*stored, *played], config.per_task, renderer.forbidden_ids)
        _show_selection(chosen, console)
        with catch_os_errors("output folder", config.out, then=", then give the command again"):
            _learn_from_selection(config, renderer, chosen, made, console)
            if played:
                write_step(made / _ROLLOUTS, 0, played)
    console.print(f"fine-tuned policy {config.out}")
    return 0


def refuse_without_effect(asked: ParsedSettings[SftConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    usual = SftConfig(fresh=True)
    if asked.config.fresh:
        unread = [field.name for field in fields(SftConfig) if field.name not in _FRESH_SETTINGS]
        remedy = "a new policy learns nothing; leave it out, and give the policy as --model to a further sft"
        refuse_unread(asked, usual, unread, remedy)
    if not asked.config.samples:
        remedy = "only rollouts that the policy plays read it; add --samples 8, or leave it out"
        refuse_unread(asked, usual, _PLAYING_SETTINGS, remedy)
    refuse_unread(asked, usual, ["kv_on_sync"], "weights do not change while this command plays; leave it out")


def validate_trainable(model: Path) -> None:
    """Reject a model that computes differently in training and in sampling, before anything is played.

    Raises:
        ConfigError: the model is one of these.
    """
    # This imports torch, which is slow.
    from repl_rl.models.disable_dropout import validate_deterministic_model
    from repl_rl.models.parameter_names import read_config

    validate_deterministic_model(read_config(model))


def _write_fresh_policy(config: SftConfig, console: Console) -> int:
    """Write a new policy with random weights, and return the exit code."""
    # This imports torch, which is slow.
    from repl_rl.sft.create_random_model import write_random_policy

    with (
        open_output_folder(config.out, POLICY, config.overwrite) as made,
        catch_os_errors("output folder", config.out, then=", then give the command again"),
    ):
        write_random_policy(made, config.seed)
    console.print(f"new policy {config.out}, random weights")
    return 0


def _read_stored(source: Path, renderer: Renderer) -> Iterator[Trajectory]:
    """Yield the trajectories of a folder or file, after checking that this policy's tokenizer encoded them.

    Raises:
        ConfigError: the path does not exist, or another tokenizer encoded them, so that their ids mean other text here.
    """
    if not source.exists():
        raise ConfigError("data", str(source), "there is no such folder or file; give one with trajectories")
    for number, trajectory in enumerate(read_trajectories(source)):
        # One tokenizer encodes all trajectories of a source, so the first one is enough.
        if number == 0:
            _validate_same_tokenizer(trajectory, renderer, source)
        yield trajectory


def _validate_same_tokenizer(trajectory: Trajectory, renderer: Renderer, source: Path) -> None:
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


def _play_rollouts(config: SftConfig, tasks: Sequence[Task], console: Console) -> Sequence[Trajectory]:
    """Play rollouts with the policy. Only training tasks are played, so that held-out ones stay unseen."""
    console.print(f"playing {config.samples} rollouts of each of {len(tasks)} tasks ...")
    with SyncRollouts(config.open_rollouts, {task.id: task for task in tasks}) as source:
        return source.sample([task for task in tasks for _ in range(config.samples)])


def _show_selection(chosen: Selection, console: Console) -> None:
    console.print(f"{len(chosen.selected)} trajectories to learn from")
    for reason, count in chosen.rejected_counts.items():
        console.print(f"  left out {count}: {reason}")


def _learn_from_selection(
    config: SftConfig, renderer: Renderer, chosen: Selection, out: Path, console: Console
) -> None:
    """Fine-tune the policy on the chosen trajectories that fit into its context."""
    # This imports torch and TRL, which are slow.
    from repl_rl.sft.finetune import build_labelled_example, read_context_tokens, run_finetuning

    room = read_context_tokens(config.model_folder)
    examples = [build_labelled_example(trajectory, config.learn_errors) for trajectory in chosen.selected]
    fitting = [example for example in examples if len(example["input_ids"]) <= room]
    if len(fitting) < len(examples):
        console.print(f"  left out {len(examples) - len(fitting)}: longer than the policy's context of {room} tokens")
    progress = FinetuneProgress(config.learning.steps, console)
    with LiveStatus(console) as status, status.show(progress.describe):
        run_finetuning(config.model_folder, renderer, fitting, out, config.learning, config.seed, progress.report_step)


class FinetuneProgress:
    """Progress of a fine-tuning: its newest step, and the time left."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps, self._console = steps, console
        self._started = time.monotonic()
        self._step, self._step_ended = 0, self._started

    def report_step(self, step: int, loss: float) -> None:
        """Print the loss of the first step and of each tenth of the steps, with the time left."""
        self._step, self._step_ended = step, time.monotonic()
        if step == 1 or step % max(1, self._steps // 10) == 0:
            line = f"step {step:>5}/{self._steps}  loss {loss:.4f} nats per token{self._estimate_left()}"
            self._console.print(line, soft_wrap=True)

    def describe(self) -> str:
        """Return the progress as one line."""
        return f"fine-tuning: {self._step} of {self._steps} steps{self._estimate_left()}"

    def _estimate_left(self) -> str:
        """Return a phrase about the time left, or "" before the first step ended and after the last one."""
        if not 0 < self._step < self._steps:
            return ""
        per_step_s = (self._step_ended - self._started) / self._step
        return f", about {format_duration(per_step_s * (self._steps - self._step))} left"
