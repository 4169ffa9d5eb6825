"""Who may call what on the server's port. A guard in front of Flower's application, in plain ASGI: no Flower here.

Flower takes and parses a message before it asks who sent it, signs nothing of it but the time, and starts any code for
any process of the same machine. So here, before a byte of a message is read:

- A **site** may make the few calls that sites need. It proves itself with a signature over this very call (method,
  path, time, a number that is used once, the digest of the message) by a key in the server's folder `sites/`.
- The **server's own processes** may make the calls that they need, from this machine, with the secret that only the
  server's user can read.
- **Everybody else** is refused, and so is every other call.

Then the message is read, up to a bound, and compared with the digest that was signed.
"""

import base64
import datetime
import hashlib
import hmac
import ipaddress
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

Scope = dict[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]

SITE_CALLS = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
# Without keys a site makes one up and registers it itself.
INSECURE_CALLS = SITE_CALLS | {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}
START_RUN = "/v1/control/start-run"
OWN_CALLS = frozenset(
    {
        START_RUN,
        *(f"/v1/control/{name}" for name in ("list-nodes", "register-node", "unregister-node")),
        *(
            f"/v1/runtime/{name}"
            for name in (
                "acquire-task",
                "send-task-heartbeat",
                "pull-task-input",
                "push-task-output",
                "push-object",
                "pull-object",
                "confirm-message-received",
                "push-messages",
                "pull-messages",
                "push-logs",
                "get-nodes",
            )
        ),
    }
)

SECRET = "tacit-secret"  # the name of a header
PUBLIC_KEY, TIMESTAMP = "flwr-public-key", "flwr-timestamp"  # as Flower sends them
NONCE, DIGEST, SIGNATURE = "tacit-nonce", "tacit-digest", "tacit-signature"
AHEAD, BEHIND = 5.0, 300.0  # seconds that a site's clock may be off: Flower's own bounds

UNKNOWN_KEY, OTHER_CLOCK = "tacit: unknown key", "tacit: the clocks differ"  # what a site looks for in its log


@dataclass(frozen=True)
class Limits:
    """Bytes."""

    call: int = 8 << 20  # of one call by a site: Flower cuts long messages into pieces of 5 MiB
    own_call: int = 64 << 20  # of one call by the server's own processes
    reply: int = 4 << 30  # of all pieces of a site's reply
    at_once: int = 16  # calls by one site (no bytes, but each may hold a message)


class Refused(Exception):
    """A call that is not let through, and what the caller is told."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("10.0.0.7"), is_loopback("0.0.0.0")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# --- The signature of a call -------------------------------------------------------------------------------


def signed_text(method: str, path: str, timestamp: str, nonce: str, digest: str) -> bytes:
    """What a site signs. No part of it can hold the line break that parts them: HTTP forbids it."""
    return "\n".join(("tacit call 1", method, path, timestamp, nonce, digest)).encode()


def signature_headers(
    sign: Callable[[bytes], bytes], method: str, path: str, timestamp: str, body: bytes
) -> dict[str, str]:
    """What a site adds to a call, beside its public key and the time."""
    nonce, digest = secrets.token_hex(16), hashlib.sha256(body).hexdigest()
    signature = sign(signed_text(method, path, timestamp, nonce, digest))
    return {NONCE: nonce, DIGEST: digest, SIGNATURE: base64.b64encode(signature).decode()}


def verified(public_key: bytes, text: bytes, signature: bytes) -> bool:
    """Whether the owner of a key (PEM) signed a text, as Flower signs: ECDSA with SHA-256."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    key = load_pem_public_key(public_key)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, text, ec.ECDSA(hashes.SHA256()))
        return True
    except InvalidSignature:
        return False


# --- The guard ---------------------------------------------------------------------------------------------


class Guard:
    """Flower's application behind a guard. `sites` gives the keys that may join now (None: insecure, anybody may)."""

    def __init__(
        self,
        application: Application,
        secret: str,
        sites: Callable[[], Mapping[bytes, str]] | None,
        *,
        limits: Limits | None = None,
        start_run_refusal: Callable[[bytes], str] = lambda body: "",
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.application = application
        self.secret = secret.encode()
        self.sites = sites
        self.limits = limits or Limits()
        self.start_run_refusal = start_run_refusal
        self.say = say
        self.clock = clock
        self.begun = clock()  # what was signed before may have been used before, and nobody remembers
        self._told = 0.0
        self._used: dict[str, float] = {}  # numbers that were used once, and until when they matter
        self._busy: dict[str, int] = {}  # calls of a site that are under way
        self._pushed: dict[str, int] = {}  # bytes of the reply that a site is sending

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.application(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets here
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            await self._answer(scope, receive, send)
        except Refused as refused:
            self._tell(f"refused {scope['method']} {scope['path'][:100]!r}: {refused}")
            await _send(send, refused.status, str(refused))

    def _tell(self, text: str) -> None:
        """At most once a second: whoever knocks often must not fill the disk."""
        if self.clock() >= self._told + 1.0:
            self._told = self.clock()
            self.say(text)

    async def _answer(self, scope: Scope, receive: Any, send: Any) -> None:
        path, headers = scope["path"], _headers(scope)
        if scope["method"] != "POST":
            raise Refused(405, "tacit: no such call")
        if path in OWN_CALLS:
            self._check_own(scope, headers)
            body = await _read(receive, headers, self.limits.own_call)
            if path == START_RUN and (why := self.start_run_refusal(body)):
                raise Refused(403, why)
            await self.application(scope, _once(body, receive), send)
        elif path in (INSECURE_CALLS if self.sites is None else SITE_CALLS):
            name = self._site(scope, headers)
            if self.sites is not None and self._busy.get(name, 0) >= self.limits.at_once:
                raise Refused(429, "tacit: too many calls at once")
            self._busy[name] = self._busy.get(name, 0) + 1
            try:
                body = await _read(receive, headers, self.limits.call)
                self._check_body(name, path, headers, body)
                await self.application(scope, _once(body, receive), send)
            finally:
                self._busy[name] -= 1
        else:
            raise Refused(404, "tacit: no such call")

    def _check_own(self, scope: Scope, headers: Mapping[str, str]) -> None:
        if not _from_here(scope):
            raise Refused(403, "tacit: only from the server's own machine")
        if not hmac.compare_digest(headers.get(SECRET, "").encode(), self.secret):
            raise Refused(403, "tacit: only for the user who runs the server")

    def _site(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """The name of the site that makes this call, proven before its message is read."""
        if self.sites is None:
            return "insecure"
        try:
            public_key = base64.b64decode(headers[PUBLIC_KEY], validate=True)
            name = self.sites().get(public_key)
            if name is None:
                raise Refused(401, UNKNOWN_KEY)
            nonce, timestamp, digest = headers[NONCE], headers[TIMESTAMP], headers[DIGEST]
            text = signed_text(scope["method"], scope["path"], timestamp, nonce, digest)
            if not verified(public_key, text, base64.b64decode(headers[SIGNATURE], validate=True)):
                raise Refused(401, "tacit: the signature does not fit the call")
            signed_at = datetime.datetime.fromisoformat(timestamp).timestamp()
        except (KeyError, ValueError, OverflowError):
            raise Refused(401, "tacit: a call without a signature") from None
        now = self.clock()
        if not (-AHEAD < now - signed_at < BEHIND and signed_at >= self.begun):
            raise Refused(401, f"{OTHER_CLOCK} by {now - signed_at:.0f} s (site behind server)")
        self._use(f"{name} {nonce}", now)
        return name

    def _use(self, nonce: str, now: float) -> None:
        """Refuse what was sent before; forget what is too old to be sent again."""
        while self._used and (oldest := next(iter(self._used))) and self._used[oldest] < now:
            del self._used[oldest]
        if nonce in self._used:
            raise Refused(401, "tacit: this call was made before")
        self._used[nonce] = now + AHEAD + BEHIND

    def _check_body(self, name: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        if self.sites is not None and not hmac.compare_digest(
            hashlib.sha256(body).hexdigest().encode(), headers[DIGEST].encode()
        ):
            raise Refused(401, "tacit: the message is not the one that was signed")
        if path == "/v1/fleet/push-messages":
            self._pushed[name] = 0
        elif path == "/v1/fleet/push-object":
            self._pushed[name] = self._pushed.get(name, 0) + len(body)
            if self.sites is not None and self._pushed[name] > self.limits.reply:
                raise Refused(413, f"tacit: a reply of more than {self.limits.reply} bytes")


def _headers(scope: Scope) -> dict[str, str]:
    """By name; one that comes twice counts as missing, so that nobody reads the other one."""
    found: dict[str, str] = {}
    twice = set()
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1").lower()
        twice |= {name} if name in found else set()
        found[name] = value.decode("latin-1")
    return {name: value for name, value in found.items() if name not in twice}


def _from_here(scope: Scope) -> bool:
    client, server = scope.get("client"), scope.get("server")
    return client is not None and (is_loopback(client[0]) or (server is not None and client[0] == server[0]))


async def _read(receive: Any, headers: Mapping[str, str], largest: int) -> bytes:
    """The whole message, if it is not too long, however it is sent."""
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()) or int(length[:20]) > largest:
        raise Refused(413, f"tacit: a message of more than {largest} bytes")
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "tacit: the message ended too early")
        body += message.get("body", b"")
        if len(body) > largest:
            raise Refused(413, f"tacit: a message of more than {largest} bytes")
        if not message.get("more_body"):
            return bytes(body)


def _once(body: bytes, receive: Any) -> Any:
    """The message as it was read, then whatever comes after it."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return waiting.pop() if waiting else await receive()

    return again


async def _send(send: Any, status: int, why: str) -> None:
    """In the form in which Flower tells its errors, so that its processes write the reason into their logs."""
    body = json.dumps({"code": status, "detail": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
