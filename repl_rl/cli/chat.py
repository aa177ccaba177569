"""`repl-rl chat`: ask a policy at the terminal, here or on a server, and watch its lines run."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Protocol

import httpx
from rich.console import Console
from rich.text import Text

from repl_rl.cli.apply_model_defaults import apply_model_defaults, print_to_stderr
from repl_rl.cli.terminal_output import make_terminal
from repl_rl.cli.unused_options import refuse_unread
from repl_rl.errors import ConfigError
from repl_rl.rollout import Rollouts, SyncRollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.store import escape_control_characters, escape_output
from repl_rl.serve.conversation import Conversation, build_turn_prompt, validate_multi_turn
from repl_rl.serve.turn_updates import ExecutedLine, TurnStreamer
from repl_rl.settings.argument_parser import ParsedSettings, parse_with_sources
from repl_rl.settings.help_pages import COMMON
from repl_rl.settings.value_bounds import AtLeast, check_fields
from repl_rl.tasks import Task
from repl_rl.trajectory.console_text import PS1, PS2
from repl_rl.trajectory.trajectory import Line, LineStatus, Observed
from repl_rl.trajectory.trajectory_builder import RolloutObserver

VARIABLE = "REPL_RL_API_KEY"
"""Environment variable of the API key for a server."""
_WAIT_S = 600.0
"""Time to wait for a server, seconds."""
_TASK_SETTINGS = ("tasks", "judges", "group_judges", "trust")
"""Settings of tasks, which a chat does not have."""
ShowLine = Callable[[ExecutedLine], None]


@dataclass(frozen=True)
class ChatConfig(RolloutConfig):
    """Ask a policy question after question in one console. An empty question or the end of input ends the chat.

    The key of a server is read from the environment variable REPL_RL_API_KEY.
    """

    server: Annotated[str, COMMON] = ""
    """Address of a server, up to and with /v1, such as http://127.0.0.1:8000/v1. "" loads the policy here."""
    temperature: Annotated[float, AtLeast(0), COMMON] = 0.0
    """Sampling temperature, >= 0; 0 is greedy."""
    concurrency: Annotated[int, AtLeast(1)] = 1
    """Consoles kept ready, >= 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if self.server and not self.server.startswith(("http://", "https://")):
            raise ConfigError("server", self.server, "give its address, such as http://127.0.0.1:8000/v1")


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Result of a turn."""

    stop: str
    answer: str | None
    continues: bool
    """True if the console stays for the next question."""


class ChatBackend(Protocol):
    """Interface of a chat partner: a policy in this process or on a server."""

    def ask(self, question: str, show: ShowLine) -> ChatReply:
        """Ask a question. `show` gets each line after it has run."""


class LocalChat:
    """Policy in this process."""

    def __init__(self, source: SyncRollouts, temperature: float) -> None:
        self._source = source
        self._temperature = temperature
        self._conversation: Conversation | None = None
        self._turns = 0

    def ask(self, question: str, show: ShowLine) -> ChatReply:
        """See `ChatBackend.ask`."""
        return self._source.run(self._run_turn(self._source.rollouts, question, show))

    def close(self) -> None:
        """Close the console."""
        self._source.run(self._end_conversation())

    async def _run_turn(self, rollouts: Rollouts, question: str, show: ShowLine) -> ChatReply:
        # The conversation begins with the first question, and again after a turn that ended its console.
        conversation = self._conversation = self._conversation or Conversation(rollouts, keep=True)
        self._turns += 1
        task, teller = Task(f"chat-{self._turns}", question, ""), TurnStreamer()
        prompt = build_turn_prompt(conversation, rollouts, task)
        # A conversation that fills the context cannot continue.
        if len(prompt.token_ids) >= rollouts.engine.context_tokens:
            await self._end_conversation()
            remedy = f"the context holds {rollouts.engine.context_tokens}; begin again, or ask less"
            raise ConfigError("tokens of this conversation", len(prompt.token_ids), remedy)

        def on_item(item: Line | Observed) -> None:
            if (ran := teller.update(item).executed_line) is not None:
                show(ran)

        try:
            played = await conversation.play_turn(
                task, prompt, self._turns, self._temperature, RolloutObserver(on_item)
            )
        except BaseException:
            # After an interrupt the state of the console is unknown, so the conversation ends.
            await self._end_conversation()
            raise
        if (last := teller.finish().executed_line) is not None:
            show(last)
        goes_on = played.failure is None and conversation.open
        if not goes_on:
            await self._end_conversation()
        failure = f": {played.failure.message}" if played.failure else ""
        return ChatReply(f"{played.stop}{failure}", played.answer, goes_on)

    async def _end_conversation(self) -> None:
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            await conversation.aclose()


class RemoteChat:
    """Policy on a server of `repl-rl serve`."""

    def __init__(self, client: httpx.Client, temperature: float) -> None:
        """Ask the server for the name of its model.

        Raises:
            ConfigError: the server does not answer, refuses, or answers in another format.
        """
        self._client = client
        self._temperature = temperature
        self._id: str | None = None
        with _explain_server_errors(str(client.base_url)):
            listed = _check_response(client.get("models")).json()
            self._model = str(listed["data"][0]["id"])

    def ask(self, question: str, show: ShowLine) -> ChatReply:
        """See `ChatBackend.ask`."""
        ours: dict[str, object] = {"keep": True} if self._id is None else {"conversation": self._id}
        said = {"model": self._model, "messages": [{"role": "user", "content": question}], "stream": True}
        asked = {**said, "temperature": self._temperature, "repl": ours}
        reply = ChatReply("cut", None, False)
        with (
            _explain_server_errors(str(self._client.base_url)),
            self._client.stream("POST", "chat/completions", json=asked) as told,
        ):
            if told.status_code != 200:
                told.read()
            # The server has ended the conversation, for example after its timeout. The next question begins a new one.
            if told.status_code == 404 and self._id is not None:
                self._id = None
                return ChatReply("kept no longer", None, False)
            for event in _iterate_events(_check_response(told)):
                found = event.get("repl", {})
                # An event holds either a complete line, or the result of the turn.
                if isinstance(line := found.get("line"), dict):
                    show(_parse_executed_line(line))
                elif found:
                    self._id = _read_text_or_none(found["conversation"])
                    reply = ChatReply(str(found["stop"]), _read_text_or_none(found["answer"]), self._id is not None)
        return reply

    def close(self) -> None:
        """End the conversation on the server."""
        if self._id is not None:
            with _explain_server_errors(str(self._client.base_url)):
                self._client.delete(f"conversations/{self._id}")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    asked = parse_with_sources(ChatConfig, "chat", argv)
    refuse_without_effect(asked)
    config = apply_model_defaults(asked, tell=print_to_stderr)
    console = make_terminal()
    with _open_backend(config) as partner:
        # One turn per question, until an empty one.
        while question := _read_question(console):
            screen = ChatScreen(console)
            reply = partner.ask(question, screen.show_line)
            answer = "no answer" if reply.answer is None else escape_control_characters(reply.answer)
            console.print(Text(answer, style="bold green" if reply.answer is not None else "yellow"))
            if not reply.continues:
                console.print(
                    Text(
                        f"[{escape_control_characters(reply.stop)}; the next question begins in a new console]",
                        style="dim",
                    )
                )
    return 0


def refuse_without_effect(asked: ParsedSettings[ChatConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    usual = ChatConfig()
    if asked.config.server:
        # A server decides everything about the policy and its consoles.
        unread = [field.name for field in fields(RolloutConfig)]
        refuse_unread(asked, usual, unread, "the server has its own settings; leave it out")
    refuse_unread(asked, usual, _TASK_SETTINGS, "a chat has no tasks; leave it out")
    refuse_unread(asked, usual, ["kv_on_sync"], "weights do not change during a chat; leave it out")


class ChatScreen:
    """Printer of one turn's lines and their output, in console format. Control characters are escaped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._asks = PS1

    def show_line(self, ran: ExecutedLine) -> None:
        """Print a line and its output."""
        error = ran.status is not None and ran.status.is_error
        shown = Text(self._asks, style="dim")
        shown.append(escape_control_characters(ran.source), style="bold not dim")
        if ran.output:
            shown.append(
                "\n" + escape_output(ran.output.removesuffix("\n")), style="red not dim" if error else "not dim"
            )
        self._console.print(shown)
        self._asks = PS2 if ran.status is LineStatus.INCOMPLETE else PS1


def _open_backend(config: ChatConfig) -> AbstractContextManager[ChatBackend]:
    return _open_remote_chat(config) if config.server else _open_local_chat(config)


@contextmanager
def _open_local_chat(config: ChatConfig) -> Iterator[ChatBackend]:
    validate_multi_turn(config.load_sampler_and_renderer()[0])
    with SyncRollouts(config.open_rollouts, {}) as source:
        here = LocalChat(source, config.temperature)
        try:
            yield here
        finally:
            here.close()


@contextmanager
def _open_remote_chat(config: ChatConfig) -> Iterator[ChatBackend]:
    key = os.environ.get(VARIABLE, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=config.server, headers=headers, timeout=_WAIT_S) as client:
        there = RemoteChat(client, config.temperature)
        try:
            yield there
        finally:
            there.close()


def _read_question(console: Console) -> str:
    """Read the next question. "" ends the chat."""
    try:
        return console.input(Text.assemble(("?", "bold cyan"), " ")).strip()
    except EOFError:
        return ""


@contextmanager
def _explain_server_errors(address: str) -> Iterator[None]:
    """Turn errors in the block into a ConfigError: no answer, or one that `repl-rl serve` does not give."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = f"it does not answer: {str(error) or type(error).__name__}"
        raise ConfigError("server", address, f"{why}; give the address that `repl-rl serve` says") from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError("server", address, f"it does not answer as `repl-rl serve` does: {error!r}") from error


def _check_response(told: httpx.Response) -> httpx.Response:
    """Return the response.

    Raises:
        ConfigError: its status is an error; the message is the server's.
    """
    if told.status_code != 200:
        try:
            why = str(told.json()["error"]["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            why = told.text[:200]
        remedy = f" (here: in the environment variable {VARIABLE})" if told.status_code == 401 else ""
        raise ConfigError(
            "server", str(told.url), f"it refuses ({told.status_code}): {escape_control_characters(why)}{remedy}"
        )
    return told


def _iterate_events(told: httpx.Response) -> Iterator[Mapping[str, dict[str, object]]]:
    """Yield the JSON of each server-sent event. An event with an error raises ConfigError."""
    for line in told.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ConfigError("server", str(told.url), escape_control_characters(str(event["error"]["message"])))
            yield event


def _read_text_or_none(value: object) -> str | None:
    return None if value is None else str(value)


def _parse_executed_line(said: Mapping[str, object]) -> ExecutedLine:
    status = None if said["status"] is None else LineStatus(str(said["status"]))
    return ExecutedLine(str(said["source"]), str(said["output"]), status, None, bool(said["cut"]))
