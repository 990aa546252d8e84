"""Selection: scores, protection and a budget become the set that stays."""

from kvtool.selection.one_shot import Selection, cut, select
from kvtool.selection.pages import select_pages
from kvtool.selection.ranking import NaNScore, Ranking, rank

__all__ = ["NaNScore", "Ranking", "Selection", "cut", "rank", "select", "select_pages"]
