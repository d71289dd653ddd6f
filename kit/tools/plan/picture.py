"""A picture of what 8 to 4,096 GPUs do to a sharded step, as one SVG file without scripts or other files.

Promises: the picture holds the numbers of the table of ``--scale``, and says with text what its colours mean.
"""

import math

from kit.tools.plan.search import ScaledStep

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 56, 76  # margins
ALL, GROUPS = ("#1f6fb2", "sharded over all GPUs"), ("#c2571a", "best group for hybrid sharding, its size below")


def picture(rows: list[ScaledStep], title: str) -> str:
    """Return the SVG: seconds of the collectives over those of the computation, by the number of GPUs.

    Both axes are logarithmic. Above 1 the computation waits for the collectives.
    """
    shares = [share for row in rows for share in (row.sent_share, row.group_sent_share)]
    low = 10.0 ** math.floor(math.log10(min(*shares, 0.5)))
    high = 10.0 ** math.ceil(math.log10(max(*shares, 2.0)))

    def x(row: ScaledStep) -> float:
        first, last = math.log2(rows[0].num_gpus), math.log2(rows[-1].num_gpus)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(row.num_gpus) - first) / (last - first), 1)

    def y(share: float) -> float:
        part = math.log10(share / low) / math.log10(high / low)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part, 1)

    parts = [
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        _text(LEFT, 20, f"{title}: collectives / computation", weight="bold"),
    ]
    for number in range(round(math.log10(low)), round(math.log10(high)) + 1):
        height = y(10.0**number)
        parts.append(_line(LEFT, height, WIDTH - RIGHT, height, "#dddddd"))
        parts.append(_text(LEFT - 8, height + 4, f"{10.0**number:.0%}", "end"))
    under = (
        ("GPUs", [f"{row.num_gpus:,}" for row in rows]),
        ("machines", [f"{row.num_machines:,}" for row in rows]),
        ("host GiB", [f"{row.host / 2**30:,.0f}" for row in rows]),  # memory of each machine
    )
    for i, (name, shown) in enumerate(under):
        height = HEIGHT - BOTTOM + 22 + 18 * i
        parts.append(_text(LEFT - 26, height, name, "end"))
        parts += [_text(x(row), height, value, "middle") for row, value in zip(rows, shown, strict=True)]
    parts.append(_line(LEFT, y(1.0), WIDTH - RIGHT, y(1.0), "#444444", " stroke-dasharray='5 4'"))
    parts.append(_text(LEFT + 8, y(1.0) - 6, "above: communication takes longer than computation"))
    lines = ((ALL, [row.sent_share for row in rows]), (GROUPS, [row.group_sent_share for row in rows]))
    for i, ((colour, meaning), values) in enumerate(lines):
        points = [(x(row), y(value)) for row, value in zip(rows, values, strict=True)]
        path = " ".join(f"{across},{up}" for across, up in points)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts += [f"<circle cx='{across}' cy='{up}' r='3.5' fill='{colour}'/>" for across, up in points]
        parts.append(_text(LEFT + 240 * i, 42, f"● {meaning}", fill=colour))
    # Below the line of the groups, where the line of all GPUs never is.
    parts += [_text(x(row), y(row.group_sent_share) + 18, f"{row.group:,}", "middle", GROUPS[0]) for row in rows]
    body = "\n".join(parts)
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'"
    return f"{head} font-family='sans-serif' font-size='12'>\n{body}\n</svg>\n"


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = "#333333", weight: str = "normal") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f"<text x='{x}' y='{y}' text-anchor='{anchor}' fill='{fill}' font-weight='{weight}'>{escaped}</text>"


def _line(x: float, y: float, end: float, down: float, colour: str, style: str = "") -> str:
    return f"<line x1='{x}' y1='{y}' x2='{end}' y2='{down}' stroke='{colour}'{style}/>"
