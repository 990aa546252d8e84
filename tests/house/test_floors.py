"""The floors of the house: imports point down only, and each third party has one home."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "kvtool").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
FLOORS = {
    "kernels": 0,
    "trace": 2,
    "policies": 2,
    "selection": 2,
    "metrics": 2,
    "replay": 3,
    "capture": 3,
    "testing": 3,
    "live": 3,
    "decomposition": 3,
    "ablate": 3,
    "check": 3,
    "bench": 3,
    "compare": 3,
    "synth": 3,
    "report": 4,
    "cli": 5,
}
HOMES = {
    "zarr": ("kvtool/trace/",),
    "typer": ("kvtool/cli/",),
    "rich": ("kvtool/cli/", "kvtool/report/terminal"),
    "pyarrow": ("kvtool/result.py",),
    "transformers": ("kvtool/capture/", "kvtool/live/"),
    "safetensors": ("kvtool/capture/", "kvtool/trace/"),
    "triton": ("kernels/",),
    "scipy": ("kvtool/compare/",),
    "fsspec": ("kvtool/trace/",),
    "distributed": ("kvtool/replay/cluster.py",),
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "kernels":
        parts = ("kvtool", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int:
    parts = module.split(".")
    return FLOORS.get(parts[1], 1) if len(parts) > 1 else 6


def imports_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            inside = [f"kvtool.{alias.name}" for alias in node.names]
            found += inside if node.module == "kvtool" else [node.module]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down_and_third_parties_stay_home(path: Path) -> None:
    module, place = module_of(path), str(path.relative_to(ROOT))
    wrong = []
    for name in imports_of(path):
        top = name.split(".")[0]
        if top == "kvtool" and module != "kvtool":
            above = floor_of(name) > floor_of(module)
            sideways = floor_of(name) == floor_of(module) == 2 and name.split(".")[1] != module.split(".")[1]
            if above or sideways:
                wrong.append(name)
        if top == "kernels":
            wrong.append(f"{name}: import it as kvtool.kernels")
        if top in HOMES and not place.startswith(HOMES[top]):
            wrong.append(f"{name} lives in {HOMES[top]}")
    assert not wrong


def test_kernels_folder_is_no_package_of_its_own() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(getattr(s, 'origin', None))"
    origin = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert origin.strip() == "None"  # a namespace at most: nothing importable with a file


def test_help_is_quick_and_light() -> None:
    code = (
        "import sys\n"
        "from kvtool.cli.main import run\n"
        "assert run(['--help']) == 0\n"
        "heavy = ('torch', 'zarr', 'transformers', 'pyarrow')\n"
        "print([m for m in heavy if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")
    assert "capture" in done.stdout
    assert "replay" in done.stdout


def test_replay_imports_no_transformers() -> None:
    code = "import sys, kvtool.replay, kvtool.policies, kvtool.trace; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


def test_transformers_works_from_the_repository_root() -> None:
    code = "from transformers import LlamaConfig, LlamaForCausalLM; import kvtool.kernels.leverage; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr
