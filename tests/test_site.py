"""The site builds without a warning, shows every page, and needs no network."""

import re
from pathlib import Path

import pytest

from tacit.cli.app import complete
from tacit.methods import known_methods

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder))
        config.plugins.on_startup(command="build", dirty=False)
        build(config)  # strict: a link that leads nowhere, or a page that nobody lists, ends it
    return folder


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    start = (site / "index.html").read_text()
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert {f"methods/{name}.html" for name in known_methods()} <= set(pages)
    for page in pages:
        assert (site / page).is_file(), page
        assert f'href="{page}"' in start, page


def test_the_references_are_made_from_the_code(site: Path) -> None:
    commands = (site / "reference" / "cli.html").read_text()
    for command in complete().registered_commands:
        name = command.name or command.callback.__name__  # type: ignore[union-attr]
        assert f"tacit {name}" in commands
    for option in ("--seeds", "--scale", "--track", "--json", "--dry-run"):
        assert option in commands
    pieces = (site / "reference" / "api" / "pieces.html").read_text()
    for path in (ROOT / "tacit" / "pieces").glob("[a-z]*.py"):
        assert f'id="tacit.pieces.{path.stem}"' in pieces
    assert (
        'id="tacit.contract.method.Method.client_train"'
        in (site / "reference" / "api" / "writing-a-method.html").read_text()
    )


def test_doctests_are_shown_as_code(site: Path) -> None:
    page = (site / "reference" / "api" / "comparing.html").read_text()
    assert re.search(
        r'<div class="highlight"><pre>.{0,40}<span class="gp">&gt;&gt;&gt; </span><span class="n">gap_closed', page
    )
    assert "<blockquote>" not in page  # what >>> means elsewhere


def test_no_page_fetches_anything(site: Path) -> None:
    fetched = r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="?(?:https?:)?//[^">]*'
    for page in site.rglob("*.html"):
        assert not re.findall(fetched, page.read_text()), page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?(?:https?:)?//", sheet.read_text()), sheet
