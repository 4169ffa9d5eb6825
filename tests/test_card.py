"""The model card: with every finished run, true to its figures, and nothing in it that must stay home."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from pictures import SITES, write_sites
from tacit.card.document import Document, Table, Text
from tacit.card.plot import calibration_plot
from tacit.card.verdict import conclusions
from tacit.config.resolve import resolve
from tacit.data.sources import load
from tacit.engine.run import run_experiment
from tacit.evaluation.interval import wilson_interval
from tacit.evaluation.metrics import confusion, expected_calibration_error, reliability
from tacit.inference.measure import measure
from tacit.inference.model import load_model
from tacit.runs.folder import Run
from tacit.runs.plan import prepare

FILES = ("card.md", "card.html", "calibration.svg", "model.json", "evaluation.json")


class Tags(HTMLParser):
    """Opened and closed tags must match; what is fetched from elsewhere is collected."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")] + (["x"] * (tag == "script"))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_finished_run_has_a_card_with_its_figures(tiny: Callable[..., Run]) -> None:
    run = tiny("fixmatch", "server")
    assert all((run.folder / name).is_file() for name in FILES)
    text = (run.folder / "card.md").read_text()
    figures = json.loads((run.folder / "evaluation.json").read_text())
    assert run.summary is not None
    assert figures["accuracy"] == pytest.approx(run.summary["accuracy"])
    assert f"**Accuracy {100 * run.summary['accuracy']:.1f} %**" in text
    low, high = figures["interval"]
    assert f"{100 * low:.1f} % to {100 * high:.1f} %" in text
    last = run.records[-1]
    assert f"| main 2 | {100 * last['accepted_ratio']:.1f} % | {100 * last['pseudo_accuracy']:.1f} % |" in text
    for number, share in enumerate(last["per_class"]):
        assert re.search(rf"^\| {number} \| 10 \| \d+ \| {100 * share:.1f} % \|", text, flags=re.MULTILINE)
    for heading in (
        "Task",
        "How good it is",
        "How sure it is",
        "Data by party (counts only)",
        "How it was trained",
        "How pseudo-labels fared",
        "What left each client",
        "Limits",
        "How to reproduce it",
    ):
        assert f"## {heading}" in text
    assert "| server | 100 | 0 | – |" in text
    assert "labels at the server, clients hold images without labels" in text
    assert "| main | model (weights) |" in text
    assert "Sohn et al." in text


def test_the_html_is_whole_and_fetches_nothing(tiny: Callable[..., Run]) -> None:
    page = (tiny("fedavg", "clients").folder / "card.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.fetched == []
    assert "<svg" in page
    assert "url(" not in page


def test_the_card_reproduces_the_run(tiny: Callable[..., Run], tmp_path: Path) -> None:
    run = tiny("fedavg", "clients")
    toml = re.findall(r"```\n(.*?)```", (run.folder / "card.md").read_text(), flags=re.DOTALL)[0]
    (tmp_path / "again.toml").write_text(toml)
    from tacit.config.recipes import load_recipe

    again = run_experiment(resolve(load_recipe(str(tmp_path / "again.toml"))), tmp_path / "again")
    for name in ("model.safetensors", "evaluation.json", "card.md"):
        assert (again.folder / name).read_bytes() == (run.folder / name).read_bytes()


def test_a_card_of_own_images_says_what_it_rests_on_and_keeps_names_at_home(tmp_path: Path) -> None:
    folder = write_sites(load("digits"), tmp_path / "secret-place", labeled=3, unlabeled=20)
    (folder / "north" / "3" / "Mrs-Smith.png").write_text("broken")
    settings = {
        "method": {"name": "fixmatch", "preset": "smoke"},
        "data": {"name": "clinics", "sites": [str(folder / site) for site in SITES], "skip_unreadable": True},
        "data.partition": "sites",
        "data.clients": 3,
        "data.placement": "clients",
    }
    run = run_experiment(resolve(settings), tmp_path / "run")
    for name in ("card.md", "card.html"):
        text = (run.folder / name).read_text()
        assert "secret-place" not in text
        assert not re.search(r"\.png", text)
        assert "left out: images that cannot be read (1 of" in text
    text = (run.folder / "card.md").read_text()
    assert re.search(r"\| north \| \d+ \| 20 \| 3 of 3 \|", text)
    assert "What the figures rest on" in text
    assert "Whether they show patients (or lesions) that were trained on is not known" in text
    assert "No groups are known: images of one patient" in text
    assert "Only 20 test images" in text
    assert "too few held-out labels" in text
    assert "nobody can know" in text
    assert "Fewer than 10 labels to learn from" in text
    assert load_model(run.folder).description.calibrated_on == 0


def test_a_card_is_written_after_a_resume_too(tiny: Callable[..., Run]) -> None:
    """Killed between the last round and the end: the resumed run ends with the same card."""
    run = tiny("fedavg", "clients")
    before = {name: (run.folder / name).read_bytes() for name in FILES}
    for name in (*FILES, "summary.json", "model.safetensors"):
        (run.folder / name).unlink()
    run_experiment(run.experiment, run.folder, resume=True)
    assert {name: (run.folder / name).read_bytes() for name in FILES} == before


def test_what_pseudo_labels_were_is_counted(tiny: Callable[..., Run]) -> None:
    run = tiny("fixmatch", "server")
    last = run.records[-1]
    mixed = np.array(last["pseudo_confusion"])  # rows: the truth
    assert mixed.sum(axis=0).tolist() == last["accepted_by_class"]
    right = [share or 0 for share in last["pseudo_accuracy_by_class"]]
    assert np.allclose(np.diag(mixed), np.array(right) * mixed.sum(axis=0))
    text = (run.folder / "card.md").read_text()
    assert "| class | labels | given in the last round | right when given | its images learned as another |" in text


NV_MEL = {
    "accepted_by_class": [5400.0, 309.0],
    "pseudo_accuracy_by_class": [0.8, 1.0],
    "pseudo_confusion": [[5114, 0], [286, 309]],
}


def test_the_card_draws_the_conclusion() -> None:
    tested = np.array([[90, 10], [31, 23]])
    first, second, third = conclusions(["nv", "mel"], [402, 67], NV_MEL, tested, ["`train.lr = 1`"])
    assert first == (
        "Labels kept for nv are 17 times those for mel (of the labels that people gave, 6.0 times): 5,400, 80 % of "
        "them right, against 309."
    )
    assert second == "**Of the images of mel that were learned, 286 of 595 (48 %) were learned as nv.**"
    assert "That holds the recall of mel down (43 % of 54 test images, 30 to 56 %)" in third
    assert third.endswith("more labels of mel (`tacit advise` says which images); `train.lr = 1`.")


def test_without_the_truth_the_card_says_what_the_test_images_suggest() -> None:
    record = {"accepted_by_class": [160.0, 30.0], "pseudo_accuracy_by_class": [None, None]}
    uneven, wrong, means = conclusions(["nv", "mel"], [40, 20], record, np.array([[14, 0], [8, 12]]))
    assert uneven.startswith("Labels kept for nv are 5 times those for mel (of the labels that people gave, 2.0 times)")
    assert wrong.startswith("**Of the test images of mel, 8 of 20 (40 %) are taken for nv.** Nobody can know how many")
    assert "60 % of 20 test images" in means
    few = conclusions(["nv", "mel"], [40, 20], record, np.array([[14, 0], [2, 1]]))
    assert few == [uneven]  # three test images tell nothing


def test_where_labels_are_right_the_card_says_so() -> None:
    def found(mixed: list[list[int]], right: list[float | None]) -> list[str]:
        given = np.sum(mixed, axis=0).tolist()
        record = {"accepted_by_class": given, "pseudo_accuracy_by_class": right, "pseudo_confusion": mixed}
        return conclusions(["a", "b"], [9, 9], record, np.eye(2))

    assert found([[49, 1], [1, 47]], [0.98, 0.98]) == ["Of no class were more than 20 % learned as one other."]
    first, second, _ = found([[25, 0], [25, 0]], [0.5, None])
    assert first == "b was never given as a label in the last round; a 50 times, 50 % of them right."
    assert "25 of 25 (100 %) were learned as a" in second


def test_a_hundred_parties_are_summed_up() -> None:
    from tacit.card.content import card
    from tacit.inference.model import describe

    plan = prepare(resolve({"method.preset": "smoke", "data.clients": 60, "data.min_size": 1, "data.partition": "iid"}))
    probs = torch.full((len(plan.split.test), 10), 0.1)
    figures = measure(probs, torch.from_numpy(plan.dataset.test_labels[plan.split.test]))
    summary = {"parameters": 1, "reporting": "last", "accuracy": 0.1, "versions": {}, "device": "cpu"}
    text = card(plan, summary, [], figures, describe(plan)).markdown()
    assert "60 clients hold" in text
    assert "client 59" not in text


def test_figures_of_a_card() -> None:
    """Four images, counted by hand."""
    probs = torch.tensor([[0.95, 0.05], [0.55, 0.45], [0.25, 0.75], [0.15, 0.85]])
    labels = torch.tensor([0, 1, 1, 1])
    found = measure(probs, labels)
    assert found["confusion"] == [[1, 0], [1, 2]] == confusion(probs, labels).tolist()
    assert found["accuracy"] == 0.75
    assert found["interval"] == pytest.approx([0.3006, 0.9544], abs=1e-4)  # Wilson, 3 of 4
    assert [(n, right) for n, _, right in found["reliability"]] == [(1, 0.0), (1, 1.0), (1, 1.0), (1, 1.0)]
    assert found["ece_calibrated"] is None  # too few


def test_the_interval_covers_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    for share in (0.5, 0.9, 0.97):
        hits = generator.binomial(50, share, size=2000)
        covered = np.mean([low <= share <= high for low, high in (wilson_interval(int(h), 50) for h in hits)])
        assert 0.92 < covered < 0.985


def test_reliability_agrees_with_the_calibration_error() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(500, 4, generator=generator).softmax(dim=1)
    labels = torch.randint(0, 4, (500,), generator=generator)
    bins = reliability(probs, labels, bins=15)
    assert sum(count for count, _, _ in bins) == 500
    gap = sum(count * abs(sure - right) for count, sure, right in bins) / 500
    assert gap == pytest.approx(expected_calibration_error(probs, labels))


def test_names_cannot_break_the_page() -> None:
    page = Document("a <b> & c", [Table(("class",), [("<script>|x",)]), Text("`<i>`")])
    assert "<script>" not in page.html()
    assert "a &lt;b&gt; &amp; c" in page.html()
    assert "\\|x" in page.markdown()


def test_the_plot_puts_dots_where_the_figures_are() -> None:
    svg = calibration_plot([(10, 0.5, 1.0), (40, 0.9, 0.5)])
    assert svg.count("<circle") == 2
    assert 'cx="176.0" cy="12.0"' in svg  # 46 + 260 / 2, and the top
    assert "40 images: says 90 %, right 50 %" in svg
