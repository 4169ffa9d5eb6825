"""The guard in front of the server's port, as a plain ASGI application: who may call what, and how much is read."""

import asyncio
import base64
import datetime
import hashlib
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

from tacit.core.errors import TacitError
from tacit.sites import guard, keeper, process
from tacit.sites.control import Known
from tacit.sites.guard import Guard, Limits, signature_headers
from tacit.sites.home import init_server, init_site, key_bytes, remove_site

NOW = 1_800_000_000.0
KEY, OTHER = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
PARTS = ("flwr-public-key", "flwr-timestamp", "tacit-nonce", "tacit-digest", "tacit-signature")
NAMES = [part.encode() for part in (*PARTS, "tacit-secret", "content-length")]
PRINTABLE = "".join(map(chr, range(32, 127)))
PULL, PUSH = "/v1/fleet/pull-messages", "/v1/fleet/push-object"


def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def sign(key: ec.EllipticCurvePrivateKey) -> Callable[[bytes], bytes]:
    return lambda text: key.sign(text, ec.ECDSA(hashes.SHA256()))


def signed(
    path: str, body: bytes, key: ec.EllipticCurvePrivateKey = KEY, at: float = NOW + 10, method: str = "POST"
) -> dict[str, str]:
    """The headers of a call as a site makes it."""
    timestamp = datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()
    return {
        "flwr-public-key": base64.b64encode(pem(key)).decode(),
        "flwr-timestamp": timestamp,
        **signature_headers(sign(key), method, path, timestamp, body),
    }


@dataclass
class Server:
    """A guard before an application that answers 200 to anything; counts what is read from callers."""

    secret: str = "open sesame"
    insecure: bool = False
    limits: Limits = field(default_factory=Limits)
    refusal: str = ""

    def __post_init__(self) -> None:
        self.clock = NOW
        self.got: list[bytes] = []
        self.read = 0
        self.said: list[str] = []
        self.guard = Guard(
            self._application,
            self.secret,
            None if self.insecure else lambda: {pem(KEY): "north"},
            limits=self.limits,
            start_run_refusal=lambda body: self.refusal,
            say=self.said.append,
            clock=lambda: self.clock,
        )
        self.clock = NOW + 10

    async def _application(self, scope: dict, receive: Callable, send: Callable) -> None:
        message = await receive()
        assert not message["more_body"]
        self.got.append(message["body"])
        await send({"type": "http.response.start", "status": 200})

    def call(
        self,
        path: str,
        headers: dict[str, str] | Iterable[tuple[bytes, bytes]],
        pieces: Iterable[bytes] = (b"",),
        *,
        client: str = "10.0.0.9",
        method: str = "POST",
    ) -> int:
        return asyncio.run(self.answer(path, headers, pieces, client=client, method=method))

    async def answer(
        self, path: str, headers: Any, pieces: Iterable[bytes], *, client: str = "10.0.0.9", method: str = "POST"
    ) -> int:
        raw = [(n.encode(), v.encode()) for n, v in headers.items()] if isinstance(headers, dict) else list(headers)
        scope = {"type": "http", "method": method, "path": path, "headers": raw}
        scope |= {"client": (client, 5), "server": ("10.0.0.1", 8443)}
        statuses: list[int] = []
        waiting = iter([*pieces, None])

        async def receive() -> dict:
            await asyncio.sleep(0)
            piece = next(waiting)
            if piece is None:
                return {"type": "http.request", "body": b"", "more_body": False}
            self.read += len(piece)
            return {"type": "http.request", "body": piece, "more_body": True}

        async def send(message: dict) -> None:
            statuses.append(message.get("status", 0))

        await self.guard(scope, receive, send)
        return statuses[0]


# --- Who may call what ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(guard.OWN_CALLS))
def test_own_calls_need_this_machine_and_the_secret(path: str) -> None:
    server = Server()
    good = {"tacit-secret": "open sesame"}
    assert server.call(path, good, [b"x"], client="10.0.0.9") == 403
    assert server.call(path, {}, [b"x"], client="127.0.0.1") == 403
    assert server.call(path, {"tacit-secret": "open sesamE"}, [b"x"], client="127.0.0.1") == 403
    twice = [(b"tacit-secret", b"open sesame"), (b"Tacit-Secret", b"open sesame")]
    assert server.call(path, twice, [b"x"], client="127.0.0.1") == 403
    assert server.call(path, signed(path, b"x"), [b"x"], client="127.0.0.1") == 403  # a site is no owner
    assert (server.read, server.got) == (0, [])  # nothing of all that was read
    assert server.call(path, good, [b"x"], client="127.0.0.1") == 200
    assert server.call(path, good, [b"x"], client="10.0.0.1") == 200  # the server itself, by its own address
    assert server.got == [b"x", b"x"]


def test_no_other_call_of_flowers_is_answered_to_anybody() -> None:
    main = pytest.importorskip("flwr.superlink.main")
    from fastapi.routing import iter_route_contexts

    known = {getattr(context.route, "path", "") for context in iter_route_contexts(main.create_app().routes)}
    ours = guard.OWN_CALLS | guard.SITE_CALLS
    assert ours <= known  # they are spelled as Flower spells them
    assert {"/v1/control/start-automation", "/v1/runtime/create-task", "/v1/fleet/register-node"} < known - ours
    server = Server()
    odd = {"/docs", "", "/", "//v1/fleet/pull-messages", "/v1/fleet/", "/V1/fleet/pull-messages", PULL + "/"}
    for path in (known - ours) | odd:
        headers = signed(path, b"") | {"tacit-secret": "open sesame"}
        assert server.call(path, headers, [b"x"], client="127.0.0.1") == 404
    for method in ("GET", "PUT", "HEAD", "OPTIONS"):
        assert server.call(PULL, signed(PULL, b"", method=method), method=method) == 405
    assert (server.read, server.got) == (0, [])


def test_web_sockets_are_closed() -> None:
    server, sent = Server(), []

    async def note(message: dict) -> None:
        sent.append(message["type"])

    asyncio.run(server.guard({"type": "websocket", "path": PULL, "headers": []}, None, note))
    assert sent == ["websocket.close"]


def test_insecure_sites_need_no_key_and_runs_need_the_secret_all_the_same() -> None:
    server = Server(insecure=True)
    assert server.call("/v1/fleet/register-node", {}, [b"x"]) == 200
    assert server.call(guard.START_RUN, {}, client="127.0.0.1") == 403
    assert server.call(guard.START_RUN, {"tacit-secret": "open sesame"}, client="127.0.0.1") == 200


def test_a_run_of_another_app_is_refused() -> None:
    server = Server(refusal="not ours")
    assert server.call(guard.START_RUN, {"tacit-secret": "open sesame"}, client="127.0.0.1") == 403
    assert not server.got


# --- Signatures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(guard.SITE_CALLS))
def test_a_site_makes_its_calls(path: str) -> None:
    server = Server()
    assert server.call(path, signed(path, b"a message"), [b"a ", b"mess", b"age"]) == 200
    assert server.got == [b"a message"]


@pytest.mark.parametrize("missing", PARTS)
def test_without_a_part_of_the_signature_nothing_is_read(missing: str) -> None:
    server = Server()
    headers = signed(PULL, b"x")
    without = {name: value for name, value in headers.items() if name != missing}
    for wrong in (without, {**headers, missing: "%"}, {**headers, missing: ""}):
        assert server.call(PULL, wrong, [b"x"]) == 401
    assert (server.read, server.got) == (0, [])


@given(st.data())
def test_what_was_signed_is_what_counts(data: st.DataObject) -> None:
    """Change any one part of a call: it is refused. So is every other body under the same headers."""
    server = Server()
    body = data.draw(st.binary(max_size=50))
    headers = signed(PULL, body)
    part = data.draw(st.sampled_from(["path", "body", "key", *headers]))
    path, sent = PULL, body
    if part == "path":
        path = data.draw(st.sampled_from(sorted(guard.SITE_CALLS - {PULL})))
    elif part == "body":
        sent = data.draw(st.binary(max_size=50).filter(lambda other: other != body))
    elif part == "key":
        headers = signed(PULL, body, OTHER)
    else:
        true = headers[part]
        headers[part] = data.draw(st.text(PRINTABLE, max_size=80).filter(lambda text: text != true))
    assert server.call(path, headers, [sent]) == 401
    assert not server.got
    assert server.read == (len(sent) if part == "body" else 0)


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=40))))
def test_strange_headers_are_refused_and_raise_nothing(headers: list[tuple[bytes, bytes]]) -> None:
    server = Server()
    assert server.call(PULL, headers, [b"x"]) in (401, 413)
    assert server.call(guard.START_RUN, headers, [b"x"], client="127.0.0.1") in (403, 413)
    assert server.read == 0


def test_a_call_is_taken_once() -> None:
    server = Server()
    headers = signed(PULL, b"x")
    assert server.call(PULL, headers, [b"x"]) == 200
    assert server.call(PULL, headers, [b"x"]) == 401
    # ECDSA: whoever sees a signature can make another valid one of it.
    r, s = utils.decode_dss_signature(base64.b64decode(headers["tacit-signature"]))
    order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973
    twin = base64.b64encode(utils.encode_dss_signature(r, order - s)).decode()
    text = guard.signed_text("POST", PULL, headers["flwr-timestamp"], headers["tacit-nonce"], headers["tacit-digest"])
    assert guard.verified(pem(KEY), text, base64.b64decode(twin))
    assert server.call(PULL, {**headers, "tacit-signature": twin}, [b"x"]) == 401
    server.clock += 600  # too old by now, whether it is remembered or not
    assert server.call(PULL, headers, [b"x"]) == 401
    assert server.call(PULL, signed(PULL, b"x", at=server.clock), [b"x"]) == 200
    assert len(server.guard._used) == 1  # what is too old is forgotten


@pytest.mark.parametrize(("off", "status"), [(-299, 200), (-301, 401), (4, 200), (6, 401)])
def test_clocks_may_differ_a_little(off: float, status: int) -> None:
    server = Server()
    server.clock = NOW + 1000
    assert server.call(PULL, signed(PULL, b"", at=server.clock + off)) == status


def test_what_was_signed_before_the_server_began_is_not_taken_again_after_a_restart() -> None:
    assert Server().call(PULL, signed(PULL, b"", at=NOW - 1)) == 401


def test_refusals_cannot_fill_the_log() -> None:
    server = Server()
    for _ in range(100):
        server.call("/" + "x" * 10_000, {})
    assert len(server.said) == 1
    assert len(server.said[0]) < 200


# --- How much is read -------------------------------------------------------------------------------------


def test_a_long_message_is_refused_by_its_told_length_and_by_its_true_one() -> None:
    body = b"x" * 1001
    for told in ("1001", "9" * 400, "-1", "٣", "1e3", ""):
        server = Server(limits=Limits(call=1000, own_call=1000))
        assert server.call(PUSH, signed(PUSH, body) | {"content-length": told}, [body]) == 413
        assert server.read == 0
    server = Server(limits=Limits(call=1000, own_call=1000))
    pieces = [b"x" * 100] * 40  # in pieces, without a length
    assert server.call(PUSH, signed(PUSH, body), pieces) == 413
    assert server.read == 1100
    own = {"tacit-secret": "open sesame"}
    assert server.call(guard.START_RUN, own, pieces, client="127.0.0.1") == 413
    assert server.read == 2200


def test_all_pieces_of_a_reply_together_are_bounded() -> None:
    server = Server(limits=Limits(call=1000, reply=2500))
    push = "/v1/fleet/push-messages"
    for _ in range(2):  # a new reply begins at nothing
        assert server.call(push, signed(push, b""), [b""]) == 200
        for number in range(3):
            body = b"x" * 1000
            assert server.call(PUSH, signed(PUSH, body), [body]) == (413 if number == 2 else 200)


def test_a_site_makes_a_few_calls_at_once() -> None:
    server = Server(limits=Limits(at_once=2))

    async def four() -> list[int]:
        return await asyncio.gather(*(server.answer(PULL, signed(PULL, b""), [b""]) for _ in range(4)))

    assert sorted(asyncio.run(four())) == [200, 200, 429, 429]
    assert server.call(PULL, signed(PULL, b"")) == 200  # and again when they are done
    server = Server(limits=Limits(at_once=2), insecure=True)  # nobody knows there whose calls they are
    assert asyncio.run(four()) == [200] * 4


def test_a_message_that_ends_too_early_is_none() -> None:
    server = Server()

    async def gone() -> dict:
        return {"type": "http.disconnect"}

    statuses = []

    async def note(message: dict) -> None:
        statuses.append(message.get("status", 0))

    headers = [(name.encode(), value.encode()) for name, value in signed(PULL, b"x").items()]
    scope = {"type": "http", "method": "POST", "path": PULL, "headers": headers, "client": ("1.2.3.4", 1)}
    asyncio.run(server.guard(scope, gone, note))
    assert statuses[0] == 400
    assert not server.got


# --- The folder of keys is the truth ----------------------------------------------------------------------


def test_keys_come_and_go_with_their_files(tmp_path: Path) -> None:
    home = init_server(tmp_path / "server", (), "127.0.0.1", 8443, insecure=False)
    for name in ("north", "east"):
        init_site(tmp_path / name, name, "localhost:8443", insecure=False)
    north, east = (tmp_path / name / f"{name}.pub" for name in ("north", "east"))
    folder, keys = home.folder / "sites", home.keys()
    assert keys() == {}
    (folder / "north.pub").write_bytes(north.read_bytes()[:50])  # half a copy
    assert keys() == {}
    (folder / "north.pub").write_bytes(north.read_bytes())
    assert keys() == {key_bytes(north): "north"}
    (folder / "north.pub").write_bytes(east.read_bytes())  # replaced, of the same length
    assert keys() == {key_bytes(east): "north"}
    (folder / "north.pub").rename(folder / "east.pub")
    assert keys() == {key_bytes(east): "east"}
    with pytest.raises(TacitError, match=r"no site 'west' .* \(there: east\)"):
        remove_site(home, "west")
    with pytest.raises(TacitError, match=r"no site '\.\./\.\./server'"):
        remove_site(home, "../../server")
    remove_site(home, "east")
    assert keys() == {}
    folder.rmdir()
    assert keys() == {}


class List:
    """Flower's list of sites, as the server's own connection shows it."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}
        self.done: list[str] = []
        self.away = False

    def sites(self) -> list[Known]:
        if self.away:
            raise TacitError("The server cannot be reached")
        return list(self.known.values())

    def register(self, name: str, key: bytes) -> None:
        if key in {site.public_key for site in self.known.values()}:
            raise TacitError("Public key already in use")
        self.known[name] = Known(name, len(self.done), "registered", key)
        self.done.append(f"+{name}")

    def unregister(self, site: Known) -> None:
        del self.known[site.name]
        self.done.append(f"-{site.name}")


def test_flowers_list_of_sites_is_made_the_folders(tmp_path: Path) -> None:
    home = init_server(tmp_path / "server", (), "127.0.0.1", 8443, insecure=False)
    pubs = {}
    for name in ("a", "b", "c"):
        init_site(tmp_path / name, name, "localhost:8443", insecure=False)
        pubs[name] = tmp_path / name / f"{name}.pub"
    folder, control = home.folder / "sites", List()
    said: list[str] = []

    def agree() -> list[str]:
        control.done.clear()
        assert keeper._agree(control, home, said.append)
        return control.done

    control.register("old", b"a key that is in no file")  # from an earlier time of the server
    shutil.copy(pubs["a"], folder)
    assert agree() == ["-old", "+a"]
    assert agree() == []
    shutil.copy(pubs["b"], folder / "a.pub")  # replaced
    assert agree() == ["-a", "+a"]
    assert control.known["a"].public_key == key_bytes(pubs["b"])
    (folder / "a.pub").rename(folder / "b.pub")  # the same key under another name: taken away first
    assert agree() == ["-a", "+b"]
    shutil.copy(pubs["b"], folder / "twin.pub")
    (folder / "c.pub").write_bytes(b"no key")
    assert agree() == []
    assert any("twin could not be registered" in line for line in said)
    assert any("c could not be registered" in line for line in said)
    (folder / "b.pub").unlink()
    control.away = True
    assert not keeper._agree(control, home, said.append)  # and it is tried again
    control.away = False
    assert agree() == ["-b", "+twin"]


def test_the_secret_is_new_at_each_start_and_its_owners_alone(tmp_path: Path) -> None:
    home = init_server(tmp_path / "server", (), "127.0.0.1", 8443, insecure=True)
    with pytest.raises(TacitError, match="does not run"):
        home.secret()
    home.new_secret()
    first = home.secret()
    assert len(first) == 64
    assert (home.folder / "secret").stat().st_mode & 0o077 == 0
    assert home.folder.stat().st_mode & 0o077 == 0
    home.new_secret()
    assert home.secret() != first


def test_the_server_starts_its_own_app_by_digest_and_no_other() -> None:
    control_pb2 = pytest.importorskip("flwr.proto.control_pb2")
    from flwr.proto.fab_pb2 import Fab

    def request(content: bytes, **more: Any) -> bytes:
        fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
        return bytes(control_pb2.StartRunRequest(fab=fab, **more).SerializeToString())

    ours = process.own_bundle()
    assert ours == process.own_bundle()  # the same bytes each time
    assert process.start_run_refusal(request(ours)) == ""
    for body in (request(ours + b"\0"), request(b""), request(ours, app_spec="@someone/app"), b"", b"\xff" * 9):
        assert "tacit: " in process.start_run_refusal(body)
    stored = control_pb2.StartRunRequest(fab=Fab(hash_str=hashlib.sha256(ours).hexdigest()))  # one from its database
    assert "tacit: " in process.start_run_refusal(stored.SerializeToString())


def test_what_is_about_to_be_installed_is_looked_at_again() -> None:
    pytest.importorskip("flwr")

    class Module:
        installed: list[bytes] = []  # noqa: RUF012

        @staticmethod
        def install_from_fab(content: bytes, skip_prompt: bool) -> None:
            Module.installed.append(content)

    process._install_only(Module)
    ours = process.own_bundle()
    Module.install_from_fab(ours, skip_prompt=True)
    with pytest.raises(RuntimeError, match="not tacit's own"):
        Module.install_from_fab(b"another", skip_prompt=True)
    assert Module.installed == [ours]
