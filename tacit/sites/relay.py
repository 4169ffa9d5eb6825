"""The last step inside a site: Flower's short-lived process hands each message to the process that has the data.

Flower starts a new process for every message. This one stays small (no torch, no images): it passes the bytes on
through a socket file that only its own user can open, and takes the answer back.
"""

import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

SOCKET = "TACIT_SITE_SOCKET"  # the environment variable that tells Flower's process where the socket is
_LENGTH = struct.Struct("<Q")


def _receive(connection: socket.socket) -> bytes:
    def exactly(count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = connection.recv(min(1 << 20, count - len(parts)))
            if not part:
                raise ConnectionError("the other side closed in the middle of a message")
            parts += part
        return bytes(parts)

    (length,) = _LENGTH.unpack(exactly(_LENGTH.size))
    return exactly(length)


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def send_request(data: bytes) -> bytes:
    """From Flower's process: the answer of the process that has the data."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        _send(connection, data)
        return _receive(connection)


class RelayServer:
    """In the process that has the data: takes one message at a time and answers it."""

    def __init__(self, response: Callable[[bytes], bytes]) -> None:
        self.respond = response
        self.folder = tempfile.TemporaryDirectory(prefix="tacit-")  # a short path, and open to this user only
        self.path = Path(self.folder.name) / "desk"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen(8)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    _send(connection, self.respond(_receive(connection)))
                except OSError:
                    continue  # Flower's process is gone: nobody waits for this answer

    def close(self) -> None:
        self.listener.close()
        self.folder.cleanup()
