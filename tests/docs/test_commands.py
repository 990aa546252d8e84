"""Every fenced command and every Python block of README and docs runs, page by page, in a fresh folder."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvtool.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "sample_traces" / "README.md"]
MAKEFILE = (ROOT / "Makefile").read_text()


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, content) of the fenced blocks that are meant to run."""
    return re.findall(r"^```(bash|sh|console|python)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[tuple[str, int]]:
    """Every command, and the exit code it should have: that of a remark `# exits 1`, else 0."""
    joined = block.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        expected = re.search(r"\s# exits (\d+)\b", line)
        bare = re.sub(r"\s+#.*$", "", line).strip()
        if bare and not bare.startswith("#"):
            found.append((bare.removeprefix("$ "), int(expected[1]) if expected else 0))
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a reader of the pages has: the repository's samples, a text, some prompts and a suite."""
    texts = sorted((ROOT / "sample_traces" / "texts").glob("*.txt"))
    (tmp_path / "sample_traces").symlink_to(ROOT / "sample_traces")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "text.txt").write_text("\n\n".join(t.read_text() for t in texts))
    (tmp_path / "prompt.txt").write_text("The harbour office stood at the end of the stone pier.")
    suite = re.search(r"^```toml\n(.*?)^```", (ROOT / "docs" / "ci.md").read_text(), re.MULTILINE | re.DOTALL)
    assert suite is not None
    (tmp_path / "gate.toml").write_text(suite[1])
    lines = [{"id": t.stem, "prompt": t.read_text()[:200]} for t in texts]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pip_installed(package: Path, place: Path) -> Path:
    """Where pip put a package of the repository. Its sources are copied, since building leaves files beside them."""
    source, site = place / f"source-of-{package.name}", place / f"site-of-{package.name}"
    shutil.copytree(package, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-build-isolation", "--no-deps"]
    subprocess.run([*command, "--target", site, source], check=True, capture_output=True)
    return site


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_runs_from_top_to_bottom(
    page: Path, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = 0
    module = types.ModuleType("page_under_test")  # dataclasses look their module up by name
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for language, content in blocks(page):
        if language == "python":
            exec(compile(content, f"{page.name}", "exec"), module.__dict__)
            ran += 1
            continue
        for line, expected in commands(content):
            program, *arguments = shlex.split(line)
            if program == "make":
                assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in arguments), line
            elif program == "pip":
                assert arguments[0] == "install", line
                for package in arguments[1:]:
                    monkeypatch.syspath_prepend(str(pip_installed(place / package, place)))
            else:
                assert program == "kvtool", f"{page.name} runs {program}"
                code = run(arguments)
                assert code == expected, f"{line}\n{capfd.readouterr().err}"
            ran += 1
    assert ran > 0
