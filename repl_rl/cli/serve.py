"""`repl-rl serve`: an OpenAI-compatible server in which the policy's lines are executed as in training."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from repl_rl.cli.apply_model_defaults import apply_model_defaults, print_to_stderr
from repl_rl.cli.next_steps import SERVING, find_missing_packages
from repl_rl.cli.unused_options import refuse_unread
from repl_rl.errors import ConfigError
from repl_rl.rollout.synchronous_rollouts import EventLoopThread
from repl_rl.rollout_config import RolloutConfig, find_run_folder
from repl_rl.sandbox import SANDBOXES
from repl_rl.settings.argument_parser import ParsedSettings, parse_with_sources
from repl_rl.settings.help_pages import COMMON
from repl_rl.settings.value_bounds import Above, AtLeast, check_fields

_TASK_SETTINGS = ("tasks", "judges", "group_judges")
"""Settings of tasks, which a server does not have."""
_RUN_SETTINGS = (
    "model",
    "prompt",
    "add_bos_token",
    "prompt_space",
    "date",
    "chat_template_kwargs",
    "sampler",
    "host_functions",
    "preload",
    "newline_tokens",
    "context_tokens",
    "dtype",
)
"""Settings that --run reads from the stored run. They may not be given together with --run."""
_RUN_TABLES = ("rollout", "limits")
"""Tables that a stored run decides."""


@dataclass(frozen=True)
class ServeConfig(RolloutConfig):
    """Serve a policy to clients of OpenAI's API. Each conversation has its own console, with the limits of a rollout.

    API keys are read from --keys, and from the environment variable REPL_RL_API_KEYS (with commas between them).
    """

    run: Annotated[Path | None, COMMON] = None
    """Stored run whose policy, prompt, sampler and limits are served. Without it, the options of this command apply."""
    host: Annotated[str, COMMON] = "127.0.0.1"
    """Address to listen on. One that other machines can reach needs keys."""
    port: Annotated[int, COMMON] = 8000
    """Port to listen on, 0 to 65535. 0 means any free port."""
    keys: Annotated[Path | None, COMMON] = None
    """File of API keys, one per line. Keys of the environment variable are valid too."""
    name: Annotated[str, COMMON] = ""
    """Model name for clients. "" selects the folder name of --run or --model, or else the value of --model."""
    concurrency: Annotated[int, AtLeast(1), COMMON] = 8
    """Concurrent turns, and consoles kept ready for them, >= 1."""
    max_waiting: Annotated[int, AtLeast(0), COMMON] = 64
    """Turns that may wait in the queue, >= 0. A further turn is refused with status 429."""
    max_conversations: Annotated[int, AtLeast(0), COMMON] = 64
    """Conversations that may be kept, each with its console, >= 0."""
    conversation_timeout_s: Annotated[float, Above(0)] = 600.0
    """Time without a turn after which a kept conversation ends, seconds, > 0."""
    shutdown_timeout_s: Annotated[float, AtLeast(0)] = 5.0
    """Time for running turns to finish after SIGTERM, seconds, >= 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if not 0 <= self.port < 65536:
            raise ConfigError("port", self.port, "give 0 to 65535")

    @property
    def served_config(self) -> RolloutConfig:
        """Configuration to serve. Engine, sandbox and seed are those of this command, never those of the run.

        Raises:
            ConfigError: `run` is not the folder of a run.
        """
        if self.run is None:
            return self
        if find_run_folder(self.run) is None:
            raise ConfigError("run", str(self.run), "it has no config.toml; give the folder of a run")
        of_run = RolloutConfig.from_run(self.run, sandbox=SANDBOXES.resolve(self.sandbox), trust=self.trust)
        here = replace(of_run, engine=self.engine, seed=self.seed, concurrency=self.concurrency)
        return replace(here, tasks=self.tasks, judges={}, group_judges={})

    @property
    def model_name(self) -> str:
        """Model name for clients."""
        if self.run is not None and not self.name:
            return self.run.resolve().name
        return self.name or (Path(self.model).resolve().name if Path(self.model).exists() else self.model)


def refuse_without_effect(asked: ParsedSettings[ServeConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    usual = ServeConfig()
    refuse_unread(asked, usual, _TASK_SETTINGS, "a server has no tasks; leave it out")
    refuse_unread(asked, usual, ["kv_on_sync"], "weights do not change while a server runs; leave it out")
    if asked.config.run is None:
        refuse_unread(asked, usual, ["trust"], "it has no effect without --run; leave it out")
    else:
        refuse_unread(asked, usual, (*_RUN_SETTINGS, *_RUN_TABLES), "the run says it; leave out one of the two")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    asked = parse_with_sources(ServeConfig, "serve", argv)
    refuse_without_effect(asked)
    if lacking := find_missing_packages(SERVING):
        raise ConfigError("package", lacking[0], "it is not installed; install it with `pip install 'repl_rl[serve]'`")
    # These modules need the packages of the extra `serve`, which may be missing when this one is imported.
    from repl_rl.serve.auth import VARIABLE, read_keys
    from repl_rl.serve.conversation_service import ServerLimits
    from repl_rl.serve.http_server import TurnServer, is_loopback, open_listening_socket, raise_file_limit

    config = apply_model_defaults(asked, tell=print_to_stderr)
    rollout_config, keys = config.served_config, read_keys(config.keys)
    raise_file_limit()
    # Take the port, and check who can reach it, before the engine opens, which may take minutes.
    found = open_listening_socket(config.host, config.port)
    host, port = found.getsockname()[:2]
    if not keys and not is_loopback(host):
        found.close()
        remedy = f"other machines can reach it, so it needs keys: give --keys FILE, or set {VARIABLE}"
        raise ConfigError("host", config.host, remedy)
    if not SANDBOXES.resolve(config.sandbox).isolates and not is_loopback(host):
        found.close()
        remedy = (
            f"nothing keeps a line from this machine there, and others can reach {config.host}; use local or docker"
        )
        raise ConfigError("sandbox", config.sandbox, remedy)
    shown = f"[{host}]" if ":" in host else host
    bounds = ServerLimits(
        config.concurrency, config.max_waiting, config.max_conversations, config.conversation_timeout_s
    )
    serving = TurnServer(
        rollout_config.open_rollouts, found, config.model_name, bounds, keys, config.shutdown_timeout_s
    )

    def print_ready() -> None:
        print(f"http://{shown}:{port}/v1 serves {config.model_name}    (interrupt to stop)", flush=True)

    # The event loop runs in a thread, so that a signal interrupts only the wait here and turns can still finish.
    with closing(EventLoopThread()) as thread:
        served = thread.start_detached(serving.run(print_ready))
        try:
            served.result()
        except KeyboardInterrupt:
            # SIGTERM raises this too.
            thread.call_soon(serving.stop)
            served.result()
            raise
    return 0
