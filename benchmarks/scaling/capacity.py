"""Carry the formulas of docs/scaling.md to a large fleet on paper, with the published figures, into that page.

    python -m benchmarks.scaling.capacity

Nothing is measured here: what a line and a rollout cost comes from the figures beside the pages, the fleet is assumed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.generated_blocks import ROOT, Block

PAGE = Block(ROOT / "docs" / "scaling.md", "scaling/capacity")
_MIB = 1 << 20
_LINES_OF_A_ROLLOUT = 10
"""Of `rollouts_per_s` in benchmarks/results/sandbox.json."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is assumed."""

    machines: int = 48
    """N, those that play: of 64 the others train."""
    gpus: int = 8
    """Of a machine."""
    cores: int = 96
    """n, of a machine."""
    tokens_per_s: float = 3000.0
    """r"""
    tokens: float = 14.0
    """l"""
    lines: float = 16.0
    """L"""
    consoles: int = 100_000
    """S"""


@dataclass(frozen=True)
class Costs:
    """What was measured, in seconds of CPU, but for `memory`."""

    host: float
    """h"""
    console: float
    """c; what the host's side of it takes is in h too"""
    birth: float
    """b"""
    owner: float
    """d"""
    memory: float
    """Of a console, bytes."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Something that can be exhausted."""

    what: str
    needed: float
    there: float
    unit: str

    @property
    def share(self) -> float:
        """Of what is there; above 1 it is what bounds the fleet, and not its GPUs."""
        return self.needed / self.there


def published() -> Costs:
    """The costs that stand beside the pages."""
    fleet, rollouts, sandbox = (
        json.loads((ROOT / name).read_text())
        for name in (
            "benchmarks/results/scaling.json",
            "benchmarks/results/rollouts.json",
            "benchmarks/results/sandbox.json",
        )
    )
    console = sandbox["cpus"] / sandbox["lines_16_per_s"]["ours"]
    return Costs(
        host=rollouts["medium"]["profile"]["host_ms"] / 1000,
        console=console,
        birth=sandbox["cpus"] / sandbox["rollouts_per_s"]["ours"] - _LINES_OF_A_ROLLOUT * console,
        owner=max(fleet["fleets"], key=lambda row: row["nodes"])["owner_cpu_ms_a_rollout"] / 1000,
        memory=sandbox["memory_mib"]["ours"] * _MIB,
    )


def lines_per_s(fleet: Fleet) -> float:
    """What its GPUs write."""
    return fleet.machines * fleet.gpus * fleet.tokens_per_s / fleet.tokens


def ceilings(fleet: Fleet, costs: Costs) -> Sequence[Ceiling]:
    """What the GPUs' speed takes of everything else, what is scarcest first."""
    lines = lines_per_s(fleet)
    a_node, a_machine = lines / (fleet.machines * fleet.gpus), lines / fleet.machines
    computed = costs.host + costs.console + costs.birth / fleet.lines
    found = (
        Ceiling("the owner, one process", costs.owner * lines / fleet.lines, 1.0, "cores"),
        Ceiling("the event loop of a node", costs.host * a_node, 1.0, "cores"),
        Ceiling("cores of a machine, for lines that compute nothing", computed * a_machine, fleet.cores, "cores"),
    )
    return sorted(found, key=lambda one: -one.share)


def longest_line_s(fleet: Fleet, costs: Costs) -> float:
    """How long lines may compute, on the mean, until the cores of machines with GPUs are exhausted."""
    computed = costs.host + costs.console + costs.birth / fleet.lines
    return fleet.cores * fleet.machines / lines_per_s(fleet) - computed


def block(fleet: Fleet, costs: Costs) -> str:
    """The generated block of docs/scaling.md."""
    lines = lines_per_s(fleet)
    rollouts, each = lines / fleet.lines, fleet.consoles / fleet.machines
    ms = {name: 1000 * value for name, value in vars(costs).items()}
    told = [
        f"Assumed: {fleet.machines} machines that play, with {fleet.gpus} GPUs and {fleet.cores} cores each,",
        f"r = {fleet.tokens_per_s:,.0f}, l = {fleet.tokens:g}, L = {fleet.lines:g}, S = {fleet.consoles:,}. Measured:",
        f"h = {ms['host']:.2f} ms, c = {ms['console']:.2f} ms, b = {ms['birth']:.0f} ms, d = {ms['owner']:.2f} ms.",
        f"The GPUs write {lines:,.0f} lines a second, {rollouts:,.0f} rollouts; each console has a line every",
        f"{fleet.consoles / lines:.1f} s. For that they need:",
        "",
        "| of | needed | there | share |",
        "|---|---|---|---|",
        *(f"| {o.what} | {o.needed:.2f} {o.unit} | {o.there:g} | {o.share:.0%} |" for o in ceilings(fleet, costs)),
        "",
        f"Consoles take {each * costs.memory / 2**30:.0f} GiB of each machine's memory, and",
        f"{rollouts / fleet.machines:,.0f} are born there a second. Lines may compute for an average of",
        f"{1000 * longest_line_s(fleet, costs):.0f} ms until the cores of machines with GPUs are exhausted.",
    ]
    return "\n".join(told) + "\n"


def main() -> None:
    """Publish."""
    PAGE.write(block(Fleet(), published()))


if __name__ == "__main__":
    main()
