"""The draft tree of a round: as SVG, which `static/tree.js` zooms, and as a nested list for small screens and readers.

The root is at the left, since tokens are read in that direction. All text is escaped here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from mmspec.app.ui.rounds import CORRECTED, Round

GAP, ROW_HEIGHT, NODE_HEIGHT, TREE_MARGIN = 22, 34, 28, 10
"""Pixels: between two depths, between two leaves, of a node, around the tree."""
CHAR_WIDTH, NOTE_WIDTH, PADDING = 8, 34, 16
"""Pixels of a character, of the note beside it, and around both."""
MAX_LABEL_CHARS = 14
"""Characters of a token in its node; longer labels are cut, and complete in the list and the tooltip."""
BUTTONS = (
    '<div class="mm-zoom" role="group" aria-label="Zoom">'
    '<button type="button" data-zoom="1.25" aria-label="Zoom in">+</button>'
    '<button type="button" data-zoom="0.8" aria-label="Zoom out">&#8722;</button>'
    '<button type="button" data-zoom="0" aria-label="Fit the width">fit</button></div>'
)


@dataclass(frozen=True)
class TreeBox:
    """A node of the drawn tree: a draft token, the root, or, as the last, the token of the model.

    Attributes:
        label: text of the token.
        note: the draft probability, or who gave the token.
        kind: CSS class.
        parent: index; -1 for the root.
    """

    label: str
    note: str
    kind: str
    parent: int

    @property
    def short_label(self) -> str:
        """The label, cut."""
        return self.label if len(self.label) <= MAX_LABEL_CHARS else self.label[: MAX_LABEL_CHARS - 1] + "…"

    @property
    def width(self) -> int:
        """Pixels."""
        return PADDING + CHAR_WIDTH * max(2, len(self.short_label)) + (NOTE_WIDTH if self.note else 0)


def layout_tree(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """(depth, row) of each node: one row per leaf, a parent centred on its children.

    Args:
        parents: index of each node's parent, -1 for the root, parents before children.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    depths = [0] * len(parents)
    rows = [0.0] * len(parents)
    for node, parent in enumerate(parents):
        depths[node] = 0 if parent < 0 else depths[parent] + 1
    num_leaves, stack = 0, [0]
    while stack:  # depth first
        node = stack.pop()
        child_nodes = children.get(node, [])
        if not child_nodes:
            rows[node] = float(num_leaves)
            num_leaves += 1
        stack.extend(reversed(child_nodes))
    for node in reversed(range(len(parents))):  # children before their parents
        if child_nodes := children.get(node, []):
            rows[node] = (rows[child_nodes[0]] + rows[child_nodes[-1]]) / 2
    return depths, rows


def list_nodes(item: Round, token_labels: Mapping[int, str]) -> list[TreeBox]:
    """The nodes of a round, and the token of the model as the last.

    Args:
        item: the round.
        token_labels: {token id: label}.
    """
    accepted = set(item.accepted_nodes[1:])
    nodes = []
    for node, (token, parent) in enumerate(zip(item.tokens, item.parents, strict=True)):
        kind = "mm-root" if not node else "mm-node-accepted" if node in accepted else "mm-rejected"
        # No token was emitted before the first round: its root stands for the whole prompt.
        label = token_labels.get(token, str(token)) if node or item.start else "prompt"
        nodes.append(TreeBox(label, _format_probability(item, node), kind, parent))
    if item.emitted:
        kind = "mm-node-correction" if item.token_kinds[-1] == CORRECTED else "mm-node-bonus"
        parent = item.accepted_nodes[len(item.emitted) - 1]
        nodes.append(TreeBox(token_labels.get(item.emitted[-1], ""), "model", kind, parent))
    return nodes


def render_tree(item: Round, token_labels: Mapping[int, str]) -> str:
    """The draft tree: accepted path, rejected branches, draft probabilities, and the token of the model.

    Args:
        item: the round.
        token_labels: {token id: label}.
    """
    nodes = list_nodes(item, token_labels)
    title = f"Draft tree: {item.num_draft_tokens} draft tokens, {item.num_accepted_tokens} accepted"
    details = f"<details><summary>The tree as a list</summary>{_render_list(nodes)}</details>"
    return (
        f'<div class="mm-tree">{BUTTONS}<div class="mm-canvas" tabindex="0" role="group" aria-label="{title}">'
        f"{_render_svg(nodes, title)}</div>{details}</div>"
    )


def _render_svg(nodes: Sequence[TreeBox], title: str) -> str:
    depths, rows = layout_tree([node.parent for node in nodes])
    lefts = [TREE_MARGIN]
    for depth in range(max(depths) + 1):  # a column is as wide as its widest node
        widest = max(node.width for node, at in zip(nodes, depths, strict=True) if at == depth)
        lefts.append(lefts[-1] + widest + GAP)
    positions = [(lefts[depth], TREE_MARGIN + row * ROW_HEIGHT) for depth, row in zip(depths, rows, strict=True)]
    edges = [
        _render_edge(nodes[node.parent], positions[node.parent], position, node.kind)
        for node, position in zip(nodes, positions, strict=True)
        if node.parent >= 0
    ]
    boxes = [_render_node(node, position) for node, position in zip(nodes, positions, strict=True)]
    width, height = lefts[-1] - GAP + TREE_MARGIN, max(y for _, y in positions) + NODE_HEIGHT + TREE_MARGIN
    return (
        f'<svg role="img" aria-label="{title}" width="{width}" height="{height:.0f}" data-width="{width}" '
        f'viewBox="0 0 {width} {height:.0f}" xmlns="http://www.w3.org/2000/svg"><title>{title}</title>'
        f"{''.join(edges)}{''.join(boxes)}</svg>"
    )


def _render_edge(parent: TreeBox, start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    x1, y1, x2, y2 = start[0] + parent.width, start[1] + NODE_HEIGHT / 2, end[0], end[1] + NODE_HEIGHT / 2
    half = (x1 + x2) / 2
    curve = f"M{x1:.0f} {y1:.0f} C{half:.0f} {y1:.0f} {half:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
    return f'<path class="mm-edge {kind}" d="{curve}"/>'


def _render_node(node: TreeBox, position: tuple[float, float]) -> str:
    x, y = position
    note = f'<tspan class="mm-probability" dx="6">{escape(node.note)}</tspan>' if node.note else ""
    return (
        f'<g class="mm-node {node.kind}"><title>{escape(node.label)} {escape(node.note)}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{node.width}" height="{NODE_HEIGHT}" rx="6"/>'
        f'<text x="{x + PADDING / 2:.0f}" y="{y + 19:.0f}">{escape(node.short_label)}{note}</text></g>'
    )


def _render_list(nodes: Sequence[TreeBox]) -> str:
    """The same tree as nested lists."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(index)
    html = dict.fromkeys(range(len(nodes)), "")
    for index in reversed(range(len(nodes))):  # children before their parents
        inner = "".join(html[child] for child in children.get(index, ()))
        node = nodes[index]
        note = f" <small>{escape(node.note)}</small>" if node.note else ""
        text = f'<span class="{node.kind}">{escape(node.label)}</span>{note}'
        html[index] = f"<li>{text}{f'<ul>{inner}</ul>' if inner else ''}</li>"
    return f'<ul class="mm-outline">{html[0]}</ul>'


def _format_probability(item: Round, node: int) -> str:
    """Conditional draft probability of a node in percent; empty for the root or where the drafter gives none."""
    if not node or item.scores is None:
        return ""
    parent = item.scores[item.parents[node]]
    return f"{100 * min(1.0, item.scores[node] / parent):.0f}%" if parent > 0 else ""
