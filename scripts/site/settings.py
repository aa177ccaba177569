"""Pages about every setting of every command, from what `--help-all` is made of."""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from html import escape
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from tyro.conf import Positional

from repl_rl.cli import VERBS
from repl_rl.settings.argument_parser import build_flags_class, get_typed_fields

FOLDER = "reference/settings"
ACTIONS = {
    "rollout": "RolloutCommandConfig",
    "sandbox check": "SandboxCheckConfig",
    "sandbox build": "ImageBuildConfig",
    "sampler check": "SamplerCheckConfig",
    "kernel install": "InstallConfig",
    "workers status": "WorkersStatusConfig",
    "runs": "RunsConfig",
    "runs compare": "CompareConfig",
    "bench sandbox": "SandboxBenchConfig",
    "bench update": "UpdateBenchConfig",
    "bench rollout": "RolloutBenchConfig",
    "bench credit": "CreditBenchConfig",
    "bench faults": "FaultsBenchConfig",
    "bench fleet": "FleetBenchConfig",
    "bench serve": "ServeBenchConfig",
}
"""Of verbs that do several things: each of them, and the name of its settings in the verb's module."""

(_ALONE,) = get_args(Positional[str])[1:]
"""In the annotation of an option whose value alone is typed."""


def import_settings_module(verb: str) -> ModuleType:
    """Import the module that holds a verb's settings. Those of benchmarks are outside the package."""
    return importlib.import_module("benchmarks.cli" if verb == "bench" else f"repl_rl.cli.{verb}")


def commands() -> dict[str, type]:
    """The settings of each command, by what is typed after `repl-rl`."""
    found: dict[str, type] = {}
    for verb in VERBS:
        module = import_settings_module(verb)
        kinds = {name.lower(): kind for name, kind in vars(module).items() if isinstance(kind, type)}
        named = {action: name for action, name in ACTIONS.items() if action.split()[0] == verb}
        found |= {action: kinds[name.lower()] for action, name in (named or {verb: f"{verb}Config"}).items()}
    return found


@dataclass(frozen=True, slots=True)
class Setting:
    """One option, as the help tells it."""

    word: str
    """As it is typed: `--table.name`, or `NAME` where the value alone is given."""
    values: str
    """What may be given after it; of a switch, which nothing follows, that it is one."""
    default: str | None
    """As it would be typed; None: it must be given."""
    about: str
    """What it does, with its bound."""


def settings(kind: type) -> dict[str, list[Setting]]:
    """The settings of a dataclass, table by table; those of none are in the table ""."""
    found: dict[str, list[Setting]] = {}
    for table, setting in _walked(build_flags_class(kind), ""):
        found.setdefault(table, []).append(setting)
    return found


def _walked(mirror: type, table: str) -> Iterator[tuple[str, Setting]]:
    hints = get_typed_fields(mirror)
    for one in fields(mirror):
        hint, name = hints[one.name], one.name.replace("_", "-")
        dotted = f"{table}.{name}" if table else name
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _walked(hint, dotted)
        else:
            extras = get_args(hint)[1:]
            about = next((str(extra.help) for extra in extras if getattr(extra, "help", None)), "")
            word = one.name.upper() if _ALONE in extras else f"--{dotted}"
            yield table, Setting(word, _values(hint), _default(one), about)


def _default(one: "Field[object]") -> str | None:
    value = one.default if one.default_factory is MISSING else one.default_factory()
    return None if value is MISSING else _word(value)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return " ".join(map(_word, value)) or "none"
    return '""' if value == "" else str(value)


def _values(hint: object) -> str:
    """What a flag of that annotation takes, in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        told = next((extra.metavar for extra in inner[1:] if getattr(extra, "metavar", None)), None)
        return str(told) if told else _values(inner[0])
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " or ".join(_values(part) for part in inner)
    if origin is tuple:
        return " ".join(f"{_values(part)}" if part is not ... else "..." for part in inner)
    if hint is NoneType:
        return "None"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(str(each.value) for each in hint)
    names = {bool: "switch", str: "text", int: "whole number", float: "number"}
    return names[hint] if hint in names else getattr(hint, "__name__", str(hint)).lower()


def pages() -> Mapping[str, str]:
    """A page for each verb that has settings, and one that lists them."""
    found: dict[str, list[str]] = {}
    for command, kind in commands().items():
        found.setdefault(command.split()[0], []).append(_section(command, kind))
    rows = [f"| [`repl-rl {verb}`]({verb}.md) | {VERBS[verb]} |" for verb in found]
    told = "Every setting, as `repl-rl VERB --help-all` tells it. A setting is an option, or a key of a TOML file: "
    told += "`--trainer.steps 3` is `steps = 3` in the table `[trainer]`."
    index = ["# Settings", "", told, "", "| command | |", "|---|---|", *rows, ""]
    return {
        f"{FOLDER}/index.md": "\n".join(index),
        **{f"{FOLDER}/{verb}.md": "\n\n".join([f"# repl-rl {verb}", *parts]) + "\n" for verb, parts in found.items()},
    }


def _section(command: str, kind: type) -> str:
    action = command.partition(" ")[2]
    head = [f"## repl-rl {command}"] if action else []
    parts = [*head, inspect.getdoc(kind) or ""]
    for table, told in settings(kind).items():
        if table:
            parts.append(f"{'###' if action else '##'} {table}")
        prefix = f"{action}-" if action else ""
        parts.append("\n".join(['<dl class="settings">', *(_entry(prefix, each) for each in told), "</dl>"]))
    return "\n\n".join(parts)


def _entry(prefix: str, setting: Setting) -> str:
    anchor = prefix + setting.word.removeprefix("--").lower()
    default = "must be given" if setting.default is None else f"default <code>{escape(setting.default)}</code>"
    return (
        f'<dt id="{anchor}"><code>{setting.word}</code> <var>{escape(setting.values)}</var> <small>{default}</small>'
        f'<a class="headerlink" href="#{anchor}" title="Permanent link">&para;</a></dt>\n'
        f"<dd>{escape(setting.about)}</dd>"
    )
