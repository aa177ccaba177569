"""Promises of fine-tuning: what is learned from, and that the mask reaches TRL's loss exactly."""

import asyncio
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from repl_rl.cli import main
from repl_rl.errors import ConfigError
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.runs.store import read_trajectories, write_step
from repl_rl.sft.finetune import IGNORED, build_labelled_example, build_sft_args, build_trainer, run_finetuning
from repl_rl.sft.finetune_config import FinetuneConfig
from repl_rl.sft.select_rollouts import select_best_rollouts
from repl_rl.tasks import Split, get_split, load_tasks
from repl_rl.trajectory.trajectory import Failure, FailureKind, Stop, Trajectory
from repl_rl.utils.file_lock import OWNER
from tests.support.finetuning import POLICY, RECOVERED, RENDERER, RIGHT, play
from tests.support.scripted_rollouts import TASK, world
from tests.support.tokenizers import overshooting_tokenizer
from tests.support.trainer.tiny_policies import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "coldstart.md"


WRONG = play(["submit_final_answer(41)\n"])


def learned(example: Mapping[str, list[int]]) -> str:
    return RENDERER.decode([label for label in example["labels"] if label != IGNORED])


@pytest.mark.parametrize("trajectory", [RIGHT, RECOVERED, WRONG])
def test_labels_are_the_loss_mask_and_ids_are_those_of_the_trajectory(trajectory: Trajectory) -> None:
    example = build_labelled_example(trajectory, learn_errors=True)
    start = len(trajectory.prompt.token_ids)
    assert tuple(example["input_ids"]) == (*trajectory.prompt.token_ids, *trajectory.completion_ids)
    assert set(example["labels"][:start]) == {IGNORED}
    for label, own, token in zip(
        example["labels"][start:], trajectory.loss_mask, trajectory.completion_ids, strict=True
    ):
        assert label == (token if own else IGNORED)


def test_lines_in_error_are_context_unless_they_are_asked_for() -> None:
    assert learned(build_labelled_example(RECOVERED)) == "6 * 7\nsubmit_final_answer(42)\n"
    assert learned(build_labelled_example(RECOVERED, learn_errors=True)) == "y\n6 * 7\nsubmit_final_answer(42)\n"
    assert (
        build_labelled_example(RECOVERED)["input_ids"]
        == build_labelled_example(RECOVERED, learn_errors=True)["input_ids"]
    )


def test_the_mask_reaches_trls_loss_exactly(tmp_path: Path) -> None:
    examples = [build_labelled_example(t) for t in (RIGHT, RECOVERED, WRONG)]
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    made = build_trainer(
        model, RENDERER.tokenizer, examples, build_sft_args(FinetuneConfig(batch_size=3), tmp_path, seed=0)
    )
    (batch,) = made.get_train_dataloader()
    ids_BT, labels_BT = batch["input_ids"], batch["labels"]
    rows = {tuple(e["labels"]): e["input_ids"] for e in examples}
    for ids, labels, seen in zip(ids_BT.tolist(), labels_BT.tolist(), batch["attention_mask"].tolist(), strict=True):
        real = sum(seen)
        assert rows.pop(tuple(labels[:real])) == ids[:real]
        assert set(labels[real:]) <= {IGNORED}
    model.train()
    loss = made.compute_loss(model, dict(batch)).item()
    logits = model(input_ids=ids_BT, attention_mask=batch["attention_mask"]).logits[:, :-1]
    nats_BT = cross_entropy(logits.transpose(1, 2), ids_BT[:, 1:], reduction="none").detach()
    mask_BT = labels_BT[:, 1:] != IGNORED
    assert loss == pytest.approx(float(nats_BT[mask_BT].mean()), rel=1e-5)
    # Each single bit of the mask counts: with any of them turned the loss would be another one.
    total, count = float(nats_BT[mask_BT].sum()), int(mask_BT.sum())
    for own, nats in zip(mask_BT.flatten().tolist(), nats_BT.flatten().tolist(), strict=True):
        turned = (total - nats) / (count - 1) if own else (total + nats) / (count + 1)
        assert abs(turned - loss) > 2e-5 * loss


@pytest.mark.parametrize("micro_batch", [0, 1])
def test_passes_of_a_step_add_up_to_the_mean_over_its_learned_tokens(micro_batch: int, tmp_path: Path) -> None:
    """Through all of the logits, once more."""
    examples = [build_labelled_example(t) for t in (RIGHT, RECOVERED, WRONG)]
    model, start = (AutoModelForCausalLM.from_pretrained(POLICY) for _ in range(2))
    seen: dict[str, torch.Tensor] = {}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, *args: object, **options: object) -> None:
            seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    args = build_sft_args(FinetuneConfig(steps=1, batch_size=3, per_device_batch_size=micro_batch), tmp_path, seed=0)
    args.max_grad_norm = 1e9
    made = build_trainer(model, RENDERER.tokenizer, examples, args, [Gradients()])
    made.train()
    nats, count = torch.zeros(()), 0
    for example in examples:
        labels = torch.tensor([example["labels"][1:]])
        logits = start(input_ids=torch.tensor([example["input_ids"]])).logits[:, :-1]
        nats = nats + cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="sum")
        count += int((labels != IGNORED).sum())
    mean = nats / count
    torch.autograd.backward(mean)
    for name, p in start.named_parameters():
        torch.testing.assert_close(seen[name], p.grad, rtol=1e-3, atol=1e-5)
    (entry,) = (entry for entry in made.state.log_history if "loss" in entry)
    assert entry["loss"] == pytest.approx(mean.item(), rel=1e-4)


def test_no_gradient_comes_from_a_token_that_is_context(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    example = build_labelled_example(RIGHT)
    only_context = {"input_ids": example["input_ids"], "labels": [IGNORED] * len(example["labels"])}
    args = build_sft_args(FinetuneConfig(batch_size=2), tmp_path, seed=0)
    gradients = []
    for examples in ([example], [example, only_context]):
        made = build_trainer(model, RENDERER.tokenizer, examples, args)
        (batch,) = made.get_train_dataloader()
        model.zero_grad()
        torch.autograd.backward(made.compute_loss(model, dict(batch)))
        gradients.append(model.get_input_embeddings().weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])


def test_fine_tuning_learns_the_lines_and_leaves_a_whole_policy(tmp_path: Path) -> None:
    losses: list[float] = []
    config = FinetuneConfig(steps=6, batch_size=4, per_device_batch_size=2, learning_rate=3e-3, warmup_steps=0)
    out = tmp_path / "policy"
    last = run_finetuning(
        POLICY, RENDERER, [build_labelled_example(RIGHT)] * 4, out, config, 0, lambda _, loss: losses.append(loss)
    )
    assert len(losses) == 6
    assert losses[-1] == last < losses[0] / 2
    tuned = Renderer.from_folder(out)
    assert tuned.encode("x = 6 * 7\n") == RENDERER.encode("x = 6 * 7\n")
    assert tuned.eos_ids == RENDERER.eos_ids
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() > 800_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["policy"]


def test_in_bfloat16_as_many_weights_move_as_in_float32(tmp_path: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(POLICY).state_dict()

    def moved(dtype: Literal["float32", "bfloat16"]) -> float:
        """Share of the weights that three small steps change."""
        config = FinetuneConfig(steps=3, batch_size=2, learning_rate=1e-6, warmup_steps=0, dtype=dtype)
        run_finetuning(POLICY, RENDERER, [build_labelled_example(RIGHT)] * 2, tmp_path / dtype, config)
        after = load_file(tmp_path / dtype / "model.safetensors")
        assert {weight.dtype for weight in after.values()} == {torch.float32}
        count = sum(int(weight.numel()) for weight in after.values())
        return float(sum(int((before[name] != weight).sum()) for name, weight in after.items()) / count)

    assert moved("bfloat16") == pytest.approx(moved("float32"), rel=0.01)
    assert moved("float32") > 0.5


def test_nothing_to_learn_and_too_long_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="examples is 0"):
        run_finetuning(POLICY, RENDERER, [], tmp_path / "o", FinetuneConfig())
    long = {"input_ids": [1] * 2000, "labels": [1] * 2000}
    with pytest.raises(ConfigError, match="tokens of a trajectory is 2000; the policy's context has 1024 tokens"):
        run_finetuning(POLICY, RENDERER, [long], tmp_path / "o", FinetuneConfig())
    assert list(tmp_path.iterdir()) == []


OVERSHOOTING = Renderer(overshooting_tokenizer())
BLOCK, END = ("if 6:\n", "    7\n", "\n"), "submit_final_answer(42)\n"


def forbidding_policy(folder: Path) -> PreTrainedModel:
    model = tiny_model(vocab=len(OVERSHOOTING.tokenizer))
    model.save_pretrained(folder)
    OVERSHOOTING.tokenizer.save_pretrained(folder)
    return model


def test_fine_tuning_learns_the_renormalised_policy_and_saves_no_mask(tmp_path: Path) -> None:
    model = forbidding_policy(tmp_path / "base")
    (right,) = asyncio.run(world([*BLOCK, END], renderer=OVERSHOOTING).collect([TASK]))
    example = build_labelled_example(right)
    never = sorted(OVERSHOOTING.forbidden_ids)
    logits = model(torch.tensor([example["input_ids"]])).logits[0, :-1].detach()
    logits[:, never] = -torch.inf
    expected = cross_entropy(logits, torch.tensor(example["labels"][1:])).item()
    losses: list[float] = []
    config = FinetuneConfig(steps=2, batch_size=1, learning_rate=1e-2, warmup_steps=0)
    run_finetuning(
        tmp_path / "base", OVERSHOOTING, [example], tmp_path / "o", config, 0, lambda _, loss: losses.append(loss)
    )
    assert losses[0] == pytest.approx(expected, rel=1e-4)
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "o")
    assert set(tuned.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(tuned.lm_head.weight[never], model.lm_head.weight[never], rtol=0, atol=1e-3)
    assert (tuned.lm_head.weight - model.lm_head.weight).abs().max() > 1e-3


def test_what_holds_a_forbidden_id_is_left_out_and_counted_or_refused_never_learned(tmp_path: Path) -> None:
    carrying = Renderer(overshooting_tokenizer(), "carry")
    (rollout,) = asyncio.run(world(["".join(BLOCK), END], renderer=carrying).collect([TASK]))
    assert not OVERSHOOTING.forbidden_ids.isdisjoint(i for line in rollout.lines for i in line.token_ids)
    demonstration = replace(rollout, outcome=None)
    assert len(select_best_rollouts([demonstration]).selected) == 1
    chosen = select_best_rollouts([demonstration], 1, OVERSHOOTING.forbidden_ids)
    assert chosen.selected == ()
    assert chosen.rejected_counts == {"writes an id that the policy never samples (--newline-tokens forbid)": 1}
    forbidding_policy(tmp_path / "base")
    example = build_labelled_example(demonstration, learn_errors=True)
    with pytest.raises(ConfigError, match="examples with forbidden ids to learn is 1; leave them out, or"):
        run_finetuning(tmp_path / "base", OVERSHOOTING, [example], tmp_path / "o", FinetuneConfig())
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("name", "value"), [("steps", 0), ("batch_size", 0), ("learning_rate", 0.0), ("per_device_batch_size", 5)]
)
def test_settings_are_checked(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        FinetuneConfig(**{name: value})  # type: ignore[arg-type]


def test_of_own_rollouts_the_best_right_ones_of_each_task_are_kept_and_demonstrations_all() -> None:
    short = play(["submit_final_answer(42)\n"])
    other = play(["1 + 1\n", "submit_final_answer(42)\n"], task_id="t2")
    shown = replace(RIGHT, outcome=None)
    failed = replace(RIGHT, outcome=None, stop=Stop.FAULT, failure=Failure(FailureKind.SANDBOX_FAULT, "lost"))
    everything = [WRONG, RECOVERED, shown, RIGHT, other, short, failed]
    chosen = select_best_rollouts(everything)
    assert chosen.selected == (shown, other, short)
    assert chosen.rejected_counts == {
        "did not solve its task": 1,
        "failed on our side, or empty": 1,
        "a better one of its task is kept": 2,
    }
    assert select_best_rollouts(everything, per_task=2).selected == (shown, RIGHT, other, short)
    assert RECOVERED in select_best_rollouts(everything, per_task=3).selected
    with pytest.raises(ConfigError, match="per_task is 0"):
        select_best_rollouts(everything, per_task=0)


def test_the_verb_learns_from_demonstrations_and_from_rollouts_of_training_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_step(tmp_path / "t" / "trajectories", 0, [replace(RIGHT, outcome=None)] * 3)
    out = tmp_path / "policy"
    flags = ["sft", "--data", str(tmp_path / "t"), "--samples", "2", "--train-tasks", "6", "--out", str(out)]
    flags += ["--engine", "transformers", "--sandbox", "unsafe", "--concurrency", "4", "--tasks", "builtin:count"]
    assert main([*flags, "--learning.steps", "2", "--learning.batch-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert "trajectories to learn from" in shown
    assert "step     2/2" in shown
    assert (out / "model.safetensors").is_file()
    played = list(read_trajectories(out / "rollouts"))
    questions = {task.id: task.question for task in load_tasks("builtin:count", split="train", count=6)}
    assert len(played) == 12
    assert {get_split(questions[t.task_id]) for t in played} == {Split.TRAIN}
    assert main(flags) == 2
    assert "it exists; name a new --out" in capsys.readouterr().err


def test_trajectories_of_another_tokenizer_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = asyncio.run(world(["submit_final_answer(42)\n"]).collect([TASK]))
    write_step(tmp_path / "trajectories", 0, foreign)
    assert main(["sft", "--data", str(tmp_path), "--out", str(tmp_path / "o")]) == 2
    assert "they were made with another tokenizer" in capsys.readouterr().err
    assert main(["sft"]) == 2
    assert "name --data FOLDER, or let the policy play with --samples 8" in capsys.readouterr().err


def recipe() -> list[list[str]]:
    """The commands by which the bundled policy is made, as the page has them."""
    page = PAGE.read_text().partition("## The bundled policy")[2]
    (block,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    return [shlex.split(line)[1:] for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_the_recipe_of_the_bundled_policy_runs_as_the_page_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own commands, with few demonstrations and few steps."""
    monkeypatch.chdir(tmp_path)
    fewer = {"--count": "40", "--learning.steps": "6", "--learning.warmup-steps": "1"}
    for words in recipe():
        tiny = [fewer.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        assert main(tiny) == 0, capsys.readouterr().err
    assert json.loads(Path("cold/transcripts.json").read_text())["kept"] == 40
    assert len(list(read_trajectories(Path("warm/trajectories")))) == 40
    losses = [float(loss) for loss in re.findall(r"loss (\S+) nats", capsys.readouterr().out)]
    assert losses[5] < losses[0]
    made = {file.name: file.stat().st_size for file in Path("policy").iterdir() if file.name != OWNER}
    shipped = {file.name: file.stat().st_size for file in POLICY.iterdir()}
    assert made == shipped
