"""The report as a person meets it: a real Chromium opens pages of real runs, with mouse, keys, phone and paper."""

import base64
import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runs import TINY
from tacit.config.resolve import resolve
from tacit.engine.run import run_experiment
from tacit.report.collect import collect
from tacit.report.page import build
from tacit.runs.folder import Run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
FLAGS += ("--disable-component-update", "--disable-sync")

if CHROMIUM is None and os.environ.get("CI") != "true":  # in CI a missing browser is an error, not a reason to skip
    pytest.skip("there is no chromium here; `make test` installs it where it can", allow_module_level=True)

from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402 (needs a browser)

expect.set_options(timeout=30_000)

LONG = 180_000  # milliseconds: a busy machine is slow, not wrong
NASTY = '"><img src=x onerror=fail()>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield found
        found.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one method, one with class thresholds, one with a matrix; one is broken, one was stopped."""
    root = tmp_path_factory.mktemp("runs")
    for name, method, placement, changes in (
        ("fixmatch-0", "fixmatch", "server", {"rounds": 4}),
        ("fixmatch-1", "fixmatch", "server", {"rounds": 4, "seed": 1}),
        ("cbafed", "cbafed", "some-clients", {"rounds": 3}),
        ("feddb", "feddb", "clients", {"rounds": 3}),
    ):
        settings = {"method.name": method, "method.preset": "smoke", "data.placement": placement, **changes}
        run_experiment(resolve(settings, TINY), root / name)
    Image.new("RGB", (24, 8), "teal").save(root / "cbafed" / "generated.png")
    (shutil.copytree(root / "cbafed", root / "stopped") / "summary.json").unlink()
    (shutil.copytree(root / "cbafed", root / f"broken-{NASTY.replace('/', '')}") / "experiment.toml").unlink()
    return root


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(build(collect([runs])))
    return path.as_uri()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Open an address; at the end there must have been no error, and no request to anywhere else."""
    pages: list[tuple[Page, list[str], bool]] = []

    def go(address: str, *, lost: bool = False, **context: Any) -> Page:
        page = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **context}).new_page()
        trouble: list[str] = []
        own = re.match(r"[a-z]+://[^/]*/", address)[0]  # type: ignore[index]
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("console", lambda told: told.type in ("error", "warning") and trouble.append(told.text))
        page.on("request", lambda asked: asked.url.startswith((own, "data:")) or trouble.append(asked.url))
        pages.append((page, trouble, lost))
        page.goto(address)
        page.wait_for_function("document.querySelectorAll('.stage svg').length || !document.querySelector('.stage')")
        return page

    yield go
    for page, trouble, lost in pages:
        page.context.close()
        unexpected = [line for line in trouble if not (lost and "ERR_CONNECTION_REFUSED" in line)]
        assert not unexpected


def stage(page: Page, key: str) -> Any:
    return page.locator(f'.stage[data-key="{key}"]')


def spoken(page: Page, key: str) -> str:
    return str(stage(page, key).get_attribute("aria-valuetext"))


def colours(page: Page, key: str) -> set[Any]:
    """The colours of a heat map's cells."""
    source = stage(page, key).locator("image").first.get_attribute("href")
    picture = Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))).convert("RGBA")
    return {picture.getpixel((x, y)) for x in range(picture.width) for y in range(picture.height)}


def sideways(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_plots_are_drawn_from_the_records(visit: Callable[..., Page], report: str, runs: Path) -> None:
    page = visit(f"{report}#run=cbafed")
    assert page.locator("figure.plot").count() > 12
    for path in page.locator("svg path.line").all():
        assert len(path.get_attribute("d")) > 10
    assert len(colours(page, "grid per_class")) > 4
    assert page.locator("#run img[alt^='generated.png']").evaluate("image => image.naturalWidth") == 24
    last = Run(runs / "cbafed").records[-1]
    assert f"{100 * last['per_class'][0]:.1f} %" in spoken(page, "grid per_class")
    accuracy = page.locator("figure.plot", has_text="Accuracy on the test images").first
    accuracy.locator("details summary").click()
    rows = accuracy.locator("tbody tr")
    expect(rows).to_have_count(5)  # the longest run has five rounds
    assert f"{100 * Run(runs / 'cbafed').records[0]['accuracy']:.1f} %" in rows.nth(0).inner_text()


def test_broken_stopped_and_finished_runs_say_so(visit: Callable[..., Page], report: str) -> None:
    page = visit(report)
    text = page.locator("#runs").inner_text()
    assert "6 runs: 4 finished, 1 stopped, 1 broken." in text
    assert "experiment.toml is missing" in text
    assert NASTY.replace("/", "") in text  # as text, not as an element
    assert page.locator("#runs img").count() == 0
    page.locator("#choose-run").select_option("stopped")
    expect(page.locator("#run")).to_contain_text("It was interrupted or failed, and can go on.")
    expect(page.locator("#run")).to_contain_text("tacit resume")


def test_sort_filter_and_open(visit: Callable[..., Page], report: str) -> None:
    page = visit(report)
    names = page.locator("#run-table tbody th")
    page.get_by_role("button", name="accuracy").click()
    shown = [float(text.split()[0]) for text in page.locator("#run-table tbody td:nth-child(8)").all_inner_texts()]
    assert shown == sorted(shown, reverse=True)
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("accuracy")
    page.get_by_role("searchbox").fill("fixmatch seed=1")
    expect(names).to_have_text(["fixmatch-1"])
    expect(page.locator("#filtered")).to_have_text("1 of 6 runs")
    page.get_by_role("searchbox").fill("")
    page.get_by_label("State").select_option("broken")
    expect(names).to_have_count(1)
    page.get_by_label("State").select_option("")
    page.get_by_role("link", name="feddb").click()
    expect(page.locator("#run-heading")).to_have_text("One run: feddb")
    assert page.url.endswith("#run=feddb")


def test_lines_can_be_switched(visit: Callable[..., Page], report: str) -> None:
    page = visit(f"{report}#run=cbafed")
    lines = stage(page, "curve accuracy").locator("path.line")
    before = lines.count()
    button = page.get_by_role("button", name="fixmatch · 2 seeds")
    assert stage(page, "curve accuracy").locator("path.band").count() == 2
    button.click()
    expect(lines).to_have_count(before - 1)
    expect(button).to_have_attribute("aria-pressed", "false")
    button.press("Enter")  # by key, too; the focus stayed where it was
    expect(lines).to_have_count(before)
    page.get_by_label("each seed").check()
    expect(stage(page, "curve accuracy").locator("path.line.thin")).to_have_count(4)
    flip = page.locator('[data-key="flip thresholds"]')
    flip.click()
    expect(stage(page, "grid thresholds").locator("path.line")).to_have_count(10)
    expect(flip).to_be_focused()


def test_mouse_and_keys_read_values_and_pick_a_round(visit: Callable[..., Page], report: str, runs: Path) -> None:
    page = visit(f"{report}#run=feddb")
    curve = stage(page, "curve accuracy")
    curve.hover()
    expect(curve.locator(".tip")).to_contain_text("round 3")
    page.mouse.move(0, 0)
    expect(curve.locator(".tip")).to_be_hidden()
    curve.focus()
    page.keyboard.press("Home")
    first = spoken(page, "curve accuracy")
    assert first.startswith("round 1, ")
    assert f"feddb {100 * Run(runs / 'feddb').records[0]['accuracy']:.1f} %" in first
    page.keyboard.press("ArrowRight")
    assert spoken(page, "curve accuracy").startswith("round 2, ")
    expect(curve.locator(".tip")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator("output")).to_have_text("round 2")
    expect(page.locator("figure", has_text="app_u, round 2")).to_be_visible()
    page.get_by_label("Pick").press("ArrowLeft")
    expect(page.locator("figure", has_text="app_u, round 1")).to_be_visible()
    matrix = stage(page, "cube app_u")
    matrix.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    value = Run(runs / "feddb").records[0]["app_u"][1][0]
    said = spoken(page, "cube app_u")
    assert "client 1" in said
    assert float(said.split()[-1]) == pytest.approx(value, rel=0.01)


def test_everything_has_a_name_for_a_screen_reader(visit: Callable[..., Page], report: str) -> None:
    page = visit(report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the content"
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, a, .stage, [role=region]')].filter(
            (e) => !(e.getAttribute('aria-label') || e.textContent.trim() || (e.labels && e.labels.length))).length"""
    )
    assert nameless == 0
    for one in page.locator(".stage").all():
        described = one.get_attribute("aria-describedby")
        assert len(page.locator(f"#{described}").text_content()) > 10
        assert one.get_attribute("aria-valuetext")
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map((e) => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 or (before, after) == (2, 4) for before, after in itertools.pairwise(levels))


def brightness(page: Page) -> float:
    red, green, blue = map(
        int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    )
    return (red + green + blue) / 3


def test_dark_and_light(visit: Callable[..., Page], report: str) -> None:
    page = visit(f"{report}#run=cbafed", color_scheme="dark")
    assert brightness(page) < 60
    dark = colours(page, "grid per_class")
    page.get_by_role("button", name="Show light colours").click()
    assert brightness(page) > 230
    page.wait_for_function("document.querySelector('.stage[data-key=\"grid per_class\"] image')")
    assert colours(page, "grid per_class") != dark


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_scrolls_down_only(width: int, visit: Callable[..., Page], report: str) -> None:
    page = visit(report, viewport={"width": width, "height": 700}, has_touch=True, is_mobile=True)
    for run in page.locator("#choose-run option").all():
        page.locator("#choose-run").select_option(run.get_attribute("value"))
        page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        page.wait_for_timeout(100)
        assert sideways(page) <= 0
    drawn = page.locator(".stage svg").first.evaluate("svg => svg.getBoundingClientRect().width")
    assert 250 < drawn <= width


def test_paper_is_light_and_has_no_buttons(visit: Callable[..., Page], report: str) -> None:
    page = visit(f"{report}#run=cbafed", color_scheme="dark")
    assert len(page.pdf()) > 20_000
    page.emulate_media(media="print", color_scheme="dark")
    assert brightness(page) > 230
    expect(page.locator("#theme")).to_be_hidden()
    assert page.locator("svg path.line").first.is_visible()


def test_watch_follows_a_run_and_ends(visit: Callable[..., Page], tmp_path: Path) -> None:
    """The page is there before the run; it fills, goes on by itself, and keeps what the reader chose."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    start = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment, "cwd": tmp_path}
    watching = subprocess.Popen([sys.executable, "-m", "tacit", "watch", "mine", "--port", "0"], **start)
    settings = ("method.name=fixmatch", "method.preset=smoke", "rounds=500", "data.subset=400", "data.test_subset=200")
    sets = [word for setting in settings for word in ("--set", setting)]
    running = None
    try:
        assert "no run in mine yet" in watching.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", watching.stdout.readline())[0]
        page = visit(address, lost=True)
        expect(page.locator("#runs")).to_contain_text("There is no run here yet")
        running = subprocess.Popen([sys.executable, "-m", "tacit", "run", *sets, "--out", "mine"], **start)
        expect(page.locator("#runs")).to_contain_text("Running: ", timeout=LONG)
        expect(stage(page, "curve accuracy").locator("path.line")).to_be_visible(timeout=LONG)
        assert page.locator("#live").inner_text() == "live"
        rounds = stage(page, "curve accuracy")
        page.locator("details.more > summary").click()
        before = int(rounds.get_attribute("aria-valuemax"))
        page.wait_for_function(
            "n => Number(document.querySelector('.stage[data-key=\"curve accuracy\"]').ariaValueMax) > n + 2",
            arg=before,
            timeout=LONG,
        )
        assert page.locator("details.more").get_attribute("open") is not None
        expect(page.locator("details.more > summary")).to_be_focused()
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=LONG / 1000)
        expect(page.locator("#runs")).to_contain_text("Stopped: ", timeout=LONG)
        watching.send_signal(signal.SIGINT)
        told, _ = watching.communicate(timeout=LONG / 1000)
        assert watching.returncode == 0
        assert "No longer watching." in told
        assert "Traceback" not in told
        expect(page.locator("#live")).to_contain_text("no longer live", timeout=LONG)
        assert stage(page, "curve accuracy").is_visible()
    finally:
        for process in filter(None, (running, watching)):
            process.kill()
            process.wait()
