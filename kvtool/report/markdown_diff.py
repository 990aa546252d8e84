"""A comparison as GitHub-flavoured Markdown, for a pull request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.report.diff_page import diff_page
from kvtool.report.markdown_page import markdown_page


def markdown_diff(document: Mapping[str, Any]) -> str:
    """The answer of `kvtool diff --markdown`.

    Args:
        document: `kvtool.diff/1`.
    """
    outcome = "B is worse" if document["worse"] else f"passed, {document['kind']}"
    if document["worse"] and not any(e["verdict"] == "worse" for g in document["groups"] for e in g["metrics"]):
        outcome = "rows are missing in B"
    return markdown_page(diff_page(document), f"kvtool diff: {outcome}")
