"""What the site makes by itself: the navigation, the command-line reference and the API reference.

mkdocs calls the three functions below while it builds (see mkdocs.yml). A new page in docs/, or a new method with its
page in docs/methods/, appears without being listed anywhere.
"""

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
FIRST = [
    "index.md",
    "your-own-images.md",
    "sites.md",
    "report.md",
    "quick-start.md",
    "concepts.md",
    "evidence.md",
    "protocols.md",
    "faq.md",
]
GUIDES = [
    "data.md",
    "splits.md",
    "views.md",
    "nets.md",
    "training.md",
    "guard.md",
    "privacy.md",
    "secure-aggregation.md",
    "compare.md",
    "trackers.md",
    "speed.md",
    "adding-a-method.md",
    "design.md",
]
# For people who write methods or use tacit from Python; the rest of the package is its own business.
API = {
    "Running and reading": [
        "tacit.api",
        "tacit.inference.notebook",
        "tacit.core.settings",
        "tacit.config.resolve",
        "tacit.runs.folder",
        "tacit.engine.run",
    ],
    "Comparing": [
        "tacit.compare.rows",
        "tacit.compare.results",
        "tacit.compare.t_test",
        "tacit.compare.tables",
        "tacit.config.scale",
        "tacit.runs.trackers",
    ],
    "Writing a method": [
        "tacit.contract.method",
        "tacit.contract.messages",
        "tacit.contract.parties",
        "tacit.contract.kinds",
        "tacit.contract.record",
        "tacit.core.payload",
        "tacit.methods",
    ],
    "Data": ["tacit.data.dataset", "tacit.data.split", "tacit.data.federation", "tacit.data.sources"],
    "Nets": ["tacit.nets"],
}


def api_pages() -> dict[str, tuple[str, list[str]]]:
    """Title and modules of each page of the API reference, by its file; all pieces, whichever there are."""
    found = {f"reference/api/{title.lower().replace(' ', '-')}.md": (title, modules) for title, modules in API.items()}
    pieces = sorted(path.stem for path in (DOCS.parent / "tacit" / "pieces").glob("[a-z]*.py"))
    found["reference/api/pieces.md"] = ("Pieces", [f"tacit.pieces.{name}" for name in pieces])
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation: some pages first, then all others, the methods by name, the references last."""
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    methods = sorted(page for page in written if page.startswith("methods/"))
    others = sorted(written - {*FIRST, *GUIDES, *methods})
    nav: list[Any] = [*FIRST, {"Guides": [*GUIDES, *others]}, {"Methods": methods}]
    api = [{title: page} for page, (title, _) in api_pages().items()]
    config.nav = [*nav, {"Reference": [{"Command line": "reference/cli.md"}, {"Python": api}]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that are not written by hand."""
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    for page, (title, modules) in api_pages().items():
        text = f"# {title}\n\n" + "\n\n".join(f"::: {module}" for module in modules) + "\n"
        files.append(File.generated(config, page, content=text))
    return files


def command_line() -> str:
    """All commands and their options, as the program itself knows them."""
    import typer
    from typer.cli import get_docs_for_click

    from tacit.cli.app import complete

    command = typer.main.get_command(complete())
    context = typer.Context(command, info_name="tacit")
    return get_docs_for_click(obj=command, ctx=context, name="tacit", title="The command line")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Tables in evidence/ lie outside of the site: their links become plain names of files."""
    import re

    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+(evidence/[^)]+)\)", r"\1 (`\2`)", markdown)
