"""A page as GitHub-flavoured Markdown.

Names and texts come from traces and file names, so every letter that Markdown or HTML would read is escaped: a token
`|` must not open a column, `<img>` must not load, `@name` must not call anyone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvtool.report.page import Grid, Heading, Part

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# An empty comment between the sign and the name keeps GitHub from linking people, issues and addresses.
_LINKS = re.compile(r"(@|#|://|www\.)")


def escaped(text: str) -> str:
    """`text` so that Markdown shows exactly it."""
    safe = "".join(_ENTITIES.get(letter, letter) for letter in text.replace("\n", " ").replace("\r", " "))
    safe = re.sub(r"([\\`*_{}\[\]|~])", r"\\\1", safe)
    safe = re.sub(r"^(\s*)([-+>]|\d+[.)])(\s)", r"\1\\\2\3", safe)
    return _LINKS.sub(lambda found: found[0][:-1] + _apart(found[0][-1]), safe)


def _apart(letter: str) -> str:
    return ("\\#" if letter == "#" else letter) + "<!-- -->"


def code(text: str, in_table: bool = True) -> str:
    """`text` letter by letter: a code span whose fence is longer than any run of backticks inside."""
    if not text or text == "-":
        return text
    shown = text.replace("\n", " ").replace("\r", " ")
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", shown)), default=0))
    if len(fence) > 1 or shown != shown.strip():
        shown = f" {shown} "  # one blank on each side is not shown
    if in_table:
        shown = shown.replace("|", "\\|")  # a table splits cells before it looks for code
    return f"{fence}{shown}{fence}"


def markdown_page(parts: Sequence[Part], title: str) -> str:
    """The parts as Markdown; folded headings become details that a reader opens.

    Args:
        title: of the whole, as a heading.
    """
    blocks, folded = [f"### {escaped(title)}"], False
    for part in parts:
        if isinstance(part, Heading):
            if folded:
                blocks.append("</details>")
            folded = part.folded
            text = escaped(part.text)
            blocks.append(f"<details><summary>{_html(part.text)}</summary>" if folded else f"#### {text}")
        elif isinstance(part, Grid):
            blocks += _table(part)
        else:
            text = escaped(part.text)
            mark = {"plain": "", "bold": "**", "italic": "*"}[part.weight]
            blocks.append(f"{mark}{text}{mark}")
    return "\n\n".join([*blocks, *(["</details>"] if folded else [])]) + "\n"


def _html(text: str) -> str:
    """For places that Markdown leaves to HTML."""
    safe = "".join(_ENTITIES.get(letter, letter) for letter in text)
    return _LINKS.sub(lambda found: found[0] + "<!-- -->", safe)


def _table(grid: Grid) -> list[str]:
    found = [f"**{escaped(grid.title)}**"] if grid.title else []
    left = {*grid.stays, *grid.words}
    lines = [
        f"| {' | '.join(escaped(name) for name in grid.columns)} |",
        f"| {' | '.join(':--' if name in left else '--:' for name in grid.columns)} |",
    ]
    for index, row in enumerate(grid.rows):
        cells = [code(row[name]) if name in grid.code else escaped(row[name]) for name in grid.columns]
        if index in grid.bold:
            cells = [
                cell if name in grid.code else f"**{cell}**" for name, cell in zip(grid.columns, cells, strict=True)
            ]
        lines.append(f"| {' | '.join(cells)} |")
    found.append("\n".join(lines))
    caption = grid.caption_for(grid.columns)
    if caption:
        found.append(f"*{escaped(caption)}*")
    return found
