"""Sampler for calls inside running text, and the parser of such calls.

A call is detected while the policy streams, executed at once, and answered in place. The parser evaluates nothing, and
reports text that is not a call. It reads a call or a list of calls, as Python or JSON:

weather("Seattle, WA")                                   [weather(place="Seattle, WA"), ask("Really?")]
{"name": "weather", "arguments": {"place": "Seattle"}}   [{"name": "weather", "parameters": {}}, ...]
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repl_rl.rollout.episode import Episode
from repl_rl.rollout.sampler_base import RolloutSampler
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import build_opening_prompt, check_single_place, compile_single_group, fill_frame
from repl_rl.samplers.tool_call_parsing import (
    Toolbox,
    ToolCall,
    ToolFunction,
    ToolResult,
    compute_tool_metrics,
    make_syntax_error,
)
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Execution, LineEnd, Prompt, Trajectory

_MAX_CALL_CHARS = 8_192
"""Longest text to parse, characters."""
_PYTHON_FORM = 'write a call such as name("text", key=1)'
_JSON_FORM = 'write {"name": "...", "arguments": {...}}'


@dataclass(frozen=True, slots=True)
class CallConvention:
    """Format of calls, their results and the final answer."""

    call: str = r"<fn>(.*?)</fn>"
    """Regular expression of calls; its one group is a call, or several, see `parse_calls`. `.` matches newlines."""
    results: str = "<fn_results>{}</fn_results>"
    """Text spliced in per call; `{}` is the result of the function, as text."""
    error: str = "<fn_error>{}</fn_error>"
    """Text spliced in per failed call; `{}` is the class and the message of the error."""
    answer: str = r"<answer>(.*?)</answer>"
    """Regular expression of the final answer; its one group is submitted. "" disables it."""

    def __post_init__(self) -> None:
        compile_single_group("convention.call", self.call)
        if self.answer:
            compile_single_group("convention.answer", self.answer)
        check_single_place("convention.results", self.results)
        check_single_place("convention.error", self.error)


class InlineCallSampler(RolloutSampler):
    """Sampler that executes each call in the text as soon as it is closed, and splices its result in.

    Several calls that are closed together run one after the other, and one observation has all of their results. An end
    token or an answer ends the rollout. Only text of the policy is searched for calls and answers.
    """

    def __init__(
        self,
        functions: Sequence[ToolFunction],
        *,
        convention: CallConvention | None = None,
        system: str = "",
        timeout_s: float = 10.0,
    ) -> None:
        """Offer `functions` under their own names.

        Args:
            functions: plain or async; arguments are literals, and the result is shown as `str` gives it.
            convention: format of calls and results.
            system: text or message before the question; see `build_opening_prompt`.
            timeout_s: wall clock of one call, seconds (> 0).

        Raises:
            ConfigError: as `Toolbox`.
        """
        self.toolbox = Toolbox(functions, timeout_s)
        self.convention = convention or CallConvention()
        self.system = system
        self._call = re.compile(self.convention.call, re.DOTALL)
        # `(?!)` never matches: no answer ends the rollout.
        self._answer = re.compile(self.convention.answer or r"(?!)", re.DOTALL)
        self._until = re.compile(f"(?:{self._call.pattern})|(?:{self._answer.pattern})", re.DOTALL)
        name = next(iter(self.toolbox.functions))
        self.rehearsals = ((f"a <fn>{name}()</fn> b <fn>{name}(x=</fn><answer>c</answer>",), ("no call",))

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        return build_opening_prompt(renderer, self.system, task.full_question, template)

    async def rollout(self, episode: Episode) -> None:
        while not episode.ended:
            line = await episode.sample(until=self._until)
            call, answer = self._call.search(line.text), self._answer.search(line.text)
            # Sampling stops at the first call or answer. An answer takes precedence.
            if answer is not None:
                episode.submit(answer[1].strip())
            elif call is not None and line.end is not LineEnd.LENGTH:
                # Run the calls one after the other. The first failure gives the status of the line.
                results = [await self.toolbox.run(requested) for requested in parse_calls(call[1])]
                status_result = next((result for result in results if not result.is_ok), results[0])
                episode.record_execution(Execution(status_result.status, sum(result.elapsed_s for result in results)))
                if not episode.ended:
                    episode.observe("".join(map(self._format_result, results)))

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return the metrics of each function: see `compute_tool_metrics`."""
        outcomes: list[tuple[str, bool]] = []
        for line in (line for t in trajectories for line in t.lines if line.execution is not None):
            match = self._call.search(line.text)
            if match is not None and line.execution is not None:
                # The record has one status per line, which counts for all calls of that line.
                names = [call.name if isinstance(call, ToolCall) else "" for call in parse_calls(match[1])]
                outcomes.extend((name, not line.execution.status.is_error) for name in names)
        return compute_tool_metrics(outcomes, self.toolbox.functions, max(len(trajectories), 1))

    def _format_result(self, result: ToolResult) -> str:
        return fill_frame(self.convention.results if result.is_ok else self.convention.error, result.text)


def parse_calls(text: str) -> list[ToolCall | ToolResult]:
    """Return the calls in `text`, in order, at least one.

    The text is a single call or a list of calls, as Python or JSON. An element of a list that is not a call becomes a
    `syntax_error` in its place. A text that cannot be read becomes a single `syntax_error`.
    """
    text = text.strip()
    if len(text) > _MAX_CALL_CHARS:
        return [make_syntax_error(f"a call has at most {_MAX_CALL_CHARS} characters")]
    # Python calls start with a name, JSON calls with a brace; a list may surround both.
    if text.lstrip("[ \n\t").startswith("{"):
        return _parse_json_calls(text)
    try:
        # Parsed, never executed.
        node = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        return [make_syntax_error(error.msg)]
    except ValueError as error:
        return [make_syntax_error(str(error))]
    except (RecursionError, MemoryError):
        return [make_syntax_error("the call is nested too deeply")]
    elements = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [_parse_python_call(element) for element in elements] or [make_syntax_error(_PYTHON_FORM)]


def parse_call(text: str) -> ToolCall | ToolResult:
    """Return the call in a text of the form `name(literal, key=literal)`. Several calls are a `syntax_error`."""
    calls = parse_calls(text)
    return calls[0] if len(calls) == 1 else make_syntax_error("write one call")


def _parse_python_call(node: ast.expr) -> ToolCall | ToolResult:
    """Return a call of a name with literals as arguments."""
    try:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise ValueError(_PYTHON_FORM)
        names = [keyword.arg for keyword in node.keywords]
        # The parser accepts `**mapping`, whose name is None.
        if None in names or len(set(names)) < len(names):
            raise ValueError("** is not allowed in a call" if None in names else "keyword argument repeated")
        # Only literals are accepted. Any other expression raises ValueError.
        args = tuple(ast.literal_eval(argument) for argument in node.args)
        kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError) as error:
        return make_syntax_error("arguments must be literals" if "malformed node" in str(error) else str(error))
    except (RecursionError, MemoryError):
        return make_syntax_error("the call is nested too deeply")
    return ToolCall(node.func.id, args, kwargs)


def _parse_json_calls(text: str) -> list[ToolCall | ToolResult]:
    """Return a call or a list of calls in JSON."""
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [make_syntax_error(f"the call is not JSON: {error}")]
    return [_parse_call_object(item) for item in (parsed if isinstance(parsed, list) else [parsed])]


def _parse_call_object(value: object) -> ToolCall | ToolResult:
    """Return a call written as `{"name": ..., "arguments": {...}}`.

    Llama 3 writes `parameters` instead of `arguments`; both are optional.
    """
    if not isinstance(value, Mapping):
        return make_syntax_error(_JSON_FORM)
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return make_syntax_error(_JSON_FORM)
    return ToolCall(name, (), dict(arguments))
