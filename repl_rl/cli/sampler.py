"""`repl-rl sampler check NAME`: run the conformance suite on a sampler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from rich.table import Table

from repl_rl.cli.apply_model_defaults import apply_defaults
from repl_rl.cli.terminal_output import make_terminal
from repl_rl.cli.unused_options import refuse_unread
from repl_rl.errors import ConfigError
from repl_rl.rollout.prompts import load_template
from repl_rl.rollout.token_renderer import Overshoot, PromptSpace, Renderer
from repl_rl.rollout_config import RolloutConfig
from repl_rl.samplers import load_sampler
from repl_rl.samplers.conformance_checks import TIMEOUT_S, run_checks
from repl_rl.settings.argument_parser import ParsedSettings, parse, parse_with_sources
from repl_rl.settings.model_defaults import PROMPT
from repl_rl.settings.toml_values import Scalar
from repl_rl.settings.value_bounds import Above, check_fields


@dataclass(frozen=True)
class SamplerCheckConfig:
    """Run the conformance suite on a sampler, with a scripted policy. The exit code is 1 if any check fails."""

    model: str | None = None
    """Policy, as in `train`, whose tokenizer and chat template write the prompts. Default: the bundled one."""
    prompt_space: PromptSpace = "auto"
    """Source of the space after a console prompt, as in `train`: observed (the console writes it), sampled (the policy
    samples it), or auto (by the vocabulary)."""
    newline_tokens: Overshoot = "forbid"
    """Treatment of tokens with text after a newline: forbid (probability 0 in sampler and trainer alike), carry that
    text into the next line, or refuse a vocabulary that has them."""
    prompt: Annotated[str, PROMPT] = "bare"
    """Prompt template: bare, base, few_shot, chat, chat_few_shot, or a text file."""
    chat_template_kwargs: Mapping[str, Scalar] = field(default_factory=dict)
    """Arguments of the model's chat template, such as enable_thinking. One that it does not read is refused."""
    timeout_s: Annotated[float, Above(0)] = TIMEOUT_S
    """Wall clock limit of one check, seconds, > 0."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", load_template(self.prompt))
        if self.chat_template_kwargs and self.model is None:
            raise ConfigError(
                "chat_template_kwargs",
                dict(self.chat_template_kwargs),
                "the bundled policy has no chat template; give --model too",
            )
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
        parse(SamplerCheckConfig, "sampler check NAME", rest)
        raise ConfigError("sampler", None, "name a shipped sampler, or module:name, after check")
    asked = parse_with_sources(SamplerCheckConfig, "sampler check NAME", rest[1:])
    refuse_without_effect(asked)
    return _check_sampler(rest[0], asked)


def refuse_without_effect(asked: ParsedSettings[SamplerCheckConfig]) -> None:
    """Reject options that are given but have no effect.

    Raises:
        ConfigError: there is one.
    """
    if asked.config.model is None:
        remedy = "it is about the tokenizer of --model; add --model, or leave it out"
        refuse_unread(asked, SamplerCheckConfig(), ["newline_tokens", "prompt_space"], remedy)


def _check_sampler(name: str, asked: ParsedSettings[SamplerCheckConfig]) -> int:
    """Run the checks, print them as a table, and return the exit code."""
    sampler = load_sampler(name)
    # Without --model, the checks use the tokenizer of the bundled policy.
    config, renderer = asked.config, None
    if config.model is not None:
        rollout_config = RolloutConfig(model=config.model)
        config = apply_defaults(asked, rollout_config)
        renderer = Renderer.from_folder(
            rollout_config.model_folder,
            config.newline_tokens,
            config.chat_template_kwargs,
            prompt_space=config.prompt_space,
        )
    rows = run_checks(sampler, renderer, config.prompt, config.timeout_s)
    table = Table("promise", "kept", "detail", title=f"sampler {name}")
    for row in rows:
        table.add_row(row.name, "yes" if row.passed else "NO", row.detail)
    console = make_terminal()
    console.print(table)
    if renderer is not None:
        console.print(renderer.findings)
    return int(not all(row.passed for row in rows))
