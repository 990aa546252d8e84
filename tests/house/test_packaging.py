"""The wheel holds every package, the kernels under their own name, and nothing called `kernels` at the top."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def folders_with_code() -> set[str]:
    found = {str(p.parent.relative_to(ROOT)).replace("/", ".") for p in (ROOT / "kvtool").rglob("*.py")}
    return found | {f"kvtool.kernels.{p.parent.name}" for p in (ROOT / "kernels").rglob("*.py")}


def test_every_folder_with_code_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["setuptools"]["packages"]) == folders_with_code()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("kvtool", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", out, source]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_is_complete(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "kvtool").rglob("*.py")}
    sources |= {f"kvtool/{p.relative_to(ROOT)}" for p in (ROOT / "kernels").rglob("*.py")}
    assert sources | {"kvtool/py.typed"} <= set(names)
    assert not [name for name in names if name.startswith("kernels/")]


@pytest.mark.parametrize("in_checkout", [False, True])
def test_kernels_import_from_the_installed_wheel(wheel: Path, tmp_path: Path, in_checkout: bool) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import sys; sys.path.insert(0 if not {in_checkout} else 1, {str(site)!r})\n"
        "import kvtool.kernels.leverage, kvtool.kernels.retained_attention.reference as r\n"
        "print(r.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT if in_checkout else tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    home = ROOT / "kernels" if in_checkout else site / "kvtool" / "kernels"
    assert Path(done.stdout.strip()).is_relative_to(home)
