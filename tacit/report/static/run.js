// One run in detail: its result, a round to pick, classes, what the method noted, split, cost, how to reproduce it.

function renderRun() {
  const section = document.getElementById("run");
  runMarks = [];
  const run = runById.get(ui.run);
  if (!run) {
    section.replaceChildren();
    return;
  }
  const { steps } = run.figures;
  const last = steps.length ? steps[steps.length - 1] : null;
  const stageOf = (step) => nameRound(run, step);
  const common = { stageOf, choose: pick, picked: () => ui.round };
  section.replaceChildren(
    runHead(run),
    ...(last === null ? [] : [roundPicker(run, steps, last)]),
    ...recallTable(run),
    ...part("Classes", [...gridPlots(run, isOfClasses, common), ...cubePlots(run, isOfClasses)]),
    ...part("What the method noted", [...gridPlots(run, isNoted, common), ...cubePlots(run, isNoted)], leftOut(run)),
    ...part("Split", splitPlots(run), splitNotes(run)),
    ...part("Communication", travelPlots(run, common), travelNotes(run)),
    ...part("Time", timePlots(run, common)),
    ...part("Pictures", run.pictures.map(picture)),
    ...reproduce(run),
  );
}

function part(title, plots, notes = []) {
  if (!plots.length && !notes.length) return [];
  return [el("h3", {}, title), ...notes.map((note) => el("p", { class: "quiet" }, note)), el("div", { class: "plots" }, ...plots)];
}

function nameRound(run, step) {
  const stage = run.figures.stages.filter((candidate) => candidate.first <= step).pop();
  const several = run.figures.stages.length > 1 && stage;
  return several ? `round ${step + 1} (${stage.name} ${step - stage.first + 1})` : `round ${step + 1}`;
}

function keep(plot) {
  runMarks.push(plot.mark);
  return plot.figure;
}

// --- Head ---------------------------------------------------------------------------------------------

function runHead(run) {
  const options = data.runs.map((other) => el("option", { value: other.id, selected: other.id === run.id }, other.name));
  const select = el("select", { id: "choose-run", "data-key": "choose-run" }, ...options);
  select.addEventListener("change", () => openRun(select.value, false));
  const results = run.results;
  const oneSided = results.largest_class > 0.5; // then plain accuracy flatters
  const figures = [
    ["balanced accuracy", oneSided ? show(results.balanced_accuracy, "share") : "–"],
    ["accuracy", show(results.accuracy, "share")],
    ["always the largest class", oneSided ? show(results.largest_class, "share") : "–"],
    ["AUC", show(results.auc, "share")],
    ["labels right", show(results.pseudo_accuracy, "share")],
    ["labels accepted", show(results.accepted_ratio, "share")],
    ["gap closed", results.gap_closed === undefined ? "–" : show(results.gap_closed, "share")],
    ["sent up", show(results.bytes_up, "bytes")],
    ["time", show(results.seconds, "seconds")],
  ].filter(([, value]) => value !== "–");
  const guard = run.summary.guard; // it may have chosen another model than the method's
  const rule = guard ? "the model that the guard chose" : { best: "the best round", last: "the last round", "last-10": "the mean of the last ten rounds" }[run.reporting] ?? run.reporting;
  const paper = run.paper.accuracy !== undefined && run.paper.accuracy !== null ? ` The paper has ${run.paper.accuracy} % (${run.paper.source}).` : "";
  const warnings = run.summary.warnings ?? [];
  return el(
    "div",
    {},
    el("h2", { id: "run-heading", tabindex: -1 }, "One run: ", run.name),
    data.runs.length > 1 ? el("p", { class: "bar" }, el("label", { for: "choose-run" }, "Show "), select) : null,
    el("p", {}, badge(run), ` ${run.says} ${run.title}`),
    run.problems.length ? el("ul", { class: "problems" }, ...run.problems.map((problem) => el("li", {}, problem))) : null,
    warnings.length || run.remarks.length ? el("ul", { class: "remarks" }, ...[...warnings, ...run.remarks].map((text) => el("li", {}, text))) : null,
    figures.length ? el("dl", { class: "tiles" }, ...figures.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))) : null,
    figures.length ? el("p", { class: "quiet" }, `${run.state === "finished" ? "The result is" : "So far, by the rule"} ${rule}.${paper}`) : null,
    guard ? el("p", {}, guard.sentence) : null,
  );
}

// Of the model after the last round; a class with few test images has a wide interval, and that is the point.
function recallTable(run) {
  if (!run.recall.length) return [];
  const whole = (share) => Math.round(100 * share);
  const rows = run.recall.map((one) =>
    el("tr", {}, el("th", { scope: "row" }, one.class), el("td", {}, show(one.images)), el("td", {}, one.images ? show(one.recall, "share") : "–"), el("td", {}, one.images ? `${whole(one.interval[0])} to ${whole(one.interval[1])} %` : "–")),
  );
  const head = el("tr", {}, ...["class", "test images", "recognised", "95 % interval"].map((name) => el("th", { scope: "col" }, name)));
  const table = el("table", { class: "recall" }, el("caption", {}, "How many test images of each class the last model recognises"), el("thead", {}, head), el("tbody", {}, ...rows));
  return [el("h3", {}, "Recall by class"), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Recall by class" }, table)];
}

// --- A round ------------------------------------------------------------------------------------------

function roundPicker(run, steps, last) {
  const range = el("input", { type: "range", id: "round", "data-key": "round", min: 0, max: steps.length - 1, step: 1 });
  const named = el("output", { for: "round" });
  const list = el("dl", { class: "tiles small" });
  range.addEventListener("input", () => pick(steps[Number(range.value)]));
  const follow = el("button", { type: "button", class: "plain", "data-key": "follow", onclick: () => pick(null) }, "last round");
  const update = (picked) => {
    const i = nearestIndex(steps, picked ?? last);
    range.value = i;
    named.textContent = nameRound(run, steps[i]);
    range.setAttribute("aria-valuetext", named.textContent);
    follow.disabled = picked === null;
    const values = Object.entries(run.figures.series).map(([name, series]) => [titleOf(name), show(series[i], unitOf(name))]);
    list.replaceChildren(...values.filter(([, value]) => value !== "–").map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  };
  runMarks.push(update);
  update(ui.round);
  return el(
    "div",
    { class: "round" },
    el("h3", {}, "A round"),
    el("p", { class: "bar" }, el("label", { for: "round" }, "Pick "), range, named, follow),
    list,
    eventList(run),
  );
}

function eventList(run) {
  if (!run.events.length) return null;
  const details = el("details", { "data-key": "events" }, el("summary", {}, `What went wrong in some round: ${run.events.length}`));
  details.append(el("ul", {}, ...run.events.map((event) => el("li", {}, `${nameRound(run, event.step)}: ${event.what}`))));
  details.open = ui.open.has("events");
  return details;
}

// --- Vectors and matrices -----------------------------------------------------------------------------

const isOfClasses = (name) => data.figures[name].section === "classes";
const isNoted = (name) => !isOfClasses(name);

function gridPlots(run, wanted, common) {
  return Object.entries(run.figures.grids)
    .filter(([name]) => wanted(name))
    .map(([name, grid]) => keep(gridPlot(run, name, grid, common)));
}

function gridPlot(run, name, grid, common) {
  const unit = unitOf(name);
  const title = { class: "", client: ", by client", party: ", by party", place: ", by place" }[grid.axis];
  const full = `${titleOf(name)}${name.startsWith("client_metrics.") ? "" : title}`;
  const few = grid.rows.length <= 16;
  const asLines = few && ui.asLines.has(name);
  const flip = () => {
    if (!ui.asLines.delete(name)) ui.asLines.add(name);
    keepPlace(renderRun);
  };
  const key = `grid ${name}`;
  const controls = few ? [el("button", { type: "button", class: "plain", "aria-pressed": String(asLines), "data-key": `flip ${name}`, onclick: flip }, "as lines")] : [];
  const thinned = grid.rows_in_all > grid.rows.length ? ` ${grid.rows.length} of ${grid.rows_in_all} rows are shown.` : "";
  if (asLines) {
    const lines = grid.rows.map((row, slot) => ({ label: row, slot, steps: grid.steps, values: grid.values[slot] }));
    return linePlot({ key, title: full, unit, lines, stages: run.figures.stages, controls, named: true, ...common });
  }
  return heatPlot({
    key,
    title: full,
    unit,
    rows: grid.rows,
    columns: grid.steps.map((step) => `round ${step + 1}`),
    steps: grid.steps,
    values: grid.values,
    domain: unit === "share" ? [0, 1] : null,
    tellColumn: (column) => common.stageOf(grid.steps[column]),
    says: sayHeat(grid.rows, grid.steps, grid.values, unit) + thinned,
    controls,
    picked: common.picked,
    choose: (column) => common.choose(grid.steps[column]),
  });
}

// A matrix of the round that is picked; it is drawn anew when another one is.
function cubePlots(run, wanted) {
  const cubes = Object.entries(run.figures.cubes).filter(([name]) => wanted(name));
  return cubes.map(([name, cube]) => {
    const holder = el("div", { class: "cube" });
    const all = extent(cube.values.flat(2));
    const domain = all && all[0] >= 0 ? [0, all[1]] : all;
    let shown = null;
    const update = (picked) => {
      const i = nearestIndex(cube.steps, picked ?? cube.steps[cube.steps.length - 1]);
      if (i === shown) return;
      shown = i;
      const values = cube.values[i];
      const cells = values.flatMap((row, y) => row.map((value, x) => ({ value, where: `${cube.rows[y]}, ${cube.columns[x]}` }))).filter((cell) => cell.value !== null);
      const most = cells.reduce((a, b) => (a && a.value >= b.value ? a : b), null);
      const plot = heatPlot({
        key: `cube ${name}`,
        title: `${titleOf(name)}, ${nameRound(run, cube.steps[i])}`,
        unit: unitOf(name),
        rows: cube.rows,
        columns: cube.columns,
        values,
        domain,
        tellColumn: (column) => cube.columns[column],
        says: `Rows: by ${cube.axis}. Columns: by ${cube.across}. Pick another round above. ${most ? `Highest: ${show(most.value, unitOf(name))} (${most.where}).` : ""}`,
      });
      keepPlace(() => holder.replaceChildren(plot.figure));
    };
    runMarks.push(update);
    update(ui.round);
    return holder;
  });
}

function leftOut(run) {
  return Object.entries(run.figures.left_out ?? {}).map(([name, why]) => `${name} is not drawn: ${why}.`);
}

// --- Split, cost, pictures ----------------------------------------------------------------------------

function splitPlots(run) {
  const split = data.splits[run.split];
  if (!split) return [];
  const sum = (table) => table.flat().reduce((a, b) => a + b, 0);
  const plots = [];
  for (const [name, title] of [["labeled", "Labelled images"], ["unlabeled", "Unlabelled images"]]) {
    const held = split.rows.map((_, i) => i).filter((i) => split[name][i].some((count) => count > 0));
    if (!held.length) continue;
    const values = held.map((i) => split[name][i]);
    const counts = held.map((i) => split[name][i].reduce((a, b) => a + b, 0));
    const [least, most] = extent(counts);
    plots.push(
      heatPlot({
        key: `split ${name}`,
        title: `${title}, by party and class`,
        unit: "number",
        rows: held.map((i) => split.rows[i]),
        columns: split.columns,
        values: values.map((row) => row.map((count) => (count ? count : null))),
        domain: [0, extent(values.flat())[1]],
        tellColumn: (column) => `class ${split.columns[column]}`,
        says: `${show(sum(values))} in ${held.length} rows; a party holds ${show(least)} to ${show(most)}. ${split.note}`,
      }).figure,
    );
  }
  return plots;
}

function splitNotes(run) {
  const split = data.splits[run.split];
  return split ? [`${split.title}; ${show(split.test)} test images.`] : [];
}

function travelPlots(run, common) {
  const { steps, series, stages } = run.figures;
  // Often as much goes down as up: the second line is dashed, so that the first shows through.
  const line = (name, i) => ({ label: titleOf(name), slot: i === 1 ? 9 : i, steps, values: series[name] });
  const pairs = [
    ["travel", "Bytes in a round", ["bytes_up", "bytes_down", "memory_bytes"], "bytes"],
    ["clients", "Clients in a round", ["asked", "answered"], "number"],
  ];
  return pairs.flatMap(([key, title, names, unit]) => {
    const lines = names.filter((name) => series[name]?.some((value) => value)).map(line);
    return lines.length ? [keep(linePlot({ key, title, unit, lines, stages, from: 0, named: true, ...common }))] : [];
  });
}

function travelNotes(run) {
  const { bytes_up: up, bytes_down: down } = run.results;
  return up || down ? [`In all rounds together: ${show(up, "bytes")} up, ${show(down, "bytes")} down.`] : [];
}

function timePlots(run, common) {
  const { steps, phases } = run.figures;
  if (!phases || !Object.keys(phases).length) return [];
  return [keep(stackPlot({ key: "phases", title: "Seconds by phase", unit: "seconds", steps, parts: phases, ...common }))];
}

function picture(one) {
  const image = el("img", { src: one.source, width: one.width, height: one.height, alt: `${one.name}, ${one.width} × ${one.height} pixels, written by the run`, class: one.width < 200 ? "small" : null });
  return el("figure", { class: "plot" }, el("figcaption", {}, el("h4", {}, one.name)), image);
}

function reproduce(run) {
  const versions = Object.entries(run.summary.versions ?? {}).map(([name, version]) => `${name} ${version}`);
  const made = [...versions, run.summary.device, ...(run.summary.cpu ?? [])].filter(Boolean).join(", ");
  const parts = run.reproduce.map((way) => el("p", {}, `${way.what}:`, copyable(way.command, `command ${way.what}`)));
  const details = el("details", { class: "experiment", "data-key": "experiment" }, el("summary", {}, "The experiment, resolved (experiment.toml)"));
  details.open = ui.open.has("experiment");
  details.append(copyable(run.toml, "the experiment"));
  return [el("h3", {}, "How to reproduce"), ...parts, made ? el("p", { class: "quiet" }, `Made with ${made}.`) : null, run.toml ? details : null].filter(Boolean);
}

function copyable(text, what) {
  const code = el("pre", { tabindex: 0 }, el("code", {}, text));
  const button = el("button", { type: "button", class: "plain copy", "aria-label": `Copy ${what}`, "data-key": `copy ${what}` }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "selected: press Ctrl-C";
    }
  });
  return el("span", { class: "copyable" }, code, button);
}
