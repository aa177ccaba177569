"""Conversation: several questions in a row in one console. Ids are only ever appended, and names stay defined.

Each question is a separate rollout with its own limits. No engine session is open between two questions, so a
conversation that waits for a person holds only its console. The functions build the text that is spliced in between
two rollouts of a conversation.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from repl_rl.deprecations import bind_protocol_methods
from repl_rl.errors import ConfigError
from repl_rl.rollout.concurrent_rollouts import Rollouts
from repl_rl.rollout.host_functions import get_host_functions
from repl_rl.rollout.sampler_base import ReplSampler, RolloutSampler
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import ChatFormat
from repl_rl.sandbox.base import LineResult, Sandbox, SandboxSession, SupportsContinue
from repl_rl.tasks import Task
from repl_rl.trajectory.console_text import PS1
from repl_rl.trajectory.trajectory import LineStatus, Observed, Prompt, Trajectory
from repl_rl.trajectory.trajectory_builder import RolloutObserver, RolloutSpec


class Conversation:
    """Console of a conversation, with all ids so far. Close it at the end, and after a cancelled turn."""

    def __init__(self, rollouts: Rollouts, *, keep: bool) -> None:
        """Start without any turn.

        With `keep`, the console outlives a turn, so that another turn can follow. Lines cannot call host functions
        then.

        Raises:
            ConfigError: `keep` is set, and lines may call host functions.
        """
        functions = get_host_functions(rollouts.hooks)
        if keep and functions:
            remedy = "a console that is kept can call none; leave one of the two out"
            raise ConfigError("host functions", [f.name for f in functions], remedy)
        self.text = ""
        """Text of all turns so far, prompts included."""
        self.token_ids: tuple[int, ...] = ()
        """Ids of all turns so far, prompts included."""
        self._shared_sandbox = _SharedConsoleSandbox(rollouts.sandbox) if keep else None
        self._rollouts = rollouts if self._shared_sandbox is None else replace(rollouts, sandbox=self._shared_sandbox)

    @property
    def open(self) -> bool:
        """True if a further turn can follow.

        This requires that the console is kept, has no open cell, and was ended by an answer or not at all.
        """
        return self._shared_sandbox is not None and self._shared_sandbox.is_reusable

    def build_next_prompt(self, continuation: Prompt) -> Prompt:
        """Return the prompt of a turn that asks `continuation` after the turns so far."""
        return Prompt(self.text + continuation.text, (*self.token_ids, *continuation.token_ids))

    async def play_turn(
        self, task: Task, prompt: Prompt, seed: int, temperature: float, observer: RolloutObserver
    ) -> Trajectory:
        """Play a turn, whose rollout gets the id of `task`. `prompt` is the task's prompt, or from `build_turn_prompt`.

        Raises:
            EngineError, InvariantError, UserCodeError: see `Rollouts.run_observed`.
        """
        spec = RolloutSpec(task.id, task, prompt, seed, self._rollouts.engine.policy_step)
        trajectory = await self._rollouts.run_observed(spec, temperature, observer)
        self.text = prompt.text + join_completion_text(trajectory)
        self.token_ids = (*prompt.token_ids, *trajectory.completion_ids)
        return trajectory

    async def aclose(self) -> None:
        """Return the console to the sandbox."""
        if self._shared_sandbox is not None:
            await self._shared_sandbox.aclose()


def build_turn_prompt(conversation: Conversation, rollouts: Rollouts, task: Task) -> Prompt:
    """Return the prompt of the next turn of a conversation: the conversation so far, then the prompt of `task`.

    Raises:
        ConfigError: as `build_follow_up_prompt`.
    """
    if not conversation.token_ids:
        return rollouts.build_prompt(task)
    version = ".".join(map(str, rollouts.sandbox.python_version))
    history = Prompt(conversation.text, conversation.token_ids)
    template = rollouts.settings.template
    continuation = build_follow_up_prompt(rollouts.renderer, template, task.question, version, history)
    return conversation.build_next_prompt(continuation)


def build_follow_up_prompt(renderer: Renderer, template: str, question: str, version: str, history: Prompt) -> Prompt:
    """Return the text between `history`, the end of a rollout in the line console, and the first line of the next one.

    A plain template is repeated with the new question, without the banner, because the console already runs. In a chat,
    the policy's turn is ended if the policy has not ended it. The question is the next user message.

    Args:
        renderer: the renderer of the policy.
        template: the prompt template of the first question, see `Renderer.build_prompt`.
        question: the next question.
        version: the version of Python in the sandbox.
        history: text and ids of all earlier turns, prompts included.

    Raises:
        ConfigError: the chat template cannot write such a message.
    """
    filled = renderer.fill_template(template, question, version)
    # The console's prompt follows if the template ends with one.
    console_prompt = PS1 if filled.console.endswith(PS1) else ""
    if filled.system is None:
        separator = "" if history.text.endswith("\n") else "\n"
        text = separator + filled.head + console_prompt
        return Prompt(text, renderer.encode_splice(text))
    message = {"role": "user", "content": filled.question}
    # The limit exceeds the question's length, so the question is never truncated.
    encoded = ChatFormat(renderer).encode_reply([message], len(renderer.encode(filled.question)) + 1)
    # The encoded message begins after an end token. Add one if the policy has not written it.
    has_end = history.token_ids[-1] in renderer.eos_ids
    end_ids = () if has_end else (renderer.end_id,)
    return Prompt(
        encoded.text + console_prompt, (*end_ids, *encoded.token_ids, *renderer.encode_splice(console_prompt))
    )


def validate_multi_turn(sampler: RolloutSampler) -> None:
    """Reject a sampler whose rollouts cannot follow each other in one console.

    Raises:
        ConfigError: it is not the line console, or begins with thinking.
    """
    if not isinstance(sampler, ReplSampler) or sampler.thinking:
        remedy = "only rollouts of the line console (repl, without thinking) follow each other in one console"
        raise ConfigError("sampler", type(sampler).__name__, remedy)


def join_completion_text(trajectory: Trajectory) -> str:
    """Return all text after the prompt, sampled and observed."""
    parts = ([s.text] if isinstance(s, Observed) else [line.text for line in s.lines] for s in trajectory.segments)
    return "".join(text for part in parts for text in part)


class _SharedConsoleSandbox:
    """Sandbox with a single console, which stays open between the sessions."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.name, self.python_version = sandbox.name, sandbox.python_version
        self._sandbox = sandbox
        self._stack = AsyncExitStack()
        self._console: _SharedConsoleSession | None = None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        """See `Sandbox.session`."""
        if self._console is None:
            # The stack closes the console at the end of the conversation, not of this session.
            self._console = _SharedConsoleSession(await self._stack.enter_async_context(self._sandbox.session()))
        else:
            # A submitted answer ends a console. Let it take further lines.
            bind_protocol_methods(self._console.session, SupportsContinue)
            if isinstance(self._console.session, SupportsContinue):
                self._console.session.continue_after_answer()
        yield self._console

    @property
    def is_reusable(self) -> bool:
        """True if a further line can start a cell, at once or after the last answer is forgotten."""
        if self._console is None:
            return True
        last = self._console.last_result
        # The last line was cancelled, or its cell is still open.
        if last is None or last.incomplete:
            return False
        return not self._console.ended or (
            last.status is LineStatus.ANSWERED and isinstance(self._console.session, SupportsContinue)
        )

    async def aclose(self) -> None:
        """Return the console to the sandbox."""
        await self._stack.aclose()


class _SharedConsoleSession:
    """Console session of a conversation, with the result of its last line."""

    def __init__(self, session: SandboxSession) -> None:
        self.session = session
        self.last_result: LineResult | None = None

    @property
    def ended(self) -> bool:
        """See `SandboxSession.ended`."""
        return self.session.ended

    async def push(self, line: str) -> LineResult:
        """See `SandboxSession.push`."""
        # After a cancelled line the console is in an unknown state.
        self.last_result = None
        self.last_result = await self.session.push(line)
        return self.last_result
