"""The rooms of docs/design.md: who may import whom. Lazy imports and those for types alone count, too."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tacit"
DESIGN = PACKAGE.parent / "docs" / "design.md"


@cache
def modules() -> dict[str, Path]:
    """Every module of tacit by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """Which modules of tacit each module imports, at any depth of its code."""
    graph = {}
    for name, path in modules().items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name} imports relatively"
                deeper = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {full if full in modules() else str(node.module) for full in deeper}
        graph[name] = frozenset((named & modules().keys()) - {name})
    return graph


def room(module: str) -> str:
    """
    >>> room("tacit.data.split"), room("tacit")
    ('data', 'tacit')
    """
    return module.split(".")[1] if "." in module else module


def floors() -> list[set[str]]:
    """The rooms as docs/design.md lists them, the lowest first; those of one line do not import each other."""
    text = DESIGN.read_text()
    listed = text.split("<!-- floors -->")[1].splitlines()
    rows = [line.split("|")[1] for line in listed if line.startswith("| `")]
    return [{word.strip("` /") for word in row.split(",")} for row in reversed(rows)]


def test_every_room_is_on_a_floor() -> None:
    rooms = {room(module) for module in modules()} - {"__main__"}
    named = [name for floor in floors() for name in floor]
    assert sorted(named) == sorted(rooms)


def test_imports_go_down_only() -> None:
    level = {name: number for number, floor in enumerate(floors()) for name in floor} | {"__main__": 99}
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if room(module) != room(other) and level[room(other)] >= level[room(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_circle_even_with_lazy_imports() -> None:
    left = {module: set(others) for module, others in imports().items()}
    while free := [module for module, others in left.items() if not others]:
        for module in free:
            del left[module]
        for others in left.values():
            others.difference_update(free)
    assert not left, f"these modules import each other: {sorted(left)}"


def test_the_search_finds_lazy_imports() -> None:
    assert "tacit.api" in imports()["tacit"]  # for types
    assert "tacit.engine.run" in imports()["tacit.cli.running"]  # within a function


def test_nobody_imports_what_is_private_elsewhere() -> None:
    wrong = []
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tacit"):
                wrong += [f"{name}: {a.name}" for a in node.names if a.name.startswith("_") and a.name[1] != "_"]
    assert not wrong


def test_the_command_line_knows_no_method() -> None:
    wrong = [
        (module, other)
        for module, others in imports().items()
        for other in others
        if room(module) == "cli" and other.startswith("tacit.methods.")
    ]
    assert not wrong
