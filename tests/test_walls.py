"""Method code cannot reach what it must not see."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tacit.config.resolve import resolve
from tacit.contract.parties import Client, Hub, NetPool, RoundInfo
from tacit.data.federation import Federation
from tacit.methods import known_methods
from tacit.runs.plan import prepare

PACKAGE = Path(__file__).parent.parent / "tacit"


def reachable(root: object) -> Iterator[torch.Tensor | np.ndarray]:
    """Every array that can be got at from an object: attributes, items, closures, bases of views."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, type | str | bytes | int | float):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor | np.ndarray):
            yield thing
            bases = (getattr(thing, "base", None), getattr(thing, "_base", None))
            stack += [base for base in bases if base is not None]
        elif isinstance(thing, dict):
            stack += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset):
            numbers = [entry for entry in thing if isinstance(entry, int)]
            if numbers and len(numbers) == len(thing):
                yield np.array(numbers)
            stack += list(thing)
        stack += list(getattr(thing, "__dict__", {}).values())
        stack += [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
        if hasattr(thing, "__self__"):
            stack.append(thing.__self__)
        if hasattr(thing, "__func__"):
            stack.append(thing.__func__)


@pytest.fixture(scope="module")
def world() -> tuple:
    plan = prepare(resolve({"method.name": "fixmatch", "data.name": "digits", "data.placement": "server"}))
    return plan, Federation(plan.dataset, plan.split, plan.setup.device)


def test_true_labels_of_unlabelled_images_are_out_of_reach(world: tuple) -> None:
    plan, federation = world
    truth = federation.truth(0)
    assert len(truth) > 20
    client = Client(plan.setup, federation.client_shard(0), RoundInfo("main", 0, 1, 0), 0, 0, NetPool(plan.setup))
    client.audit(torch.arange(3), torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))
    arrays = list(reachable(client))
    assert any(array is client.shard.unlabeled for array in arrays)  # the search does find what is there
    for array in arrays:
        found = torch.as_tensor(np.asarray(array))
        row = found.flatten() if found.numel() == len(found) else torch.zeros(0)  # one number an image, of any type
        assert len(row) < len(truth), "something as long as the labels is there"


def test_a_client_sees_its_own_images_only(world: tuple) -> None:
    plan, federation = world
    client = Client(plan.setup, federation.client_shard(0), RoundInfo("main", 0, 1, 0), 0, 0, NetPool(plan.setup))
    own = client.shard.unlabeled.numel()
    images = [a for a in reachable(client) if torch.as_tensor(np.asarray(a)).dtype == torch.uint8]
    assert sum(np.asarray(image).size for image in images) == own
    assert client.shard.unlabeled.untyped_storage().nbytes() == own  # not a view into everybody's images


def test_the_server_sees_no_client_data(world: tuple) -> None:
    plan, federation = world
    hub = Hub(plan.setup, federation.server_shard(), RoundInfo("main", 0, 1, 0), NetPool(plan.setup))
    images = [a for a in reachable(hub) if torch.as_tensor(np.asarray(a)).dtype == torch.uint8]
    assert sum(len(np.asarray(image)) for image in images) == plan.experiment.data.labels


def imports(path: Path) -> set[str]:
    """The modules that a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


STANDARD = sys.stdlib_module_names


@pytest.mark.parametrize("path", sorted((PACKAGE / "pieces").glob("*.py")), ids=lambda p: p.name)
def test_pieces_need_torch_and_nets_alone(path: Path) -> None:
    for name in imports(path):
        ours = name.startswith(("tacit.pieces", "tacit.nets", "tacit.views"))
        assert ours or name.split(".")[0] in STANDARD | {"torch"}, name


ALLOWED = (
    "tacit.contract",
    "tacit.core.errors",
    "tacit.core.payload",
    "tacit.methods",
    "tacit.nets",
    "tacit.pieces",
    "tacit.views",
)


@pytest.mark.parametrize("path", sorted((PACKAGE / "methods").rglob("*.py")), ids=lambda p: p.name)
def test_methods_see_the_contract_and_the_pieces(path: Path) -> None:
    for name in imports(path):
        inside = name.startswith("tacit")
        assert not inside or name.startswith(ALLOWED), f"{path.name} imports {name}"


def test_the_engine_knows_no_method_and_no_data_set() -> None:
    for path in [*(PACKAGE / "engine").glob("*.py"), *(PACKAGE / "backends").glob("*.py")]:
        text = path.read_text()
        for name in known_methods():
            assert name not in text.lower(), f"{path.name} knows {name}"
    for path in (PACKAGE / "methods").rglob("*.py"):
        for data in ("mnist", "cifar", "svhn", "isic"):
            assert data not in path.read_text().lower().replace("isically", ""), f"{path.name} knows {data}"


def test_no_global_randomness_and_no_pickle() -> None:
    banned = ("np.random.seed", "np.random.rand", "torch.manual_seed", "random.seed", "pickle.load(", "torch.load(")
    # The one pickle: published weights, by torch's reader that runs nothing, after the file's digest was compared.
    restricted = PACKAGE / "nets" / "weights.py"
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path == restricted:
            calls = [line for line in text.splitlines() if "torch.load(" in line]
            assert calls, "no pickle is read any more: this exception can go"
            assert all("weights_only=True" in line for line in calls), calls
            text = text.replace("torch.load(", "")
        assert not [word for word in banned if word in text], path


def test_one_console_for_all() -> None:
    """What is printed goes through `core.console.SafeConsole`: no name can act as markup or as a control code."""
    for path in PACKAGE.rglob("*.py"):
        if path.name == "console.py":
            continue
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        named = {ast.unparse(call.func) for call in calls}
        assert not named & {"Console", "rich.print", "typer.echo", "typer.secho", "click.echo", "Text.from_markup"}, (
            path
        )
        assert not {"rich.markup", "rich.panel", "rich.rule"} & imports(path), path  # they read markup on their own
        assert "Text.from_markup" not in named, path
        prints = [call for call in calls if ast.unparse(call.func) in ("print", "sys.stdout.write", "sys.stderr.write")]
        assert all(_harmless(call) for call in prints), path


def _harmless(call: ast.Call) -> bool:
    """Of `print`: text of our own, or what was made safe."""
    what = ast.unparse(call.args[0]) if call.args else "''"
    return isinstance(call.args[0], ast.Constant) or what.startswith(("json.dumps(", "safe_lines(", "f'tacit {"))
