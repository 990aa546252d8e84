"""Installed packages made up on the spot: a folder on the path with modules and metadata, as pip leaves them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # the sources beside the tests are importable from them

from made_up import Install


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(package, version, policies=…, metrics=…, module=source): on the path until the test ends."""
    loaded = set(sys.modules)
    monkeypatch.delenv("KVTOOL_NO_PLUGINS", raising=False)

    def one(
        package: str,
        version: str = "1.0",
        *,
        policies: Mapping[str, str] | None = None,
        metrics: Mapping[str, str] | None = None,
        entry_points: str | None = None,
        **modules: str,
    ) -> Path:
        site = tmp_path / f"site-{package}-{version}"
        info = site / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        text = ""
        for group, given in (("kvtool.policies", policies), ("kvtool.metrics", metrics)):
            if given:
                text += f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in given.items())
        (info / "entry_points.txt").write_text(text if entry_points is None else entry_points)
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        return site

    yield one
    for name in set(sys.modules) - loaded:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
