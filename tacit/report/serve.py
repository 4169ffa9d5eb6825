"""The page over HTTP, for as long as someone looks: it asks for newer data by itself."""

import errno
import gzip
import hashlib
import ipaddress
import json
import re
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tacit.core.errors import TacitError
from tacit.core.text import safe
from tacit.report.collect import Collector
from tacit.report.page import build

USUAL_PORT = 8750


class PageServer(ThreadingHTTPServer):
    """Serves two things: `/`, the page with the data of now, and `/data.json`, the data alone."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], host: str, port: int | None) -> None:
        self.collector = Collector(folders)
        self.only_loopback = is_loopback(host)
        self._one_at_a_time = threading.Lock()
        if not is_host(host):  # looking it up could take minutes
            raise TacitError(f"--host {safe(host)} is neither an address nor a name of a machine. Write 127.0.0.1.")
        try:
            super().__init__((host, USUAL_PORT if port is None else port), Handler)
        except (OSError, UnicodeError) as error:
            if port is not None or not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:
                why = getattr(error, "strerror", None) or error
                raise TacitError(
                    f"{safe(host)}:{USUAL_PORT if port is None else port} cannot be listened on ({why}). "
                    "Choose another --port (0: any that is free) or another --host."
                ) from None
            super().__init__((host, 0), Handler)  # the usual port is taken: any other will do

    @property
    def address(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def data(self) -> tuple[dict[str, Any], str]:
        """What there is now, and a tag that changes when it does."""
        with self._one_at_a_time:
            data = self.collector.collect()
        content = json.dumps({key: value for key, value in data.items() if key != "made"}, sort_keys=True)
        return data, f'"{hashlib.sha256(content.encode()).hexdigest()[:16]}"'

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error; all else is told."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.only_loopback and not is_loopback(self.headers.get("Host", "").rpartition(":")[0]):
            # A page from elsewhere whose name was made to point at this machine must not read the runs.
            self._answer(403, "text/plain", b"This page is served to this machine only.\n")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/data.json"):
            self._answer(404, "text/plain", b"There is only / and /data.json here.\n")
            return
        data, tag = self.server.data()
        if path == "/":
            self._answer(200, "text/html; charset=utf-8", build(data, live=True).encode())
        elif self.headers.get("If-None-Match") == tag:
            self._answer(304, "application/json", b"", tag)
        else:
            self._answer(200, "application/json", json.dumps(data, allow_nan=False).encode(), tag)

    def _answer(self, status: int, kind: str, body: bytes, tag: str = "") -> None:
        packed = len(body) > 10_000 and "gzip" in self.headers.get("Accept-Encoding", "")
        body = gzip.compress(body, 1) if packed else body
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if packed:
            self.send_header("Content-Encoding", "gzip")
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is for people; requests are not worth a line each."""


def is_host(text: str) -> bool:
    """Whether a text could be an address or the name of a machine.

    >>> is_host("127.0.0.1"), is_host("::1"), is_host("my-machine.local"), is_host("a b c"), is_host("a..b")
    (True, True, True, False, False)
    """
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return len(text) <= 253 and all(re.fullmatch(r"[A-Za-z0-9_-]{1,63}", part) for part in text.split("."))


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("[::1]"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    bare = host.strip("[]")
    try:
        return bare == "localhost" or ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False
