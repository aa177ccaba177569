"""Try each chat template that TRL ships: a table in benchmarks/results/templates.md, counts in docs/templates.md.

    python -m benchmarks.models.templates

No model is needed: a tokenizer of single bytes gets the control tokens that stand in the template.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from benchmarks.generated_blocks import RESULTS, ROOT, Block
from repl_rl.errors import ConfigError
from repl_rl.rollout.chat_template import Message
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.samplers.chat_format import ChatFormat, make_tool_call_message
from repl_rl.samplers.tool_call_parsing import detect_call_parser

PAGE = Block(RESULTS / "templates.md", "models/templates")
SUMMARY = Block(ROOT / "docs" / "templates.md", "models/templates")
SHIPPED = files("trl") / "chat_templates"
CONTROL = re.compile(
    r"<[|｜][^<>{}\s]+?[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_\w+>|</?s>|<eos>|\[/?INST\]|</?think>|</?tool_call>"
)
"""What stands in these templates for one token."""
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|return|>", "<|call|>", "<|eot|>", "<end_of_turn>", "<turn|>",
    "<|tool_response>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|end|>", "<|user|>",
    "<|observation|>", "</s>",
)  # fmt: skip
"""What the models of these templates end their turns with: those that a template writes are its end tokens."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One of them.
        b: The other.
    """
    return a + b


SCHEMA = get_json_schema(add)
CALL = make_tool_call_message([("add", {"a": 40, "b": 2})])
QUESTION: Message = {"role": "user", "content": "How many?"}
REPLY: Message = {"role": "user", "content": "And now?"}
RESULT: Message = {"role": "tool", "content": "42"}


def names() -> list[str]:
    """The templates that models have; those that TRL trains with in their place are left out."""
    found = (file.name.removesuffix(".jinja") for file in SHIPPED.iterdir() if file.name.endswith(".jinja"))
    return sorted(name for name in found if not name.endswith("_training"))


def renderer_of(name: str) -> Renderer:
    """A renderer with the template of that name, and with all the end tokens that it writes."""
    text = (SHIPPED / f"{name}.jinja").read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    controls = sorted(set(CONTROL.findall(text)))
    ends = [end for end in ENDS if end in controls]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token=ends[0], name_or_path=name)
    fast.add_special_tokens({"additional_special_tokens": controls})
    fast.chat_template = text
    return Renderer(fast, ends=fast.convert_tokens_to_ids(ends))


@dataclass(frozen=True, slots=True)
class Row:
    """What can be done with one template."""

    name: str
    feedback: bool
    """A user message can be spliced in after a turn."""
    tools: bool
    """The template writes the tools that are offered."""
    parsed: bool
    """The calls that it writes are read back from a turn."""
    origin: str
    """Who says how."""
    kept: bool
    """Written again as a whole, the conversation begins as it was sampled; False: the template alters earlier turns."""
    arguments: tuple[str, ...]
    """Names that `--chat-template-kwargs.KEY` accepts."""


def row(name: str) -> Row:
    """Try one template."""
    renderer = renderer_of(name)
    chat = ChatFormat(renderer)
    feedback, kept = _spliced(chat, REPLY, {"role": "assistant", "content": "I look."}, ())
    try:
        offering = ChatFormat(renderer, [SCHEMA])
    except ConfigError:
        return Row(name, feedback, False, False, "", kept, tuple(sorted(renderer.chat_template.variable_names)))
    try:
        origin = detect_call_parser(offering).source
    except ConfigError:
        origin = ""
    answered, kept_too = _spliced(offering, RESULT, CALL, ("add",)) if origin else (False, True)
    read = bool(origin) and answered
    return Row(
        name, feedback, True, read, origin, kept and kept_too, tuple(sorted(renderer.chat_template.variable_names))
    )


def _spliced(chat: ChatFormat, reply: Message, turn: Message, called: tuple[str, ...]) -> tuple[bool, bool]:
    """Whether `reply` can be spliced in after `turn`, and whether the template then writes what it wrote before."""
    try:
        glue = chat.encode_reply([reply], 100, called).text
    except ConfigError:
        return False, False
    named = {**reply, "name": "add", "tool_call_id": "call00000"} if called else reply
    whole = chat.render([QUESTION, turn, named], True)
    before = (chat.build_prompt([QUESTION]).text, chat.render([QUESTION, turn], False).rstrip("\n"))
    return True, all(map(whole.startswith, before)) and whole.endswith(glue)


def table(rows: Sequence[Row]) -> str:
    """Return the block of the results."""
    lines = [
        "| template | feedback turns | tools written | parsed back | by | prefix kept | `--chat-template-kwargs.` |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        flags = [_yes(each.feedback), _yes(each.tools), _yes(each.parsed) if each.tools else "-", each.origin or "-"]
        keys = ", ".join(f"`{key}`" for key in each.arguments) or "-"
        lines.append(f"| {' | '.join([each.name, *flags, 'yes' if each.kept else 'here only', keys])} |")
    counts = _count(rows)
    lines.append(f"| **{len(rows)}** | **{counts[0]}** | **{counts[1]}** | **{counts[2]}** | | **{counts[3]}** | |")
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """Return the block of the documentation: one count per column of the table."""
    feedback, tools, parsed, kept = _count(rows)
    return (
        f"Of {len(rows)} templates, {feedback} accept feedback turns and {tools} write tools. repl_rl parses the calls "
        f"of {parsed}.\nIn {kept}, a longer conversation keeps the earlier text.\n"
    )


def _count(rows: Sequence[Row]) -> list[int]:
    return [sum(flag) for flag in zip(*((r.feedback, r.tools, r.parsed, r.kept) for r in rows), strict=True)]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


if __name__ == "__main__":
    tried = [row(name) for name in names()]
    PAGE.write(table(tried))
    SUMMARY.write(summary(tried))
