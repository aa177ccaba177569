"""Evaluations while training: of the policy of their step, without a trace in training, and the best policy is kept."""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from repl_rl.cli.train import TrainConfig
from repl_rl.errors import ConfigError
from repl_rl.rollout_config import find_recorded_task
from repl_rl.runs.run_folder import RunFolder
from repl_rl.settings.argument_parser import dump_toml
from repl_rl.tasks import get_split
from repl_rl.trainer.checkpoint_schedule import CheckpointSchedule
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.plugins.checkpoint import CheckpointManager, list_states, open_run
from repl_rl.trainer.plugins.periodic_evaluation import Evaluation
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.trainer.grpo_runs import TASKS
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

SMALL = TrainerConfig(steps=5, prompts_per_step=2, group_size=3, warmup_steps=0, num_iterations=2)


class Watched:
    """Evaluates by saying what it was told to, and keeps the weights that the source sampled from."""

    def __init__(self, source: SampledSource, scores: Mapping[int, float]) -> None:
        self.source = source
        self.scores = scores
        self.weights: dict[int, dict[str, Tensor]] = {}

    def play(self, step: int) -> Mapping[str, float]:
        self.weights[step] = copy.deepcopy(dict(self.source.model.state_dict()))
        return {"solve_rate": self.scores[step], "greedy": 0.5}


def trained(
    out: Path, scores: Mapping[int, float], every: int, config: TrainerConfig = SMALL
) -> tuple[SampledSource, Watched, list[dict[str, float]]]:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model))
    watched, rows = Watched(source, scores), list[dict[str, float]]()

    def on_step(record: StepRecord, _: object) -> None:
        rows.append(record.metrics)

    evaluation = Evaluation(every, watched.play) if every else None
    run_training(model, tiny_tokenizer(), TASKS, source, config, out, TrainingOptions(on_step, evaluation=evaluation))
    return source, watched, rows


def test_the_training_is_the_same_and_weights_travel_once_a_step(tmp_path: Path) -> None:
    plain, _, rows = trained(tmp_path / "plain", {}, 0)
    source, watched, told = trained(tmp_path / "told", {2: 0.1, 4: 0.3}, 2)
    before, after = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("plain", "told"))
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert [row["loss"] for row in rows] == [row["loss"] for row in told]
    assert plain.loads == source.loads == [0, 2, 4, 6, 8], "an evaluation only has them earlier"
    assert sorted(watched.weights) == [2, 4]


def test_an_evaluation_is_of_the_policy_after_its_step_and_its_figures_are_in_that_steps_row(tmp_path: Path) -> None:
    config = replace(SMALL, save_steps=2)
    _, watched, rows = trained(tmp_path, {2: 0.1, 4: 0.3}, 2, config)
    for step, weights in watched.weights.items():
        saved = load_file(tmp_path / f"checkpoint-{2 * step}" / "model.safetensors")
        assert all(torch.equal(weights[name], weight) for name, weight in saved.items())
    names = {"eval/solve_rate", "eval/greedy", "eval/best_step", "eval_s"}
    assert [names & row.keys() for row in rows] == [set(), names, set(), names, set()]
    assert [row["eval/solve_rate"] for row in rows if "eval_s" in row] == [0.1, 0.3]
    assert all(row["update_s"] >= 0 and row["sync_s"] > 0 for row in rows)


@pytest.mark.parametrize(("scores", "best"), [({1: 0.2, 2: 0.7, 3: 0.7, 4: 0.4, 5: 0.0}, 2), ({5: 0.1}, 5)])
def test_the_best_policy_is_kept_whole_and_of_equals_the_earlier(
    scores: Mapping[int, float], best: int, tmp_path: Path
) -> None:
    _, watched, rows = trained(tmp_path, scores, 5 // len(scores))
    kept = load_file(tmp_path / "best" / "model.safetensors")
    assert all(torch.equal(watched.weights[best][name], weight) for name, weight in kept.items())
    assert (tmp_path / "best" / "tokenizer.json").is_file()
    assert (tmp_path / "best" / "config.json").is_file()
    assert rows[-1]["eval/best_step"] == best
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "final"]


def test_with_adapters_the_best_policy_is_kept_as_its_adapters(tmp_path: Path) -> None:
    trained(tmp_path, {5: 0.1}, 5, replace(SMALL, lora_rank=2))
    assert (tmp_path / "best" / "adapter_model.safetensors").is_file()


class Broken(BaseException):
    """Stands for what ends a run."""


@pytest.mark.parametrize("second", [{1: 0.5, 2: 0.2, 3: 0.3, 4: 0.1, 5: 0.0}, {1: 0.5, 2: 0.2, 3: 0.6, 4: 0.1, 5: 0.0}])
@pytest.mark.parametrize("stop_at", [3, pytest.param(5, marks=pytest.mark.heavy)])
def test_a_resumed_run_has_the_best_policy_of_its_own_steps_though_others_came_out_better(
    second: Mapping[int, float], stop_at: int, tmp_path: Path
) -> None:
    weights: dict[int, dict[str, Tensor]] = {}

    def play(scores: Mapping[int, float], stop_at: int, saving: CheckpointSchedule) -> None:
        folder = RunFolder(tmp_path / "run", overwrite=False, resume=True)
        source = SampledSource(tiny_model())
        watched = Watched(source, scores)
        watched.weights = weights

        def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
            if record.step == stop_at:
                raise Broken
            folder.write_step(record.step, record.metrics, trajectories, record.credit)

        with open_run(folder, "", resume=True) as state:
            keeper = CheckpointManager(folder.states_folder, saving, state)
            evaluation, out = Evaluation(1, watched.play), folder.checkpoints_folder
            run_training(
                tiny_model(),
                tiny_tokenizer(),
                TASKS,
                source,
                SMALL,
                out,
                TrainingOptions(on_step, evaluation=evaluation, checkpoints=keeper),
            )

    first = {1: 0.5, 2: 0.2, 3: 0.6, 4: 0.7, 5: 0.8}  # rollouts need not repeat, nor need what is found of them
    with pytest.raises(Broken):
        play(first, 3, CheckpointSchedule(every_s=0, max_time_share=1.0))
    with pytest.raises(Broken):
        play(first, stop_at, CheckpointSchedule(every_s=1e6))
    assert [place.name for place in list_states(tmp_path / "run" / "states")] == ["000001", "000002"]
    play(second, 0, CheckpointSchedule(every_s=1e6))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = max(second, key=second.__getitem__)
    assert rows[-1]["eval/best_step"] == best
    kept = load_file(tmp_path / "run" / "checkpoints" / "best" / "model.safetensors")
    assert all(torch.equal(weights[best][name], weight) for name, weight in kept.items())
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["best", "final"]


def questions(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"id": t, "question": t, "answer": "1"}) + "\n" for t in texts))
    return str(path)


def test_a_validation_file_holds_the_held_out_tasks_and_all_others_are_trained_on(tmp_path: Path) -> None:
    many = [f"What is {n} + 1?" for n in range(30)]
    assert {get_split(text) for text in many} == {get_split(many[0]), "held_out", "train"}
    tasks = questions(tmp_path / "tasks.jsonl", *many)
    validation = questions(tmp_path / "validation.jsonl", "What is 1 + 99?", many[3])
    training, held_out = TrainConfig(tasks=tasks, validation=validation).split_tasks()
    assert [task.question for task in held_out] == ["What is 1 + 99?", many[3]]
    assert [task.question for task in training] == many[:3] + many[4:], "a question of both is not trained on"
    training, held_out = TrainConfig(tasks=tasks).split_tasks()
    assert len(training) + len(held_out) == 30


@pytest.mark.parametrize(
    ("judges", "wanted"),
    [({}, "exact"), ({"numeric": 1.0}, "numeric"), ({"task": 0.5, "numeric": 1.0}, "0.5*exact + numeric")],
)
def test_held_out_tasks_have_the_judge_that_training_has(
    tmp_path: Path, judges: Mapping[str, float], wanted: str
) -> None:
    """For a split, for a validation source, and for the task that a replay of the run looks up."""
    tasks = questions(tmp_path / "tasks.jsonl", *map(str, range(30)))
    validation = questions(tmp_path / "validation.jsonl", "a", "b")
    split = TrainConfig(tasks=tasks, judges=judges)
    for config in (split, replace(split, validation=validation)):
        training, held_out = config.split_tasks()
        assert {task.judge for task in training} == {task.judge for task in held_out} == {wanted}
        run = tmp_path / (config.validation and "validated") / "run"
        run.mkdir(parents=True)
        (run / "config.toml").write_text(dump_toml(config))
        assert find_recorded_task(run, held_out[0].id, config) == held_out[0]


@pytest.mark.parametrize("judge", ["", "task", "numeric"])
def test_only_a_judge_that_is_not_used_may_be_named_by_a_validation_file(tmp_path: Path, judge: str) -> None:
    judges = {judge: 1.0} if judge else {}
    validation = tmp_path / "validation.jsonl"
    validation.write_text('{"question": "q", "answer": "1", "judge": "nowhere:f"}\n')
    config = TrainConfig(tasks=questions(tmp_path / "tasks.jsonl", "a"), judges=judges, validation=str(validation))
    if judge == "numeric":
        assert [task.judge for task in config.split_tasks()[1]] == ["numeric"]
    else:
        with pytest.raises(ConfigError, match=r"validation\.jsonl:1: judge is 'nowhere:f'; it would be imported"):
            config.split_tasks()


def test_what_leaves_nothing_to_train_on_or_is_never_made_is_refused(tmp_path: Path) -> None:
    same = questions(tmp_path / "tasks.jsonl", "a", "b")
    with pytest.raises(ConfigError, match=r"validation is '.*tasks.jsonl'; every question of `tasks` is in it"):
        TrainConfig(tasks=same, validation=same).split_tasks()
    with pytest.raises(ConfigError, match="eval_steps is 7; training takes 6 steps"):
        TrainConfig(eval_steps=7, trainer=TrainerConfig(steps=6))
