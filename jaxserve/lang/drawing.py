"""A graph as an SVG picture: branches side by side, time downwards. No jax.

A full line is what comes next in a branch, a dashed one a value. Nodes at one height can run at the same time.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.lang.graph import Graph, Node

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 26, 26, 16, 12
_CHARACTERS = 27
_COLORS = {
    "text": "#f4f4f2", "role": "#f4f4f2", "end role": "#f4f4f2", "gen": "#d7e8f7", "select": "#dcefd9",
    "call": "#f7e6d0", "argument": "#efe3f5", "insert": "#fbfbfa", "fork": "#e4e4e0", "join": "#e4e4e0",
}  # fmt: skip


def draw(graph: Graph) -> str:
    """The picture's text."""
    nodes = graph.nodes()
    columns = _columns(nodes)
    rows = _rows(nodes)
    width = 2 * _MARGIN + (max(columns.values(), default=0) + 1) * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + 22 + (max(rows, default=0) + 1) * (_HEIGHT + _GAP_Y)

    def place(node: Node) -> tuple[int, int]:
        return (
            _MARGIN + columns[node.branch] * (_WIDTH + _GAP_X),
            _MARGIN + 22 + rows[node.number] * (_HEIGHT + _GAP_Y),
        )

    title = f"{graph.name}({', '.join(graph.parameters)})"
    if graph.stopped is not None:
        title += f" … open: {graph.stopped}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<text x="{_MARGIN}" y="{_MARGIN + 8}" font-weight="bold">{html.escape(title)}</text>',
    ]
    for source, target, is_value in _edges(nodes):
        lines.append(_edge(place(nodes[source]), place(nodes[target]), is_value=is_value))
    for node in nodes:
        lines.append(_box(node, *place(node)))
    return "\n".join([*lines, "</svg>"])


def _columns(nodes: list[Node]) -> dict[int, int]:
    """Branches in the order in which they appear."""
    columns: dict[int, int] = {0: 0}
    for node in nodes:
        columns.setdefault(node.branch, len(columns))
    return columns


def _edges(nodes: list[Node]) -> list[tuple[int, int, bool]]:
    """(from, to, whether it carries a value)."""
    edges: list[tuple[int, int, bool]] = []
    last: dict[int, int] = {}
    opened_by: dict[int, int] = {}
    for node in nodes:
        if node.kind not in ("call", "argument"):
            before = last.get(node.branch, opened_by.get(node.branch))
            if before is not None:
                edges.append((before, node.number, False))
            last[node.branch] = node.number
        edges += [(number, node.number, True) for number in node.inputs]
        if node.kind == "fork":
            opened_by.update(dict.fromkeys(node.branches, node.number))
        elif node.kind == "join":
            edges += [(last[branch], node.number, False) for branch in node.branches if branch in last]
    return edges


def _rows(nodes: list[Node]) -> list[int]:
    """The earliest height at which everything that a node needs is above it."""
    rows = [0] * len(nodes)
    for source, target, _ in _edges(nodes):
        rows[target] = max(rows[target], rows[source] + 1)
    return rows


def _edge(start: tuple[int, int], end: tuple[int, int], *, is_value: bool) -> str:
    x1, y1 = start[0] + _WIDTH // 2, start[1] + _HEIGHT
    x2, y2 = end[0] + _WIDTH // 2, end[1]
    middle = (y1 + y2) // 2
    style = 'stroke="#999" stroke-dasharray="3 3"' if is_value else 'stroke="#555"'
    return f'<path d="M{x1} {y1}C{x1} {middle} {x2} {middle} {x2} {y2}" fill="none" {style}/>'


def _box(node: Node, x: int, y: int) -> str:
    text = f"{node.kind} {node.label}".strip()
    shown = text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"
    color = _COLORS.get(node.kind, "#fff")
    return (
        f"<g><title>{html.escape(f'%{node.number} {text}')}</title>"
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{color}" stroke="#888"/>'
        f'<text x="{x + 8}" y="{y + 17}" fill="#222">{html.escape(shown)}</text></g>'
    )
