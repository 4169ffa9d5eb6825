// The runs: a table to sort and filter, and one row a group, over its seeds.

const STATES = { finished: "✓ finished", running: "● running", stopped: "‖ stopped", broken: "✗ broken" };

const COLUMNS = [
  { key: "name", head: "run", value: (run) => run.name },
  { key: "state", head: "state", value: (run) => run.state },
  { key: "method", head: "method", value: (run) => shortMethod(run) },
  { key: "data", head: "data", value: (run) => shortName(run.data) },
  { key: "placement", head: "labels at", value: (run) => run.placement },
  { key: "seed", head: "seed", value: (run) => run.seed, number: true },
  { key: "rounds", head: "rounds", value: (run) => run.rounds.done, text: roundsText, number: true },
  { key: "balanced_accuracy", head: "balanced", value: (run) => run.results.balanced_accuracy, unit: "share", number: true },
  { key: "accuracy", head: "accuracy", value: (run) => run.results.accuracy, unit: "share", number: true },
  { key: "auc", head: "AUC", value: (run) => run.results.auc, unit: "share", number: true },
  { key: "pseudo_accuracy", head: "labels right", value: (run) => run.results.pseudo_accuracy, unit: "share", number: true },
  { key: "bytes_up", head: "sent up", value: (run) => run.results.bytes_up, unit: "bytes", number: true },
  { key: "seconds", head: "time", value: (run) => run.results.seconds, unit: "seconds", number: true },
];

function shortName(name) {
  return name.split("/").slice(-2).join("/");
}

function shortMethod(run) {
  return run.method.replace(/^.*\//, "").replace(/\.py$/, "") || "–";
}

function roundsText(run) {
  const { done, of } = run.rounds;
  return of !== null && of !== done ? `${done} of ${of}` : String(done);
}

function badge(run) {
  return el("span", { class: `badge ${run.state}` }, STATES[run.state]);
}

function shownRuns() {
  const words = ui.text.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (run) => {
    const text = [run.name, run.state, run.method, run.data, run.placement, run.title, `seed=${run.seed}`].join(" ").toLowerCase();
    return (!ui.state || run.state === ui.state) && words.every((word) => text.includes(word));
  };
  const column = COLUMNS.find((candidate) => candidate.key === ui.sort.key);
  const runs = data.runs.filter(matches);
  if (!column) return runs;
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  return runs.sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    const [noX, noY] = [x === null || x === undefined, y === null || y === undefined];
    if (noX || noY) return Number(noX) - Number(noY); // what is missing comes last, whatever the direction
    return ui.sort.descending ? compare(y, x) : compare(x, y);
  });
}

function renderRuns() {
  const counts = Object.keys(STATES).map((state) => [state, data.runs.filter((run) => run.state === state).length]);
  const told = counts.filter(([, count]) => count).map(([state, count]) => `${count} ${state}`).join(", ");
  const many = data.runs.length > 1;
  const parts = [el("h2", { id: "runs-heading", tabindex: -1 }, many ? "Runs" : "The run")];
  if (!data.runs.length) parts.push(el("p", {}, "There is no run here yet. This page fills when one begins."));
  else parts.push(el("p", {}, many ? `${data.runs.length} runs: ${told}.` : `${data.runs[0].name}: ${data.runs[0].says}`));
  const troubled = data.runs.filter((run) => run.problems.length);
  if (troubled.length) {
    parts.push(el("ul", { class: "problems" }, ...troubled.map((run) => el("li", {}, el("strong", {}, run.name), `: ${run.problems.join(" ")}`))));
  }
  if (many) parts.push(filters(), runTable());
  if (data.groups.length > 1 || data.groups.some((group) => group.runs.length > 1)) parts.push(...groupTable());
  document.getElementById("runs").replaceChildren(...parts);
}

function filters() {
  const text = el("input", { type: "search", id: "filter", "data-key": "filter", value: ui.text, placeholder: "name, method, data, seed=0 …" });
  text.addEventListener("input", () => {
    ui.text = text.value;
    refreshTable();
  });
  const states = Object.entries(STATES).map(([state, words]) => el("option", { value: state, selected: ui.state === state }, words));
  const state = el("select", { id: "state", "data-key": "state" }, el("option", { value: "" }, "any"), ...states);
  state.addEventListener("change", () => {
    ui.state = state.value;
    refreshTable();
  });
  return el(
    "div",
    { class: "bar", role: "search" },
    el("label", { for: "filter" }, "Filter "),
    text,
    el("label", { for: "state" }, "State "),
    state,
    el("span", { id: "filtered", role: "status" }),
  );
}

function refreshTable() {
  document.getElementById("run-table")?.replaceWith(runTable());
  renderCurves();
}

function runTable() {
  const runs = shownRuns();
  const head = COLUMNS.map((column) => {
    const sorted = ui.sort.key === column.key ? (ui.sort.descending ? "descending" : "ascending") : null;
    const sort = () => {
      ui.sort = { key: column.key, descending: sorted === "ascending" || (sorted === null && Boolean(column.number)) };
      refreshTable();
      document.querySelector(`[data-key="sort ${column.key}"]`).focus();
    };
    const arrow = sorted === "ascending" ? " ▲" : sorted ? " ▼" : "";
    return el("th", { scope: "col", "aria-sort": sorted, class: column.number ? "number" : null }, el("button", { type: "button", "data-key": `sort ${column.key}`, onclick: sort }, column.head, el("span", { "aria-hidden": "true" }, arrow)));
  });
  const cell = (run, column) => {
    if (column.key === "name") {
      const open = el("a", { href: `#run=${encodeURIComponent(run.id)}`, "data-key": `open ${run.id}`, title: run.title || null }, run.name);
      return el("th", { scope: "row" }, open);
    }
    if (column.key === "state") return el("td", { title: run.says }, badge(run));
    const value = column.value(run);
    const text = column.text ? column.text(run) : column.number && typeof value === "number" && column.unit ? show(value, column.unit) : String(value ?? "–");
    return el("td", { class: column.number ? "number" : null }, text || "–");
  };
  const rows = runs.map((run) => el("tr", { "aria-current": run.id === ui.run ? "true" : null }, ...COLUMNS.map((column) => cell(run, column))));
  requestAnimationFrame(() => {
    const told = document.getElementById("filtered");
    if (told) told.textContent = runs.length === data.runs.length ? "" : `${runs.length} of ${data.runs.length} runs`;
  });
  return el(
    "div",
    { class: "scroll", id: "run-table", tabindex: 0, role: "region", "aria-label": "Runs, to sort and filter" },
    el("table", {}, el("caption", { class: "unseen" }, "Runs. A heading sorts the table; a run's name opens it below."), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)),
  );
}

function groupTable() {
  const heads = ["experiment", "runs", "balanced", "accuracy", "AUC", "labels right", "sent up", "time", "paper"];
  const rows = data.groups
    .filter((group) => group.results.accuracy)
    .map((group) => {
      const members = group.runs.map((id) => runById.get(id));
      const paper = members.find((run) => run.paper.accuracy !== undefined && run.paper.accuracy !== null)?.paper;
      const unfinished = members.filter((run) => run.state !== "finished").length;
      const { balanced_accuracy: balanced, accuracy, auc, pseudo_accuracy: right, bytes_up: up, seconds } = group.results;
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, group.label),
        el("td", {}, `${members.length}${unfinished ? ` (${unfinished} unfinished)` : ""}`),
        ...[[balanced, "share"], [accuracy, "share"], [auc, "share"], [right, "share"]].map(([result, unit]) => el("td", { class: "number" }, showSpread(result, unit))),
        el("td", { class: "number" }, up ? showBytes(up.mean) : "–"),
        el("td", { class: "number" }, seconds ? showSeconds(seconds.mean) : "–"),
        el("td", { class: "long" }, paper ? `${paper.accuracy} % (${paper.source})` : "–"),
      );
    });
  if (!rows.length) return [];
  return [
    el("h3", {}, "Over the seeds"),
    el("p", { class: "quiet" }, "Runs that differ only in their seed are one row: mean ± standard deviation, by each run's reporting rule. A paper's number stands for the paper's scale, not for ours."),
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Results over the seeds" },
      el("table", {}, el("caption", { class: "unseen" }, "Results over the seeds"), el("thead", {}, el("tr", {}, ...heads.map((head, i) => el("th", { scope: "col", class: i > 1 && i < 8 ? "number" : null }, head)))), el("tbody", {}, ...rows)),
    ),
  ];
}
