"""Page: the building blocks of an HTML page that needs no network. Text is escaped here and nowhere else.

    document("demo", [card("Reward", "What it shows.", picture), card("Rows", "", table(["state"], [["ok"]]))])

Arguments named ``html`` and what these functions return is markup; everything else is text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

CSS = """
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#1b1f24;--dim:#5b6570;--grid:#e1e5ea;--line:#e3e6eb;
--idle:#c3cad2;--accent:#0072b2;--good:#116329;--good-bg:#dafbe1;--bad:#a40e26;--bad-bg:#ffebe9;--warn:#7d4e00;--warn-bg:#fff8c5}
@media(prefers-color-scheme:dark){:root{--bg:#0f1216;--card:#181c22;--ink:#e4e8ed;--dim:#98a2ae;--grid:#323943;
--line:#2a3038;--idle:#4b5563;--accent:#4aa8e0;--good:#7ee2a8;--good-bg:#12301e;--bad:#ff9a9a;--bad-bg:#3d1618;--warn:#f0c95c;--warn-bg:#352a0b}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 16px 48px}
h1{font-size:26px;line-height:1.2;margin:0 10px 0 0;overflow-wrap:anywhere}
h2{font-size:17px;margin:0}
header{display:flex;flex-wrap:wrap;align-items:center;gap:8px;margin-bottom:4px}
p{margin:0}
.lead{color:var(--dim);margin-bottom:18px;overflow-wrap:anywhere}
.pill{font-size:13px;font-weight:600;padding:2px 10px;border-radius:99px}
.good{color:var(--good);background:var(--good-bg)}
.bad{color:var(--bad);background:var(--bad-bg)}
.warn{color:var(--warn);background:var(--warn-bg)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-bottom:12px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:12px 14px}
.tile b{display:block;font-size:22px;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span,.tile i{display:block;color:var(--dim);font-size:13px;font-style:normal}
.card{padding:16px 18px;margin-bottom:12px}
.card>p{color:var(--dim);margin:2px 0 10px;max-width:100ch}
.say{display:block;border-radius:8px;padding:8px 12px;margin-bottom:12px;white-space:pre-wrap;overflow-wrap:anywhere}
.card .say{margin:8px 0 12px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:0 12px;align-items:start}
.scroll{overflow-x:auto}
svg{display:block;width:100%;min-width:600px;height:auto;color:var(--ink)}
svg text{font-family:inherit!important}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:5px 16px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--dim);font-weight:500;white-space:nowrap}
td{overflow-wrap:anywhere;white-space:pre-line}
th.n,td.n{text-align:right;white-space:nowrap}
td.w{white-space:nowrap}
tr:last-child td{border-bottom:0}
footer{color:var(--dim);font-size:13px;margin-top:18px}
"""


def document(title: str, html: Iterable[str]) -> str:
    """A whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(part for part in html if part)
        + "\n</main></body></html>\n"
    )


def headline(title: str, pill: str, tone: str, lead: str) -> str:
    """The title, a coloured word beside it and a sentence under it. ``tone``: good, bad or warn."""
    return (
        f'<header><h1>{escape(title)}</h1><span class="pill {tone}">{escape(pill)}</span></header>'
        f'<p class="lead">{escape(lead)}</p>'
    )


def tiles(items: Sequence[tuple[str, str, str]]) -> str:
    """Key figures: (name, figure, remark)."""
    cells = (
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(figure)}</b><i>{escape(remark)}</i></div>'
        for name, figure, remark in items
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def card(title: str, text: str, html: str) -> str:
    """A framed section; "" when there is nothing to frame."""
    if not html:
        return ""
    words = f"<p>{escape(text)}</p>" if text else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{words}{html}</section>'


def scroll(html: str) -> str:
    """Something wide, that scrolls on a narrow screen instead of shrinking."""
    return f'<div class="scroll">{html}</div>' if html else ""


def pair(*html: str) -> str:
    """Cards side by side where there is room."""
    return f'<div class="pair">{"".join(html)}</div>'


def say(text: str, tone: str) -> str:
    """A sentence that must not be overlooked."""
    return f'<div class="say {tone}">{escape(text)}</div>'


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = (), names: Sequence[int] = ()
) -> str:
    """A table without its empty columns; "" without rows.

    ``numbers``: columns that are aligned to the right. ``names``: columns whose text is never broken.
    """
    filled = [i for i in range(len(head)) if any(row[i] for row in rows)]
    if not filled:
        return ""
    style = dict.fromkeys(numbers, "n") | dict.fromkeys(names, "w")
    top = "".join(_cell("th", style.get(i, ""), head[i]) for i in filled)
    body = "".join(f"<tr>{''.join(_cell('td', style.get(i, ''), row[i]) for i in filled)}</tr>" for row in rows)
    thead = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return scroll(f"<table>{thead}<tbody>{body}</tbody></table>")


def _cell(tag: str, style: str, text: str) -> str:
    chosen = f' class="{style}"' if style else ""
    return f"<{tag}{chosen}>{escape(text)}</{tag}>"
