"""What parties hold at the paths that somebody gave (folders, tables, .npz), as far as names tell: nothing is decoded
yet. Each becomes a draft of a report, several are gathered into one."""

import os
from dataclasses import replace
from pathlib import Path

from tacit.core.errors import Answer, Question, TacitError
from tacit.core.settings import Data
from tacit.core.text import safe
from tacit.data.columns import Table, read_table
from tacit.data.folder_report import FolderReport, Item
from tacit.data.layout import NO_CLASS, Node, as_classes, as_party, scan, tables_in
from tacit.data.names import role, says_nothing
from tacit.data.readers import npz_arrays, read_npz
from tacit.data.tables import TABLES

SERVER = "server"  # a site of this name is the server
LEAVE_OUT = "leave-out"


def site_names(paths: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart.

    >>> site_names([Path("/x/north"), Path("/x/south.csv")]), site_names([Path("/north/data"), Path("/south/data")])
    (['north', 'south'], ['north/data', 'south/data'])
    """
    whole = [path.resolve().with_suffix("") if path.suffix else path.resolve() for path in paths]
    if len(set(whole)) < len(whole):
        raise TacitError(f"A site is given twice among {', '.join(str(path) for path in paths)}: give each once.")
    for length in range(1, max(len(path.parts) for path in whole)):
        names = ["/".join(path.parts[-length:]) for path in whole]
        if len(set(names)) == len(names):
            break
    return names


def gathered(paths: list[Path], tests: list[Path], how: Data) -> FolderReport:
    """What the parties hold, one path each, not looked at yet."""
    for path in paths if len(paths) > 1 else ():
        if (kind := role(path.resolve().stem)) in ("train", "test", "val"):
            raise TacitError(
                f"{path} is given as a site, but its name says that it holds {kind} images. Test images that all sites "
                "share are given with `--test PATH` (or data.tests), validation images are left aside; a site of that "
                "name must be renamed."
            )
    top = os.path.commonpath([path.resolve().parent for path in (*paths, *tests)])
    whole = FolderReport(Path(top), kind="sites", paths=list(paths), tests=list(tests))
    drafts = [draft_of(path, how) for path in paths]
    for site, draft in zip(site_names(paths), drafts, strict=True):
        for name in draft.sites:  # a table may name several sites itself
            own = name if len(draft.sites) > 1 else site
            whole.items += [replace(item, site=own) for item in draft.items if item.site == name]
            whole.sites += [own] if own not in whole.sites else []
        whole.items += [item for item in draft.items if not item.site]  # tests that are nobody's
        _add(whole, draft, f"{site}/" if len(paths) > 1 else "")
    for path in tests:
        shared = draft_of(path, how, part="test")
        whole.items += [replace(item, part="test", site="") for item in shared.items]
        _add(whole, shared, "")
    pinned = [draft.chosen for draft in drafts if draft.kind == "table"]
    whole.chosen = pinned[0] if pinned and all(one == pinned[0] for one in pinned) else {}
    _check_says_something(drafts, whole)
    return whole


def _add(whole: FolderReport, draft: FolderReport, prefix: str) -> None:
    whole.folders += [name for name in draft.folders if name not in whole.folders]
    whole.unreadable += draft.unreadable
    whole.stray += draft.stray
    whole.not_images += draft.not_images
    whole.left_out += draft.left_out
    whole.ignored += [f"{prefix}{name}" for name in draft.ignored]
    whole.told += [f"{prefix}{line}" for line in draft.told]


def _check_says_something(drafts: list[FolderReport], whole: FolderReport) -> None:
    """A site whose only folder is called `images`, where others have classes: nobody can tell what is in it."""
    for draft in drafts:
        if len(draft.folders) == 1 and says_nothing(draft.folders[0]) and len(whole.folders) > 1 and len(drafts) > 1:
            raise TacitError(
                f"{draft.path / draft.folders[0]}: its name says that it holds images, not of which class. Rename it "
                f"to `unlabeled`, or to the class ({', '.join(safe(n, 40) for n in whole.folders[:5])})."
            )


def draft_of(path: Path, how: Data, part: str = "train") -> FolderReport:
    """What one party holds at a path, as far as names tell."""
    if path.is_dir():
        node = scan(path)
        tables = readable_tables(path, how) if how.layout in ("auto", "table") else []
        if how.layout == "table" or (tables and not _has_classes(node)):
            return _draft_by_table(node, tables, how)
        if tables:
            raise TacitError(
                f"{path} holds class folders and {safe(tables[0].name)}, which names images in it. Give the table "
                'itself if it is meant; else move it away, or write layout = "classes" under [data] (`--classes`).'
            )
        if how.layout != "classes":
            _check_one_party(node, path)
        return as_party(node, path.resolve().name, part)
    if path.suffix.lower() == ".npz" and path.is_file():
        return _draft_npz(path)
    if path.suffix.lower() in TABLES and path.is_file():
        return _draft_table(path, how)
    missing = "is no data set" if path.exists() else "does not exist"
    raise TacitError(
        f"{path} {missing}. Expected a folder with one folder of images for each class, an .npz, "
        "or a .csv, .tsv or .parquet with the columns path and label."
    )


def _draft_by_table(node: Node, tables: list[Path], how: Data) -> FolderReport:
    """A folder by the one table in it; beside what it names, images in a folder of unlabelled ones."""
    if len(tables) != 1:
        names = ", ".join(safe(table.name, 60) for table in tables[:4])
        raise TacitError(
            f"{node.path} holds {len(tables) or 'no'} tables that name its images{': ' * bool(names)}{names}. Give the "
            "one that is meant instead of the folder."
        )
    report = _draft_table(tables[0], how)
    named = {item.path.resolve() for item in report.items}
    others = [image for place in node.every() for image in place.images if image.resolve() not in named]
    plain = [image for image in others if any(role(part) == "unlabeled" for part in image.relative_to(node.path).parts)]
    if plain and len(report.sites) > 1:
        raise TacitError(
            f"{tables[0]} names sites, but nobody says whose the {len(plain):,} unlabelled images beside it are, as "
            f"{safe(plain[0].name, 60)}. Name them in the table, without a label."
        )
    report.items += [Item(image, "", "train", site=report.sites[0]) for image in plain]
    rest = len(others) - len(plain)
    report.ignored += [f"{rest} images that {tables[0].name} does not name"] if rest else []
    report.path = node.path
    return report


def _check_one_party(node: Node, path: Path) -> None:
    against = as_classes(node).against
    if NO_CLASS in against:
        raise TacitError(
            f"{path} is given as one party, but {safe(against)}. If it holds several sites, give each of them: "
            f"{', '.join(safe(folder.path) for folder in node.filled[:3])}."
        )


def _has_classes(node: Node) -> bool:
    """Whether there are folders whose names could be classes, beside those that only say that they hold images."""
    return any(not says_nothing(folder.name) for folder in node.filled) or any(
        folder.folders for folder in node.of("train", "test", "labeled")
    )


def readable_tables(path: Path, how: Data) -> list[Path]:
    """The tables in a folder that name images in it; a question about their columns is passed on."""
    found = []
    for table in tables_in(scan(path)):
        try:
            read = read_table(table, how)
        except Question:
            if not _has_classes(scan(path)):
                raise
            found.append(table)
        except TacitError:
            continue  # a table of something else
        else:
            found += [table] if any(read.files.look(row["path"]) for row in read.rows[:200]) else []
    return found


def _draft_npz(path: Path) -> FolderReport:
    """The images of an .npz: the same report as for files."""
    arrays = read_npz(path)
    most = int(max(arrays.train_labels.max(initial=-1), arrays.test_labels.max(initial=-1)))
    classes = arrays.classes or tuple(str(label) for label in range(most + 1))
    if most >= len(classes):
        raise TacitError(f"{path}: the label {most} is none of its {len(classes)} classes.")
    notes = [arrays.note] if arrays.note else []
    report = FolderReport(path, order=list(classes), sites=[path.stem], notes=notes)
    named = npz_arrays(path, lambda names: [name for name in names if name in ("group_train", "group_test")])
    parts = (
        ("train", arrays.train_images, arrays.train_labels, named.get("group_train")),
        ("test", arrays.test_images, arrays.test_labels, named.get("group_test")),
    )
    for part, images, labels, groups in parts:
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            name = "" if label < 0 else classes[label]
            group = "" if groups is None else str(groups[number])
            grey_or_rgb = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
            report.items.append(Item(Path(f"{path}[{part} {number}]"), name, part, group, path.stem, grey_or_rgb))
    report.largest = max(arrays.train_images.shape[1:])  # what is an array already keeps its size
    return report


def _draft_table(path: Path, how: Data) -> FolderReport:
    """Every file that a table names; paths are relative to the table's own folder."""
    table = read_table(path, how)
    chosen = table.chosen | ({"siteless": how.siteless} if how.siteless else {})
    report = FolderReport(path, kind="table", paths=[path], chosen=chosen, told=table.told)
    _check_sites(table, how)
    named = any(row.get("site") for row in table.rows)
    aside = 0
    for number, row in enumerate(table.rows, start=1):
        part = _part(row, path, number)
        site = row.get("site", "") or (how.siteless if named and part == "train" else "" if named else path.stem)
        if part == "val":
            aside += 1
        elif site == LEAVE_OUT:
            report.left_out.append((Path(row["path"]), "names no site"))
        else:
            _take(report, table, row, part, site)
    report.sites = sorted({item.site for item in report.items if item.site} or {path.stem})
    report.ignored += [f"{aside} rows of val (neither trained nor tested on)"] if aside else []
    return report


def _part(row: dict[str, str], path: Path, number: int) -> str:
    given = row.get("split", "")
    part = role(given) or given or "train"
    if part not in ("train", "test", "val"):
        raise TacitError(
            f"{path}, row {number}: split is '{safe(given, 60)}'. Expected train, test, val (neither trained nor "
            "tested on), or nothing (train)."
        )
    if not row["path"]:
        raise TacitError(f"{path}, row {number}: the path is empty.")
    return part


def _take(report: FolderReport, table: Table, row: dict[str, str], part: str, site: str) -> None:
    try:
        file = table.files.find(row["path"])
    except ValueError as error:
        report.unreadable.append((Path(row["path"]), str(error)))
    else:
        report.items.append(Item(file, row["label"], part, row.get("group", ""), site))


def _check_sites(table: Table, how: Data) -> None:
    """Rows for training that name no site, where others do, are asked about."""
    lost = [row for row in table.rows if not row.get("site") and role(row.get("split", "")) in ("", "train")]
    if not lost or how.siteless or not any(row.get("site") for row in table.rows):
        return
    example = safe(lost[0]["path"], 60)
    raise Question(
        f"{table.path}: {len(lost):,} of {len(table.rows):,} rows name no site, as that of {example}.",
        [
            Answer("they are not read", f"--siteless {LEAVE_OUT}", {"siteless": LEAVE_OUT}),
            Answer("they are the server's", f"--siteless {SERVER}", {"siteless": SERVER}),
        ],
        "--siteless NAME makes them a site of that name. Or fill in the column.",
    )
