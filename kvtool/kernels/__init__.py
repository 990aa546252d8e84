"""Floor 0: attention arithmetic in plain torch and Triton; knows no trace and no command line.

The sources lie in the top-level folder `kernels/` and are packaged as `kvtool.kernels.<op>`.
The bare name `kernels` belongs to another distribution that transformers imports, so that
folder has no `__init__.py`. In a source checkout that is not installed, the lines below find it.
"""

from pathlib import Path as _Path

_sources = _Path(__file__).resolve().parents[2] / "kernels"
if not (_Path(__file__).parent / "leverage").is_dir() and (_sources / "leverage" / "__init__.py").is_file():
    __path__.append(str(_sources))
