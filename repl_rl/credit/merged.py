"""Credit from the tree that the rollouts of a group form where their lines coincide, without any branching.

A *node* is everything before a line. Rollouts that wrote the same lines, and saw the same observations, are at the same
node. A line that a rollout wrote there is a *draw*. All rollouts are at the root before their first line, since a group
shares one prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal

from repl_rl.credit.earnings import EPSILON, OUTCOME_DEVIATION, Advantages, GroupRewards, outcome_scores, to_go

PSEUDO_DRAWS = 3
"""Number of draws that the parent's baseline counts as, in the baseline of a node. Most nodes have one or two draws,
whose mean alone is noisier than the group's."""

By = Literal["ids", "states"]
"""Condition for two lines to share a node: equal ids before them, or equal console states."""

Form = Literal["baseline", "difference"]
"""Credit of a line: its value minus its node's baseline, or the group's number plus the change by the line."""


@dataclass(slots=True, eq=False)
class Node:
    """A node of the tree, from which lines of rollouts start."""

    parent: "Node | None" = None
    children: dict[str, "Node"] = field(default_factory=dict)
    """Child nodes by name."""
    draws: list["Node | float"] = field(default_factory=list)
    """Result of each draw: a node, or the outcome of the rollout that ended with it."""
    value: float = 0.0
    """Mean value or outcome over all draws."""
    baseline: float = 0.0
    """The value, shrunk towards the parent's baseline."""


def merged_prefixes(group: GroupRewards, *, by: By = "ids", form: Form = "baseline") -> Advantages:
    """Compute A(i, l) = (Q(i, l) - b(s)) / (std R + EPSILON) + S(i, l) / OUTCOME_DEVIATION for the node s of line l.

    Q(i, l) is the value of the node that the line led to, or the outcome of the rollout that ended with it. The value
    V(s) of a node is the mean of Q over its draws. Its baseline b(s) is (sum of Q over n draws + PSEUDO_DRAWS * b of
    its parent) / (n + PSEUDO_DRAWS). If n is 1, it is b of the parent. At the root, it is V, the mean of all outcomes.

    With form="difference", A(i, l) = A_outcome(i) + (Q(i, l) - V(s)) / (std R + EPSILON) + S(i, l) / OUTCOME_DEVIATION.
    This is the group's number plus the change that the line made where rollouts part. The root adds no change, because
    the group's number includes it already.

    With by="ids", lines share a node after equal ids, observations included. With by="states", they share it after
    equal console states in the same order. A line that left the state unchanged leads back to its own node.

    Without line rewards, both forms equal `outcome` bit for bit if rollouts share only the root and no line leads back
    to it. The same holds if nodes are not known. Rewards that lines were given are not part of a value: their sum from
    the line on is added unchanged. S is the bounded sum of shaping. A rollout without an outcome is at no node.

    Sources: TEMPO (arXiv 2509.18314) for the tree and for the difference, which it also applies at the root; RTMC
    (arXiv 2604.11037) for shrinking, with another prior.
    """
    scores_G = outcome_scores(group)
    names_G_L = group.states_G_L if by == "states" else group.prefixes_G_L
    outcomes = {i: r for i, r in enumerate(group.outcomes_G) if r is not None}
    changed: Mapping[int, Sequence[float]] = {}
    # Equal outcomes have no deviation to divide by, and no differences to credit.
    if names_G_L and len(set(outcomes.values())) > 1:
        scale = stdev(outcomes.values()) + EPSILON
        changed = {i: [c / scale for c in row] for i, row in _changes(outcomes, names_G_L, form).items()}
    credited = []
    for i, (score, shaped_L, given_L) in enumerate(zip(scores_G, group.shaping_to_go(), group.given_G_L, strict=True)):
        parts = zip(changed.get(i, [0.0] * len(given_L)), shaped_L, to_go(given_L, 1.0), strict=True)
        credited.append(tuple(score + c + s / OUTCOME_DEVIATION + g for c, s, g in parts))
    return tuple(credited)


def _changes(outcomes: Mapping[int, float], names_G_L: Sequence[Sequence[str]], form: Form) -> dict[int, list[float]]:
    """Return the tree's addition to R(i) - mean R for each line of the graded rollouts, reward units.

    It is a difference of differences, so that it is exactly 0 where the tree adds no information.
    """
    nodes, paths = _planted(outcomes, names_G_L)
    root = nodes[0]
    found: dict[int, list[float]] = {}
    for i, path in paths.items():
        # A line leads to the node of the next line, and the last one to the outcome.
        ends = [led_to.value for led_to in path[1:]] + [outcomes[i]] * bool(path)
        if form == "difference":
            found[i] = [q - s.value if s is not root else 0.0 for s, q in zip(path, ends, strict=True)]
        else:
            found[i] = [(q - outcomes[i]) - (s.baseline - root.baseline) for s, q in zip(path, ends, strict=True)]
    return found


def _planted(
    outcomes: Mapping[int, float], names_G_L: Sequence[Sequence[str]]
) -> tuple[list[Node], dict[int, list[Node]]]:
    """Return the nodes, parents first, with values and baselines; and the node of each line of the graded rollouts."""
    root = Node()
    nodes, paths = [root], dict[int, list[Node]]()
    for i, outcome in outcomes.items():
        here, names_L = root, names_G_L[i]
        paths[i] = [root] if names_L else []
        for before, name in pairwise(names_L):
            # Equal names in a row mean that the line left the state unchanged.
            if name != before:
                if name not in here.children:
                    here.children[name] = Node(here)
                    nodes.append(here.children[name])
                here.draws.append(here.children[name])
                here = here.children[name]
            paths[i].append(here)
        here.draws.append(outcome)
    for node in reversed(nodes):
        # Each draw counts once, however often others followed it. A mean over the leaves below would not do that.
        node.value = fmean(led_to.value if isinstance(led_to, Node) else led_to for led_to in node.draws)
    # Parents come first, so that each parent has its baseline.
    for node in nodes:
        _shrink(node)
    return nodes, paths


def _shrink(node: Node) -> None:
    """Set the baseline of a node. The parent's baseline is known."""
    if node.parent is None:
        node.baseline = node.value
    elif len(node.draws) == 1:
        node.baseline = node.parent.baseline
    else:
        count = len(node.draws)
        node.baseline = (count * node.value + PSEUDO_DRAWS * node.parent.baseline) / (count + PSEUDO_DRAWS)
