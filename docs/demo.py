"""The demo behind `make demo`: every step is a kvtool command that you can type yourself."""

from __future__ import annotations

import pydoc_data.topics
import shlex
import subprocess
import sys
from pathlib import Path

FOLDER = Path("demo")
KVTOOL = Path(sys.executable).with_name("kvtool")


def run(arguments: str) -> None:
    print(f"\n$ kvtool {arguments}", flush=True)
    finished = subprocess.run([KVTOOL, *shlex.split(arguments)])
    if finished.returncode:
        sys.exit(finished.returncode)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    text, trace, results = FOLDER / "text.txt", FOLDER / "smollm2.zarr", FOLDER / "results"
    print("English text to feed the model: Python's own help topics")
    text.write_text("\n\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    run(f"capture smollm2 --text-file {text} --prompt-tokens 1024 --eval-tokens 128 -o {trace} --force")
    run(f"inspect {trace} --verify")
    run(f"replay {trace} -p all -r 0.5,0.75,0.9 -o {results} --force")
    print(f"\nThe trace is {trace}, the tables are in {results}. Next: try your own policy,")
    print(f"  kvtool replay {trace} -p docs/example_policy.py:NewestAndLoudest -r 0.75")


if __name__ == "__main__":
    main()
