"""Package tools: what is run, what becomes of it, and that nothing of a package is run.

Stand-ins for apt-get, dpkg-deb and npm lie first on the PATH; pip is the real one, with an index on disk.
"""

import importlib.util
import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tacit.core.errors import TacitError
from tacit.data.archives import collect
from tacit.data.packages import Package

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the stand-ins are shell scripts")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def script(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def tar_of(path: Path, name: str) -> Path:
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 5
        archive.addfile(entry, io.BytesIO(b"hello"))
    return path


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_npm(tools: Path, work: Path) -> None:
    package = tar_of(tools / "package.tgz", "package/data")
    script(tools, "npm", f'echo "$@" > said.txt; cp {package} fake-1.2.3.tgz')
    seen: list[str] = []
    found = Package("npm", "fake", "1.2.3").fetch(work, lambda what, done, total: seen.append(what))
    assert collect(found, ("data",)) == {"data": b"hello"}
    said = (work / "said.txt").read_text()
    assert said.startswith("pack --ignore-scripts")
    assert said.endswith("fake@1.2.3\n")
    assert seen[0] == "fetching the npm package fake 1.2.3"


def test_debian_with_empty_package_lists(tools: Path, work: Path) -> None:
    """The first try finds no package; with fresh lists, in a folder of our own, the second does."""
    log = tools / "log.txt"
    script(
        tools,
        "apt-get",
        f"""echo "$@" >> {log}
case "$*" in
*Dir::State::lists=*update) touch {tools}/updated ;;
*Dir::State::lists=*download*) test -e {tools}/updated && touch data_1.0_all.deb ;;
*) echo "E: Unable to locate package data"; exit 100 ;;
esac""",
    )
    content = tar_of(tools / "content.tar", "./usr/share/data")
    script(tools, "dpkg-deb", f'test "$1" = --fsys-tarfile && test -e "$2" && cat {content}')
    found = Package("debian", "data").fetch(work)
    assert collect(found, ("data",)) == {"data": b"hello"}
    assert len(log.read_text().splitlines()) == 3


def test_an_installed_package_is_read_in_place(work: Path, tmp_path: Path) -> None:
    (tmp_path / "installed").mkdir()
    assert Package("debian", "data", installed=str(tmp_path / "installed")).fetch(work) == tmp_path / "installed"


def test_failures_carry_the_tools_words(tools: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tools, "npm", "echo 'npm ERR! network unreachable' >&2; exit 1")
    with pytest.raises(TacitError, match=r"npm failed: npm ERR! network unreachable"):
        Package("npm", "fake", "1.2.3").fetch(work)
    script(tools, "npm", "true")
    with pytest.raises(TacitError, match=r"expected one file \*\.tgz"):
        Package("npm", "fake", "1.2.3").fetch(work)
    monkeypatch.setenv("PATH", str(work))
    assert Package("npm", "fake").missing_tool() == "npm"
    with pytest.raises(TacitError, match="apt-get is not on this machine"):
        Package("debian", "data").fetch(work)


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")
def test_pip_saves_a_source_archive_without_running_it(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "setup-was-run"
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "some.data-1.0.zip", "w") as archive:
        archive.writestr("some.data-1.0/setup.py", f"open({str(marker)!r}, 'w')\nraise SystemExit('never run me')")
        archive.writestr("some.data-1.0/PKG-INFO", "Metadata-Version: 1.1\nName: some.data\nVersion: 1.0\n")
        archive.writestr("some.data-1.0/data", "hello")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    found = Package("pypi", "some.data", "1.0").fetch(work)
    assert collect(found, ("data",)) == {"data": b"hello"}
    assert not marker.exists()
