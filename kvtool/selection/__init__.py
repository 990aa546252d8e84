"""Selection: scores, protection and a budget become the set that stays."""

from kvtool.selection.one_shot import Selection, cut, select
from kvtool.selection.ranking import NaNScore, Ranking, rank

__all__ = ["NaNScore", "Ranking", "Selection", "cut", "rank", "select"]
