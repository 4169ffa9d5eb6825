"""The usual public download: https, resumed where it stopped, checked, and renamed when whole."""

import hashlib
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from tacit.core.errors import TacitError

Progress = Callable[[str, int, int], None]  # (what is going on, done, of so many; 0: unknown)

_PIECE = 1 << 18


def silent(what: str, done: int, total: int) -> None:
    """The progress of somebody who does not want to see any."""


def download(
    address: str,
    target: Path,
    *,
    md5: str = "",
    progress: Progress = silent,
    timeout: float = 30.0,
    tries: int = 3,
) -> None:
    """Fetch `address` into `target`; what has come so far waits in `<target>.part` and is not fetched again.

    Addresses without https are accepted only on this machine, or where a checksum guards the content.
    """
    _refuse_unguarded(address, md5)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    for attempt in range(1, tries + 1):
        before = _size(part)
        try:
            _fetch_rest(address, part, md5, progress, timeout)
            break
        except (OSError, HTTPException) as error:  # urllib's errors are OSErrors
            busy = isinstance(error, urllib.error.HTTPError) and error.code >= 500
            worth_it = busy or _size(part) > before  # no network at all: no need to wait for it thrice
            if attempt == tries or not worth_it:
                raise TacitError(_failure(address, part, error)) from None
    if md5 and _md5(part) != md5:
        part.unlink()
        raise TacitError(
            f"{address} delivered something else than the known file (its md5 is not {md5}). "
            "It was thrown away; try again later, or get the file by hand."
        )
    os.replace(part, target)


def _fetch_rest(address: str, part: Path, md5: str, progress: Progress, timeout: float) -> None:
    """One attempt: ask for what is missing, append it, and complain if it ends too early."""
    have = _size(part)
    try:
        response = _ask(address, have, timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        if error.headers.get("Content-Range", "").endswith(f"/{have}"):
            return  # everything had come already
        part.unlink()  # longer than the file: it belongs to something else
        response = _ask(address, 0, timeout)
    with response:
        _refuse_unguarded(response.url, md5)  # a redirection may have led elsewhere
        goes_on = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if not goes_on:
            have = 0  # the server sends the whole file
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else 0
        with open(part, "ab" if goes_on else "wb") as file:
            while piece := response.read(_PIECE):
                file.write(piece)
                have += len(piece)
                progress(f"downloading {part.stem}", have, total)
        if total and have < total:
            raise ConnectionError(f"the connection closed after {have} of {total} bytes")


def _ask(address: str, have: int, timeout: float) -> HTTPResponse:
    request = urllib.request.Request(address, headers={"User-Agent": "tacit"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    response: HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
    return response


def _refuse_unguarded(address: str, md5: str) -> None:
    """
    >>> _refuse_unguarded("https://example.org/x", "")
    >>> _refuse_unguarded("http://example.org/x", "")
    Traceback (most recent call last):
    tacit.core.errors.TacitError: http://example.org/x is not fetched: ...
    """
    parts = urllib.parse.urlsplit(address)
    local = parts.hostname in ("127.0.0.1", "localhost", "::1")
    if parts.scheme != "https" and not (parts.scheme == "http" and (md5 or local)):
        raise TacitError(f"{address} is not fetched: it is neither https nor guarded by a checksum.")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _failure(address: str, part: Path, error: Exception) -> str:
    have = _size(part)
    kept = f" {have} bytes are kept; the same command goes on from there." if have else ""
    return f"{address} could not be fetched: {getattr(error, 'reason', None) or error}.{kept}"
