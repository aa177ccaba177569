"""Replay of stored trajectories in a fresh console: step, verify, edit, branch.

- Comparison: `Difference` between a line's recorded and replayed output, with its probable cause.
- Session: `Replay` runs a trajectory line by line, with lines of the user in between; `open_replay` opens one.
- Branches: `branch` samples continuations with the policy from a `BranchPoint` in the middle of a trajectory.
- Verification: `verify_all` replays trajectories and counts those that show what was recorded.
"""

import asyncio
import re
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError, SandboxFault, StoreError
from repl_rl.rollout import Rollouts, RolloutSampler
from repl_rl.rollout.episode import Episode, offer_host_functions
from repl_rl.rollout.host_functions import (
    RecordedHostCalls,
    add_host_functions,
    get_host_functions,
    make_recorded_function,
)
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.runs.store import LineTransition, build_transitions
from repl_rl.samplers.fenced_code_sampler import (
    extract_error_message,
    extract_printed_text,
    format_as_comments,
    normalize_block_result,
)
from repl_rl.sandbox.base import (
    LineResult,
    Sandbox,
    SandboxSession,
    combine_results,
    open_console,
    push_each,
    push_lines,
)
from repl_rl.tasks import Task, Workspace
from repl_rl.trajectory.console_text import PS1, PS2, LineBuffer, TypedLineTracker, choose_prompt
from repl_rl.trajectory.trajectory import LineEnd, LineStatus, Observed, Prompt, Sampled, Segment, Stop, Trajectory


class DifferenceCause(StrEnum):
    """Probable cause of a difference, guessed from the output and from the names in the line."""

    ADDRESSES = "addresses"
    """Only addresses of objects differ."""
    TIME = "time"
    """The line depends on a clock, or only one of the two runs reached its time limit."""
    RANDOMNESS = "randomness"
    """The line depends on a random source, or two replays differ."""
    ENVIRONMENT = "environment"
    """Replays agree with each other, so the environment of the console has changed."""
    HOST = "host"
    """The line makes other calls of host functions than recorded; answers come from the record."""
    EDIT = "edit"
    """The user typed a line earlier in this replay."""


@keeps_old_names
@dataclass(frozen=True, slots=True)
class ShownText:
    """Text that a console showed for a line, and the line's status."""

    text: str
    """Output and next prompt, as an observation would hold them."""
    status: LineStatus
    truncated: bool = False
    """True if a marker replaces the middle of the text."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Line that shows something else than recorded."""

    line: int
    """Number of the line in the trajectory, from 0."""
    recorded: ShownText
    now: ShownText
    cause: DifferenceCause


_CUT_MARK = re.compile(r"\n\[\.\.\. \d+ (?:tokens|characters) cut \.\.\.\]\n")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]*")
_TORN_ADDRESS = re.compile(r"(?<= cut \.\.\.\]\n)[0-9a-fA-Fx]{1,16}(?=>)")
"""Rest of an object's address that a truncation cuts in two."""
_WORD = re.compile(r"[A-Za-z_]\w*")
_BINDING = re.compile(r"^\s*(?:(?:import|from|def|class|for|with|async|global)\b.*|([^=#]*?)[-+*/%|&^@<>]*=(?!=).*)")
"""Physical line that binds names: a statement with a keyword, or an assignment, whose targets are group 1."""
_CAUSE_WORDS = {
    DifferenceCause.TIME: {"time", "datetime", "timeit", "sched", "calendar"},
    DifferenceCause.RANDOMNESS: {"random", "secrets", "uuid", "urandom"},
    DifferenceCause.ADDRESSES: {"id", "hash"},
    DifferenceCause.ENVIRONMENT: {
        "os", "sys", "platform", "socket", "subprocess", "pathlib", "glob", "shutil", "tempfile", "getpass", "locale",
        "resource", "open",
    },
}  # fmt: skip
"""Words of a line that point to a cause."""


def is_same(recorded: ShownText, now: ShownText) -> bool:
    """Return True if a line shows what is recorded. If the record's middle is cut, its two ends must agree."""
    if recorded.status is not now.status:
        return False
    if recorded.text == now.text or not recorded.truncated:
        return recorded.text == now.text
    # A program may have printed text that looks like the marker, so try every match. A cut between two tokens may split
    # a character, which decodes to replacement characters.
    for mark in _CUT_MARK.finditer(recorded.text):
        head, tail = recorded.text[: mark.start()].rstrip("\ufffd"), recorded.text[mark.end() :].lstrip("\ufffd")
        if len(head) + len(tail) <= len(now.text) and now.text.startswith(head) and now.text.endswith(tail):
            return True
    return False


def contains_result(recorded: ShownText, result: LineResult) -> bool:
    """Return True if a sampler's observation of console output contains the output of the replay.

    Between the fences of the shipped sampler, and in comments, the whole text is compared. In any other text, each line
    of the output must occur, in order. If that text was cut, only the status is compared.
    """
    # The shipped sampler marks printed text, so that it can be compared as a whole.
    printed = extract_printed_text(recorded.text)
    if printed is not None:
        end = "\n" if result.text and not result.text.endswith("\n") else ""
        return is_same(replace(recorded, text=printed), ShownText(result.text + end, result.status, result.truncated))
    if recorded.status is not result.status or is_shown_as_comments(recorded, result):
        return recorded.status is result.status
    return recorded.truncated or _contains_lines(extract_error_message(result).rstrip("\n"), recorded.text)


def is_shown_as_comments(recorded: ShownText, result: LineResult) -> bool:
    """Return True if an observation is the output of a line as comments within its block."""
    return is_same(recorded, ShownText(format_as_comments(result), result.status, result.truncated))


def _contains_lines(printed: str, text: str) -> bool:
    """Return True if `text` has each line of `printed`, in order."""
    position = 0
    for line in printed.split("\n"):
        start = text.find(line, position)
        if start < 0:
            return False
        position = start + len(line)
    return True


def guess_cause(
    sources: Sequence[str], recorded: ShownText, now: ShownText, second_replay: ShownText | None
) -> DifferenceCause:
    """Return the probable cause of a difference.

    `sources` are the executed lines up to the differing one. `second_replay` is its output in a second replay, or None.
    """
    if is_same(_remove_addresses(recorded), _remove_addresses(now)):
        return DifferenceCause.ADDRESSES
    if LineStatus.TIMEOUT in (recorded.status, now.status) and recorded.status is not now.status:
        return DifferenceCause.TIME
    # Look for clocks, random sources and the like in every line that this one depends on.
    words = _find_reached_words(sources)
    for cause, names in _CAUSE_WORDS.items():
        if words & names:
            return cause
    return DifferenceCause.ENVIRONMENT if second_replay is None or second_replay == now else DifferenceCause.RANDOMNESS


def _remove_addresses(shown: ShownText) -> ShownText:
    """Return the text without addresses of objects, and without a partly truncated address."""
    text = _TORN_ADDRESS.sub("", shown.text) if shown.truncated else shown.text
    return ShownText(_ADDRESS.sub("", text), shown.status, shown.truncated)


def _find_reached_words(sources: Sequence[str]) -> set[str]:
    """Collect the words of the last line, and of each earlier line that binds one of the words so far."""
    words = set(_WORD.findall(sources[-1]))
    # Walk back, because a line can only depend on earlier ones.
    for source in reversed(sources[:-1]):
        for physical in source.split("\n"):
            match = _BINDING.match(physical)
            bound = _WORD.findall(match[1] if match and match[1] is not None else physical) if match else []
            if words.intersection(bound):
                words.update(_WORD.findall(source))
    return words


STATE_LINE = (
    "print(__import__('hashlib').sha256(__import__('re').sub(r' at 0x[0-9a-f]+', '', repr(sorted(("
    "n, type(v).__qualname__, repr(sorted(v, key=repr) if isinstance(v, (set, frozenset)) else v), "
    "repr(vars(v)) if type(v).__repr__ is object.__repr__ and hasattr(v, '__dict__') else '', "
    "repr([getattr(getattr(v, '__code__', 0), k, 0) for k in ('co_code', 'co_consts', 'co_names')])) "
    "for n, v in globals().items() if not n.startswith('__')))).encode('utf-8', 'replace')).hexdigest())"
)
"""Line that `Replay.compute_state_digest` runs in the console: it prints a digest and binds no name."""


@keeps_old_names
@dataclass(frozen=True, slots=True)
class ReplayedLine:
    """Line that ran in the rebuilt console."""

    text: str
    """Text as the policy wrote it, or as it was typed, with its newline."""
    result: LineResult
    shown: ShownText
    """Output and next prompt, as an observation would hold them."""
    line: int | None
    """Number of the recorded line that it runs or replaces, from 0; None means that it was typed in addition."""
    executed_lines: tuple[str, ...]
    """Physical lines that the console received."""
    recorded_line: LineTransition | None
    """Recorded line and observation to compare with; None means that the line was typed."""
    difference: Difference | None = None
    """Difference from `recorded_line`; None means that they agree."""


@keeps_old_names
class Replay:
    """Trajectory, and a console in which its first `position` lines have run. See `open_replay`.

    Calls of host functions are answered from the record. A call that is not recorded is refused with a `HostError`.
    """

    def __init__(self, trajectory: Trajectory, console: SandboxSession, recall: RecordedHostCalls) -> None:
        """Start at line 0. `recall` answers the console's calls of host functions."""
        self.trajectory = trajectory
        self._recall = recall
        self.position = 0
        """Number of the next recorded line, from 0."""
        self.steps: list[ReplayedLine] = []
        """Steps that have run."""
        self._transitions = build_transitions(trajectory)
        self._console = console
        self._buffer = LineBuffer()
        self._in_cell = False

    @property
    def ended(self) -> bool:
        """True if the console takes no further line, or all recorded lines have run."""
        return self._console.ended or self.position >= len(self._transitions)

    @property
    def current_prompt(self) -> str:
        """Prompt that the console shows now."""
        return choose_prompt(self._in_cell)

    @property
    def is_edited(self) -> bool:
        """True if a line was typed, so that the state may differ from the recorded one."""
        return any(step.recorded_line is None for step in self.steps)

    async def run_next(self) -> ReplayedLine | None:
        """Run the next recorded line. Return None and skip it if no console ran anything for it.

        Raises:
            ConfigError: no line is left, or the console has ended.
        """
        if self.position >= len(self._transitions):
            raise ConfigError("replay.step()", self.position, f"the trajectory has {len(self._transitions)} lines")
        # A line without an execution, such as an answer that was written as text, is skipped.
        recorded = self._transitions[self.position]
        execution = recorded.line.execution
        if execution is None or not execution.ran:
            self.position += 1
            return None
        # The buffer follows recorded lines, so that a line of the user later continues the open block.
        if recorded.was_typed:
            self._buffer.feed(recorded.line.text + "\n" * (recorded.line.end is LineEnd.EOS))
        step = await self._run(recorded.line.text, execution.ran, self.position, recorded)
        self.position += 1
        return step

    async def run_to_line(self, lines: int) -> None:
        """Run recorded lines up to the first `lines` of them.

        Raises:
            ConfigError: `lines` is below `position` or above the number of lines, or the console ends before.
        """
        if not self.position <= lines <= len(self._transitions):
            remedy = f"give {self.position} to {len(self._transitions)}; to go back, open a fresh replay"
            raise ConfigError("line to replay to", lines, remedy)
        while self.position < lines:
            await self.run_next()

    async def run_instead(self, text: str) -> ReplayedLine:
        """Run a line of the user in place of the next recorded one."""
        step = await self._run_typed(text, self.position)
        self.position += 1
        return step

    async def run_typed(self, text: str) -> ReplayedLine:
        """Run a line of the user; the next recorded line remains the next."""
        return await self._run_typed(text, None)

    async def compute_state_digest(self) -> str:
        """Return a digest of the console's names, with type and `repr` of each value: 64 hexadecimal digits.

        Addresses are left out. Functions count with their code, objects with the default `repr` with their attributes,
        sets in sorted order. Equal states have equal digests. Different states have different digests as far as `repr`
        shows the difference. The console computes it, so a program that replaced `print` or `repr` can fake it.

        Raises:
            ConfigError: the console has ended, or waits for the rest of a cell.
        """
        if self._in_cell:
            raise ConfigError("console", "within a cell", "finish the cell first")
        return (await push_lines(self._open(), [STATE_LINE])).text.strip()

    async def _run_typed(self, text: str, line: int | None) -> ReplayedLine:
        """Run a line of the user, with a newline at its end."""
        line_text = text if text.endswith("\n") else f"{text}\n"
        return await self._run(line_text, self._buffer.feed(line_text), line, None)

    async def _run(
        self, text: str, lines: tuple[str, ...], line: int | None, recorded: LineTransition | None
    ) -> ReplayedLine:
        """Run physical lines in the console, and add the step, with its difference from the recorded line."""
        execution = recorded.line.execution if recorded is not None else None
        self._recall.expect_calls(execution.calls if execution is not None else ())
        results = await push_each(self._open(), lines)
        result = combine_results(results)
        self._in_cell = result.incomplete
        # No prompt follows an end token, because the policy reads nothing more.
        is_last = recorded is not None and recorded.line.end is LineEnd.EOS and not recorded.next_prompt
        next_prompt = "" if self._console.ended or is_last else choose_prompt(result.incomplete)
        shown = ShownText(result.text + next_prompt, result.status, result.truncated)
        step = ReplayedLine(text, result, shown, line, lines[: len(results)], recorded)
        if recorded is not None:
            step = replace(step, difference=self._compare(recorded, step))
        self.steps.append(step)
        return step

    def _compare(self, recorded: LineTransition, step: ReplayedLine) -> Difference | None:
        """Return the difference of a step from its recorded line, or None if they agree."""
        execution, observed = recorded.line.execution, recorded.observed
        assert execution is not None
        recorded_text = ShownText(
            observed.text if observed else "", execution.status, observed is not None and observed.cut
        )
        is_last = self.position + 1 == len(self._transitions)
        # The comparison depends on what the sampler put into the record: only a status, console text, or its own text.
        if observed is None and not recorded.was_typed:
            agrees = execution.status in (step.result.status, normalize_block_result(step.result).status)
        elif recorded.was_typed and (recorded.next_prompt or is_last or observed is None):
            agrees = is_same(recorded_text, step.shown) or is_shown_as_comments(recorded_text, step.result)
        else:
            agrees = contains_result(recorded_text, step.result) or contains_result(
                recorded_text, normalize_block_result(step.result)
            )
        if agrees and not self._recall.difference:
            return None
        # A known cause wins over the guess: changed calls, and above all a typed line.
        sources = [entry.text for entry in (*self.steps, step)]
        cause = (
            DifferenceCause.HOST if self._recall.difference else guess_cause(sources, recorded_text, step.shown, None)
        )
        cause = DifferenceCause.EDIT if self.is_edited else cause
        return Difference(self.position, recorded_text, step.shown, cause)

    def _open(self) -> SandboxSession:
        """Return the console.

        Raises:
            ConfigError: the console has ended.
        """
        if self._console.ended:
            raise ConfigError("console", "ended", "open a fresh replay; see `ended`")
        return self._console


@asynccontextmanager
async def open_replay(trajectory: Trajectory, sandbox: Sandbox, to_line: int = 0) -> AsyncIterator[Replay]:
    """Open a fresh console with the workspace of `trajectory`, and run the first `to_line` lines of it.

    Raises:
        SetupError, StoreError: the workspace cannot be made here, or is not stored.
        ConfigError: the trajectory cannot be typed into a console, or has no such line; or its lines could call host
            functions, which the sandbox does not support.
        SandboxFault: no console could be started.
    """
    validate_replayable(trajectory)
    async with open_console(sandbox, trajectory.workspace) as console:
        recall = RecordedHostCalls(dict.fromkeys(trajectory.host_functions, "known from a record alone"))
        if trajectory.host_functions:
            offer_host_functions(console, recall, sandbox.name)
        replay = Replay(trajectory, console, recall)
        await replay.run_to_line(to_line)
        yield replay


def validate_replayable(trajectory: Trajectory) -> None:
    """Raise ConfigError for a trajectory that cannot be replayed.

    Its lines were run by a tool instead of a console, or its old record lacks the console's input.

    Raises:
        ConfigError: for some executed line the console's input is unknown.
    """
    executions = list(trajectory.executions)
    # An answer that was written as text was not executed.
    unknown = [execution for execution in executions if not execution.ran and execution.answer is None]
    if unknown:
        text = next(line.text for line in trajectory.lines if line.execution is not None and not line.execution.ran)
        remedy = "its record lacks the input of the console; it can be shown, but not executed again"
        raise ConfigError(f"trajectory {trajectory.id}, a line that was executed", text[:40], remedy)
    # An old record of an answer in a console looks the same.
    if executions and not any(execution.ran for execution in executions):
        remedy = "its record has no input of a console; it can be shown, but not executed again"
        raise ConfigError(f"trajectory {trajectory.id}", "an answer in its text", remedy)


@keeps_old_names
@dataclass(frozen=True, slots=True)
class BranchPoint:
    """Point in the middle of a trajectory from which branches continue."""

    trajectory: Trajectory
    line: int
    """Number of recorded lines before it."""
    prompt: Prompt
    segments: tuple[Segment, ...]
    """Segments after the prompt, with the recorded ids."""
    executed_lines: tuple[str, ...]
    """Physical lines that rebuild the console's state, in order."""
    pending_text: str = ""
    """Text after the last newline; the next line continues it."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids that the policy continues from, prompt included."""
        return (*self.prompt.token_ids, *(i for segment in self.segments for i in segment.token_ids))


@keeps_old_names
@dataclass(frozen=True, slots=True)
class Branches:
    """Continuations from one start."""

    start: BranchPoint
    trajectories: tuple[Trajectory, ...]
    """Complete trajectories: the recorded part before the start, then the policy's continuation."""

    @property
    def mean_outcome(self) -> float | None:
        """Mean outcome, an estimate of the value of the start; None if no continuation was graded."""
        outcomes = [t.outcome for t in self.trajectories if t.outcome is not None]
        return fmean(outcomes) if outcomes else None


def get_branch_point(trajectory: Trajectory, line: int) -> BranchPoint:
    """Return the point after the first `line` lines, as recorded.

    Raises:
        ConfigError: the trajectory has fewer lines, ended with that line, or was not run in a console.
    """
    validate_replayable(trajectory)
    if not 0 <= line <= len(trajectory.lines):
        raise ConfigError("line to branch from", line, f"give 0 to {len(trajectory.lines)}")
    # Keep the segments before the point, and cut the one that contains it.
    segments: list[Segment] = []
    remaining = line
    for segment in trajectory.segments:
        if isinstance(segment, Observed):
            segments.append(segment)
        elif remaining == 0:
            break
        else:
            segments.append(Sampled(segment.lines[:remaining]))
            # An observation follows the whole segment, not a part of it.
            if remaining < len(segment.lines):
                break
            remaining -= len(segment.lines)
    # The tracker finds the text after the last newline, which the next line continues.
    tracker = TypedLineTracker()
    runs = [(recorded, recorded.execution) for recorded in trajectory.lines[:line] if recorded.execution is not None]
    for recorded, execution in runs:
        tracker.check_typed(recorded.text, execution.ran, recorded.end is LineEnd.EOS)
    # Nothing can follow an end token or a submitted answer.
    last_execution = trajectory.lines[line - 1].execution if line else None
    ended = trajectory.stop is Stop.EOS and line == len(trajectory.lines)
    if ended or (
        last_execution is not None and (last_execution.answer is not None or not isinstance(segments[-1], Observed))
    ):
        raise ConfigError("line to branch from", line, "the rollout ended with that line; give a smaller number")
    executed = tuple(physical for _, execution in runs for physical in execution.ran)
    return BranchPoint(trajectory, line, trajectory.prompt, tuple(segments), executed, tracker.carry)


def get_replay_branch_point(replay: Replay, renderer: Renderer) -> BranchPoint:
    """Return the point that a replay has reached.

    From the first typed line on, all text counts as observation, so it is masked and not trained.

    Raises:
        ConfigError: the console has ended.
    """
    typed_index = next((i for i, step in enumerate(replay.steps) if step.recorded_line is None), None)
    if typed_index is None:
        return get_branch_point(replay.trajectory, replay.position)
    if replay.steps[-1].result.answer is not None or not replay.steps[-1].shown.text.endswith((PS1, PS2)):
        raise ConfigError("console", "ended", "nothing can follow; open a fresh replay")
    # Recorded ids are valid only up to the first typed or replaced line; the rest is encoded again.
    first = next((step.line for step in replay.steps[typed_index:] if step.line is not None), replay.position)
    start = get_branch_point(replay.trajectory, first)
    for step in replay.steps[typed_index:]:
        start = _append_typed_line(start, step, renderer)
    return replace(start, line=replay.position)


def _append_typed_line(start: BranchPoint, step: ReplayedLine, renderer: Renderer) -> BranchPoint:
    """Return `start` with the text of a step appended as an observation."""
    shown = step.text + step.shown.text
    previous = start.segments[-1] if start.segments else start.prompt
    # A withheld space has to be encoded with the text that follows it.
    withheld = not isinstance(previous, Sampled) and renderer.withholds_space(previous)
    ids = renderer.encode_splice(f" {shown}" if withheld and not shown.startswith("\n") else shown)
    start = replace(start, executed_lines=(*start.executed_lines, *step.executed_lines), pending_text="")
    # Text at the very beginning extends the prompt; text after an observation extends that.
    if not start.segments:
        return replace(start, prompt=Prompt(start.prompt.text + shown, (*start.prompt.token_ids, *ids)))
    last = start.segments[-1]
    if isinstance(last, Observed):
        merged = Observed(last.text + shown, (*last.token_ids, *ids), last.cut or step.shown.truncated)
        return replace(start, segments=(*start.segments[:-1], merged))
    return replace(start, segments=(*start.segments, Observed(shown, ids, step.shown.truncated)))


class ContinueSampler(RolloutSampler):
    """Sampler that rebuilds a start and then hands the episode to another sampler."""

    def __init__(self, sampler: RolloutSampler, start: BranchPoint) -> None:
        self._sampler = sampler
        self._start = start

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        """Return the recorded prompt, bit for bit."""
        return self._start.prompt

    def open_resources(self) -> AbstractAsyncContextManager[None]:
        """Return the resources of the continuing sampler."""
        return self._sampler.open_resources()

    async def on_start(self, episode: Episode) -> None:
        """Call `on_start` of the continuing sampler."""
        await self._sampler.on_start(episode)

    async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
        """Call `on_end` of the continuing sampler."""
        await self._sampler.on_end(rollout, result)

    async def rollout(self, episode: Episode) -> None:
        """Restore the start in the episode, and let the other sampler continue."""
        await episode.restore(self._start.segments, self._start.executed_lines, self._start.pending_text)
        if not episode.ended:
            await self._sampler.rollout(episode)


async def branch(
    rollouts: Rollouts, start: BranchPoint, task: Task | None, count: int, temperature: float = 1.0
) -> Branches:
    """Sample `count` (>= 1) continuations of `start` with the policy and the sampler of `rollouts`.

    Every continuation begins with exactly the ids of `start`, in a console with the recorded workspace. `task` grades
    them; None leaves them ungraded. Calls of host functions before `start` are answered from the record. Later calls
    are refused if `rollouts` does not have the function.

    Raises:
        StoreError: the workspace is not stored.
        EngineError, UserCodeError, InvariantError: as `Rollouts.collect`.
    """
    origin = start.trajectory
    workspace = Workspace.from_content(origin.workspace.content) if origin.workspace is not None else None
    graded_task = replace(task or Task(origin.task_id, origin.prompt.text, ""), workspace=workspace)
    # Give each start its own seed, so that branches from different lines differ.
    seed = rollouts.settings.seed + zlib.crc32(f"{origin.id}/{start.line}".encode())
    # Functions that exist only in the record answer the calls before the start.
    names = {function.name for function in get_host_functions(rollouts.hooks)}
    recorded = [make_recorded_function(name) for name in origin.host_functions if name not in names]
    branching = replace(
        rollouts,
        sampler=ContinueSampler(rollouts.sampler, start),
        settings=replace(rollouts.settings, seed=seed),
        hooks=add_host_functions(rollouts.hooks, recorded) if recorded else rollouts.hooks,
    )
    trajectories = await branching.collect([graded_task] * count, temperature)
    # Children of calls before the start belong to every branch.
    recorded_children = {c.child for line in origin.lines[: start.line] if line.execution for c in line.execution.calls}
    children = [child for child in origin.children if child.id in recorded_children]
    renamed = (t.with_id(f"{origin.id}+{start.line}.{i}", children) for i, t in enumerate(trajectories))
    return Branches(start, tuple(t if task else t.without_outcome() for t in renamed))


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of replaying one trajectory."""

    id: str
    lines: int
    """Lines that ran and were compared."""
    difference: Difference | None
    """First line that shows something else; None means that all compared lines agree.

    Later lines are not compared, because they may differ for the same reason.
    """
    skip_reason: str = ""
    """Reason why it could not be replayed; "" if it was."""


@keeps_old_names
@dataclass(frozen=True, slots=True)
class DeterminismReport:
    """Verifications of a run's trajectories."""

    verifications: tuple[Verification, ...]

    @property
    def verified_count(self) -> int:
        """Number of trajectories that were replayed."""
        return sum(not v.skip_reason for v in self.verifications)

    @property
    def divergent(self) -> tuple[Verification, ...]:
        """Verifications of the trajectories with a difference."""
        return tuple(v for v in self.verifications if v.difference is not None)

    @property
    def match_rate(self) -> float | None:
        """Share of the replayed trajectories whose lines all showed what was recorded; None if none was replayed."""
        return 1.0 - len(self.divergent) / self.verified_count if self.verified_count else None

    @property
    def divergence_causes(self) -> Counter[str]:
        """Number of divergent trajectories per cause."""
        return Counter(v.difference.cause.value for v in self.divergent if v.difference)


async def verify_trajectory(trajectory: Trajectory, sandbox: Sandbox) -> Verification:
    """Replay one trajectory up to its first difference. It is skipped if it has a `failure`, or if the replay fails."""
    if trajectory.failure is not None:
        return Verification(trajectory.id, 0, None, "our failure ended it when it was recorded")
    try:
        steps = await _replay_lines(trajectory, sandbox, None)
        last = steps[-1] if steps else None
        if last is None or last.difference is None:
            return Verification(trajectory.id, len(steps), None)
        # Run the same lines again: two replays that differ show randomness.
        second_steps = await _replay_lines(trajectory, sandbox, len(steps))
    except (ConfigError, SandboxFault, StoreError) as error:
        return Verification(trajectory.id, 0, None, str(error))
    second_shown = second_steps[-1].shown if len(second_steps) == len(steps) else None
    return Verification(trajectory.id, len(steps), _classify_difference(steps, last.difference, second_shown))


def _classify_difference(
    steps: Sequence[ReplayedLine], difference: Difference, second_shown: ShownText | None
) -> Difference:
    """Return `difference` with the cause that a second replay, `second_shown`, makes probable."""
    sources = [step.text for step in steps]
    # Changed calls are a known cause; only a guessed cause profits from the second replay.
    if difference.cause is DifferenceCause.HOST:
        return difference
    return replace(difference, cause=guess_cause(sources, difference.recorded, difference.now, second_shown))


async def _replay_lines(trajectory: Trajectory, sandbox: Sandbox, max_lines: int | None) -> list[ReplayedLine]:
    """Run lines until one differs (`max_lines` None), or until `max_lines` of them have run."""
    async with open_replay(trajectory, sandbox) as replay:
        while not replay.ended and (max_lines is None or len(replay.steps) < max_lines):
            step = await replay.run_next()
            if step is None:
                continue
            # A failed sandbox shows nothing about the trajectory.
            if step.result.status is LineStatus.SANDBOX_FAULT:
                raise SandboxFault(step.result.text or "the console did not answer")
            if max_lines is None and step.difference is not None:
                break
        return replay.steps


async def verify_all(
    trajectories: Iterable[Trajectory],
    sandbox: Sandbox,
    concurrency: int = 16,
    on_each: Callable[[Verification], None] | None = None,
) -> DeterminismReport:
    """Replay trajectories, `concurrency` (>= 1) at once; call `on_each` with each result as it arrives."""
    slots = asyncio.Semaphore(concurrency)

    async def verify_one(trajectory: Trajectory) -> Verification:
        async with slots:
            verification = await verify_trajectory(trajectory, sandbox)
        if on_each is not None:
            on_each(verification)
        return verification

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(verify_one(t)) for t in trajectories]
    return DeterminismReport(tuple(task.result() for task in tasks))


__all__ = [
    "BranchPoint",
    "Branches",
    "ContinueSampler",
    "DeterminismReport",
    "Difference",
    "DifferenceCause",
    "Replay",
    "ReplayedLine",
    "ShownText",
    "Verification",
    "branch",
    "get_branch_point",
    "get_replay_branch_point",
    "open_replay",
    "verify_all",
    "verify_trajectory",
]
