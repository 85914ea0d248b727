"""softcuda as a shared library: built once for each version of its source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
LIBRARY = "libcuda.so.1"
# The name under which cuda.bindings looks for the driver among what is loaded.
FLAGS = (
    "-std=gnu11 -O2 -Wall -shared -fPIC -pthread -fvisibility=hidden"
    f" -Wl,-soname,{LIBRARY}"
).split()


class NoCompilerError(RuntimeError):
    """There is no gcc to build softcuda with."""


def build() -> Path:
    """Return the library's path, after building it if nobody has yet.

    Raises:
        NoCompilerError: If it is not built and there is no gcc.
    """
    sources = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sources:
        digest.update(source.read_bytes())
    library = _own_folder() / digest.hexdigest()[:16] / LIBRARY
    if not library.exists():
        _compile([path for path in sources if path.suffix == ".c"], library)
    return library


def _own_folder() -> Path:
    """Return a folder that no other user can write to: what is in it is loaded."""
    folder = Path(tempfile.gettempdir()) / f"asyncache-softcuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is open to other users")
    return folder


def _compile(sources: list[Path], library: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None:
        raise NoCompilerError("softcuda, the software driver, needs gcc: install it")
    library.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / LIBRARY
        subprocess.run([compiler, *FLAGS, "-o", built, *sources], check=True)
        # Another process may be at the same: both make the same library.
        built.replace(library)
