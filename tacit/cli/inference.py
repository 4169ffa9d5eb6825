"""The commands that use a finished model: evaluate, predict, export, advise."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from tacit.core.console import SafeConsole, noted
from tacit.core.errors import TacitError, nearest
from tacit.core.text import as_word, safe, safe_lines
from tacit.evaluation.headline import leads
from tacit.evaluation.interval import interval_text

if TYPE_CHECKING:
    from tacit.runs.folder import Run

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="the folder of a finished run, or an exported .safetensors")
]


def evaluate(
    run: RunArgument,
    data: Annotated[str, typer.Option(help="labelled images: your own by their path, or a named set")] = "",
    calibrate: Annotated[bool, typer.Option("--calibrate", help="fit the temperature on them, and save it")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the figures into this .json")] = None,
) -> None:
    """How good a finished model is: on the run's own test images, or on labelled images of yours."""
    from tacit.cli.data import fetch_bar
    from tacit.core.files import write_atomically
    from tacit.core.paths import check_file
    from tacit.inference.assess import assess, recalibrate
    from tacit.inference.model import load_model

    console = SafeConsole()
    if out is not None:
        check_file(out)
    model = load_model(run)
    with fetch_bar(console) as progress:
        found = assess(model, data, progress)
    figures = found.figures
    show_figures(figures, console)
    show_trained(figures, found.remark, console)
    for line in found.left_out[:10]:
        console.print(noted(line, "Left out:"))
    if len(found.left_out) > 10:
        console.print(noted(f"and {len(found.left_out) - 10} more (all are in --out)", "Left out:"))
    if calibrate:
        temperature, number = recalibrate(model, found)
        console.print(f"Temperature {temperature:.2f}, fitted on {number:,} labels, is saved with the run.")
    if out is not None:
        write_atomically(out, (json.dumps({**figures, "left_out": found.left_out}, indent=2) + "\n").encode())
        console.print(f"Written to {out}")


def show_figures(figures: dict[str, Any], console: SafeConsole) -> None:
    console.print(
        Text.assemble(
            (_first_figure(figures), "bold"), f" on {figures['images']:,} images: {safe_lines(figures['data'])}"
        )
    )
    named = {"AUC": "auc", "balanced accuracy": "balanced_accuracy", "macro F1": "macro_f1"}
    skip = leads(figures)
    parts = [
        f"{name} {100 * figures[key]:.1f} %" for name, key in named.items() if figures[key] is not None and key != skip
    ]
    console.print(f"{', '.join(parts)}; confidence is {100 * figures['ece']:.1f} points off on average")
    confusion = figures["confusion"]
    table = Table("class", "images", "recognised", "95 % interval", "right when named", "most often taken for")
    for number, name in enumerate(figures["classes"]):
        own, hits = sum(confusion[number]), confusion[number][number]
        predicted = sum(row[number] for row in confusion)
        wrong = [0 if other == number else count for other, count in enumerate(confusion[number])]
        worst = max(range(len(wrong)), key=wrong.__getitem__)
        table.add_row(
            safe(name),
            f"{own:,}",
            f"{100 * hits / own:.1f} %" if own else "–",
            interval_text(hits, own),
            f"{100 * hits / predicted:.1f} %" if predicted else "–",
            f"{safe(figures['classes'][worst])} ({wrong[worst]})" if wrong[worst] else "–",
        )
    console.print(table)
    if sites := figures.get("sites"):
        table = Table("site", "images", "accuracy", "95 % interval", "balanced accuracy")
        for name, own in sites.items():
            hits = round(own["accuracy"] * own["images"])
            balanced = own["balanced_accuracy"]
            table.add_row(
                safe(name),
                f"{own['images']:,}",
                f"{100 * own['accuracy']:.1f} %",
                interval_text(hits, own["images"]),
                "–" if balanced is None else f"{100 * balanced:.1f} %",
            )
        console.print(table)


def _first_figure(figures: dict[str, Any]) -> str:
    """Accuracy with its interval, behind balanced accuracy where one class has more than half of the images."""
    low, high = (100 * bound for bound in figures["interval"])
    plain = f"ccuracy {100 * figures['accuracy']:.1f} % (95 % interval {low:.1f} to {high:.1f} %)"
    if leads(figures) == "accuracy":
        return f"A{plain}"
    always = f"always the largest class: {100 * figures['largest_class']:.1f} %"
    return f"Balanced accuracy {100 * figures['balanced_accuracy']:.1f} %, a{plain}, {always},"


def show_trained(figures: dict[str, Any], remark: str, console: SafeConsole) -> None:
    """Whether these images can tell anything about new ones."""
    if remark:
        console.print(noted(remark))
    trained = figures.get("trained_on", {"labeled": 0, "unlabeled": 0})
    seen = trained["labeled"] + trained["unlabeled"]
    if not seen:
        return
    rest = figures.get("not_trained_on")
    others = f"On the other {rest['images']:,}: {_first_figure(rest).rstrip(',')}." if rest else "No others are here."
    console.print(
        noted(
            f"{seen:,} of these {figures['images']:,} images were trained on ({trained['labeled']:,} with their "
            f"labels, {trained['unlabeled']:,} without). Figures on them say nothing about new images. {others}",
            "Beware:",
        )
    )


def predict(
    run: RunArgument,
    images: Annotated[
        list[Path], typer.Argument(help="images, folders (at any depth), tables with a column path, .npz")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="a .csv, .parquet or .jsonl")] = Path("predictions.csv"),
    abstain: Annotated[float, typer.Option(help="name no class below this confidence, such as 0.8")] = 0.0,
) -> None:
    """The classes of images, with probabilities, into a table. Images that cannot be read are in it and say why."""
    from tacit.cli.data import fetch_bar
    from tacit.inference.images import collect
    from tacit.inference.model import load_model
    from tacit.inference.predict import check_output, predict_items

    console = SafeConsole()
    check_output(out)
    model = load_model(run)
    items = collect(images)
    if not items:
        raise TacitError(f"There is no image in {', '.join(map(str, images))}.")
    with fetch_bar(console) as progress:
        found = predict_items(model, items, abstain, progress)
    found.save(out)
    labels, unread = found.labels, sum(bool(fault) for fault in found.faults)
    table = Table("predicted", "images", "mean confidence")
    for name in found.classes:
        sure = [float(c) for label, c in zip(labels, found.confidence, strict=True) if label == name]
        table.add_row(safe(name), f"{len(sure):,}", f"{100 * sum(sure) / len(sure):.0f} %" if sure else "–")
    if abstain:
        table.add_row(f"(not sure enough: below {abstain:g})", f"{labels.count('') - unread:,}", "")
    if unread:
        table.add_row("(could not be read)", f"{unread:,}", "")
    console.print(table)
    if not model.description.calibrated_on:
        console.print(noted("no temperature was fitted: take confidences as a ranking only."))
    if model.description.depends_on_batch:
        console.print(noted("with BN policy `batch` a prediction depends on the images beside it."))
    console.print(f"{len(found):,} rows written to {out}")


def export(
    run: RunArgument,
    to: Annotated[str, typer.Option(help="onnx, torch or safetensors")] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the file (default: in the run's folder)")] = None,
) -> None:
    """The model as one file for other programs, with class names and preprocessing inside."""
    from tacit.core.formatting import size_text
    from tacit.core.paths import check_file
    from tacit.inference.export import ENDINGS, OPSET
    from tacit.inference.export import export as write
    from tacit.inference.model import load_model

    if to not in ENDINGS:
        raise TacitError(f"--to {to} is no format.{nearest(to, ENDINGS)} Write one of: {', '.join(ENDINGS)}.")
    path = out or (run if run.is_dir() else run.parent) / f"exported{ENDINGS[to]}"
    check_file(path)
    if path.suffix != ENDINGS[to]:
        raise TacitError(
            f"--out {path}: a file for {to} ends in {ENDINGS[to]}. Write --out "
            f"{as_word(path.with_suffix(ENDINGS[to]))}."
        )
    model = load_model(run)
    write(model, to, path)
    about = model.description
    console = SafeConsole()
    console.print(f"Written to {path} ({size_text(path.stat().st_size)})")
    how = {
        "onnx": f"ONNX, opset {OPSET}. onnxruntime and others run it",
        "torch": "torch.export. torch.export.load(path).module() runs it without tacit",
        "safetensors": "Weights and description. `tacit predict` takes it in place of a run",
    }
    console.print(
        f"{how[to]}.\nInput: images, uint8 [batch, {about.channels}, {about.size}, {about.size}], any batch size "
        f"({about.rule}); normalised inside.\nOutput: probabilities [batch, {len(about.classes)}] of "
        f"{', '.join(map(safe, about.classes[:10]))}{', …' if len(about.classes) > 10 else ''}; temperature "
        f"{about.temperature:.2f} inside."
    )
    if about.depends_on_batch:
        console.print(noted("with BN policy `batch` a prediction depends on the images beside it."))


def advise(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a finished run")],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="images for each client")] = 20,
    curves: Annotated[
        bool, typer.Option("--curves", help="more labels, or more unlabelled images? Trains anew")
    ] = False,
    minutes: Annotated[float, typer.Option(min=0, help="of --curves: begin no repeat that would take longer")] = 10.0,
) -> None:
    """Which unlabelled images would help most if labelled: a list for each client, which stays on that client.

    With --curves instead: whether more labels or more unlabelled images would help more.
    """
    from tacit.inference.advise import CRITERION, advise
    from tacit.runs.folder import Run

    console = SafeConsole()
    if curves:
        show_curves(Run(run), minutes, console)
        return
    found = advise(Run(run), count)
    table = Table("client", "unlabelled", "listed", "mean margin")
    for advice in found:
        table.add_row(
            safe(advice.client),
            f"{advice.unlabeled:,}",
            f"{advice.listed:,}",
            f"{advice.margin:.2f}" if advice.listed else "–",
        )
    console.print(table)
    console.print("The lists:")
    for advice in found:  # below each other, not in a cell: a path that is cut is no path
        console.print(f"  {safe(advice.client)}: {safe_lines(advice.file.resolve())}")
    console.print(f"By {CRITERION}.")
    console.print(
        "Each list lies in the client's own folder; only these counts are shown here. Once labelled (a file moved into "
        "its class folder), run `tacit init` and `tacit run` again."
    )


def show_curves(run: "Run", minutes: float, console: SafeConsole) -> None:
    """What more labels would give, beside what the unlabelled images gave."""
    from tacit.compare.curves import check_curves, conclusion, label_curves, labels_gain
    from tacit.core.paths import check_folder

    unlabeled = check_curves(run)
    out = run.folder.with_name(f"{run.folder.name}-curves")
    check_folder(out)
    console.print(f"The labels alone are trained with shares of the labels, into {safe_lines(out)}.")
    found = label_curves(run, out, minutes, console.print)
    tested = json.loads((run.folder / "evaluation.json").read_text())["images"]
    for line in conclusion(labels_gain(found, tested), unlabeled, (run.summary or {})["guard"]["by"]):
        console.print(line)


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: `tacit evaluate runs/mine-seed0 --data more-labelled-images/`")(evaluate)
    app.command(epilog="Example: `tacit predict runs/mine-seed0 new-images/ -o predictions.csv --abstain 0.8`")(predict)
    app.command(epilog="Example: `tacit export runs/mine-seed0 --to onnx -o mine.onnx`")(export)
    app.command(epilog="Example: `tacit advise runs/mine-seed0 --count 50`")(advise)
