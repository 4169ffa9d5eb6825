"""Every method is a file here, or a folder; and how one is found by its name, or in a file of the user's own."""

import hashlib
import importlib
import pkgutil
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

from tacit.contract.method import Method
from tacit.core.errors import TacitError, nearest


def known_methods() -> list[str]:
    """The names of all methods: the names of the files in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


@dataclass(frozen=True)
class MethodFile:
    """A method file as it was read. What is digested is what is executed, whatever becomes of the file meanwhile."""

    path: Path
    source: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> "MethodFile":
        try:
            return cls(path, path.read_bytes())
        except (OSError, ValueError):  # ValueError: NUL in the name
            raise TacitError(
                f"There is no method file {path}. Give the path of a .py file with a Method in it."
            ) from None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()

    def load(self) -> type[Method]:
        """Run the file; the class of its method."""
        module = types.ModuleType(f"tacit_own_{self.path.stem}")
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module  # dataclasses and type hints look their module up there
        try:
            exec(compile(self.source, str(self.path), "exec", dont_inherit=True), module.__dict__)
        except Exception as error:
            moved = isinstance(error, ModuleNotFoundError) and str(error.name).startswith("tacit.")
            raise TacitError(
                f"The method file {self.path} cannot be loaded: {type(error).__name__}: {error}."
                + (" What a method needs is now had with `from tacit import Method, Reply, Task, …`." if moved else "")
            ) from error
        return _method_in(module, self.path.stem)


def find_method(name: str) -> type[Method]:
    """The class of a method, by the name of its file; or by a path, for a method of your own (`./mine.py`)."""
    if name.endswith(".py"):
        return MethodFile.read(Path(name).expanduser()).load()
    if name in known_methods():
        return _method_in(importlib.import_module(f"tacit.methods.{name}"), name)
    known = ", ".join(known_methods())
    raise TacitError(f"There is no method '{name}'.{nearest(name, known_methods())} Known: {known}.")


def _method_in(module: types.ModuleType, stem: str) -> type[Method]:
    wanted = stem.replace("_", "").replace("-", "").lower()
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Method) and value.__name__.lower() == wanted:
            return value
    raise TacitError(
        f"The file of method '{stem}' defines no subclass of Method with that name. Expected a class whose name "
        f"in small letters is '{wanted}'."
    )
