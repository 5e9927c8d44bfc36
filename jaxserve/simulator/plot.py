"""The pareto plot as an SVG file: tokens per second and device over tokens per second and user. No jax."""

from __future__ import annotations

import html
from collections.abc import Sequence

from jaxserve.simulator.planner import Outcome, pareto

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 460, 80, 40, 20, 50


def pareto_svg(outcomes: Sequence[Outcome], title: str) -> str:
    """Every candidate a point (its name appears when it is pointed at), the best of them joined by a line."""
    known = [outcome for outcome in outcomes if outcome.result is not None]
    if not known:
        raise ValueError("plot: no candidate could be simulated")
    high_x = 1.05 * max(outcome.rate_per_user for outcome in known) or 1.0
    high_y = 1.05 * max(outcome.rate_per_device for outcome in known) or 1.0
    plot_width, plot_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / high_x * plot_width, _TOP + plot_height * (1 - y / high_y)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{html.escape(title)}</text>',
        f'<text x="{_LEFT + plot_width / 2}" y="{_HEIGHT - 10}" text-anchor="middle">output tok/s per user</text>',
        f'<text transform="translate(16 {_TOP + plot_height / 2}) rotate(-90)" text-anchor="middle">'
        "output tok/s per device</text>",
    ]
    for k in range(6):
        x, y = place(high_x * k / 5, high_y * k / 5)
        lines.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + plot_height}" stroke="#ddd"/>')
        lines.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + plot_width}" y2="{y:.1f}" stroke="#ddd"/>')
        bottom = _TOP + plot_height + 18
        lines.append(f'<text x="{x:.1f}" y="{bottom}" text-anchor="middle">{high_x * k / 5:.0f}</text>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{high_y * k / 5:.0f}</text>')
    front = [place(outcome.rate_per_user, outcome.rate_per_device) for outcome in pareto(known)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in front)
    lines.append(f'<polyline points="{path}" fill="none" stroke="#0a6" stroke-width="2"/>')
    for outcome in known:
        x, y = place(outcome.rate_per_user, outcome.rate_per_device)
        name = html.escape(outcome.candidate.label)
        lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#046"><title>{name}</title></circle>')
    return "\n".join([*lines, "</svg>", ""])
