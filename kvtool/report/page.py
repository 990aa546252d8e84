"""Page: an answer as plain parts, so that a terminal and a pull request say the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Heading:
    """What the next parts are about.

    Attributes:
        folded: a pull request may fold what follows, up to the next heading.
    """

    text: str
    folded: bool = False


@dataclass(frozen=True)
class Line:
    """One sentence.

    Attributes:
        weight: `bold` for findings, `italic` for what the numbers are.
    """

    text: str
    weight: Literal["plain", "bold", "italic"] = "plain"


@dataclass(frozen=True)
class Grid:
    """A table of texts.

    Attributes:
        columns: titles, in the order in which they stand.
        rows: the text under each title.
        stays: columns that never give way; they may be folded over several lines.
        gives_way: columns that a narrow terminal leaves out, the first one first.
        code: columns that hold names or texts of others, to be shown letter by letter.
        words: columns that hold words, which may be broken between them; the others hold numbers, never cut.
        bold: indices of the rows that matter most.
        title, caption: above and below.
        explains: by column, what it means; said in the caption where the column is shown.
    """

    columns: Sequence[str]
    rows: Sequence[Mapping[str, str]]
    stays: Sequence[str]
    gives_way: Sequence[str] = ()
    code: Sequence[str] = ()
    words: Sequence[str] = ()
    bold: frozenset[int] = frozenset()
    title: str | None = None
    caption: str | None = None
    explains: Mapping[str, str] = field(default_factory=dict)

    def caption_for(self, shown: Sequence[str]) -> str | None:
        """The caption of a table with these columns."""
        said = [self.caption, *(self.explains[name] for name in self.explains if name in shown)]
        return " ".join(sentence for sentence in said if sentence) or None


Part = Heading | Line | Grid
