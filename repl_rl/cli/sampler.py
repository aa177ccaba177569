"""`repl-rl sampler check NAME`: run the conformance suite on a sampler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from rich.table import Table

from repl_rl.cli.defaults import follow
from repl_rl.cli.terminal import terminal
from repl_rl.cli.unread import refuse_unread
from repl_rl.errors import ConfigError
from repl_rl.rollout.prompt_space import PromptSpace
from repl_rl.rollout.prompts import template
from repl_rl.rollout.renderer import Overshoot, Renderer
from repl_rl.samplers import load_sampler
from repl_rl.samplers.conformance import TIMEOUT_S, check
from repl_rl.settings.arguments import Parsed, parse, parse_with_sources
from repl_rl.settings.bounds import Above, check_fields
from repl_rl.settings.pretrained import PROMPT
from repl_rl.settings.scalars import Scalar
from repl_rl.world import World


@dataclass(frozen=True)
class CheckConfig:
    """Run the conformance suite on a sampler, with a scripted policy. The exit code is 1 if any check fails."""

    model: str | None = None
    """Policy, as in `train`, whose tokenizer and chat template write the prompts. Default: the bundled one."""
    prompt_space: PromptSpace = "auto"
    """The writer of the space after a prompt, as in `train`: auto, observed, sampled."""
    overshoot: Overshoot = "forbid"
    """Treatment of tokens with text after a newline: forbid (probability 0 in sampler and trainer alike), carry that
    text into the next line, or refuse a vocabulary that has them."""
    prompt: Annotated[str, PROMPT] = "bare"
    """Prompt template: bare, base, few_shot, chat, chat_few_shot, or a text file."""
    chat: Mapping[str, Scalar] = field(default_factory=dict)
    """Arguments of the model's chat template, such as enable_thinking. One that it does not read is refused."""
    timeout_s: Annotated[float, Above(0)] = TIMEOUT_S
    """Wall clock limit of one check, seconds, > 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", template(self.prompt))
        if self.chat and self.model is None:
            raise ConfigError("chat", dict(self.chat), "the bundled policy has no chat template; give --model too")
        check_fields(self)


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    action, rest = (argv[0], argv[1:]) if argv else ("", argv)
    if action in ("-h", "--help"):
        print("usage: repl-rl sampler check NAME [options]    (NAME: a shipped sampler or module:name)")
        return 0
    if action != "check":
        raise ConfigError("sampler action", action, "choose check")
    # Without a name there may still be --help, which exits within `parse`.
    if not rest or rest[0].startswith("-"):
        parse(CheckConfig, "sampler check NAME", rest)
        raise ConfigError("sampler", None, "name a shipped sampler, or module:name, after check")
    asked = parse_with_sources(CheckConfig, "sampler check NAME", rest[1:])
    refuse_without_effect(asked)
    return _check(rest[0], asked)


def refuse_without_effect(asked: Parsed[CheckConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    if asked.config.model is None:
        remedy = "it is about the tokenizer of --model; add --model, or leave it out"
        refuse_unread(asked, CheckConfig(), ["overshoot", "prompt_space"], remedy)


def _check(name: str, asked: Parsed[CheckConfig]) -> int:
    sampler = load_sampler(name)
    config, renderer = asked.config, None
    if config.model is not None:
        world = World(model=config.model)
        config = follow(asked, world)
        renderer = Renderer.from_folder(
            world.model_folder, config.overshoot, config.chat, prompt_space=config.prompt_space
        )
    rows = check(sampler, renderer, config.prompt, config.timeout_s)
    table = Table("promise", "kept", "detail", title=f"sampler {name}")
    for row in rows:
        table.add_row(row.name, "yes" if row.passed else "NO", row.detail)
    console = terminal()
    console.print(table)
    if renderer is not None:
        console.print(renderer.findings)
    return int(not all(row.passed for row in rows))
