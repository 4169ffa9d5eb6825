"""What stands around the code says what is so: contributing, changelog, citation, security, workflow, container."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import tacit

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", ".github/pull_request_template.md"]


def text(name: str) -> str:
    return (ROOT / name).read_text()


# --- The version ------------------------------------------------------------------------------------------


def test_the_version_is_written_in_one_place() -> None:
    settings = tomllib.loads(text("pyproject.toml"))
    assert "version" not in settings["project"]
    assert "version" in settings["project"]["dynamic"]
    source = settings["tool"]["hatch"]["version"]["path"]
    assert re.findall(r'^__version__ = "(.+?)"', text(source), flags=re.MULTILINE) == [tacit.__version__]


def test_the_newest_version_of_the_changelog_is_this_one() -> None:
    found = re.findall(r"^## \[(.+?)\](?: - (.+))?$", text("CHANGELOG.md"), flags=re.MULTILINE)
    assert found[0] == ("Unreleased", "")
    assert found[1][0] == tacit.__version__
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in found[1:])
    kinds = set(re.findall(r"^### (.+)$", text("CHANGELOG.md"), flags=re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}  # as Keep a Changelog has them


def test_types_come_with_the_package() -> None:
    assert (ROOT / "tacit" / "py.typed").read_bytes() == b""
    assert tomllib.loads(text("pyproject.toml"))["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["tacit"]


# --- The citation -----------------------------------------------------------------------------------------


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["message"]
    assert citation["title"]
    assert citation["authors"] == [{"name": "tacit contributors"}]
    assert citation["version"] == tacit.__version__
    assert citation["license"] == tomllib.loads(text("pyproject.toml"))["project"]["license"]


@pytest.mark.parametrize("name", ["feddb", "cbafed", "bsemifl", "ddrfed"])
def test_the_citation_names_the_paper_as_its_page_does(name: str) -> None:
    papers = {paper["notes"].lower(): paper for paper in yaml.safe_load(text("CITATION.cff"))["references"]}
    assert len(papers) == 4
    page = " ".join(text(f"docs/methods/{name}.md").split())
    assert f"{papers[name]['authors'][0]['family-names']} et al., {papers[name]['title']}, " in page
    assert re.search(rf"{re.escape(papers[name]['title'])}, [^.]*\b{papers[name]['year']}\b", page)


# --- Pages and the workflow -------------------------------------------------------------------------------


def anchors(page: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", text(name)):
        if "://" in target:
            continue
        place = (ROOT / name).parent / target
        assert place.exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors(place.read_text()), f"{name} links to {target}#{anchor}"


def test_every_target_that_contributing_names_exists() -> None:
    there = set(re.findall(r"^([a-z]+):", text("Makefile"), flags=re.MULTILINE))
    named = {word for name in PAGES for word in re.findall(r"(?:`|^)make ([a-z]+)", text(name), flags=re.MULTILINE)}
    assert {"run", "test", "docs"} <= named
    assert named <= there
    assert there <= named, "CONTRIBUTING.md has a table of all targets"


def test_the_deprecation_policy_has_three_sentences() -> None:
    policy = text("CONTRIBUTING.md").split("## Deprecation policy\n")[1].split("\n## ")[0]
    assert len(re.findall(r"\.(?=\s)", policy)) == 3


def test_the_workflow_runs_what_contributing_asks_for() -> None:
    workflow = yaml.safe_load(text(".github/workflows/test.yml"))
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as a truth value
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make test", "make docs"]
    least = tomllib.loads(text("pyproject.toml"))["project"]["requires-python"].removeprefix(">=")
    assert job["strategy"]["matrix"]["python"][0] == least
    for step in job["steps"]:
        assert "run" in step or re.fullmatch(r"[\w/-]+@v\d+", step["uses"])


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name
)
def test_issue_forms_are_complete(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"]
    assert form["description"]
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in asked}) == len(asked)
    assert all(part["attributes"]["label"] for part in asked)


# --- The container ----------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The lines of the Dockerfile without comments, continued ones joined: [("FROM", "python:3.11-slim"), …]."""
    lines = [line for line in text("docker/site/Dockerfile").splitlines() if line and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in whole.splitlines())]


def values(word: str) -> list[str]:
    return [rest for found, rest in instructions() if found == word]


def test_the_image_has_a_pinned_base_of_the_least_python() -> None:
    least = tomllib.loads(text("pyproject.toml"))["project"]["requires-python"].removeprefix(">=")
    assert {base.split()[0] for base in values("FROM")} == {f"python:{least}-slim"}
    assert "latest" not in text("docker/site/Dockerfile")


def test_a_site_in_a_container_is_not_root_and_opens_no_port() -> None:
    user = values("USER")[-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, so that a cluster can see that it is not root"
    assert instructions().index(("USER", user)) > max(i for i, (word, _) in enumerate(instructions()) if word == "FROM")
    assert not values("EXPOSE")
    assert not re.search(r"\bsudo\b|chmod 777|--privileged", text("docker/site/Dockerfile"))


def test_the_image_starts_a_site_with_its_folders_outside() -> None:
    assert values("ENTRYPOINT") == ['["tacit"]']
    assert values("CMD") == ['["site", "join", "--data", "/data"]']
    assert values("VOLUME") == ['["/site/tacit-site", "/data"]']
    assert values("WORKDIR")[-1] == "/site"  # where `tacit site` looks for its folder, tacit-site
    guide = text("docs/sites.md").split("## In a container\n")[1].split("\n## ")[0]
    assert "-f docker/site/Dockerfile " in guide
    assert ":/site/tacit-site" in guide
    assert ":/data:ro" in guide


def let_through(name: str) -> bool:
    """Whether .dockerignore lets a path at the top of the checkout through: the last line that fits decides."""
    kept = True
    for line in text(".dockerignore").splitlines():
        if line and not line.startswith("#") and fnmatch(name, line.removeprefix("!")):
            kept = line.startswith("!")
    return kept


def test_no_secret_gets_into_the_image() -> None:
    copied = [word for line in values("COPY") if "--from=" not in line for word in line.split()[:-1]]
    assert not values("ADD")
    assert "." not in copied
    for name in copied:
        assert (ROOT / name).exists(), f"the Dockerfile copies {name}"
        assert let_through(name), f".dockerignore keeps {name} back"
    others = {
        "tacit-site",
        "tacit-server",
        "runs",
        "data",
        "images",
        "key",
        ".git",
        ".venv",
        ".env",
        "ca.key",
        "site.toml",
    }
    assert not [name for name in others if let_through(name)]
    assert not re.search(r"(?i)password|secret|token", " ".join(values("ARG") + values("ENV")))


def test_the_image_installs_pinned_packages_and_an_extra_that_exists() -> None:
    (install,) = [line for line in values("RUN") if "pip install" in line]
    assert "-c constraints.txt" in install
    assert "--no-cache-dir" in install
    assert "http" not in text("docker/site/Dockerfile")  # which index is asked is the builder's business
    (extras,) = [line.removeprefix("EXTRAS=") for line in values("ARG") if line.startswith("EXTRAS=")]
    assert set(extras.split(",")) <= set(tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"])
    assert re.search(r"^torch==", text("constraints.txt"), flags=re.MULTILINE)
