"""Rollout config: policy, tasks, engine, sandbox and limits as one value, which opens rollouts or consoles.

    config = RolloutConfig(engine="transformers", concurrency=8)
    async with config.open_rollouts() as rollouts: ...     # policy, engine and consoles, opened together
    async with config.open_consoles() as sandbox: ...      # the consoles alone, with the same limits and preloads

`RolloutConfig.from_run(run)` is the config of a stored run. Functions below the class read stored runs, and check that
their settings run no code of a stranger.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from repl_rl.deprecations import keeps_old_names
from repl_rl.engine import ENGINES, Dtype, EngineConfig, EngineOptions, KvOnSync
from repl_rl.engine.restarting_engine import open_restarting_engine
from repl_rl.errors import ConfigError
from repl_rl.models.resolve_model import BUNDLED, ResolvedModel, is_bundled_kind, resolve_model
from repl_rl.rollout import Rollouts, RolloutSampler, RolloutSettings, load_group_judges
from repl_rl.rollout.chat_template import parse_date, reads_clock
from repl_rl.rollout.episode import RolloutConsole
from repl_rl.rollout.host_functions import (
    HostFunction,
    HostFunctions,
    HostModel,
    count_nested_sessions,
    load_host_functions,
    validate_workspace_names,
)
from repl_rl.rollout.prompts import load_template, validate_recorded_template
from repl_rl.rollout.retry import FaultRetries
from repl_rl.rollout.rollout_hooks import GroupJudging, RolloutHook
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.synchronous_rollouts import EventLoopThread
from repl_rl.rollout.token_renderer import Overshoot, PromptSpace, Renderer
from repl_rl.samplers import SAMPLERS, choose_sampler, get_sampler_options, load_sampler
from repl_rl.sandbox import SANDBOXES, Limits, Sandbox, SandboxConfig, open_sandbox
from repl_rl.settings.argument_parser import UNRECORDED, load_toml, read_table
from repl_rl.settings.component_options import HasOptions
from repl_rl.settings.component_registry import validate_no_code
from repl_rl.settings.function_tables import OptionTable, WeightTable, read_option_table, read_weight_table, split_names
from repl_rl.settings.help_pages import COMMON, HelpSuffix
from repl_rl.settings.migrate_run_settings import ADDED, modern
from repl_rl.settings.model_defaults import CONTEXT, PROMPT
from repl_rl.settings.toml_values import Scalar
from repl_rl.settings.value_bounds import AtLeast, check_fields
from repl_rl.tasks import TASK_SOURCES, Split, Task, load_tasks, set_judges, validate_recorded_source
from repl_rl.tasks.task import OWN

_log = logging.getLogger(__name__)
QUICKSTART = "builtin:quickstart"
"""Bundled tasks."""
TRIED = 16
"""Number of workspaces that are tested before an engine opens; others are made when their first rollout begins."""
OF_A_RUN = frozenset(
    {
        *("name", "out", "overwrite", "resume", "checkpoint", "train_tasks", "eval_tasks", "eval_steps", "validation"),
        *("curriculum", "trainer", "workers"),
    }
)
"""Settings in a training run's `config.toml` that are not part of its rollout config."""
_CODE = ("sampler", "host_functions", "judges", "group_judges")
"""Settings that may name user code, as module:name."""


@keeps_old_names
@dataclass(frozen=True)
class RolloutConfig:
    """Rollout config: the policy and the environment that it acts in."""

    model: Annotated[str, COMMON] = BUNDLED
    """Policy: a folder (weights, config, tokenizer; or PEFT adapters), a .gguf file, or owner/name[@revision] of the
    hub. builtin:quickstart is the bundled tiny one.
    """
    tasks: Annotated[str, HelpSuffix(lambda: f"Prefixes: {TASK_SOURCES.describe()}."), COMMON] = QUICKSTART
    """Source of tasks: a JSONL or Parquet file, or PREFIX:PLACE, such as builtin:easy or gsm8k:FILE."""
    judges: WeightTable = field(default_factory=dict)
    """Judges of answers, given as --judges NAME, or with weights as --judges.task 1 --judges.my_judges:format 0.2.

    The first decides whether a task is solved; task is the judge that each task names, which is the default.
    """
    group_judges: WeightTable = field(default_factory=dict)
    """Functions that score a group, module:function, given as `judges`.

    From a task and all of its rollouts they compute an addition to each outcome, such as a ranking.
    """
    engine: Annotated[EngineConfig | str, ENGINES, COMMON] = "vllm"
    """Inference engine that samples."""
    sandbox: Annotated[SandboxConfig | str, SANDBOXES, COMMON] = "local"
    """Sandbox in which lines run."""
    preload: tuple[str, ...] = ()
    """Modules that every console has already imported, at no cost per console."""
    sampler: Annotated[
        str, HasOptions(get_sampler_options), HelpSuffix(lambda: f"Registered: {SAMPLERS.describe()}."), COMMON
    ] = "repl"
    """Sampler of rollouts: a registered one, or module:name of a class, an instance or a function.

    Its options are given as --sampler.KEY VALUE, such as --sampler.max-error-streak 3.
    """
    host_functions: OptionTable = field(default_factory=dict)
    """Functions of the host that lines may call: llm_query, rollout, or module:name of your own.

    Given as --host-functions NAME ..., and their options as --host-functions.NAME.OPTION VALUE, such as
    --host-functions.my_tools:search.max-calls 8.
    """
    prompt: Annotated[str, PROMPT, COMMON] = "bare"
    """Prompt template: bare, base, few_shot, chat, chat_few_shot, or a text file. config.toml stores a file's text."""
    chat_template_kwargs: Mapping[str, Scalar] = field(default_factory=dict)
    """Arguments of the model's chat template, such as enable_thinking; an argument that it does not read is refused."""
    add_bos_token: bool = True
    """Begin plain prompts with the BOS token if the model's own tokenizer writes one.

    A stored run of a version without this setting is played without the BOS token.
    """
    prompt_space: PromptSpace = "auto"
    """Writer of the space after a prompt (>>> and ...): the console (observed) or the policy (sampled).

    A sampled space is part of the line's first token. auto means sampled if the vocabulary joins a word and the space
    before it, as in pretrained models; config.toml stores the choice.
    """
    date: str = ""
    """Date and time for the model's chat template, such as 2026-11-27 or 2026-11-27T09:30.

    "" means the time at which the run starts. If the template reads the clock, config.toml stores the value.
    """
    newline_tokens: Overshoot = "forbid"
    """Treatment of tokens that have text after a newline: forbid, carry or refuse.

    forbid gives them probability 0 in sampler and trainer. carry moves that text into the next line. refuse rejects a
    vocabulary that has them.
    """
    context_tokens: Annotated[int | None, AtLeast(2), CONTEXT, COMMON] = None
    """Longest sequence to sample in, tokens, prompt included, >= 2.

    None takes the length in the model's config.json.
    """
    dtype: Annotated[Dtype, COMMON] = "auto"
    """Number format of sampling weights, keys and values.

    auto means bfloat16 on a GPU, and float32 with a float32 trainer.
    """
    kv_on_sync: KvOnSync = "drop"
    """Treatment of the KV cache of in-flight rollouts at a weight sync, with trainer.max_staleness_steps: drop or keep.

    See docs/update.md.
    """
    concurrency: Annotated[int, AtLeast(1), COMMON] = 128
    """Concurrent rollouts, and consoles kept ready for them, >= 1.

    vllm runs fewer if their expected lengths do not fit into its KV cache.
    """
    seed: Annotated[int, AtLeast(0), COMMON] = 0
    """Seed of tasks, rollouts and training, >= 0."""
    trust: bool = field(default=False, metadata=UNRECORDED)
    """Import each module:name that a task's row or the config.toml of a stored run names.

    By default only names on the command line or in a file of --config are imported. It is not recorded.
    """
    rollout: RolloutLimits = field(default_factory=RolloutLimits)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.date:
            parse_date(self.date)
        object.__setattr__(self, "prompt", load_template(self.prompt))
        object.__setattr__(self, "sampler", choose_sampler(self.tasks, self.sampler))
        # Names without weights or options become tables, so that equal configs compare equal.
        for name in ("judges", "group_judges"):
            object.__setattr__(self, name, read_weight_table(name, getattr(self, name)))
        object.__setattr__(self, "host_functions", read_option_table("host_functions", self.host_functions))
        object.__setattr__(self, "preload", split_names(self.preload))
        # A name becomes that kind with its default options, for the same reason.
        object.__setattr__(self, "engine", ENGINES.resolve(self.engine))
        object.__setattr__(self, "sandbox", SANDBOXES.resolve(self.sandbox))

    @classmethod
    def from_run(
        cls,
        run: Path,
        *,
        sandbox: SandboxConfig | str | None = None,
        engine: str | None = None,
        model: str | None = None,
        trust: bool = False,
    ) -> "RolloutConfig":
        """Load the config of a stored run, with the given changes. Its policy is the trained one, if the run has one.

        A run may come from a stranger, so its config.toml decides neither what is imported here nor how lines are
        isolated.

        Args:
            run: the run's folder, or a file or folder of trajectories in it. Trajectories outside of a run give the
                default config.
            sandbox: another sandbox; a name means that kind with its default options. None takes the run's, if it
                isolates.
            engine: another kind of engine, with its default options.
            model: another policy.
            trust: import each module:name that the run names, and use the container image that it names.

        Raises:
            ConfigError: its config.toml cannot be read, or holds a setting that no run has; it names code or an image
                and `trust` is false; or its sandbox does not isolate and `sandbox` is None.
        """
        folder, own = _read_recorded_settings(run)
        # Refuse foreign code before anything reads these settings.
        if not trust:
            validate_recorded_settings(own, str(folder / "config.toml") if folder else "settings")
        rollout_config = _read_recorded_config(folder, own, sandbox, trust)
        if engine is not None and engine != ENGINES.resolve(rollout_config.engine).kind:
            rollout_config = replace(rollout_config, engine=engine)
        trained = folder / "checkpoints" / "final" if folder else None
        policy = model or (str(trained) if trained and trained.is_dir() else rollout_config.model)
        return replace(rollout_config, model=policy, trust=trust)

    @classmethod
    def from_run_consoles(
        cls, run: Path, *, sandbox: SandboxConfig | str | None = None, trust: bool = False
    ) -> "RolloutConfig":
        """Load the consoles' part of a stored run's config: its sandbox, limits and preloads.

        Args:
            run: as in `from_run`.
            sandbox: as in `from_run`.
            trust: use the container image that the run names.

        Raises:
            ConfigError: as in `from_run`, except for code that the run names.
        """
        folder, own = _read_recorded_settings(run)
        kept = {"sandbox", "preload", "limits", *SANDBOXES.get_entries_with_options()}
        return _read_recorded_config(folder, {key: value for key, value in own.items() if key in kept}, sandbox, trust)

    @property
    def converted_models_folder(self) -> Path:
        """Folder of the models that are made from GGUF files and adapters; it is next to the runs."""
        return Path("runs/.models")

    @cached_property
    def policy(self) -> ResolvedModel:
        """Policy on disk; it is found, downloaded or converted once.

        Raises:
            ConfigError: it does not exist, or cannot be loaded.
        """
        return resolve_model(
            self.model, self.converted_models_folder, lambda line: print(line, file=sys.stderr, flush=True)
        )

    def with_policy_of(self, other: "RolloutConfig") -> Self:
        """Return this config with the resolved policy of `other`, which has the same `model`."""
        vars(self)["policy"] = other.policy
        return self

    @property
    def model_folder(self) -> Path:
        """Folder of the policy. Raises the errors of `policy`."""
        return self.policy.folder

    @property
    def is_bundled_kind(self) -> bool:
        """True for the bundled policy, or one of its shape and vocabulary. Raises the errors of `policy`."""
        return is_bundled_kind(self.model_folder)

    @cached_property
    def prompt_time(self) -> datetime:
        """Date and time for chat templates."""
        return parse_date(self.date) if self.date else datetime.now()

    def resolve_prompt_settings(self, recorded: Path | None = None) -> Self:
        """Return this config with `date` and `prompt_space` resolved; see `resolve_date` and `resolve_prompt_space`."""
        date = resolve_date(self.date, self.model_folder, recorded)
        space = resolve_prompt_space(self.prompt_space, self.model_folder, recorded)
        if (date, space) == (self.date, self.prompt_space):
            return self
        return replace(self, date=date, prompt_space=space).with_policy_of(self)

    def load_renderer(self) -> Renderer:
        """Load the renderer, which owns the policy's tokenizer, and check the prompt template.

        Raises:
            ConfigError: the vocabulary or the template does not fit.
        """
        space = get_recorded_prompt_space(self.prompt_space, self.model_folder)
        renderer = Renderer.from_folder(
            self.model_folder,
            self.newline_tokens,
            self.chat_template_kwargs,
            bos=self.add_bos_token,
            prompt_space=space,
            now=self.prompt_time,
        )
        # Check the template now, before an engine opens.
        renderer.build_prompt("", self.prompt)
        return renderer

    def load_sampler_and_renderer(self) -> tuple[RolloutSampler, Renderer]:
        """Load the sampler and the renderer, and check that they fit; open nothing.

        Raises:
            ConfigError: they do not fit, or the prompt or an option has no effect.
        """
        load_group_judges(self.group_judges)
        sampler = load_sampler(self.sampler)
        load_host_functions(self.host_functions)
        sampler.check(self.rollout)
        renderer = self.load_renderer()
        sampler.check_policy(renderer, self.prompt)
        return sampler, renderer

    def open_consoles(self, warm: int | None = None) -> AbstractAsyncContextManager[Sandbox]:
        """Open the sandbox with this config's limits and preloads, for the length of an `async with`.

        Args:
            warm: consoles kept ready (>= 0); None means `concurrency`.

        Raises:
            SandboxUnavailable: this machine does not support its isolation. No weaker one is used instead.
        """
        ready = self.concurrency if warm is None else warm
        return open_sandbox(self.sandbox, limits=self.limits, preload=self.preload, warm=ready)

    def try_workspaces(self, tasks: Iterable[Task]) -> None:
        """Make the first distinct workspaces of `tasks`, so that a bad one fails before an engine opens.

        It opens consoles and blocks. Without a workspace in any task it does nothing.

        Raises:
            SetupError: one cannot be made, or hides a host function; names the task and the wrong part of its
                workspace.
            SandboxUnavailable, SandboxFault: no console can be started here.
        """
        # One task per distinct workspace; reversed twice, so that the first task of each is used, in order.
        firsts = {task.workspace: task for task in reversed(list(tasks)) if task.workspace is not None}
        validate_workspace_names(load_host_functions(self.host_functions), firsts.values())
        if firsts:
            with closing(EventLoopThread()) as thread:
                thread.run(self._make_workspaces(list(firsts.values())[::-1][:TRIED]))

    async def _make_workspaces(self, tasks: Sequence[Task]) -> None:
        """Open a console with the workspace of each task, and close it."""
        async with self.open_consoles(warm=0) as sandbox:
            for task in tasks:
                console = RolloutConsole(sandbox, task)
                try:
                    await console.open_session()
                finally:
                    await console.aclose()

    @asynccontextmanager
    async def open_rollouts(self, replica: int = 0, node: int = 0) -> AsyncIterator[Rollouts]:
        """Open policy, engine, sandbox and sampler, for the length of an `async with`; check user input first.

        Args:
            replica: index of this process among several (>= 0), so that no two play the same rollouts.
            node: index of this worker (>= 0), so that engines that do not seed their sessions sample differently.

        Raises:
            ConfigError: the policy, sampler, prompt or an option does not fit.
            SandboxUnavailable, EngineError: a part does not start.
        """
        sampler, renderer = self.load_sampler_and_renderer()
        host = load_host_functions(self.host_functions)
        opening = EngineOptions(
            self.model_folder,
            self.context_tokens,
            self.dtype,
            max_sessions=self.concurrency + count_nested_sessions(host),
            seed=self.seed + replica + node,
            forbidden_ids=renderer.forbidden_ids,
            max_growth_tokens=self.rollout.max_growth_tokens,
            kv_on_sync=self.kv_on_sync,
        )
        engine_kind = ENGINES.resolve(self.engine)
        # The check imports engine packages, which takes seconds, so run it in a thread.
        await asyncio.to_thread(engine_kind.check, opening)
        # Exit order is reversed: the sampler's resources close before the engine and the consoles.
        async with (
            self.open_consoles() as sandbox,
            open_restarting_engine(lambda: engine_kind.open(opening)) as engine,
            self._open_host_models(host) as models,
            sampler.open_resources(),
        ):
            yield Rollouts(
                engine,
                sandbox,
                renderer,
                sampler,
                self.rollout,
                RolloutSettings(self.prompt, self.seed, replica, self.concurrency),
                self._make_hooks(host, models),
            )

    def _make_hooks(self, host: Sequence[HostFunction], models: Mapping[str, HostModel]) -> tuple[RolloutHook, ...]:
        """Return the hooks of this config's optional features, and retries."""
        hooks: list[RolloutHook] = [FaultRetries()]
        if host:
            hooks.append(HostFunctions(host, models))
        if judges := load_group_judges(self.group_judges):
            hooks.append(GroupJudging(judges))
        return tuple(hooks)

    @asynccontextmanager
    async def _open_host_models(self, host: Sequence[HostFunction]) -> AsyncIterator[Mapping[str, HostModel]]:
        """Open the models that host functions query instead of the policy."""
        async with AsyncExitStack() as stack:
            found = {}
            # Reversed, so that the first function of a model sets the engine's size.
            for name, function in {f.model: f for f in reversed(host) if f.model}.items():
                folder = resolve_model(
                    name, self.converted_models_folder, lambda line: print(line, file=sys.stderr)
                ).folder
                renderer = Renderer.from_folder(
                    folder, self.newline_tokens, bos=self.add_bos_token, now=self.prompt_time
                )
                most, ids = function.limits.max_concurrent_total, renderer.forbidden_ids
                opening = EngineOptions(folder, None, self.dtype, max_sessions=most, seed=self.seed, forbidden_ids=ids)
                engine = await stack.enter_async_context(ENGINES.resolve("transformers").open(opening))
                found[name] = HostModel(engine, renderer)
            yield found

    def draw_tasks(self, split: Split | str = Split.TRAIN, count: int | None = None) -> tuple[Task, ...]:
        """Load this config's tasks of a split, with its judges; see `load_tasks`."""
        named = {*self.judges} or {OWN}
        # Without the tasks' own judges, no row's judge is imported, so no trust is needed.
        trust = self.trust or OWN not in named
        found = load_tasks(self.tasks, split=split, count=count, seed=self.seed, judges=named, trust=trust)
        return set_judges(self.judges, found)


def resolve_date(date: str, model: Path, recorded: Path | None) -> str:
    """Return the date and time for a model's chat template, or "" if it writes none.

    Args:
        date: the chosen date; "" means that none was chosen.
        model: the folder of the model.
        recorded: config.toml of the resumed run, whose date is used. None or a missing file means the current time.
    """
    if date or not reads_clock(model):
        return date
    if recorded is not None and recorded.is_file():
        return str(load_toml(recorded).get("date", ""))
    return datetime.now().isoformat(timespec="seconds")


def resolve_prompt_space(chosen: PromptSpace, model: Path, recorded: Path | None) -> PromptSpace:
    """Return `get_recorded_prompt_space`, with "auto" decided by the vocabulary."""
    space = get_recorded_prompt_space(chosen, model, recorded)
    if space != "auto":
        return space
    return "sampled" if Renderer.from_folder(model, "carry").samples_space else "observed"


def get_recorded_prompt_space(chosen: PromptSpace, model: Path, recorded: Path | None = None) -> PromptSpace:
    """Return `chosen`, or for "auto" the form that a run recorded, or "auto" if none did.

    Args:
        chosen: the setting.
        model: the folder of the model. A model in a run's folder was trained as that run's config.toml describes.
        recorded: config.toml of the resumed run. None or a missing file means a new run.
    """
    if chosen != "auto":
        return chosen
    # The model may be the run's final policy or one of its checkpoints.
    runs = [place for place in (model.parent, model.parent.parent) if (place / "metrics.jsonl").is_file()]
    files = (recorded, *(run / "config.toml" for run in runs))
    known = next((file for file in files if file is not None and file.is_file()), None)
    form = {**ADDED, **load_toml(known)}["prompt_space"] if known is not None else "auto"
    return "sampled" if form == "sampled" else "observed" if form == "observed" else "auto"


def find_run_folder(run: Path) -> Path | None:
    """Return the folder of the run that a file or folder of trajectories belongs to, or None."""
    places = (run, *run.resolve().parents[:2])
    return next((place for place in places if (place / "config.toml").is_file()), None)


def find_recorded_task(run: Path, id: str, rollout_config: RolloutConfig) -> Task | None:
    """Load the tasks of a stored run again under `rollout_config`, and return the one with this id, or None."""
    folder = find_run_folder(run)
    said = load_toml(folder / "config.toml") if folder else {}
    validation = str(said.get("validation", ""))
    if not rollout_config.trust:
        validate_recorded_settings({"tasks": validation}, str(run))
    # A separate validation source is used whole; otherwise both sides are splits of one source.
    sides = ((Split.ALL, ""), (Split.ALL, validation)) if validation else ((Split.TRAIN, ""), (Split.HELD_OUT, ""))
    for (split, tasks), name in zip(sides, ("train_tasks", "eval_tasks"), strict=True):
        count = said.get(name)
        drawn = replace(rollout_config, tasks=tasks or rollout_config.tasks).draw_tasks(
            split, count if isinstance(count, int) else None
        )
        if (found := next((task for task in drawn if task.id == id), None)) is not None:
            return found
    return None


def validate_recorded_settings(said: Mapping[str, object], where: str) -> None:
    """Raise ConfigError for settings of a stored run that name code to import, or a local file to read as a prompt.

    Raises:
        ConfigError: names the first such setting.
    """
    for key, value in said.items():
        name = key.partition(".")[0]
        if name in _CODE:
            # A function is the key of its weight or options, and any option may name code too.
            for text in (key, *_iterate_texts(value)):
                validate_no_code(f"{name} in {where}", text)
        elif name in ("tasks", "prompt"):
            validate = validate_recorded_source if name == "tasks" else validate_recorded_template
            for text in _iterate_texts(value):
                validate(f"{name} in {where}", text)


def _iterate_texts(value: object) -> Iterator[str]:
    """Yield each key and value of a nested table as text, or the value itself."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _iterate_texts(each)
    else:
        yield str(value)


def _read_recorded_settings(run: Path) -> tuple[Path | None, Mapping[str, object]]:
    """Return the folder of a stored run and its rollout settings. Without a run, return None and no settings."""
    folder = find_run_folder(run)
    said: Mapping[str, object] = {**ADDED, **modern(load_toml(folder / "config.toml"))} if folder else {}
    return folder, {key: value for key, value in said.items() if key not in OF_A_RUN and key != "trust"}


def _read_recorded_config(
    folder: Path | None, own: Mapping[str, object], sandbox: SandboxConfig | str | None, trust: bool
) -> RolloutConfig:
    """Read a stored run's config.

    Replace its sandbox by `sandbox`, or else restrict it to what a stranger may choose.
    """
    where = str(folder / "config.toml") if folder else "settings"
    rollout_config = read_table(RolloutConfig, own, where)
    if not trust:
        _refuse_unrecorded(rollout_config, own, where)
    # Choose the sandbox: that of the caller, or the run's if it isolates.
    theirs = SANDBOXES.resolve(rollout_config.sandbox)
    _warn_about_limits(rollout_config.limits, where)
    if isinstance(sandbox, SandboxConfig):
        return replace(rollout_config, sandbox=sandbox)
    if sandbox is not None and sandbox != theirs.kind:
        return replace(rollout_config, sandbox=SANDBOXES.resolve(sandbox))
    if trust and theirs.isolates and not theirs.is_remote:
        return rollout_config
    if sandbox is None:
        theirs.validate_recorded_choice(where)
    # The user named only the kind, so use its default image and runtime.
    return replace(rollout_config, sandbox=theirs.with_default_image())


def _refuse_unrecorded(rollout_config: RolloutConfig, own: Mapping[str, object], where: str) -> None:
    """Apply the checks of `validate_recorded_settings` to the parsed config too, so that nothing bypasses them.

    Raises:
        ConfigError: a setting names code, or the prompt is not the one that `own` records.
    """
    validate_recorded_settings({name: getattr(rollout_config, name) for name in (*_CODE, "tasks")}, where)
    # A file was replaced by its text, so compare with the record, which names no file.
    if rollout_config.prompt != own.get("prompt", RolloutConfig.prompt):
        raise ConfigError(
            f"prompt in {where}",
            rollout_config.prompt,
            "the stored run records another text under `prompt`; leave the other out",
        )


def _warn_about_limits(limits: Limits, where: str) -> None:
    """Warn of each limit that a stored run sets above this machine's default, because its lines may use that much."""
    usual = Limits()
    pairs = [(one.name, getattr(limits, one.name), getattr(usual, one.name)) for one in fields(Limits)]
    more = [f"{name} = {value} (default {default})" for name, value, default in pairs if value > default]
    if more:
        _log.warning("limits in %s are above the default: %s", where, ", ".join(more))
