"""Hooks of mkdocs for `make docs`: the list of decisions, redirects, and ``llms.txt`` from the navigation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DECISIONS = "docs/adr/"
SUMMARY = "Post-train language models by reinforcement learning: any inference engine with any training engine."
REDIRECTS = {"docs/architecture": "structures", "docs/life-of-a-sample": "structures"}
"""Pages that were merged into others."""


def on_post_build(config: Any) -> None:
    """Write a redirect at the address of each merged page."""
    for page, target in REDIRECTS.items():
        folder = Path(config.site_dir) / page
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url=../{target}/">\n')


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Append the titles of all decisions to their page."""
    if page.file.src_uri != f"{DECISIONS}README.md":
        return markdown
    found = [file for file in files.documentation_pages() if file.src_uri.startswith(f"{DECISIONS}0")]
    titles = {Path(file.src_uri).name: _title(file.content_string) for file in found}
    return markdown + "".join(f"\n- [{title}]({name})" for name, title in sorted(titles.items()))


def on_nav(nav: Any, config: Any, files: Any) -> None:
    """Write ``llms.txt``: every page of the navigation, by section, with its first sentence."""
    lines = [f"# {config.site_name}\n\n> {SUMMARY}\n"]
    for section in nav.items:
        lines.append(f"\n## {section.title}\n\n")
        lines += [
            f"- [{page.title or _title(page.file.content_string)}]({page.url or './'})\n" for page in _pages(section)
        ]
    path = Path(config.site_dir) / "llms.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def _pages(item: Any) -> list[Any]:
    if item.is_page:
        return [item]
    return [page for child in item.children for page in _pages(child)]


def _title(markdown: str) -> str:
    return markdown.partition("\n")[0].lstrip("# ")
