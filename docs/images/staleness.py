"""Draws staleness.svg, one straggler under each policy: ``python docs/images/staleness.py``."""

from __future__ import annotations

from pathlib import Path

from version import WIDTH, style, text

HEIGHT, LEFT, BAR = 356, 148, 30
ROWS = {"wait": 48, "drop": 144, "count": 240}
FROM, ENDS, CLOSES = 172, 640, 396  # of the long response, and of the last step that may train it at max_staleness 1


def bar(x: float, stop: float, y: float, words: str, kind: str) -> str:
    shape = f'<rect x="{x}" y="{y}" width="{stop - x - 4}" height="{BAR}" rx="5" class="{kind}"/>'
    return shape + text((x + stop - 4) / 2, y + 20, words, "mid")


def lanes(policy: str) -> str:
    y = ROWS[policy]
    names = text(20, y + 38, f"{policy}", "name") + text(LEFT - 8, y + 20, "trainer", "end soft")
    return names + text(LEFT - 8, y + 56, "replica", "end soft")


def steps(policy: str, *parts: tuple[float, float, str, str]) -> str:
    return "".join(bar(x, stop, ROWS[policy], words, kind) for x, stop, words, kind in parts)


def straggler(policy: str, *parts: tuple[float, float, str, str]) -> str:
    return "".join(bar(x, stop, ROWS[policy] + 36, words, kind) for x, stop, words, kind in parts)


def picture() -> str:
    drawn = [
        *(lanes(policy) for policy in ROWS),
        steps("wait", (LEFT, 272, "step 3", "work"), (272, ENDS, "waits for it", "hold"), (ENDS, 770, "step 4", "good"),
              (770, 892, "step 5", "work")),
        straggler("wait", (FROM, ENDS, "a long response, begun with version 3", "move"), (ENDS, 892, "others", "work")),
        steps("drop", (LEFT, 272, "step 3", "work"), (272, CLOSES, "step 4", "work"), (CLOSES, 520, "step 5", "work"),
              (520, 644, "step 6", "work"), (644, 768, "step 7", "work"), (768, 892, "step 8", "work")),
        straggler("drop", (FROM, CLOSES, "the same: too old from here on", "move"), (CLOSES, 892, "others in its place", "work")),
        steps("count", (LEFT, 272, "step 3", "work"), (272, CLOSES, "step 4", "work"), (CLOSES, 520, "step 5", "work"),
              (520, 644, "step 6", "work"), (644, 768, "step 7", "hold"), (768, 892, "step 8", "work")),
        straggler("count", (FROM, ENDS, "the same", "move"), (ENDS, 892, "others", "work")),
        text(20, 330, "At max_staleness 1. Under wait, step 4 is the last that may train it, and closes with it. Under count, step 7 trains it,"),
        text(20, 348, "when it is four versions old.", ""),
    ]  # fmt: skip
    card = f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10"/>'
    time = text(LEFT, 30, "time →", "soft")
    title = "<title>The same straggler under wait, drop and count</title>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{title}'
        f"<style>{style()} .name {{ font-weight: 600; }}</style>{card}{time}{''.join(drawn)}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
