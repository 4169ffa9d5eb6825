// What is shown, what the reader chose, and how both are kept when newer data comes.

const ui = {
  hidden: new Set(), // groups, by label
  each: false, // a thin line for each seed
  run: null,
  round: null, // a step; null: the last one
  sort: { key: null, descending: false },
  text: "",
  state: "",
  open: new Set(), // details, by key
  asLines: new Set(), // vectors shown as lines
};

const MOST_LINES = 12; // shown at first; the others can be switched on
const FIRST_SECTIONS = ["result", "labels"];

let data = { runs: [], groups: [], splits: {}, figures: {} };
let runById = new Map();
let curveMarks = [];
let runMarks = [];

function take(newer) {
  data = newer;
  runById = new Map(data.runs.map((run) => [run.id, run]));
  if (!runById.has(ui.run)) ui.run = (data.runs.find((run) => run.state === "running") ?? data.runs.find((run) => run.state === "finished") ?? data.runs[0])?.id ?? null;
}

function titleOf(name) {
  const own = name.startsWith("client_metrics.") ? `${name.slice(15)}, told by each client` : null;
  return own ?? data.figures[name]?.title ?? name;
}

function unitOf(name) {
  return data.figures[name]?.unit ?? "number";
}

// --- Curves -------------------------------------------------------------------------------------------

function shownGroups() {
  const ids = new Set(shownRuns().map((run) => run.id));
  return data.groups.map((group, slot) => ({ ...group, slot })).filter((group) => group.runs.some((id) => ids.has(id) && runById.get(id).figures.steps.length));
}

function renderCurves() {
  const section = document.getElementById("curves");
  curveMarks = [];
  const groups = shownGroups();
  if (!groups.length) {
    section.replaceChildren();
    return;
  }
  const visible = groups.filter((group) => !ui.hidden.has(group.label));
  const names = Object.keys(data.figures).filter((name) => groups.some((group) => group.runs.some((id) => runById.get(id).figures.series[name])));
  const first = names.filter((name) => FIRST_SECTIONS.includes(data.figures[name].section));
  const others = names.filter((name) => !FIRST_SECTIONS.includes(data.figures[name].section));
  const bySection = (a, b) => FIRST_SECTIONS.indexOf(data.figures[a].section) - FIRST_SECTIONS.indexOf(data.figures[b].section);
  const more = el("details", { class: "more", "data-key": "more" }, el("summary", {}, `More figures by round: ${others.map(titleOf).join(", ")}`));
  const fillMore = () => {
    if (more.open && more.childElementCount === 1) more.append(el("div", { class: "plots" }, ...others.map((name) => curve(name, visible))));
  };
  more.addEventListener("toggle", fillMore);
  more.open = ui.open.has("more");
  fillMore();
  section.replaceChildren(
    el("h2", { id: "curves-heading", tabindex: -1 }, "By round"),
    legendButtons(groups, visible),
    el("div", { class: "plots" }, ...first.sort(bySection).map((name) => curve(name, visible))),
    ...(others.length ? [more] : []),
  );
}

function legendButtons(groups, visible) {
  const toggle = (label) => () => {
    if (!ui.hidden.delete(label)) ui.hidden.add(label);
    keepPlace(renderCurves);
  };
  const buttons = groups.map((group) => {
    const on = !ui.hidden.has(group.label);
    const count = group.runs.length;
    const seeds = count > 1 ? ` · ${count} ${new Set(group.seeds).size === count ? "seeds" : "runs"}` : "";
    return el(
      "button",
      { type: "button", class: "toggle", "aria-pressed": String(on), "data-key": `toggle ${group.label}`, onclick: toggle(group.label) },
      el("i", { class: `swatch ${styleOf(group.slot)}` }),
      `${group.label}${seeds}`,
    );
  });
  const each = el("input", { type: "checkbox", id: "each", "data-key": "each", checked: ui.each });
  each.addEventListener("change", () => {
    ui.each = each.checked;
    keepPlace(renderCurves);
  });
  const several = groups.some((group) => group.runs.length > 1);
  const hidden = groups.length - visible.length;
  return el(
    "div",
    {},
    el("div", { class: "bar", role: "group", "aria-label": "Lines to show" }, ...buttons, several ? el("label", { class: "each" }, each, " each seed") : null),
    several || hidden ? el("p", { class: "quiet" }, several ? "A line is the mean over the seeds, its band one standard deviation. " : "", hidden ? `${hidden} of ${groups.length} lines are hidden.` : "") : null,
  );
}

function curve(name, groups) {
  const lines = groups.flatMap((group) => {
    const members = group.runs.map((id) => runById.get(id)).filter((run) => run.figures.series[name]);
    if (!members.length) return [];
    const single = { label: group.label, slot: group.slot, steps: members[0].figures.steps, values: members[0].figures.series[name] };
    if (!group.bands) return [single];
    const { mean, std, n } = group.bands[name];
    const seeds = ui.each ? members.map((run) => ({ label: run.name, slot: group.slot, steps: run.figures.steps, values: run.figures.series[name], thin: true })) : [];
    return [...seeds, { label: group.label, slot: group.slot, steps: group.steps, values: mean, std, n }];
  });
  const staged = new Map();
  for (const group of groups) for (const stage of runById.get(group.runs[0]).figures.stages.slice(1)) staged.set(`${stage.name} ${stage.first}`, stage);
  const stages = staged.size <= 2 ? [...staged.values()] : [];
  const span = extent(groups.flatMap((group) => group.runs.flatMap((id) => runById.get(id).figures.steps)));
  const plot = linePlot({
    key: `curve ${name}`,
    title: titleOf(name),
    unit: unitOf(name),
    lines,
    stages,
    span,
    stageOf: (step) => `round ${step + 1}`,
    choose: pick,
    picked: () => ui.round,
  });
  curveMarks.push(plot.mark);
  return plot.figure;
}

// --- Choices ------------------------------------------------------------------------------------------

function pick(step) {
  ui.round = step;
  for (const mark of [...curveMarks, ...runMarks]) mark(step);
}

function openRun(id, go) {
  if (!runById.has(id)) return;
  ui.run = id;
  history.replaceState(null, "", `#run=${encodeURIComponent(id)}`);
  keepPlace(() => {
    document.getElementById("run-table")?.replaceWith(runTable());
    renderRun();
  });
  if (!go) return;
  document.getElementById("run-heading").focus({ preventScroll: true });
  document.getElementById("run").scrollIntoView();
}

function followHash() {
  const wanted = new URLSearchParams(location.hash.slice(1)).get("run");
  if (wanted !== null) openRun(wanted, true);
}

// Draw something anew without losing where the reader is.
function keepPlace(render) {
  const key = document.activeElement?.closest("[data-key]")?.dataset.key;
  render();
  if (!key || document.activeElement !== document.body) return;
  const found = document.querySelector(`[data-key="${CSS.escape(key)}"]`);
  (found?.querySelector(":scope > summary") ?? found)?.focus({ preventScroll: true });
}

function render() {
  keepPlace(() => {
    renderNav();
    renderRuns();
    renderCurves();
    renderRun();
  });
}

function renderNav() {
  const many = data.runs.length > 1;
  document.getElementById("heading").textContent = many ? `${data.runs.length} runs` : (data.runs[0]?.name ?? "No run yet");
  document.title = `${document.getElementById("heading").textContent} · tacit`;
  const made = new Date(data.made);
  document.getElementById("made").textContent = `tacit ${data.version} · ${Number.isNaN(made.valueOf()) ? data.made : made.toLocaleString()}`;
  const links = [["#runs", many ? "Runs" : "The run"], ["#curves", "By round"], ["#run", "One run"]];
  document.getElementById("nav").replaceChildren(...links.map(([href, name]) => el("a", { href }, name)));
}

// --- Light, dark, paper -------------------------------------------------------------------------------

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  const button = document.getElementById("theme");
  button.textContent = isDark() ? "☀ light" : "☾ dark";
  button.setAttribute("aria-label", isDark() ? "Show light colours" : "Show dark colours");
}

function listen() {
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(isDark() ? "light" : "dark");
    render();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    setTheme(document.documentElement.dataset.theme);
    render();
  });
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    setTheme("light");
    ui.open.add("experiment");
    render();
    for (const stage of document.querySelectorAll(".stage")) stage.redraw(stage.clientWidth || 600);
  });
  addEventListener("afterprint", () => {
    setTheme(before);
    render();
  });
  addEventListener("hashchange", followHash);
  document.addEventListener("toggle", (event) => {
    const key = event.target.dataset?.key;
    if (key && event.target.open) ui.open.add(key);
    else if (key) ui.open.delete(key);
  }, true);
}

// --- Live ---------------------------------------------------------------------------------------------

const PAUSE = 1000;

function follow() {
  const told = document.getElementById("live");
  let tag = "";
  told.hidden = false;
  told.textContent = "live";
  const ask = async () => {
    let pause = PAUSE;
    try {
      const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        take(await answer.json());
        tag = answer.headers.get("ETag") ?? "";
        render();
      }
      const text = data.runs.some((run) => run.state === "running") ? "live" : "live: no run is going on";
      if (told.textContent !== text) told.textContent = text;
      told.classList.remove("lost");
    } catch {
      told.textContent = "no longer live: tacit watch has ended; these are its last data";
      told.classList.add("lost");
      pause = 5 * PAUSE;
    }
    setTimeout(ask, pause);
  };
  setTimeout(ask, PAUSE);
}

take(JSON.parse(document.getElementById("data").textContent));
data.groups.slice(MOST_LINES).forEach((group) => ui.hidden.add(group.label));
setTheme(null);
listen();
render();
followHash();
if (document.documentElement.dataset.live === "true") follow();
