"""Find the method that is meant, and look at what can be seen before it runs: class, options, declarations, presets."""

import dataclasses
import inspect
import sys
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit.config.resolve import build_method, resolve
from tacit.contract import kinds
from tacit.contract.method import PLACEMENTS, Method
from tacit.core.errors import TacitError, nearest
from tacit.core.paths import user_path
from tacit.core.text import safe
from tacit.methods import MethodFile, find_method, known_methods
from tacit.runs.plan import stages_of
from tacit.testing.findings import Problem, Verdict, judged, sentence
from tacit.testing.observe import DECLARATIONS
from tacit.testing.trial import told

FROZEN = "Write @dataclass(frozen=True) above the class: there is nothing to remember things on."


@dataclass(frozen=True)
class Subject:
    """Which method is meant: a name that tacit knows, or a file."""

    name: str  # as `method.name` takes it
    file: Path | None = None
    wanted: str = ""  # the class that must be in the file, where a class was given

    @property
    def shown(self) -> str:
        return self.file.name if self.file else self.name


def find_subject(method: str | Path | type[Method]) -> Subject:
    """The method that is meant; a TacitError if there is no such file or name."""
    if isinstance(method, type):
        return _subject_of_class(method)
    text = str(method)
    if not text.endswith(".py"):
        if isinstance(method, str) and text in known_methods():
            return Subject(text)
        if isinstance(method, str) and "/" not in text:
            beside = f" There is a file {safe(text)}.py here: give it as {safe(text)}.py." if _is_file(text) else ""
            known = ", ".join(known_methods())
            raise TacitError(
                f"There is no method '{safe(text)}'.{beside or nearest(text, known_methods())} Give a file of your own "
                f"(./mine.py), or one of: {known}."
            )
        raise TacitError(f"'{safe(text)}' is no method file. Give the path of a .py file with a Method in it.")
    path = user_path(text)
    MethodFile.read(path)  # a file that is not there, or cannot be read, is no method that breaks rules
    return Subject(str(path.resolve()), path.resolve())


def _is_file(name: str) -> bool:
    try:
        return Path(f"{name}.py").is_file()
    except (OSError, ValueError):
        return False


def _subject_of_class(kind: type[Method]) -> Subject:
    package = kind.__module__.split(".")
    if package[:2] == ["tacit", "methods"] and find_method(package[2]) is kind:
        return Subject(package[2])
    source = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if source is None or not Path(source).is_file():
        raise TacitError(
            f"{kind.__name__} stands in no file, and workers load a method from its file. Save it as "
            f"{kind.__name__.lower()}.py and check that."
        )
    path = Path(source).resolve()
    return Subject(str(path), path, kind.__name__)


def loads(subject: Subject) -> tuple[type[Method] | None, Verdict]:
    """The class of the method, if it can be used at all, and what is wrong with it."""
    if subject.wanted and subject.file and not _named_alike(subject.wanted, subject.file.stem):
        why = f"{subject.wanted} stands in {safe(subject.file.name)}, but a method is found by the name of its file."
        return None, judged([Problem(why, f"Put it into a file {subject.wanted.lower()}.py, and check that.")])
    try:
        kind = find_method(subject.name)
    except (Exception, SystemExit) as error:
        return None, judged([_not_loaded(subject, error)])
    problems = [*_of_the_class(kind), *_of_placements(kind), *_of_declarations(kind)]
    if not problems:  # what is wrong above would be told again, in other words
        problems = _of_presets(kind, subject)
    return (kind if not problems else None), judged(problems)


def _named_alike(name: str, stem: str) -> bool:
    return name.lower() == stem.replace("_", "").replace("-", "").lower()


def _not_loaded(subject: Subject, error: BaseException) -> Problem:
    cause = error.__cause__ if error.__cause__ is not None else error
    file = safe(subject.shown)
    if isinstance(cause, TypeError) and "frozen" in str(cause):  # Python's own words, of a class that is not
        return Problem(f"A class in {file} is a dataclass, but not frozen ({cause}).", FROZEN)
    if cause is not error or not isinstance(error, TacitError):
        return Problem(
            sentence(f"{file} cannot be loaded: {told(cause, subject.file)}"),
            "Mend this; the file is executed from top to bottom whenever a run begins.",
        )
    stem = Path(subject.name).stem
    module = sys.modules.get(f"tacit_own_{stem}")
    own = [value for value in vars(module).values() if isinstance(value, type)] if module else []
    here = [value for value in own if module is not None and value.__module__ == module.__name__]
    methods = [value.__name__ for value in here if issubclass(value, Method)]
    alike = [value.__name__ for value in here if _named_alike(value.__name__, stem)]
    if alike:
        return Problem(f"{alike[0]} is no subclass of Method.", f"Write `class {alike[0]}(Method):`.")
    class_name = "".join(part.capitalize() for part in stem.replace("-", "_").split("_"))
    found = f"it defines {', '.join(methods)}" if methods else "it defines none"
    renamed = f", or the file {methods[0].lower()}.py" if methods else ""
    return Problem(
        f"{file} defines no subclass of Method with the file's name: {found}.",
        f"Name the class {class_name} (in small letters and without _ it must be the file's name){renamed}.",
    )


def _of_the_class(kind: type[Method]) -> list[Problem]:
    problems = []
    name = kind.__name__
    if "__dataclass_params__" not in vars(kind):  # a base's does not count: fields here would be no options
        problems.append(Problem(f"{name} is no dataclass of its own, so one can set attributes on it.", FROZEN))
    elif not getattr(kind, "__dataclass_params__").frozen:  # noqa: B009
        problems.append(Problem(f"{name} is a dataclass, but not frozen.", FROZEN))
    options = {option.name: option for option in dataclasses.fields(kind)}
    typed = inspect.get_annotations(kind)
    for attribute, value in vars(kind).items():
        bare = isinstance(value, bool | int | float | str) and attribute not in typed and not attribute.isupper()
        if bare and not attribute.startswith("_") and not hasattr(Method, attribute):
            kept = " and the base's default holds" if attribute in options else ""
            problems.append(
                Problem(
                    f"{name}.{attribute} = {value!r} has no type, so it is no option{kept}.",
                    f"Write `{attribute}: {type(value).__name__} = {value!r}` for an option, or "
                    f"`{attribute}: ClassVar[{type(value).__name__}]` for a constant.",
                )
            )
    try:
        hints = typing.get_type_hints(kind)
    except Exception as error:
        why = f"The type of an option of {name} cannot be read: {safe(error)}."
        return [*problems, Problem(why, "Import the names that its types are made of.")]
    for option in options.values():
        if hints[option.name] in (Any, object):
            problems.append(
                Problem(
                    f"The option {name}.{option.name} has no type that can be checked.",
                    f"Write float, int, bool, str or a Literal, or tacit's Share, Positive, Count: "
                    f"`{option.name}: Share = …`.",
                )
            )
        missing = dataclasses.MISSING
        if option.default is missing and option.default_factory is missing:
            problems.append(
                Problem(
                    f"The option {name}.{option.name} has no default.",
                    f"Write one: `{option.name}: … = …`; what a paper sets otherwise belongs into presets.",
                )
            )
    return problems


def _of_placements(kind: type[Method]) -> list[Problem]:
    given, known = kind.placements, ", ".join(f'"{place}"' for place in PLACEMENTS)
    if isinstance(given, str) or not isinstance(given, tuple | list) or not given:
        shown = safe(repr(given), 60)
        remedy = f"Write a tuple of {known}: `placements: ClassVar = ({PLACEMENTS[0]!r},)`."
        return [Problem(f"placements = {shown} is no tuple of placements.", remedy)]
    return [
        Problem(
            f"placements has {safe(repr(place), 60)}, which is no placement.{nearest(str(place), PLACEMENTS)}",
            f"Write some of {known}; leave placements out if it works with all of them.",
        )
        for place in given
        if place not in PLACEMENTS
    ]


def _of_declarations(kind: type[Method]) -> list[Problem]:
    problems = []
    for attribute in DECLARATIONS:
        declared: object = getattr(kind, attribute)
        if not isinstance(declared, Mapping):
            why = f"{attribute} is a {type(declared).__name__}, not a dict of names and kinds."
            problems.append(Problem(why, f'Write `{attribute}: ClassVar = {{"model": "weights"}}`.'))
            continue
        for name, text in declared.items():
            try:
                kinds.parse(text)
            except (TacitError, TypeError) as error:
                why = f"{attribute} declares {safe(repr(name), 60)}: {safe(repr(text), 60)}, which says nothing."
                problems.append(Problem(why, safe(error, 500) if isinstance(error, TacitError) else "Write a text."))
    return problems


def _of_presets(kind: type[Method], subject: Subject) -> list[Problem]:
    presets: object = kind.presets
    if not isinstance(presets, Mapping):
        return [Problem("presets is no dict.", 'Write `presets: ClassVar = {"paper": {}, "smoke": {}}`.')]
    problems = [
        Problem(
            f"There is no preset '{preset}'.",
            f'Write `presets: ClassVar = {{"paper": {{}}, "smoke": {{…}}}}`: {what}.',
        )
        for preset, what in (
            ("paper", "paper has the settings of the paper, {} the defaults"),
            ("smoke", "smoke runs every stage in seconds on the embedded digits"),
        )
        if preset not in presets
    ]
    for preset in presets:
        for placement in kind.placements:
            if problem := _unresolved(kind, subject, preset, placement):
                problems.append(problem)
                break  # the other placements would say the same
    return problems


def _unresolved(kind: type[Method], subject: Subject, preset: str, placement: str) -> Problem | None:
    """Why a preset does not become an experiment that can be saved and read again."""
    layers = {"method.name": subject.name, "method.preset": preset, "data.placement": placement}
    try:
        experiment = resolve(layers)
        built = build_method(experiment, kind)
        stages_of(experiment, kind)
        again = build_method(resolve(tomllib.loads(experiment.to_toml())), kind)
    except (Exception, SystemExit) as error:
        why = f"The preset '{safe(preset)}' cannot be used (labels at {placement}): {told(error, subject.file)}"
        remedy = "Mend it in presets: a plain key is an option of the method, a dotted one a key of the experiment."
        return Problem(sentence(why), remedy)
    if built != again:
        why = f"The preset '{safe(preset)}', written as TOML and read again, gives other options."
        return Problem(why, "Give options types that TOML has: bool, int, float, str, or a Literal of them.")
    return None
