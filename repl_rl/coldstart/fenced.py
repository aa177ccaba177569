"""Demonstration plans for `FencedCodeSampler`: fenced blocks of code, then a boxed answer. Nothing is executed here."""

import random
from collections.abc import Sequence

from repl_rl.coldstart.demonstrations import ECHO, Mix, Plan, altered, guessed, missing_attribute, wrong_formula
from repl_rl.tasks import Sketch


def fenced_plan(drawn: Sketch, mix: Mix, rng: random.Random) -> Plan:
    """Draw one demonstration of `drawn`."""
    kind = rng.random()
    if kind < mix.guess:
        return _answered((), guessed(drawn))
    if kind < mix.guess + mix.mistake:
        return _mistake(drawn, rng)
    good = _good(drawn, drawn.expression)
    if kind < mix.guess + mix.mistake + mix.surprise:
        return _answered([altered(block, rng) for block in good], ECHO, given=len(good))
    return _answered(good, ECHO)


def _answered(blocks: Sequence[str], answer: str, given: int = 0) -> Plan:
    text = answer.removeprefix("'").removesuffix("'")
    return Plan((*blocks, f"\\boxed{{{text}}}"), end_token=True, given=given)


def _block(*lines: str) -> str:
    """Return a block of code up to its closing fence; later text comes from the sampler."""
    code = "\n".join(lines)
    return f"```python\n{code}\n```"


def _good(drawn: Sketch, expression: str) -> tuple[str, ...]:
    """Return one block, or two if the next block depends on the value of a name."""
    if drawn.setup and drawn.setup[-1].isidentifier():
        *setup, name = drawn.setup
        return _block(*setup, f"print({name})"), _block(f"print({expression})")
    # Only the console needs the empty line that closes a block of code.
    return (_block(*(line for line in drawn.setup if line), f"print({expression})"),)


def _mistake(drawn: Sketch, rng: random.Random) -> Plan:
    """Draw a plan with a mistake: a block that fails or prints nothing, or an answer that ignores the output."""
    good, wrong = _good(drawn, drawn.expression), wrong_formula(drawn)
    kind = rng.random()
    if kind < 0.05:
        return _answered(good, guessed(drawn))
    if kind < 0.10 and wrong is not None:
        return _answered(_good(drawn, wrong), ECHO)
    attribute = missing_attribute(drawn, rng)
    undefined = f"print({drawn.expression})" if drawn.setup else "print(result)"
    # An undefined name, a syntax error, a value that is not printed, and a missing attribute.
    failing = [_block(undefined), _block(f"print({drawn.expression}))"), _block(*drawn.setup, drawn.expression)]
    failing += [_block(f"print({attribute})")] if attribute else []
    return _after(rng.choice(failing), good, drawn, rng)


def _after(failed: str, good: Sequence[str], drawn: Sketch, rng: random.Random) -> Plan:
    """Draw what follows a block that showed no value: recovery, a guess, the same block again, or giving up."""
    choice = rng.random()
    if choice < 0.35:
        return _answered((failed, *good), ECHO)
    if choice < 0.80:
        return _answered((failed,), guessed(drawn))
    if choice < 0.92:
        return _answered((failed, failed), guessed(drawn))
    return Plan((failed,), end_token=True)
