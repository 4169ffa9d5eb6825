"""The public download, against a server on this machine: resumed, checked, and clear when it fails."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tacit.core.errors import TacitError
from tacit.data.download import download

CONTENT = np.random.default_rng(0).bytes(700_000)
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Notes each Range header; may cut connections after some bytes, or not know ranges at all."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []
        self.cuts: list[int] = []  # how many bytes the next answers send before they break off
        self.knows_ranges = True
        self.redirect = ""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        if self.server.redirect:
            self.send_response(302)
            self.send_header("Location", self.server.redirect)
            self.end_headers()
            return
        if self.path != "/data.bin":
            self.send_error(404)
            return
        start = 0
        if asked and self.server.knows_ranges:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(CONTENT):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        stop = start + self.server.cuts.pop(0) if self.server.cuts else len(CONTENT)
        self.wfile.write(CONTENT[start:stop])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def test_download_with_progress(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    target = tmp_path / "deep" / "data.bin"
    download(server.address, target, md5=MD5, progress=lambda *step: seen.append(step))
    assert target.read_bytes() == CONTENT
    assert seen[-1] == ("downloading data.bin", len(CONTENT), len(CONTENT))
    assert [path.name for path in target.parent.iterdir()] == ["data.bin"]


def test_a_cut_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000, 200_000]
    download(server.address, tmp_path / "data.bin", md5=MD5)
    assert server.ranges == [None, "bytes=300000-", "bytes=500000-"]
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_an_interrupted_download_goes_on_the_next_time(server: Server, tmp_path: Path) -> None:
    server.cuts = [300_000]
    with pytest.raises(TacitError, match=r"after 300000 of 700000 bytes\. 300000 bytes are kept; the same command"):
        download(server.address, tmp_path / "data.bin", tries=1)
    assert [path.name for path in tmp_path.iterdir()] == ["data.bin.part"]
    download(server.address, tmp_path / "data.bin", tries=1)
    assert server.ranges == [None, "bytes=300000-"]
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_killed_after_the_last_byte(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    download(server.address, tmp_path / "data.bin", md5=MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_a_part_that_is_too_long_is_thrown_away(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(CONTENT + b"something else")
    download(server.address, tmp_path / "data.bin", md5=MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.knows_ranges = False
    (tmp_path / "data.bin.part").write_bytes(CONTENT[:1000])
    download(server.address, tmp_path / "data.bin", md5=MD5)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_wrong_content_is_thrown_away(server: Server, tmp_path: Path) -> None:
    with pytest.raises(TacitError, match="something else than the known file"):
        download(server.address, tmp_path / "data.bin", md5="0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_failures_are_clear_and_not_repeated_in_vain(server: Server, tmp_path: Path) -> None:
    with pytest.raises(TacitError, match=r"/none could not be fetched: Not Found"):
        download(server.address.replace("data.bin", "none"), tmp_path / "data.bin")
    assert len(server.ranges) == 1
    with pytest.raises(TacitError, match=r"could not be fetched: .*refused"):
        download("http://127.0.0.1:9/x", tmp_path / "data.bin", tries=1)


def test_only_https_or_a_checksum(server: Server, tmp_path: Path) -> None:
    for address in ("http://example.org/x", "ftp://example.org/x", "file:///etc/passwd"):
        with pytest.raises(TacitError, match="neither https nor guarded"):
            download(address, tmp_path / "x")
    server.redirect = "file:///etc/passwd"
    with pytest.raises(TacitError, match="could not be fetched"):
        download(server.address, tmp_path / "x", tries=1)
    assert not (tmp_path / "x").exists()
