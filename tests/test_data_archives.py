"""An archive cannot write anywhere, whatever its members are called."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tacit.core.errors import TacitError
from tacit.data.archives import collect


def write_tar(path: Path, *entries: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for entry in entries:
            entry.size = 5 if entry.isreg() else 0
            archive.addfile(entry, io.BytesIO(b"hello") if entry.isreg() else None)
    return path


def link(name: str, to: str, kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, to
    return entry


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["../data", "inside/../../data", "/data", "..\\data"])
def test_members_that_point_outside(tmp_path: Path, name: str) -> None:
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    tar = write_tar(place / "x.tar.gz", tarfile.TarInfo("good/data"), tarfile.TarInfo(name))
    with zipfile.ZipFile(place / "x.zip", "w") as archive:
        archive.writestr("good/data", b"hello")
        archive.writestr(zipfile.ZipInfo(name), b"hello")
    before = files_below(tmp_path)
    for path in (tar, place / "x.zip"):
        with pytest.raises(TacitError, match=r"x\.(tar\.gz|zip) is refused.*points outside"):
            collect(path, ("data",))
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    secret = tmp_path / "secret"
    secret.write_text("do not read")
    path = write_tar(tmp_path / "x.tar.gz", link("data", str(secret), kind))
    with pytest.raises(TacitError, match="is a link or a device"):
        collect(path, ("data",))


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    entry = zipfile.ZipInfo("data")
    entry.create_system, entry.external_attr = 3, 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(entry, str(tmp_path / "secret"))
    with pytest.raises(TacitError, match="is a link"):
        collect(tmp_path / "x.zip", ("data",))


def test_good_members_are_read_and_nothing_is_unpacked(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar.gz", tarfile.TarInfo("./deep/down/data"), link("other", "/etc", tarfile.SYMTYPE))
    assert collect(path, ("data",)) == {"data": b"hello"}
    assert files_below(tmp_path) == {"x.tar.gz"}
    with pytest.raises(TacitError, match="lacks more"):
        collect(path, ("data", "more"))
