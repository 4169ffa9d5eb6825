"""What the docs say is tried."""

import re
from pathlib import Path

from benchmarks import own_walk
from tacit.config.resolve import resolve
from tacit.engine.run import run_experiment
from tacit.methods import find_method, known_methods

ROOT = Path(__file__).parent.parent


def test_the_example_of_adding_a_method_runs(tmp_path: Path) -> None:
    """The code of the page, as it stands, in every placement; its note is in the record, its replies are accepted."""
    page = (ROOT / "docs" / "adding-a-method.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    path = tmp_path / "sharp.py"
    path.write_text(code)
    for placement in ("server", "clients", "some-clients"):
        settings = {"method.name": str(path), "method.preset": "smoke", "data.placement": placement, "rounds": 3}
        run = run_experiment(resolve(settings, {"data.labels": 300, "train.server_epochs": 5}), tmp_path / placement)
        assert len(run.records[-1]["client_weights"]) == 4
        assert not run.records[-1]["refused"]
    assert find_method(str(path)).citation == "nobody, today"


def test_the_walk_of_the_docs_can_be_run_again() -> None:
    """Each block of the page is the output of a step of `python -m benchmarks.own_walk`, and says of which command."""
    page = own_walk.PAGE.read_text()
    blocks = {found["name"]: found[0] for found in own_walk.BLOCK.finditer(page)}
    assert list(blocks) == list(own_walk.STEPS)
    for name, text in blocks.items():
        shown = re.findall(r"^    \$ (.*)$", text, flags=re.MULTILINE)
        assert shown in ([own_walk.STEPS[name].shown], [])
        assert shown or own_walk.STEPS[name].long, f"run `python -m benchmarks.own_walk FOLDER {name}`"
    same = {name: text.partition("-->\n")[2].removesuffix("<!-- /walk -->") for name, text in blocks.items()}
    assert own_walk.rendered(page, same) == page
    assert "/tmp" not in page


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_lists_every_method() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in known_methods():
        assert f"docs/methods/{name}.md" in readme
