"""Draws version.svg, the life of a version of the weights: ``python docs/images/version.py``."""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT = 920, 392, 128
LANES = {"trainer": 64, "behind it": 112, "ledger": 180, "replica": 256, "behind it ": 304}
LIGHT = {
    "text": "#1f2328", ".soft": "#59636e", ".card": "#ffffff", ".work": "#d5e3f5", ".move": "#fbe3c4", ".hold": "#f2aba1",
    ".good": "#c5e8c8", ".dot, #head path": "#59636e",
}  # fmt: skip
DARK = {
    "text": "#e6edf3", ".soft": "#9aa5b1", ".card": "#10151c", ".work": "#26405f", ".move": "#5f4520", ".hold": "#8a322b",
    ".good": "#245030", ".dot, #head path": "#9aa5b1",
}  # fmt: skip
LINES = """
.card { stroke: #8b949e; } .lane { stroke: #8b949e; stroke-dasharray: 2 4; }
.arrow { stroke: #7d8794; fill: none; stroke-width: 1.4; marker-end: url(#head); }
.halo { paint-order: stroke; stroke-width: 5px; }
.mid { text-anchor: middle; } .end { text-anchor: end; }
"""


def style() -> str:
    """Colours for light pages, and for dark ones."""
    light, dark = (
        " ".join(f"{what} {{ fill: {how}; }}" for what, how in each.items())
        + f" .halo {{ stroke: {each['.card']}; }}"
        for each in (LIGHT, DARK)
    )
    font = "text { font-family: system-ui, sans-serif; font-size: 13px; }"
    return f"{font} {light} {LINES} @media (prefers-color-scheme: dark) {{ {dark} }}"


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'


def box(lane: str, start: float, stop: float, words: str, kind: str, at: float = 0.0) -> str:
    y = LANES[lane]
    shape = f'<rect x="{start}" y="{y - 17}" width="{stop - start}" height="34" rx="5" class="{kind}"/>'
    return shape + text(at or (start + stop) / 2, y + 5, words, "mid")


def arrow(x: float, lane: str, to: str, *, stop: float | None = None) -> str:
    down = LANES[to] > LANES[lane]
    y, end = LANES[lane] + (17 if down else -17), LANES[to] + (-19 if down else 19)
    if lane == "ledger":
        y = LANES[lane] + (8 if down else -8)
    if to == "ledger":
        end = LANES[to] + (-8 if down else 8)
    return f'<path class="arrow" d="M{x} {y} L{stop or x} {end}"/>'


def event(x: float, words: str) -> str:
    y = LANES["ledger"]
    return f'<circle cx="{x}" cy="{y}" r="5" class="dot"/>' + text(x + 10, y + 5, words, "halo")


def picture() -> str:
    lanes = [
        text(LEFT - 16, y + 5, name.strip(), "end" if name.strip() != "behind it" else "end soft")
        + f'<line class="lane" x1="{LEFT}" x2="{WIDTH - 24}" y1="{y}" y2="{y}"/>'
        for name, y in LANES.items()
    ]
    drawn = [
        box("trainer", 132, 238, "train step 11", "work"),
        box("trainer", 242, 310, "one copy", "hold"),
        box("trainer", 314, 890, "train step 12, on samples that are still being generated", "work"),
        box("behind it", 250, 400, "hash · make available", "move"),
        event(242, "announced"),
        event(400, "current: v12"),
        event(620, "may swap"),
        event(752, "committed"),
        arrow(242, "trainer", "ledger"),
        arrow(400, "behind it", "ledger"),
        box("replica", 132, 646, "generate with v11", "work", at=270),
        box("replica", 650, 718, "one copy", "hold"),
        box("replica", 722, 890, "generate with v12", "good"),
        box("behind it ", 420, 560, "fetch · verify", "move"),
        text(572, LANES["behind it "] + 5, "staged", "halo"),
        arrow(408, "ledger", "behind it ", stop=424),
        arrow(612, "behind it ", "ledger", stop=616),
        arrow(626, "ledger", "replica", stop=650),
        arrow(720, "replica", "ledger", stop=746),
        text(
            LEFT,
            352,
            "Whatever fails on the way: the replica is wholly on v11, the ledger knows why, and it is tried again.",
        ),
        text(
            LEFT, 372, "Red is what training and generation are held for. When a replica swaps is a policy.", "soft"
        ),
        text(LEFT, 30, "time →", "soft"),
    ]
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z"/></marker></defs>'
    )
    card = f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10"/>'
    title = "<title>The life of a version of the weights</title>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{title}<style>{style()}</style>'
        f"{head}{card}{''.join(lanes)}{''.join(drawn)}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
