"""Packages that capturing needs beyond kvtool's own: said in one sentence where one is absent."""

from __future__ import annotations

import importlib.util

from kvtool.errors import KvtoolError


def require(*packages: str) -> None:
    """Refuse early where a package is not installed.

    Raises:
        KvtoolError: code `package-missing`.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise KvtoolError(
                "package-missing", f"capturing needs the package {package}", "pip install 'kvtool[capture]'"
            )
