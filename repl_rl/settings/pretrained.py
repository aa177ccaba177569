"""Defaults that follow the model: next to a field's default, which is the bundled policy's, that of any other model.

max_lines: Annotated[int, AtLeast(1), Pretrained.of(32)] = 8
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, get_args, get_origin, get_type_hints

from repl_rl.settings.scalars import Scalar


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that a default may depend on. Slow ones are functions, called when they are needed."""

    chat_template: Callable[[], bool]
    """Returns True where the model's tokenizer has a chat template."""
    own_context_tokens: Callable[[], int | None]
    """Longest sequence that the model takes, tokens; None: its config.json does not say."""
    gpu: Callable[[], bool]
    """Returns True where this process trains on a GPU."""
    bfloat16: Callable[[], bool]
    """Returns True where that GPU computes in bfloat16."""
    adapters: bool
    """Low-rank adapters are trained in place of the weights."""
    rows: int
    """Rollouts or trajectories of an optimizer step in this process, >= 1."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """In the annotation of a field: its default where the model is not the bundled policy."""

    told: str
    """The default, as `--help` says it."""
    value: Callable[[Facts], Scalar | None]
    """The default; None: that of the class."""

    @classmethod
    def of(cls, value: Scalar) -> "Pretrained":
        """A default that depends on nothing else."""
        return cls(format_default(value), lambda facts: value)

    @classmethod
    def context(cls, most: int) -> "Pretrained":
        """The model's own context, and at most `most` tokens."""
        told = f"{most}, or what config.json says where that is less"
        return cls(told, lambda facts: None if (own := facts.own_context_tokens()) is None else min(own, most))

    @classmethod
    def part(cls, most: int) -> "Pretrained":
        """The largest divisor of a step's rows that is at most `most`."""
        told = f"the largest divisor up to {most}"
        return cls(told, lambda facts: max(n for n in range(1, most + 1) if facts.rows % n == 0))


PROMPT = Pretrained(
    "chat where its tokenizer has a chat template, else base", lambda facts: "chat" if facts.chat_template() else "base"
)
"""Default of a prompt template."""
DTYPE = Pretrained(
    "bfloat16 on a GPU that computes in it", lambda facts: "bfloat16" if facts.gpu() and facts.bfloat16() else None
)
"""Default of the number format of an update."""
CONTEXT = Pretrained.context(8192)
"""Default of the longest sequence. docs/pretrained.md says where it comes from."""


def pretrained_of(hint: object) -> Pretrained | None:
    """The default in an annotation; None: there is none, so the default of the class is that of every model."""
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Pretrained)), None)


def following(kind: type, prefix: str = "") -> Mapping[str, Pretrained]:
    """The settings of a dataclass whose defaults follow the model, by their dotted names."""
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
    """A default as people write it: 5e-4, not 0.0005."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return str(value)
