"""A histogram as SVG for a page."""

from collections.abc import Sequence

from kit.tools.report.axes import short, ticks
from kit.tools.report.page import escaped

WIDTH, HEIGHT = 480, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 22, 40  # margins


def histogram_svg(counts: Sequence[int], edges: Sequence[float], title: str, limit: tuple[str, float]) -> str:
    """Draw how many values lie in each bin.

    Args:
        counts: [N].
        edges: [N + 1], the bounds of the bins; the first is 0.
        title: of the axis of the values.
        limit: a text, and the value at which a vertical line is drawn if it is not beyond the last edge.
    """
    width, height, end = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM, edges[-1]
    top = max(*counts, 1)

    def x(value: float) -> float:
        return round(LEFT + width * value / end, 1)

    def y(count: float) -> float:
        return round(TOP + height * (1 - count / top), 1)

    parts = []
    for tick in ticks(0, top):
        parts.append(f"<path class=grid d='M{LEFT} {y(tick)}h{width}'/>")
        parts.append(f"<text x={LEFT - 5} y={y(tick) + 4} text-anchor=end>{short(tick)}</text>")
    for tick in ticks(0, end, 6):
        parts.append(f"<path class=tick d='M{x(tick)} {HEIGHT - BOTTOM}v4'/>")
        parts.append(f"<text x={x(tick)} y={HEIGHT - BOTTOM + 15} text-anchor=middle>{short(tick)}</text>")
    for i, count in enumerate(counts):
        at, size = x(edges[i]), round(x(edges[i + 1]) - x(edges[i]), 1)
        parts.append(
            f"<path class=bar d='M{at} {HEIGHT - BOTTOM}V{y(count)}h{size}V{HEIGHT - BOTTOM}'/>" if count else ""
        )
    text, value = limit
    if value <= end:
        parts.append(f"<path class=mark d='M{x(value)} {TOP}v{height}'/>")
        anchor = "end" if x(value) > LEFT + width / 2 else "start"
        parts.append(f"<text x={x(value)} y={TOP - 8} text-anchor={anchor}>{escaped(text)}</text>")  # above all bars
    parts.append(f"<text x={LEFT + width / 2} y={HEIGHT - 6} text-anchor=middle>{escaped(title)}</text>")
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role=img aria-label='{escaped(title)}'>{''.join(parts)}</svg>"
