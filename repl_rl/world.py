"""The policy and the world that it acts in: one value, read in one way, with two doors.

    world = World(engine="transformers", concurrency=8)
    async with world.rollouts() as rollouts: ...     # policy, engine and consoles, opened together
    async with world.consoles() as sandbox: ...      # the consoles alone, with the same limits and preloads
`World.recorded(run)` is the one that a stored run was played in.
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
"""The bundled tasks."""
TRIED = 16
"""Workspaces that are made once before an engine opens; others are made when their first rollout begins."""
OF_A_RUN = frozenset(
    {
        *("name", "out", "overwrite", "resume", "states", "train_tasks", "eval_tasks", "eval_every", "validation"),
        *("curriculum", "trainer", "fleet"),
    }
)
"""What `config.toml` of a training run says beside its world."""


@dataclass(frozen=True)
class World:
    """The policy and the world that it acts in."""

    model: str = BUNDLED
    """The policy: a folder (weights, config, tokenizer; or PEFT adapters), a .gguf file, or owner/name[@revision] of
    the hub; builtin:quickstart is the bundled tiny one."""
    tasks: str = QUICKSTART
    """Their source: builtin:NAME, a JSONL or Parquet file, dataset:NAME, gsm8k:FILE, math:FILE, verifiers:NAME."""
    judge: str = ""
    """What grades answers: judges with weights, such as "task + 0.2*my_judges:format"; the first says whether a task is
    solved, and task is the judge that each task names. "": that one alone."""
    group_judge: str = ""
    """Functions of yours, module:function or weight*module:function with + between, from a task and all of its rollouts
    to what each gets on top of its outcome, such as a ranking. "": none."""
    engine: Annotated[EngineKind | str, ENGINES] = "vllm"
    """What samples."""
    sandbox: Annotated[SandboxKind | str, SANDBOXES] = "local"
    """Where lines run."""
    preload: str = ""
    """Modules that every console has imported already, so that they cost it nothing: names with commas between."""
    sampler: Annotated[str, Optioned(sampler_options)] = "repl"
    """How a rollout goes: a shipped sampler, or module:name of a class, an instance or a function. Its options are said
    as --sampler.KEY VALUE, such as --sampler.give-up-after 3, or in parentheses: "repl(give_up_after=3)"."""
    host_functions: str = ""
    """Functions of the host that lines may call: llm_query, rollout, or module:name of your own, with commas between;
    options in parentheses, such as "llm_query(train=True),my_tools:search(calls=8)"."""
    prompt: Annotated[str, PROMPT] = "bare"
    """Prompt template: bare, base, few_shot, chat, chat_few_shot, or a text file; config.toml has the file's text."""
    chat: Mapping[str, Scalar] = field(default_factory=dict)
    """Arguments of the model's chat template, such as enable_thinking; one that it does not read is refused."""
    bos: bool = True
    """Begin plain prompts with the first token that the model's own tokenizer writes (BOS), where it writes one. Runs
    of versions that wrote none are played as they were."""
    prompt_space: PromptSpace = "auto"
    """The writer of the space after a prompt (>>> and ...): observed, the console; sampled, the policy, as part of its
    line's first token. auto: sampled where the vocabulary joins a word and the space before it, as that of pretrained
    models does; config.toml keeps which."""
    date: str = ""
    """Date and time that the model's chat template writes, such as 2026-11-27 or 2026-11-27T09:30. "": those at which
    the run begins; where its template reads the clock, config.toml keeps them."""
    overshoot: Overshoot = "forbid"
    """What to do with tokens that have text after a newline: forbid (probability 0 in sampler and trainer alike), carry
    that text into the next line, or refuse a vocabulary that has them."""
    context_tokens: Annotated[int | None, AtLeast(2), CONTEXT] = None
    """Longest sequence that is sampled in, tokens, prompt included, >= 2. None: what the model's config.json says."""
    dtype: Dtype = "auto"
    """Number format of sampling weights, keys and values; auto: bfloat16 on a GPU, float32 beside a float32 trainer."""
    kv_on_sync: KvOnSync = "drop"
    """With trainer.ahead: drop or keep keys and values of rollouts under way when weights change (docs/update.md)."""
    concurrency: Annotated[int, AtLeast(1)] = 128
    """Rollouts under way at once, and consoles kept ready for them, >= 1. vllm plays fewer where the lengths that they
    are expected to reach do not fit into its cache."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Seeds tasks, rollouts and training, >= 0."""
    trust: bool = field(default=False, metadata=UNRECORDED)
    """Import each module:name that a file names: a task's row as its judge, or the config.toml of a stored run. Without
    it only those are imported that the command line names, or a file of --config. It is not recorded."""
    rollout: RolloutLimits = field(default_factory=RolloutLimits)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.date:
            instant(self.date)
        object.__setattr__(self, "prompt", template(self.prompt))
        object.__setattr__(self, "sampler", sampler_of(self.tasks, self.sampler))
        # A name becomes the kind as it is by default, so that equal worlds are equal however they were written.
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
        """The world of a stored run, but for what is given; its policy is the one that it trained, where there is one.

        A run may be a stranger's, so its config.toml decides neither what is imported here nor how lines are isolated.

        Args:
            run: the run's folder, or a file or folder of trajectories in it. One that belongs to no run has the world
                that is the default.
            sandbox: another sandbox; a name is that kind with its default options. None: the run's, if it isolates.
            engine: another kind of engine, as it is by default.
            model: another policy.
            trust: import each module:name that the run names, and use the container image that it names.

        Raises:
            ConfigError: its config.toml cannot be read, or says what no run can be told; it names code or an image and
                `trust` is false; or its sandbox does not isolate and `sandbox` is None.
        """
        folder, own = _settings(run)
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
        """The consoles of a stored run: its sandbox, limits and preloads. Nothing that plays rollouts is read.

        Args:
            run: as `recorded` takes it.
            sandbox: as `recorded` takes it.
            trust: use the container image that the run names.

        Raises:
            ConfigError: as `recorded`, but for code that the run names.
        """
        folder, own = _settings(run)
        kept = {"sandbox", "preload", "limits", *SANDBOXES.tables()}
        return _read_world(folder, {key: value for key, value in own.items() if key in kept}, sandbox, trust)

    @property
    def models(self) -> Path:
        """Where the folders are that are made of GGUF files and adapters: beside the runs."""
        return Path("runs/.models")

    @cached_property
    def policy(self) -> Origin:
        """Where the policy comes from; it is looked for, downloaded or made once.

        Raises:
            ConfigError: there is none, or it cannot be had.
        """
        return resolve(self.model, self.models, lambda line: print(line, file=sys.stderr, flush=True))

    def with_policy_of(self, other: "World") -> Self:
        """This world, with the policy that `other` has found: of the same `model`, which is not looked for again."""
        vars(self)["policy"] = other.policy
        return self

    @property
    def model_folder(self) -> Path:
        """Where the policy lies. Raises as `policy` does."""
        return self.policy.folder

    @property
    def is_bundled_kind(self) -> bool:
        """True for the bundled policy, or one of its shape and vocabulary. Raises as `policy` does."""
        return is_bundled_kind(self.model_folder)

    @cached_property
    def now(self) -> datetime:
        """The date and time that chat templates read."""
        return instant(self.date) if self.date else datetime.now()

    def resolve_prompt_settings(self, recorded: Path | None = None) -> Self:
        """This world with what its policy decides said: `date` and `prompt_space`. See `date_of`, `prompt_space_of`."""
        date = date_of(self.date, self.model_folder, recorded)
        space = prompt_space_of(self.prompt_space, self.model_folder, recorded)
        if (date, space) == (self.date, self.prompt_space):
            return self
        return replace(self, date=date, prompt_space=space).with_policy_of(self)

    def renderer(self) -> Renderer:
        """The owner of the policy's tokenizer, with the prompt template tried.

        Raises:
            ConfigError: the vocabulary or the template does not fit.
        """
        space = recorded_prompt_space(self.prompt_space, self.model_folder)
        renderer = Renderer.from_folder(
            self.model_folder, self.overshoot, self.chat, bos=self.bos, prompt_space=space, now=self.now
        )
        renderer.prompt("", self.prompt)
        return renderer

    def fitting(self) -> tuple[RolloutSampler, Renderer]:
        """The sampler, and the owner of the policy's tokenizer, tried with each other; nothing is opened.

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
        """The sandbox with this world's limits and preloads, for the length of an `async with`.

        Args:
            warm: consoles kept ready (>= 0); None: `concurrency` of them.

        Raises:
            SandboxUnavailable: its isolation cannot be had on this machine. Nothing weaker is used instead.
        """
        preload = [name.strip() for name in self.preload.split(",") if name.strip()]
        ready = self.concurrency if warm is None else warm
        return open_sandbox(self.sandbox, limits=self.limits, preload=preload, warm=ready)

    def try_workspaces(self, tasks: Iterable[Task]) -> None:
        """Make the workspaces of `tasks`, the first that differ, so that a bad one is refused before an engine opens.

        It opens consoles for it, and blocks; where no task has a workspace it does nothing.

        Raises:
            SetupError: one cannot be made, or hides a host function; names the task and what of its workspace is wrong.
            SandboxUnavailable, SandboxFault: there are no consoles here.
        """
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
        """Policy, engine, sandbox and sampler, for the length of an `async with`; what one can mend is refused first.

        Args:
            replica: which of several processes this is (>= 0), so that none plays another's rollouts.
            node: which of a fleet's (>= 0), so that no two engines that do not seed their sessions draw alike.

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
        await asyncio.to_thread(engine_kind.check, opening)
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
        """The models that host functions ask in place of the policy."""
        async with AsyncExitStack() as stack:
            found = {}
            for name, function in {f.model: f for f in reversed(host) if f.model}.items():
                folder = resolve(name, self.models, lambda line: print(line, file=sys.stderr)).folder
                renderer = Renderer.from_folder(folder, self.overshoot, bos=self.bos, now=self.now)
                most, ids = function.limits.at_once_in_all, renderer.forbidden_ids
                opening = Opening(folder, None, self.dtype, max_sessions=most, seed=self.seed, forbidden_ids=ids)
                engine = await stack.enter_async_context(ENGINES.chosen("transformers").open(opening))
                found[name] = Model(engine, renderer)
            yield found

    def drawn(self, split: Split | str = Split.TRAIN, count: int | None = None) -> tuple[Task, ...]:
        """The world's tasks of a split, with its judges; see `load_tasks`."""
        named = {judge.name for judge in weighed(self.judge)} if self.judge else {OWN}
        trust = self.trust or OWN not in named  # then no judge of a row is asked
        found = load_tasks(self.tasks, split=split, count=count, seed=self.seed, judges=named, trust=trust)
        return judged_by(self.judge, found)


def folder_of(run: Path) -> Path | None:
    """The folder of the run that a file of trajectories, or a folder of them, belongs to; None: it belongs to none."""
    places = (run, *run.resolve().parents[:2])
    return next((place for place in places if (place / "config.toml").is_file()), None)


def recorded_task(run: Path, id: str, world: World) -> Task | None:
    """The task of that id among those that a stored run drew, in the world of that run; None: it is not there."""
    folder = folder_of(run)
    said = load(folder / "config.toml") if folder else {}
    validation = str(said.get("validation", ""))
    if not world.trust:
        refuse_strangers({"tasks": validation}, str(run))
    sides = ((Split.ALL, ""), (Split.ALL, validation)) if validation else ((Split.TRAIN, ""), (Split.HELD_OUT, ""))
    for (split, tasks), name in zip(sides, ("train_tasks", "eval_tasks"), strict=True):
        count = said.get(name)
        drawn = replace(world, tasks=tasks or world.tasks).drawn(split, count if isinstance(count, int) else None)
        if (found := next((task for task in drawn if task.id == id), None)) is not None:
            return found
    return None


def _settings(run: Path) -> tuple[Path | None, Mapping[str, object]]:
    """The folder of a stored run, and what its config.toml says of its world; None and nothing: it has none."""
    folder = folder_of(run)
    said: Mapping[str, object] = {**ADDED, **modern(load(folder / "config.toml"))} if folder else {}
    return folder, {key: value for key, value in said.items() if key not in OF_A_RUN and key != "trust"}


def date_of(date: str, model: Path, recorded: Path | None) -> str:
    """The date and time that the chat template of a model writes; "": it writes none.

    Args:
        date: the one that was chosen; "": none was.
        model: the folder of the model.
        recorded: config.toml of the run that is resumed, whose date is used; None, or no such file: the current time.
    """
    if date or not reads_clock(model):
        return date
    if recorded is not None and recorded.is_file():
        return str(load(recorded).get("date", ""))
    return datetime.now().isoformat(timespec="seconds")


def recorded_prompt_space(chosen: PromptSpace, model: Path, recorded: Path | None = None) -> PromptSpace:
    """`chosen`, or for "auto" the form that a run recorded; "auto" where none did.

    Args:
        chosen: the setting.
        model: the folder of the model. A model in a run's folder was trained as that run's config.toml says.
        recorded: config.toml of the run that is resumed; None, or no such file: it begins.
    """
    if chosen != "auto":
        return chosen
    runs = [place for place in (model.parent, model.parent.parent) if (place / "metrics.jsonl").is_file()]
    files = (recorded, *(run / "config.toml" for run in runs))
    known = next((file for file in files if file is not None and file.is_file()), None)
    form = {**ADDED, **load(known)}["prompt_space"] if known is not None else "auto"
    return "sampled" if form == "sampled" else "observed" if form == "observed" else "auto"


def prompt_space_of(chosen: PromptSpace, model: Path, recorded: Path | None) -> PromptSpace:
    """`recorded_prompt_space`, with "auto" decided by the vocabulary."""
    space = recorded_prompt_space(chosen, model, recorded)
    if space != "auto":
        return space
    return "sampled" if Renderer.from_folder(model, "carry").samples_space else "observed"


def _read_world(
    folder: Path | None, own: Mapping[str, object], sandbox: SandboxKind | str | None, trust: bool
) -> World:
    """Read a stored run's world; its sandbox is replaced by `sandbox`, or else held to what a stranger may choose."""
    where = str(folder / "config.toml") if folder else "settings"
    world = read(World, own, where)
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
    return replace(world, sandbox=theirs.with_usual_programs())  # the user named the kind alone


_CODE = ("sampler", "host_functions", "judge", "group_judge")
"""Settings that may name code of a user's own, as module:name."""


def refuse_strangers(said: Mapping[str, object], where: str) -> None:
    """Refuse settings of a stored run that name code to import, or a file of this machine to read as a prompt.

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


def _warn_of_limits(limits: Limits, where: str) -> None:
    """Name each limit that a stored run sets higher than this machine's default: its lines may use that much."""
    usual = Limits()
    pairs = [(one.name, getattr(limits, one.name), getattr(usual, one.name)) for one in fields(Limits)]
    more = [f"{name} = {value} (default {default})" for name, value, default in pairs if value > default]
    if more:
        _log.warning("limits in %s are above the default: %s", where, ", ".join(more))
