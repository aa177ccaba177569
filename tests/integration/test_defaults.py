"""Defaults follow the model: the bundled policy's kind has its own, any other model those of a pretrained one."""

import json
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.models.defaults import PAGE, block
from repl_rl.cli import main
from repl_rl.cli.apply_model_defaults import UpdateInfo, apply_defaults, apply_model_defaults
from repl_rl.cli.chat import ChatConfig
from repl_rl.cli.eval import EvalConfig
from repl_rl.cli.rollout import RolloutCommandConfig
from repl_rl.cli.sampler import SamplerCheckConfig
from repl_rl.cli.serve import ServeConfig
from repl_rl.cli.sft import SftConfig
from repl_rl.cli.train import TrainConfig, describe_update
from repl_rl.cli.transcripts import TranscriptsConfig
from repl_rl.errors import ConfigError
from repl_rl.models.resolve_model import is_bundled_kind
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.settings.argument_parser import ParsedSettings, dump_toml, flatten, parse, parse_with_sources
from repl_rl.settings.model_defaults import get_model_dependent_fields
from repl_rl.sft.create_random_model import make_random_policy, make_tokenizer, write_random_policy
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.config_checks import GpuMemory, validate_gpu_memory
from repl_rl.trainer.train import warn_about_learning_rate
from repl_rl.utils.hardware import LocalGpuInfo
from repl_rl.utils.package_data import find_asset
from scripts.site.settings import commands, settings

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}assistant: "
OWN_CONTEXT = 2048


class Gpu:
    """The GPU of another machine."""

    def __init__(self, there: bool, bfloat16: bool) -> None:
        self._there, self._bfloat16 = there, bfloat16

    def exists(self) -> bool:
        return self._there

    def supports_bfloat16(self) -> bool:
        return self._bfloat16


NONE, OLD, NEW = Gpu(False, False), Gpu(True, False), Gpu(True, True)


def write_model(folder: Path, chat: bool, context: int = OWN_CONTEXT, hidden: int = 64) -> Path:
    """A model that is not of the bundled policy's kind: it is smaller."""
    make_tokenizer(folder)
    renderer = Renderer.from_folder(folder)
    model = make_random_policy(
        len(renderer.tokenizer), renderer.pad_id, renderer.end_id, hidden, layers=2, context_tokens=context
    )
    model.save_pretrained(folder)
    if chat:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {
        "chat": write_model(place / "chat", chat=True),
        "base": write_model(place / "base", chat=False),
        "long": write_model(place / "long", chat=False, context=1 << 17),
    }


def resolved(config: object) -> dict[str, object]:
    """Return the settings that config.toml would record."""
    return dict(flatten(tomllib.loads(dump_toml(config))))


def trained(flags: Sequence[str], gpus: Gpu = NONE, recorded: Path | None = None) -> dict[str, object]:
    """The recorded settings of `repl-rl train` with these flags."""
    asked = parse_with_sources(TrainConfig, "train", flags, presets=find_asset("presets"))
    return resolved(apply_model_defaults(asked, recorded, describe_update, gpus))


ALONE = {"vllm.kv_cache_gib": None, "vllm.sleep": False}
SHARED = {"vllm.kv_cache_gib": 8, "vllm.sleep": True}
"""Options of a vLLM that leaves memory of its GPU to the trainer."""
BUNDLED: Mapping[str, object] = {
    **ALONE,
    "prompt": "bare",
    "context_tokens": None,
    "rollout.max_lines": 8,
    "rollout.max_line_tokens": 48,
    "rollout.max_observation_tokens": 128,
    "rollout.max_wall_s": 120.0,
    "eval_tasks": 240,
    "trainer.prompts_per_step": 12,
    "trainer.per_device_batch_size": 0,
    "trainer.learning_rate": 5e-4,
    "trainer.warmup_steps": 5,
    "trainer.dtype": "float32",
    "trainer.gradient_checkpointing": False,
}
PRETRAINED: Mapping[str, object] = {
    **ALONE,
    "prompt": "chat",
    "context_tokens": OWN_CONTEXT,
    "rollout.max_lines": 32,
    "rollout.max_line_tokens": 256,
    "rollout.max_observation_tokens": 512,
    "rollout.max_wall_s": 900.0,
    "eval_tasks": 32,
    "trainer.prompts_per_step": 4,
    "trainer.per_device_batch_size": 2,
    "trainer.learning_rate": 1e-6,
    "trainer.warmup_steps": 10,
    "trainer.dtype": "float32",
    "trainer.gradient_checkpointing": False,
}
SIZES = {"eval_tasks": 240, "trainer.prompts_per_step": 12, "trainer.per_device_batch_size": 8}
ON_GPU = {**SIZES, **SHARED, "trainer.dtype": "bfloat16", "trainer.gradient_checkpointing": True}
ROWS: Mapping[str, tuple[str, str, Gpu, Mapping[str, object]]] = {
    "another model with a chat template": ("chat", "", NONE, PRETRAINED),
    "another without": ("base", "", NONE, {**PRETRAINED, "prompt": "base"}),
    "a long context is bounded": ("long", "", NONE, {**PRETRAINED, "prompt": "base", "context_tokens": 8192}),
    "adapters": ("chat", "--trainer.lora-rank 4", NONE, {**PRETRAINED, "trainer.learning_rate": 1e-5}),
    "a GPU": ("chat", "", NEW, {**PRETRAINED, **ON_GPU}),
    "a GPU without bfloat16": (
        *("chat", "", OLD),
        {**PRETRAINED, **SIZES, **SHARED, "trainer.gradient_checkpointing": True},
    ),
    "adapters on a GPU": (
        *("chat", "--trainer.lora-rank 4", NEW),
        {**PRETRAINED, **ON_GPU, "trainer.learning_rate": 1e-5},
    ),
    "a step that 8 does not divide": (
        *("chat", "--trainer.prompts-per-step 3 --trainer.group-size 4", NEW),
        {**PRETRAINED, **ON_GPU, "trainer.prompts_per_step": 3, "trainer.per_device_batch_size": 6},
    ),
    "a step that 2 does not divide": (
        *("chat", "--trainer.prompts-per-step 3 --trainer.group-size 3", NONE),
        {**PRETRAINED, "trainer.prompts_per_step": 3, "trainer.per_device_batch_size": 1},
    ),
    "a short run": ("chat", "--trainer.steps 6", NONE, {**PRETRAINED, "trainer.warmup_steps": 0}),
    "a flag": ("chat", "--trainer.learning-rate 3e-5", NONE, {**PRETRAINED, "trainer.learning_rate": 3e-5}),
    "a flag that says the bundled policy's": (
        *("chat", "--trainer.learning-rate=5e-4 --rollout.max-lines 8 --prompt bare", NONE),
        {**PRETRAINED, "trainer.learning_rate": 5e-4, "rollout.max_lines": 8, "prompt": "bare"},
    ),
    "a switch": (
        *("chat", "--trainer.no-gradient-checkpointing --trainer.dtype float32", NEW),
        {**PRETRAINED, **SIZES, **SHARED},
    ),
    "rollouts during the update, when vLLM cannot sleep": (
        *("chat", "--trainer.max-staleness-steps 1", NEW),
        {**PRETRAINED, **ON_GPU, "vllm.sleep": False},
    ),
    "rollouts of workers": ("chat", "--workers ray", NEW, {**PRETRAINED, **ON_GPU, **ALONE}),
    "rollouts of transformers": (
        *("chat", "--engine transformers", NEW),
        {**PRETRAINED, **ON_GPU, **dict.fromkeys(SHARED)},
    ),
    "a cache of the user's": ("chat", "--vllm.kv-cache-gib 3", NEW, {**PRETRAINED, **ON_GPU, "vllm.kv_cache_gib": 3}),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_settings_that_nobody_says_follow_the_model(row: str, models: Mapping[str, Path]) -> None:
    model, flags, gpus, expected = ROWS[row]
    found = trained(["--model", str(models[model]), *flags.split()], gpus)
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize("gpus", [NONE, NEW])
def test_the_bundled_policy_has_the_defaults_of_the_settings_on_every_machine(
    gpus: Gpu, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained([], gpus) == resolved(TrainConfig())
    assert {name: resolved(TrainConfig()).get(name) for name in BUNDLED} == BUNDLED
    assert set(BUNDLED) == set(PRETRAINED) == set(get_model_dependent_fields(TrainConfig))
    assert capsys.readouterr().out == ""


def test_a_file_wins_over_defaults_and_a_flag_over_the_file(models: Mapping[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("prompt = 'bare'\n[trainer]\nlearning_rate = 2e-6\nwarmup_steps = 3\ncheckpointing = false\n")
    flags = ["--model", str(models["chat"]), "--config", str(file), "--trainer.warmup-steps", "4"]
    found = trained(flags, NEW)
    given = {"prompt": "bare", "trainer.learning_rate": 2e-6, "trainer.warmup_steps": 4}
    expected = {**PRETRAINED, **SIZES, **SHARED, **given}
    assert {name: found.get(name) for name in PRETRAINED} == {**expected, "trainer.dtype": "bfloat16"}


def test_a_preset_wins_over_defaults(models: Mapping[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Defaults do not change the preset of docs/pretrained.md. On a GPU, vLLM alone gets options, for its memory."""
    flags = ["--model", str(models["chat"]), "--preset", "pretrained"]
    preset = resolved(parse(TrainConfig, "train", ["--preset", "pretrained"], presets=find_asset("presets")))
    assert {**trained(flags), "model": RolloutConfig.model} == preset
    assert capsys.readouterr().out == ""
    assert {**trained(flags, NEW), "model": RolloutConfig.model} == preset | SHARED


def test_a_run_that_goes_on_has_what_it_recorded_whatever_the_machine_is_now(
    models: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of a version that gave every model the bundled policy's defaults, too."""
    old = parse(TrainConfig, "train", ["--model", str(models["chat"])])
    (tmp_path / "config.toml").write_text(dump_toml(old))
    flags = ["--model", str(models["chat"]), "--resume"]
    assert trained(flags, NEW, tmp_path / "config.toml") == resolved(old) | {"resume": True}
    assert "which is resumed: vllm.sleep off, prompt bare, " in capsys.readouterr().out
    assert trained(flags, NEW, tmp_path / "none.toml")["trainer.learning_rate"] == 1e-6


def test_a_recorded_config_holds_for_another_model_and_what_that_changes_is_said(
    models: Mapping[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(dump_toml(TrainConfig()))
    given = ["--config", str(file), "--model", str(models["chat"]), "--rollout.max-lines", "5"]
    found = trained(given)
    assert (found["trainer.learning_rate"], found["rollout.max_lines"], found["prompt"]) == (5e-4, 5, "bare")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("settings of ")]
    assert len(told) == 1
    assert told[0].startswith(f"settings of {file}, written for model builtin:quickstart, apply to {models['chat']}: ")
    assert "trainer.learning_rate 5e-4 (default 1e-6)" in told[0]
    assert "max_lines" not in told[0]


def test_the_line_at_the_start_names_the_defaults_and_their_source(
    models: Mapping[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    trained(["--model", str(models["chat"]), "--trainer.lora-rank", "4", "--rollout.max-lines", "9"], NEW)
    assert capsys.readouterr().out == (
        f"defaults for a pretrained model ({models['chat']}): vllm.kv_cache_gib 8, vllm.sleep on, "
        f"prompt chat, context_tokens {OWN_CONTEXT}, "
        "rollout.max_line_tokens 256, rollout.max_observation_tokens 512, "
        "rollout.max_wall_s 900.0, trainer.per_device_batch_size 8, "
        "trainer.learning_rate 1e-5, trainer.warmup_steps 10, trainer.dtype bfloat16, "
        "trainer.gradient_checkpointing on; flags and files win\n"
    )


SMALL_QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
LARGER_QWEN = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}


def write_without_data(config: Qwen2Config, folder: Path) -> None:
    """A model whose weights are a hole in its file, which takes no room on the disk."""
    with torch.device("meta"):
        weights = Qwen2ForCausalLM(config).state_dict()
    del weights["lm_head.weight"]  # tied to the embeddings
    header, end = dict[str, object](), 0
    for name, weight in weights.items():
        start, end = end, end + 2 * weight.numel()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)


@pytest.mark.parametrize(("shape", "gib"), [(SMALL_QWEN, 24), (LARGER_QWEN, 80)], ids=["0.5 B", "1.5 B"])
def test_the_obvious_command_leaves_the_trainer_room_on_one_gpu(
    shape: Mapping[str, int], gib: int, tmp_path: Path
) -> None:
    """All weights are trained, next to a vLLM that would take 92 % of the GPU without these defaults."""
    shared = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True}
    make_tokenizer(tmp_path)
    write_without_data(Qwen2Config(**shape, **shared), tmp_path)
    asked = parse_with_sources(TrainConfig, "train", ["--model", str(tmp_path)])
    memory = GpuMemory(gib << 30, gib << 30)
    config = apply_model_defaults(asked, None, describe_update, NEW)
    validate_gpu_memory(config, config.trainer, memory=memory)
    with pytest.raises(ConfigError, match=r"choose --vllm\.sleep"):
        validate_gpu_memory(asked.config, asked.config.trainer, memory=memory)


PLAYED = {
    **ALONE,
    "prompt": "chat",
    "context_tokens": OWN_CONTEXT,
    **{name: value for name, value in PRETRAINED.items() if name.startswith("rollout.")},
}
SFT = {
    "learning.steps": 200,
    "learning.batch_size": 32,
    "learning.per_device_batch_size": 8,
    "learning.learning_rate": 2e-5,
    "learning.warmup_steps": 10,
    "learning.dtype": "bfloat16",
}
SFT_ON_A_CPU = {
    "learning.steps": 16,
    "learning.batch_size": 16,
    "learning.per_device_batch_size": 2,
    "learning.learning_rate": 2e-4,
    "learning.warmup_steps": 2,
    "learning.dtype": "float32",
}
VERBS: Mapping[str, tuple[type[RolloutConfig], str, Mapping[str, object]]] = {
    "sft": (SftConfig, "--samples 1", {**PLAYED, **SFT}),
    "eval": (EvalConfig, "", {**PLAYED, "count": 240}),
    "rollout": (RolloutCommandConfig, "", PLAYED),
    "chat": (ChatConfig, "", PLAYED),
    "serve": (ServeConfig, "", PLAYED),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_opens_a_policy_has_them(verb: str, models: Mapping[str, Path]) -> None:
    kind, flags, expected = VERBS[verb]
    asked: ParsedSettings[RolloutConfig] = parse_with_sources(
        kind, verb, ["--model", str(models["chat"]), *flags.split()]
    )
    config = apply_model_defaults(asked, update=lambda config: UpdateInfo(rows_per_step=32, steps=200), gpus=NEW)
    assert config.policy is asked.config.policy  # a model of the hub is asked for once
    found = resolved(config)
    assert set(get_model_dependent_fields(kind)) == set(expected)
    assert {name: found.get(name) for name in expected} == expected
    usual: ParsedSettings[RolloutConfig] = parse_with_sources(kind, verb, flags.split())
    assert apply_model_defaults(usual, gpus=NEW) == usual.config


def test_a_fine_tuning_without_a_gpu_has_the_sizes_of_make_pretrained(models: Mapping[str, Path]) -> None:
    asked = parse_with_sources(SftConfig, "sft", ["--model", str(models["chat"]), "--data", "demonstrations"])

    def describe(config: SftConfig) -> UpdateInfo:
        return UpdateInfo(rows_per_step=config.learning.batch_size, steps=config.learning.steps)

    found = resolved(apply_model_defaults(asked, update=describe, gpus=NONE))
    assert {name: found[name] for name in SFT_ON_A_CPU} == SFT_ON_A_CPU


def test_demonstrations_and_the_check_of_a_sampler_have_the_prompt_of_the_model(models: Mapping[str, Path]) -> None:
    model = str(models["chat"])
    made = parse_with_sources(
        TranscriptsConfig, "transcripts", ["--from-tasks", "builtin:quickstart", "--model", model]
    )
    config = apply_defaults(made, RolloutConfig(model=model))
    assert (config.prompt, config.max_tokens) == ("chat", OWN_CONTEXT)
    assert (
        apply_defaults(
            parse_with_sources(SamplerCheckConfig, "sampler check", ["--model", model]), RolloutConfig(model=model)
        ).prompt
        == "chat"
    )


def test_a_machine_says_whether_it_has_a_gpu() -> None:
    assert LocalGpuInfo().exists() == torch.cuda.is_available()
    assert LocalGpuInfo().supports_bfloat16() == (torch.cuda.is_available() and torch.cuda.is_bf16_supported(False))


def test_a_policy_is_of_the_bundled_kind_by_its_shape_and_vocabulary(
    models: Mapping[str, Path], tmp_path: Path
) -> None:
    bundled = find_asset("policies/quickstart")
    write_random_policy(tmp_path / "fresh", seed=3)
    saved = shutil.copytree(bundled, tmp_path / "saved")
    AutoTokenizer.from_pretrained(bundled).save_pretrained(saved)  # as a trainer saves it
    assert all(map(is_bundled_kind, (bundled, tmp_path / "fresh", saved)))
    renamed = shutil.copytree(bundled, tmp_path / "renamed")
    text = (renamed / "tokenizer.json").read_text()
    (renamed / "tokenizer.json").write_text(text.replace('"submit_final_answer"', '"submit"'))
    wide = json.loads((bundled / "config.json").read_text()) | {"hidden_size": 256}
    (shutil.copytree(bundled, tmp_path / "wide") / "config.json").write_text(json.dumps(wide))
    (shutil.copytree(bundled, tmp_path / "broken") / "config.json").write_text("[")
    (tmp_path / "empty").mkdir()
    others = [tmp_path / name for name in ("renamed", "wide", "broken", "empty")]
    assert not any(map(is_bundled_kind, (*others, *models.values())))


def test_python_code_is_warned_of_the_learning_rate_of_another_model(
    models: Mapping[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    pretrained = RolloutConfig(model=str(next(iter(models.values()))))
    warn_about_learning_rate(RolloutConfig(), TrainerConfig())
    warn_about_learning_rate(pretrained, TrainerConfig(learning_rate=1e-6))
    assert caplog.text == ""
    warn_about_learning_rate(pretrained, TrainerConfig())
    assert "learning_rate is 0.0005, the default for the bundled policy" in caplog.text
    assert f"for {pretrained.model} set TrainerConfig(learning_rate=...) to about 1e-6" in caplog.text


@pytest.mark.parametrize("command", ["train", "sft", "eval", "serve", "chat", "rollout", "transcripts"])
def test_the_help_says_both_defaults(command: str) -> None:
    kind = commands()[command]
    told = {each.word: each for table in settings(kind).values() for each in table}
    assert get_model_dependent_fields(kind)
    for name, default in get_model_dependent_fields(kind).items():
        about = told["--" + name.replace("_", "-")].about
        assert about.endswith(f"; of any other model: {default.description}.")
        assert " Default of the bundled policy: " in about


def test_the_page_has_every_default_that_follows_the_model() -> None:
    assert PAGE.text == block()


def test_the_help_of_train_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Default of the bundled policy: 5e-4; of any other model: 1e-6, with lora_rank 1e-5." in told
    assert "Default of the bundled policy: bare; of any other model: chat where its tokenizer has a chat" in told


SMALL = (
    *("--engine", "transformers", "--sandbox", "unsafe", "--train-tasks", "8", "--eval-tasks", "2"),
    *("--trainer.steps", "2", "--trainer.prompts-per-step", "2", "--trainer.group-size", "2", "--concurrency", "4"),
)


@pytest.mark.heavy
def test_the_obvious_command_trains_another_model_with_its_defaults_and_goes_on_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"id": str(n), "question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = write_model(tmp_path / "model", chat=True, context=OWN_CONTEXT)
    command = ["train", "--model", str(model), "--tasks", str(tasks), "--out", str(tmp_path / "runs"), "--name", "mine"]
    assert main([*command, *SMALL]) == 0
    printed = capsys.readouterr().out
    assert printed.count("defaults for a pretrained model") == 1
    assert "a step samples 4 rollouts, about " in printed
    assert "no held-out task is solved" in printed
    assert "evaluation: 2 held-out tasks" in printed
    run = tmp_path / "runs" / "mine"
    found = dict(flatten(tomllib.loads((run / "config.toml").read_text())))
    small = {
        "eval_tasks": 2,
        "trainer.prompts_per_step": 2,
        "trainer.per_device_batch_size": 2,
        "trainer.warmup_steps": 0,
    }
    expected = {**PRETRAINED, **dict.fromkeys(SHARED), **small}  # without vLLM
    assert {name: found.get(name) for name in expected} == expected
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert main([*command, *SMALL, "--resume", "--trainer.steps", "3"]) == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--context-tokens", "4096"), "context_tokens is 4096"),
        (
            ("--prompt", "base", "--chat-template-kwargs.enable_thinking", "false"),
            "chat_template_kwargs.enable_thinking",
        ),
        (("--trainer.per-device-batch-size", "3"), "per_device_batch_size is 3"),
        (("--trainer.lr-scheduler", "constant"), "warm-up"),
    ],
)
def test_what_does_not_fit_another_model_is_refused_and_nothing_is_written(
    flags: Sequence[str],
    told: str,
    models: Mapping[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--model", str(models["chat"]), "--out", str(tmp_path), "--name", "run"]
    assert main(["train", *given, *SMALL, *flags]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert told in error
    assert not (tmp_path / "run").exists()
