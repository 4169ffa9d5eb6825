"""What the server's own machine says to Flower: who may join, who is there, start the app."""

import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tacit.core.errors import TacitError
from tacit.sites.home import ServerHome
from tacit.sites.process import own_bundle, with_secret


@dataclass(frozen=True)
class Known:
    """A site as the server knows it."""

    name: str
    node: int
    status: str  # registered, online, offline
    public_key: bytes


class Control:
    """A connection to the server by the user who runs it, on its own machine (all others are refused)."""

    def __init__(self, home: ServerHome) -> None:
        from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        self.client = ControlHttpClient.from_server_address(
            server_address=home.local_address,
            insecure=home.insecure,
            root_certificates=None if home.insecure else (home.folder / "ca.crt").read_bytes(),
            interceptors=[
                CliClientHttpInterceptor(),
                RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
                with_secret(home.secret()),
            ],
        )

    def _call(self, method: Any, request: Any) -> Any:
        import httpx

        try:
            return method(request)
        except httpx.HTTPStatusError as error:
            raise TacitError(
                f"The server refused this ({error.response.status_code}: {error.response.text[:300]})."
            ) from None
        except httpx.HTTPError as error:
            raise TacitError(f"The server cannot be reached ({type(error).__name__}: {error}).") from None

    def sites(self) -> list[Known]:
        from flwr.proto.control_pb2 import ListNodesRequest

        nodes = self._call(self.client.ListNodes, ListNodesRequest()).nodes_info
        return [
            Known(node.name, node.node_id, node.status, node.public_key)
            for node in nodes
            if node.status != "unregistered"
        ]

    def register(self, name: str, key: bytes) -> None:
        """From now on the owner of this key may join under this name."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        self._call(self.client.RegisterNode, RegisterNodeRequest(public_key=key, name=name))

    def unregister(self, site: Known) -> None:
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        self._call(self.client.UnregisterNode, UnregisterNodeRequest(node_id=site.node))

    def start(self, job: str) -> None:
        """Let Flower start the server app for a job."""
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        bundle = own_bundle()
        app = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
        request = StartRunRequest(fab=app, override_config=user_config_to_proto({"job": job}))
        if not self._call(self.client.StartRun, request).HasField("run_id"):
            raise TacitError("Flower did not take the run. The server's log may say why.")

    def close(self) -> None:
        with suppress(Exception):
            self.client.close()


def wait_until_ready(home: ServerHome, seconds: float) -> Control:
    """A connection to a server that has just been started."""
    end = time.monotonic() + seconds
    while True:
        control = Control(home)
        try:
            control.sites()
            return control
        except TacitError:
            control.close()
            if time.monotonic() > end:
                raise
        time.sleep(0.3)
