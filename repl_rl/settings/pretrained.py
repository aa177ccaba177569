"""Defaults that depend on the model: a field has the bundled policy's default, its annotation that of other models.

max_lines: Annotated[int, AtLeast(1), Pretrained.of(32)] = 8
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, get_args, get_origin, get_type_hints

from repl_rl.settings.scalars import Scalar


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a default may depend on. Slow ones are functions, called on demand."""

    chat_template: Callable[[], bool]
    """Function that returns True if the model's tokenizer has a chat template."""
    own_context_tokens: Callable[[], int | None]
    """Function that returns the model's longest sequence, tokens, or None if config.json does not state it."""
    gpu: Callable[[], bool]
    """Function that returns True if this process trains on a GPU."""
    bfloat16: Callable[[], bool]
    """Function that returns True if that GPU computes in bfloat16."""
    adapters: bool
    """True if LoRA adapters are trained in place of the weights."""
    rows: int
    """Rollouts or trajectories per optimizer step in this process, >= 1."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """Marker in the annotation of a field: its default for any model but the bundled policy."""

    told: str
    """The default as `--help` shows it."""
    value: Callable[[Facts], Scalar | None]
    """Function that returns the default. None means the default of the class."""

    @classmethod
    def of(cls, value: Scalar) -> "Pretrained":
        """Return a default that depends on no facts."""
        return cls(format_default(value), lambda facts: value)

    @classmethod
    def context(cls, most: int) -> "Pretrained":
        """Return a default that is the model's own context, at most `most` tokens."""
        told = f"{most}, or what config.json says where that is less"
        return cls(told, lambda facts: None if (own := facts.own_context_tokens()) is None else min(own, most))

    @classmethod
    def part(cls, most: int) -> "Pretrained":
        """Return a default that is the largest divisor of a step's rows up to `most`."""
        told = f"the largest divisor up to {most}"
        return cls(told, lambda facts: max(n for n in range(1, most + 1) if facts.rows % n == 0))


PROMPT = Pretrained(
    "chat where its tokenizer has a chat template, else base", lambda facts: "chat" if facts.chat_template() else "base"
)
"""Default of the prompt template."""
DTYPE = Pretrained(
    "bfloat16 on a GPU that computes in it", lambda facts: "bfloat16" if facts.gpu() and facts.bfloat16() else None
)
"""Default of the number format of updates."""
CONTEXT = Pretrained.context(8192)
"""Default of the longest sequence. docs/pretrained.md gives its source."""


def pretrained_of(hint: object) -> Pretrained | None:
    """Return the default in an annotation. None means that the default of the class is that of every model."""
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Pretrained)), None)


def following(kind: type, prefix: str = "") -> Mapping[str, Pretrained]:
    """Return the settings of a dataclass whose defaults depend on the model, by dotted name."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, Pretrained] = {}
    assert is_dataclass(kind)
    for one in fields(kind):
        hint = hints[one.name]
        if (default := pretrained_of(hint)) is not None:
            found[prefix + one.name] = default
        elif isinstance(hint, type) and is_dataclass(hint):
            found |= following(hint, f"{prefix}{one.name}.")
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
