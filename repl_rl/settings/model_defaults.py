"""Defaults that depend on the model.

A field has the default of the bundled policy, and its annotation has that of other models:

    max_lines: Annotated[int, AtLeast(1), PretrainedDefault.constant(32)] = 8
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, get_args, get_origin, get_type_hints

from repl_rl.settings.component_registry import Registry
from repl_rl.settings.toml_values import Scalar


@dataclass(frozen=True, slots=True)
class ModelDefaultsContext:
    """Facts that a default may depend on. Slow ones are functions, called on demand."""

    has_chat_template: Callable[[], bool]
    """Function that returns True if the model's tokenizer has a chat template."""
    get_model_context: Callable[[], int | None]
    """Function that returns the model's longest sequence, tokens, or None if config.json does not state it."""
    has_gpu: Callable[[], bool]
    """Function that returns True if this process trains on a GPU."""
    supports_bfloat16: Callable[[], bool]
    """Function that returns True if that GPU computes in bfloat16."""
    trains_adapters: bool
    """True if LoRA adapters are trained in place of the weights."""
    rows_per_step: int
    """Rollouts or trajectories per optimizer step in this process, >= 1."""
    steps: int
    """Steps of the run, >= 1."""
    shares_gpu: bool
    """True if vLLM samples on the GPU on which this process trains."""
    samples_during_update: bool
    """True if rollouts run during the update."""


@dataclass(frozen=True, slots=True)
class PretrainedDefault:
    """Marker in the annotation of a field: its default for any model but the bundled policy."""

    description: str
    """The default as `--help` shows it."""
    compute: Callable[[ModelDefaultsContext], Scalar | None]
    """Function that returns the default. None means the default of the class."""
    depends_on_sizes: bool = False
    """True if the default depends on `rows_per_step` or `steps`, so it is computed after their own defaults."""

    @classmethod
    def constant(cls, value: Scalar) -> "PretrainedDefault":
        """Return a default that depends on no facts."""
        return cls(format_default(value), lambda facts: value)

    @classmethod
    def limit_context(cls, most: int) -> "PretrainedDefault":
        """Return a default that is the model's own context, at most `most` tokens."""
        told = f"{most}, or what config.json says where that is less"
        return cls(told, lambda facts: None if (own := facts.get_model_context()) is None else min(own, most))

    @classmethod
    def on_cpu(cls, value: Scalar) -> "PretrainedDefault":
        """Return a default for a machine without a GPU, where usual sizes would take long."""
        return cls(f"{format_default(value)} without a GPU", lambda facts: None if facts.has_gpu() else value)

    @classmethod
    def on_shared_gpu(cls, value: Scalar, *, unless_async: bool = False) -> "PretrainedDefault":
        """Return a default for training on the GPU where vLLM samples. Otherwise vLLM leaves the trainer no memory.

        With `unless_async`, it does not apply if rollouts run during the update.
        """
        told = f"{format_default(value)} in `train` on the GPU that vLLM samples on"
        told += ", without trainer.max_staleness_steps" if unless_async else ""
        return cls(
            told,
            lambda facts: value if facts.shares_gpu and not (unless_async and facts.samples_during_update) else None,
        )

    @classmethod
    def largest_divisor(cls, most: int, most_on_cpu: int) -> "PretrainedDefault":
        """Return a default that is the largest divisor of a step's rows up to a bound."""

        def compute(facts: ModelDefaultsContext) -> int:
            bound = most if facts.has_gpu() else most_on_cpu
            return max(n for n in range(1, bound + 1) if facts.rows_per_step % n == 0)

        return cls(f"the largest divisor up to {most}, without a GPU up to {most_on_cpu}", compute, True)

    @classmethod
    def eighth_of_run(cls, most: int) -> "PretrainedDefault":
        """Return a default that is an eighth of the run's steps, rounded down, at most `most`.

        The learning rate is 0 in the first step of a warm-up, so a run of fewer than 8 steps has no warm-up.
        """
        return cls(f"an eighth of the steps, at most {most}", lambda facts: min(most, facts.steps // 8), True)


PROMPT = PretrainedDefault(
    "chat where its tokenizer has a chat template, else base",
    lambda facts: "chat" if facts.has_chat_template() else "base",
)
"""Default of the prompt template."""
DTYPE = PretrainedDefault(
    "bfloat16 on a GPU that computes in it",
    lambda facts: "bfloat16" if facts.has_gpu() and facts.supports_bfloat16() else None,
)
"""Default of the number format of updates."""
CONTEXT = PretrainedDefault.limit_context(8192)
"""Default of the longest sequence. docs/pretrained.md gives its source."""


def get_pretrained_default(hint: object) -> PretrainedDefault | None:
    """Return the default in an annotation. None means that the default of the class is that of every model."""
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, PretrainedDefault)), None)


def get_model_dependent_fields(kind: type, prefix: str = "") -> Mapping[str, PretrainedDefault]:
    """Return the settings of a dataclass whose defaults depend on the model, by dotted name."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, PretrainedDefault] = {}
    assert is_dataclass(kind)
    for one in fields(kind):
        hint = hints[one.name]
        if (default := get_pretrained_default(hint)) is not None:
            found[prefix + one.name] = default
        elif isinstance(hint, type) and is_dataclass(hint):
            found |= get_model_dependent_fields(hint, f"{prefix}{one.name}.")
        # Options of a component are in a table of its name, next to the setting that selects it.
        for registry in [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Registry)]:
            for name, options in registry.get_entries_with_options().items():
                found |= get_model_dependent_fields(options, f"{prefix}{name}.")
    return found


def format_default(value: object) -> str:
    """Format a default as people write it: 5e-4, not 0.0005."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return str(value)
