"""The folder of a server or of a site: one file of settings, and the keys that belong there and nowhere else.

server:  server.toml  ca.crt  ca.key  server.crt  server.key  sites/NAME.pub  state.db  jobs/  secret (while it runs)
site:    site.toml    key  NAME.pub  ca.crt (from the server)  kept/  sent.jsonl  sent.head  jobs/  policy.toml (if any)
"""

import datetime
import ipaddress
import os
import re
import secrets
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import tomli_w

from tacit.core.errors import TacitError
from tacit.core.files import write_atomically
from tacit.sites.guard import is_loopback

SERVER, SITE = "server.toml", "site.toml"
SECRET = "secret"  # the name of a file
YEARS = 5


@dataclass(frozen=True)
class ServerHome:
    """A server: where it listens, and by which names sites reach it."""

    folder: Path
    bind: str
    port: int
    hosts: tuple[str, ...]
    insecure: bool = False
    largest_reply_mb: int = 4096  # megabytes that a site may send in one reply

    @property
    def local_address(self) -> str:
        """Where this machine itself reaches the server."""
        here = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(self.bind, self.bind)
        return f"[{here}]:{self.port}" if ":" in here else f"{here}:{self.port}"

    def new_secret(self) -> None:
        """A new secret, for the calls of the user who runs the server."""
        path = self.folder / SECRET
        path.unlink(missing_ok=True)
        _write_secret(path, secrets.token_hex(32).encode())

    def secret(self) -> str:
        try:
            return (self.folder / SECRET).read_text()
        except FileNotFoundError:
            raise TacitError(f"The server of {self.folder} does not run. Start it: tacit site serve") from None
        except OSError as error:
            raise TacitError(
                f"{self.folder / SECRET} cannot be read ({error.strerror}). This is for the user who runs the server."
            ) from None

    def keys(self) -> Callable[[], dict[bytes, str]]:
        """Gives the keys that may join now, and whose they are. The folder is read again whenever it changes."""
        known: dict[bytes, str] = {}
        seen: list[object] = [None]

        def now() -> dict[bytes, str]:
            state = self.keys_state()
            if state != seen[0]:
                known.clear()
                for name, path in self.site_keys().items():
                    try:
                        known.setdefault(key_bytes(path), name)
                    except TacitError:
                        continue  # half a copy, or no key: `serve` tells of it
                seen[0] = state
            return known

        return now

    def keys_state(self) -> object:
        """Changes when a key comes, goes or is replaced."""
        found = []
        for entry in os.scandir(self.folder / "sites") if (self.folder / "sites").is_dir() else ():
            try:
                stat = entry.stat()
            except FileNotFoundError:  # gone in this moment
                continue
            found.append((entry.name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        return sorted(found)

    def site_keys(self) -> dict[str, Path]:
        """The public keys that sites sent, by the sites' names, in the order of their client numbers."""
        found = {path.stem: path for path in (self.folder / "sites").glob("*.pub")}
        return {name: found[name] for name in sorted(found, key=natural)}


@dataclass(frozen=True)
class SiteHome:
    """A site: its name and the server it works with."""

    folder: Path
    name: str
    server: str
    insecure: bool = False


def natural(name: str) -> list[tuple[int, int | str]]:
    """A key that sorts numbers within names by their value.

    >>> sorted(["site-10", "site-2"], key=natural)
    ['site-2', 'site-10']
    """
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part]


HOST = re.compile(
    r"(?!.{254})[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*"
)


def host_of(text: str, what: str) -> str:
    """A name or an address of a machine.

    >>> host_of("hospital.example", "--host"), host_of("10.1.2.3", "--host"), host_of("::1", "--host")
    ('hospital.example', '10.1.2.3', '::1')
    """
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        if HOST.fullmatch(text) and not text.rpartition(".")[2].isdecimal():
            return text
    raise TacitError(
        f"{what} is {text[:80]!r}, which is no name and no address of a machine. Expected one as in hospital.example "
        "or 10.1.2.3, without a port."
    )


def port_of(given: object, what: str) -> int:
    """A port; digits of other scripts are no digits here.

    >>> port_of("8443", "--port"), port_of(8443, "--port")
    (8443, 8443)
    """
    text = str(given)
    if text.isascii() and text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= 65535:
        return int(text)
    raise TacitError(f"{what} is {text[:80]!r}. Expected a port: a whole number from 1 to 65535, as in 8443.")


def address_of(text: str, what: str) -> tuple[str, int]:
    """A server's name and port.

    >>> address_of("hospital.example:8443", "--server"), address_of("[::1]:8443", "--server")
    (('hospital.example', 8443), ('::1', 8443))
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host):
        raise TacitError(f"{what} is {text[:80]!r}. Expected the server's name and port, as in hospital.example:8443.")
    return host_of(host[1:-1] if host[0] + host[-1] == "[]" else host, what), port_of(port, what)


def only_loopback(host: str) -> None:
    """Refuse to work without TLS and keys for anything but this machine."""
    if not is_loopback(host):
        raise TacitError(
            f"--insecure means no encryption and no keys, so it works on this machine alone (127.0.0.1), not for "
            f"'{host}'. Leave it out: keys and certificates are made for you."
        )


def init_server(folder: Path, hosts: tuple[str, ...], bind: str, port: int | str, insecure: bool) -> ServerHome:
    """A new server folder with a certificate authority of its own and a certificate for these names."""
    names = tuple(host_of(host, "--host") for host in hosts)
    bind = host_of(bind, "--bind")
    home = ServerHome(folder, bind, port_of(port, "--port"), names or ("localhost",), insecure)
    _check_kind(bind, insecure)
    _new(folder)
    if not insecure:
        make_certificates(folder, home.hosts, bind)
    (folder / "sites").mkdir(parents=True, exist_ok=True)
    _write(folder / SERVER, home)
    return home


def init_site(folder: Path, name: str, server: str, insecure: bool) -> SiteHome:
    """A new site folder with a key pair of its own. The private key never leaves it."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", name):
        raise TacitError(f"'{name}' is no name for a site. Use letters, digits, '-', '_' and '.', at most 63.")
    host, _ = address_of(server, "--server")
    _check_kind(host, insecure)
    _new(folder)
    home = SiteHome(folder, name, server, insecure)
    if not insecure:
        make_site_key(folder, name)
    _write(folder / SITE, home)
    return home


def _check_kind(host: str, insecure: bool) -> None:
    """What could go wrong with keys is told before a folder is made for them."""
    if insecure:
        only_loopback(host)
    else:
        _cryptography()


def read_home(folder: Path) -> ServerHome | SiteHome:
    """The server or site that lives in a folder."""
    try:
        if (folder / SERVER).is_file():
            given = tomllib.loads((folder / SERVER).read_text())
            hosts = tuple(host_of(str(host), "hosts") for host in given["hosts"])
            bind, port = host_of(str(given["bind"]), "bind"), port_of(given["port"], "port")
            largest = int(given.get("largest_reply_mb", ServerHome.largest_reply_mb))
            return ServerHome(folder, bind, port, hosts, bool(given.get("insecure")), largest)
        given = tomllib.loads((folder / SITE).read_text())
        address_of(str(given["server"]), "server")
        return SiteHome(folder, str(given["name"]), str(given["server"]), bool(given.get("insecure")))
    except (FileNotFoundError, NotADirectoryError):
        raise TacitError(
            f"{folder} is the folder of no server and no site. Make one with `tacit site init-server` or `tacit site "
            "init-client NAME`, or name it with --home."
        ) from None
    except (OSError, TacitError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise TacitError(f"The settings in {folder} cannot be read ({type(error).__name__}: {error}).") from None


def server_home(folder: Path) -> ServerHome:
    home = read_home(folder)
    if not isinstance(home, ServerHome):
        raise TacitError(f"{folder} is the folder of a site; this command is for the server's.")
    return home


def site_home(folder: Path) -> SiteHome:
    home = read_home(folder)
    if not isinstance(home, SiteHome):
        raise TacitError(f"{folder} is the folder of a server; this command is for a site's.")
    if not home.insecure and not (folder / "ca.crt").is_file():
        raise TacitError(f"{folder / 'ca.crt'} is missing: copy ca.crt from the server's folder there.")
    return home


def _new(folder: Path) -> None:
    """Make the folder, if there is no server or site in it already."""
    try:
        for there in (SERVER, SITE):
            if (folder / there).exists():
                raise TacitError(
                    f"{folder} already has a {there}. Nothing was changed: its keys are in use. Take another."
                )
        if folder.exists() and not folder.is_dir():
            raise TacitError(f"--home is {folder}, which is a file. Expected a folder, or a name that is free.")
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise TacitError(
            f"The folder {str(folder)[:200]!r} cannot be made ({reason}). Choose another --home."
        ) from None


def _write(path: Path, home: ServerHome | SiteHome) -> None:
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(home).items()}
    del settings["folder"]
    write_atomically(path, tomli_w.dumps(settings).encode())


def _write_secret(path: Path, data: bytes) -> None:
    """A file that only its owner can read, from its first moment on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


# --- Keys -------------------------------------------------------------------------------------------------


def make_certificates(folder: Path, hosts: tuple[str, ...], bind: str) -> None:
    """A certificate authority for this federation alone, and the server's certificate, signed by it."""
    x509, hashes, serialization, ec, name_oid = _cryptography()
    authority_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    authority = x509.Name([x509.NameAttribute(name_oid.COMMON_NAME, "tacit federation")])
    now = datetime.datetime.now(datetime.UTC)

    def certificate(subject: object, public_key: object) -> object:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
            .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )

    def usage(signs_certificates: bool) -> object:
        no = {"content_commitment": False, "data_encipherment": False, "key_agreement": False}
        return x509.KeyUsage(
            digital_signature=not signs_certificates,
            key_encipherment=False,
            key_cert_sign=signs_certificates,
            crl_sign=signs_certificates,
            encipher_only=False,
            decipher_only=False,
            **no,
        )

    root = certificate(authority, authority_key.public_key())
    root = root.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)  # type: ignore[attr-defined]
    root = root.add_extension(usage(True), critical=True).sign(authority_key, hashes.SHA384())
    names = list(
        dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1", *([] if bind in ("0.0.0.0", "::") else [bind])])
    )
    subject = x509.Name([x509.NameAttribute(name_oid.COMMON_NAME, "tacit server")])
    leaf = certificate(subject, key.public_key())
    leaf = leaf.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)  # type: ignore[attr-defined]
    leaf = leaf.add_extension(usage(False), critical=True)
    leaf = leaf.add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    leaf = leaf.add_extension(x509.SubjectAlternativeName([_alternative(x509, name) for name in names]), critical=False)
    leaf = leaf.sign(authority_key, hashes.SHA384())

    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    for path, private in (("ca.key", authority_key), ("server.key", key)):
        _write_secret(folder / path, private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    write_atomically(folder / "ca.crt", root.public_bytes(pem))
    write_atomically(folder / "server.crt", leaf.public_bytes(pem))


def _alternative(x509: object, name: str) -> object:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))  # type: ignore[attr-defined]
    except ValueError:
        return x509.DNSName(name)  # type: ignore[attr-defined]


def make_site_key(folder: Path, name: str) -> None:
    """A key pair as Flower wants it: NIST P-384, OpenSSH format."""
    _, _, serialization, ec, _ = _cryptography()
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write_secret(folder / "key", private)
    write_atomically(folder / f"{name}.pub", public + f" {name}\n".encode())


def key_bytes(path: Path) -> bytes:
    """A public key in the form in which Flower stores and sends it; anything else in the file is refused."""
    _, _, serialization, ec, _ = _cryptography()
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except Exception as error:  # whatever a parser of strange bytes raises
        raise TacitError(
            f"{path} is no public key of a site ({error}). Expected the NAME.pub that init-client made."
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise TacitError(f"{path} is a key of another kind. Expected the NAME.pub that `tacit site init-client` made.")
    return bytes(key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))


def remove_site(home: ServerHome, name: str) -> None:
    """Take a site's key away. A server that runs refuses it from its next call on."""
    path = home.site_keys().get(name)
    if path is None:
        there = ", ".join(home.site_keys()) or "none"
        raise TacitError(f"There is no site {name[:80]!r} in {home.folder / 'sites'} (there: {there}).")
    path.unlink()


def _cryptography() -> tuple:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise TacitError("Real sites need Flower and what comes with it: pip install 'tacit[flower]'") from None
    return x509, hashes, serialization, ec, NameOID
