"""Rollout config: policy, tasks, engine, sandbox and limits as one value, which opens rollouts or consoles.

    world = World(engine="transformers", concurrency=8)
    async with world.rollouts() as rollouts: ...     # policy, engine and consoles, opened together
    async with world.consoles() as sandbox: ...      # the consoles alone, with the same limits and preloads
`World.recorded(run)` is the config of a stored run.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from repl_rl.engine import ENGINES, Dtype, EngineKind, KvOnSync, Opening
from repl_rl.engine.lasting import lasting
from repl_rl.errors import ConfigError
from repl_rl.origin import BUNDLED, Origin, resolve
from repl_rl.origin.bundled import is_bundled_kind
from repl_rl.rollout import Rollouts, RolloutSampler, group_judges
from repl_rl.rollout.chat_template import instant, reads_clock
from repl_rl.rollout.console import Console
from repl_rl.rollout.host import HostFunction, refuse_hidden
from repl_rl.rollout.host_session import Model
from repl_rl.rollout.host_shipped import host_functions, nested_sessions
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.prompt_space import PromptSpace
from repl_rl.rollout.prompts import refuse_file, template
from repl_rl.rollout.renderer import Overshoot, Renderer
from repl_rl.rollout.thread import LoopThread
from repl_rl.samplers import load_sampler, sampler_of, sampler_options
from repl_rl.sandbox import SANDBOXES, Limits, Sandbox, SandboxKind, open_sandbox
from repl_rl.settings.arguments import read
from repl_rl.settings.bounds import AtLeast, check_fields
from repl_rl.settings.legacy import ADDED, modern
from repl_rl.settings.named import refuse_code
from repl_rl.settings.optioned import Optioned
from repl_rl.settings.pretrained import CONTEXT, PROMPT
from repl_rl.settings.scalars import Scalar
from repl_rl.settings.toml import UNRECORDED, flatten, load
from repl_rl.tasks import Split, Task, judged_by, load_tasks, refuse_source
from repl_rl.tasks.weights import OWN, weighed

_log = logging.getLogger(__name__)
QUICKSTART = "builtin:quickstart"
"""Bundled tasks."""
TRIED = 16
"""Number of workspaces that are tested before an engine opens; others are made when their first rollout begins."""
OF_A_RUN = frozenset(
    {
        *("name", "out", "overwrite", "resume", "states", "train_tasks", "eval_tasks", "eval_every", "validation"),
        *("curriculum", "trainer", "fleet"),
    }
)
"""Settings in a training run's `config.toml` that are not part of its rollout config."""


@dataclass(frozen=True)
class World:
    """Rollout config: the policy and the environment that it acts in."""

    model: str = BUNDLED
    """Policy: a folder (weights, config, tokenizer; or PEFT adapters), a .gguf file, or owner/name[@revision] of the
    hub. builtin:quickstart is the bundled tiny one.
    """
    tasks: str = QUICKSTART
    """Source of tasks: builtin:NAME, a JSONL or Parquet file, dataset:NAME, gsm8k:FILE, math:FILE, verifiers:NAME."""
    judge: str = ""
    """Judges of answers, with weights, such as "task + 0.2*my_judges:format".

    The first decides whether a task is solved; task is the judge that each task names. "" means task alone.
    """
    group_judge: str = ""
    """Functions that score a group, module:function or weight*module:function with + between.

    From a task and all of its rollouts they compute an addition to each outcome, such as a ranking. "" means none.
    """
    engine: Annotated[EngineKind | str, ENGINES] = "vllm"
    """Inference engine that samples."""
    sandbox: Annotated[SandboxKind | str, SANDBOXES] = "local"
    """Sandbox in which lines run."""
    preload: str = ""
    """Modules that every console has already imported, at no cost per console: names with commas between."""
    sampler: Annotated[str, Optioned(sampler_options)] = "repl"
    """Sampler of rollouts: a shipped one, or module:name of a class, an instance or a function.

    Its options are given as --sampler.KEY VALUE, such as --sampler.give-up-after 3, or in parentheses:
    "repl(give_up_after=3)".
    """
    host_functions: str = ""
    """Functions of the host that lines may call: llm_query, rollout, or module:name of your own, with commas between.

    Options follow in parentheses, such as "llm_query(train=True),my_tools:search(calls=8)".
    """
    prompt: Annotated[str, PROMPT] = "bare"
    """Prompt template: bare, base, few_shot, chat, chat_few_shot, or a text file. config.toml stores a file's text."""
    chat: Mapping[str, Scalar] = field(default_factory=dict)
    """Arguments of the model's chat template, such as enable_thinking; an argument that it does not read is refused."""
    bos: bool = True
    """Begin plain prompts with the BOS token if the model's own tokenizer writes one.

    Runs of versions without it are played as recorded.
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
    overshoot: Overshoot = "forbid"
    """Treatment of tokens that have text after a newline: forbid, carry or refuse.

    forbid gives them probability 0 in sampler and trainer. carry moves that text into the next line. refuse rejects a
    vocabulary that has them.
    """
    context_tokens: Annotated[int | None, AtLeast(2), CONTEXT] = None
    """Longest sequence to sample in, tokens, prompt included, >= 2.

    None takes the length in the model's config.json.
    """
    dtype: Dtype = "auto"
    """Number format of sampling weights, keys and values.

    auto means bfloat16 on a GPU, and float32 with a float32 trainer.
    """
    kv_on_sync: KvOnSync = "drop"
    """Treatment of the KV cache of in-flight rollouts at a weight sync, with trainer.ahead: drop or keep.

    See docs/update.md.
    """
    concurrency: Annotated[int, AtLeast(1)] = 128
    """Concurrent rollouts, and consoles kept ready for them, >= 1.

    vllm runs fewer if their expected lengths do not fit into its KV cache.
    """
    seed: Annotated[int, AtLeast(0)] = 0
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
            instant(self.date)
        object.__setattr__(self, "prompt", template(self.prompt))
        object.__setattr__(self, "sampler", sampler_of(self.tasks, self.sampler))
        # A name becomes that kind with its default options, so that equal configs compare equal.
        object.__setattr__(self, "engine", ENGINES.chosen(self.engine))
        object.__setattr__(self, "sandbox", SANDBOXES.chosen(self.sandbox))

    @classmethod
    def recorded(
        cls,
        run: Path,
        *,
        sandbox: SandboxKind | str | None = None,
        engine: str | None = None,
        model: str | None = None,
        trust: bool = False,
    ) -> "World":
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
        folder, own = _settings(run)
        # Refuse foreign code before anything reads these settings.
        if not trust:
            refuse_strangers(own, str(folder / "config.toml") if folder else "settings")
        world = _read_world(folder, own, sandbox, trust)
        if engine is not None and engine != ENGINES.chosen(world.engine).kind:
            world = replace(world, engine=engine)
        trained = folder / "checkpoints" / "final" if folder else None
        policy = model or (str(trained) if trained and trained.is_dir() else world.model)
        return replace(world, model=policy, trust=trust)

    @classmethod
    def recorded_consoles(cls, run: Path, *, sandbox: SandboxKind | str | None = None, trust: bool = False) -> "World":
        """Load the consoles' part of a stored run's config: its sandbox, limits and preloads.

        Args:
            run: as in `recorded`.
            sandbox: as in `recorded`.
            trust: use the container image that the run names.

        Raises:
            ConfigError: as in `recorded`, except for code that the run names.
        """
        folder, own = _settings(run)
        kept = {"sandbox", "preload", "limits", *SANDBOXES.tables()}
        return _read_world(folder, {key: value for key, value in own.items() if key in kept}, sandbox, trust)

    @property
    def models(self) -> Path:
        """Folder of the models that are made from GGUF files and adapters; it is next to the runs."""
        return Path("runs/.models")

    @cached_property
    def policy(self) -> Origin:
        """Policy on disk; it is found, downloaded or converted once.

        Raises:
            ConfigError: it does not exist, or cannot be loaded.
        """
        return resolve(self.model, self.models, lambda line: print(line, file=sys.stderr, flush=True))

    def with_policy_of(self, other: "World") -> Self:
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
    def now(self) -> datetime:
        """Date and time for chat templates."""
        return instant(self.date) if self.date else datetime.now()

    def resolve_prompt_settings(self, recorded: Path | None = None) -> Self:
        """Return this config with `date` and `prompt_space` resolved; see `date_of` and `prompt_space_of`."""
        date = date_of(self.date, self.model_folder, recorded)
        space = prompt_space_of(self.prompt_space, self.model_folder, recorded)
        if (date, space) == (self.date, self.prompt_space):
            return self
        return replace(self, date=date, prompt_space=space).with_policy_of(self)

    def renderer(self) -> Renderer:
        """Load the renderer, which owns the policy's tokenizer, and check the prompt template.

        Raises:
            ConfigError: the vocabulary or the template does not fit.
        """
        space = recorded_prompt_space(self.prompt_space, self.model_folder)
        renderer = Renderer.from_folder(
            self.model_folder, self.overshoot, self.chat, bos=self.bos, prompt_space=space, now=self.now
        )
        # Check the template now, before an engine opens.
        renderer.prompt("", self.prompt)
        return renderer

    def fitting(self) -> tuple[RolloutSampler, Renderer]:
        """Load the sampler and the renderer, and check that they fit; open nothing.

        Raises:
            ConfigError: they do not fit, or the prompt or an option has no effect.
        """
        group_judges(self.group_judge)
        sampler = load_sampler(self.sampler)
        host_functions(self.host_functions)
        sampler.check(self.rollout)
        renderer = self.renderer()
        sampler.check_policy(renderer, self.prompt)
        return sampler, renderer

    def consoles(self, warm: int | None = None) -> AbstractAsyncContextManager[Sandbox]:
        """Open the sandbox with this config's limits and preloads, for the length of an `async with`.

        Args:
            warm: consoles kept ready (>= 0); None means `concurrency`.

        Raises:
            SandboxUnavailable: this machine does not support its isolation. No weaker one is used instead.
        """
        preload = [name.strip() for name in self.preload.split(",") if name.strip()]
        ready = self.concurrency if warm is None else warm
        return open_sandbox(self.sandbox, limits=self.limits, preload=preload, warm=ready)

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
        refuse_hidden(host_functions(self.host_functions), firsts.values())
        if firsts:
            with closing(LoopThread()) as thread:
                thread.run(self._make(list(firsts.values())[::-1][:TRIED]))

    async def _make(self, tasks: Sequence[Task]) -> None:
        async with self.consoles(warm=0) as sandbox:
            for task in tasks:
                console = Console(sandbox, task)
                try:
                    await console.begin()
                finally:
                    await console.aclose()

    @asynccontextmanager
    async def rollouts(self, replica: int = 0, node: int = 0) -> AsyncIterator[Rollouts]:
        """Open policy, engine, sandbox and sampler, for the length of an `async with`; check user input first.

        Args:
            replica: index of this process among several (>= 0), so that no two play the same rollouts.
            node: index of this worker (>= 0), so that engines that do not seed their sessions sample differently.

        Raises:
            ConfigError: the policy, sampler, prompt or an option does not fit.
            SandboxUnavailable, EngineError: a part does not start.
        """
        sampler, renderer = self.fitting()
        host = host_functions(self.host_functions)
        opening = Opening(
            self.model_folder,
            self.context_tokens,
            self.dtype,
            max_sessions=self.concurrency + nested_sessions(host),
            seed=self.seed + replica + node,
            forbidden_ids=renderer.forbidden_ids,
            growth_tokens=self.rollout.most_tokens,
            kv_on_sync=self.kv_on_sync,
        )
        engine_kind = ENGINES.chosen(self.engine)
        # The check imports engine packages, which takes seconds, so run it in a thread.
        await asyncio.to_thread(engine_kind.check, opening)
        # Exit order is reversed: the sampler's resources close before the engine and the consoles.
        async with (
            self.consoles() as sandbox,
            lasting(lambda: engine_kind.open(opening)) as engine,
            self._asked(host) as models,
            sampler.opened(),
        ):
            yield Rollouts(
                engine,
                sandbox,
                renderer,
                sampler,
                self.rollout,
                self.prompt,
                seed=self.seed,
                replica=replica,
                concurrency=self.concurrency,
                host=host,
                host_models=models,
                group_judges=group_judges(self.group_judge),
            )

    @asynccontextmanager
    async def _asked(self, host: Sequence[HostFunction]) -> AsyncIterator[Mapping[str, Model]]:
        """Open the models that host functions query instead of the policy."""
        async with AsyncExitStack() as stack:
            found = {}
            # Reversed, so that the first function of a model sets the engine's size.
            for name, function in {f.model: f for f in reversed(host) if f.model}.items():
                folder = resolve(name, self.models, lambda line: print(line, file=sys.stderr)).folder
                renderer = Renderer.from_folder(folder, self.overshoot, bos=self.bos, now=self.now)
                most, ids = function.limits.at_once_in_all, renderer.forbidden_ids
                opening = Opening(folder, None, self.dtype, max_sessions=most, seed=self.seed, forbidden_ids=ids)
                engine = await stack.enter_async_context(ENGINES.chosen("transformers").open(opening))
                found[name] = Model(engine, renderer)
            yield found

    def drawn(self, split: Split | str = Split.TRAIN, count: int | None = None) -> tuple[Task, ...]:
        """Load this config's tasks of a split, with its judges; see `load_tasks`."""
        named = {judge.name for judge in weighed(self.judge)} if self.judge else {OWN}
        # Without the tasks' own judges, no row's judge is imported, so no trust is needed.
        trust = self.trust or OWN not in named
        found = load_tasks(self.tasks, split=split, count=count, seed=self.seed, judges=named, trust=trust)
        return judged_by(self.judge, found)


def folder_of(run: Path) -> Path | None:
    """Return the folder of the run that a file or folder of trajectories belongs to, or None."""
    places = (run, *run.resolve().parents[:2])
    return next((place for place in places if (place / "config.toml").is_file()), None)


def recorded_task(run: Path, id: str, world: World) -> Task | None:
    """Return the task of that id among those that a stored run loaded, with its config, or None if it is not there."""
    folder = folder_of(run)
    said = load(folder / "config.toml") if folder else {}
    validation = str(said.get("validation", ""))
    if not world.trust:
        refuse_strangers({"tasks": validation}, str(run))
    # A separate validation source is used whole; otherwise both sides are splits of one source.
    sides = ((Split.ALL, ""), (Split.ALL, validation)) if validation else ((Split.TRAIN, ""), (Split.HELD_OUT, ""))
    for (split, tasks), name in zip(sides, ("train_tasks", "eval_tasks"), strict=True):
        count = said.get(name)
        drawn = replace(world, tasks=tasks or world.tasks).drawn(split, count if isinstance(count, int) else None)
        if (found := next((task for task in drawn if task.id == id), None)) is not None:
            return found
    return None


def _settings(run: Path) -> tuple[Path | None, Mapping[str, object]]:
    """Return the folder of a stored run and its rollout settings; without a run, None and no settings."""
    folder = folder_of(run)
    said: Mapping[str, object] = {**ADDED, **modern(load(folder / "config.toml"))} if folder else {}
    return folder, {key: value for key, value in said.items() if key not in OF_A_RUN and key != "trust"}


def date_of(date: str, model: Path, recorded: Path | None) -> str:
    """Return the date and time for a model's chat template, or "" if it writes none.

    Args:
        date: the chosen date; "" means that none was chosen.
        model: the folder of the model.
        recorded: config.toml of the resumed run, whose date is used. None or a missing file means the current time.
    """
    if date or not reads_clock(model):
        return date
    if recorded is not None and recorded.is_file():
        return str(load(recorded).get("date", ""))
    return datetime.now().isoformat(timespec="seconds")


def recorded_prompt_space(chosen: PromptSpace, model: Path, recorded: Path | None = None) -> PromptSpace:
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
    form = {**ADDED, **load(known)}["prompt_space"] if known is not None else "auto"
    return "sampled" if form == "sampled" else "observed" if form == "observed" else "auto"


def prompt_space_of(chosen: PromptSpace, model: Path, recorded: Path | None) -> PromptSpace:
    """Return `recorded_prompt_space`, with "auto" decided by the vocabulary."""
    space = recorded_prompt_space(chosen, model, recorded)
    if space != "auto":
        return space
    return "sampled" if Renderer.from_folder(model, "carry").samples_space else "observed"


def _read_world(
    folder: Path | None, own: Mapping[str, object], sandbox: SandboxKind | str | None, trust: bool
) -> World:
    """Read a stored run's config.

    Replace its sandbox by `sandbox`, or else restrict it to what a stranger may choose.
    """
    where = str(folder / "config.toml") if folder else "settings"
    world = read(World, own, where)
    if not trust:
        _refuse_unrecorded(world, own, where)
    theirs = SANDBOXES.chosen(world.sandbox)
    _warn_of_limits(world.limits, where)
    if isinstance(sandbox, SandboxKind):
        return replace(world, sandbox=sandbox)
    if sandbox is not None and sandbox != theirs.kind:
        return replace(world, sandbox=SANDBOXES.chosen(sandbox))
    if trust and theirs.isolates and not theirs.elsewhere:
        return world
    if sandbox is None:
        theirs.refuse_unasked(where)
    # The user named only the kind, so use its default image and runtime.
    return replace(world, sandbox=theirs.with_usual_programs())


_CODE = ("sampler", "host_functions", "judge", "group_judge")
"""Settings that may name user code, as module:name."""


def refuse_strangers(said: Mapping[str, object], where: str) -> None:
    """Raise ConfigError for settings of a stored run that name code to import, or a local file to read as a prompt.

    Raises:
        ConfigError: names the first such setting.
    """
    for key, value in flatten(said):
        name = key.partition(".")[0]
        if name in _CODE:
            refuse_code(f"{name} in {where}", str(value))
        elif name == "tasks":
            refuse_source(f"{name} in {where}", str(value))
        elif name == "prompt":
            refuse_file(f"{name} in {where}", str(value))


def _refuse_unrecorded(world: World, own: Mapping[str, object], where: str) -> None:
    """Check the config that was read as `refuse_strangers` checks its table, so that no other way in exists.

    Raises:
        ConfigError: a setting names code, or the prompt is not the one that `own` records.
    """
    refuse_strangers({name: getattr(world, name) for name in (*_CODE, "tasks")}, where)
    # A file was replaced by its text, so compare with the record, which names no file.
    if world.prompt != own.get("prompt", World.prompt):
        raise ConfigError(f"prompt in {where}", world.prompt, "the run does not record it; leave it out")


def _warn_of_limits(limits: Limits, where: str) -> None:
    """Warn of each limit that a stored run sets above this machine's default, because its lines may use that much."""
    usual = Limits()
    pairs = [(one.name, getattr(limits, one.name), getattr(usual, one.name)) for one in fields(Limits)]
    more = [f"{name} = {value} (default {default})" for name, value, default in pairs if value > default]
    if more:
        _log.warning("limits in %s are above the default: %s", where, ", ".join(more))
