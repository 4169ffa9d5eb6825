// What every plot has: a heading, a place to draw on, a sentence that says what is seen, the data as a table.
// The place is a slider along its columns (mostly rounds), so that arrow keys move along it and a screen reader
// speaks each value; its picture is hidden from the reader, the sentence and the table are not.

let plotNumber = 0;

const observer = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const draw = entry.target.redraw;
    const width = Math.floor(entry.contentRect.width);
    if (draw && width > 0 && width !== entry.target.drawnWidth) {
      entry.target.drawnWidth = width;
      draw(width);
    }
  }
});

// columns: how many places the slider has. draw(width): returns {picture, place(column, row) → x, y}.
// tell(column, row): the lines to show there, the first as heading. hit(x, y): the column and row at a point.
function plotFigure({ key, title, says, table, controls = [], columns, rows = 1, draw, tell, hit, choose }) {
  plotNumber += 1;
  const describedBy = `says-${plotNumber}`;
  const tip = el("div", { class: "tip", hidden: true });
  const stage = el("div", {
    class: "stage",
    tabindex: 0,
    role: "slider",
    "aria-label": rows > 1 ? `${title}. Left and right: round. Up and down: row.` : `${title}. Left and right: round.`,
    "aria-describedby": describedBy,
    "aria-valuemin": 1,
    "aria-valuemax": Math.max(1, columns),
    "data-key": key,
  });
  const cursor = { column: columns - 1, row: 0, drawn: null };

  function point(column, row, visibly) {
    cursor.column = Math.min(Math.max(column, 0), columns - 1);
    cursor.row = Math.min(Math.max(row, 0), rows - 1);
    const [heading, ...lines] = tell(cursor.column, cursor.row);
    stage.setAttribute("aria-valuenow", cursor.column + 1);
    stage.setAttribute("aria-valuetext", [heading, ...lines.map((line) => `${line.label} ${line.value}`)].join(", "));
    if (!visibly || !cursor.drawn) return;
    tip.replaceChildren(
      el("strong", {}, heading),
      ...lines.map((line) =>
        el("span", { class: "tip-line" }, el("i", { class: `swatch ${line.style ?? "none"}` }), `${line.label} `, el("b", {}, line.value)),
      ),
    );
    tip.hidden = false;
    const { x, y } = cursor.drawn.place(cursor.column, cursor.row);
    const room = stage.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, x > stage.clientWidth / 2 ? x - tip.offsetWidth - 12 : x + 12))}px`;
    tip.style.top = `${Math.max(0, Math.min(stage.clientHeight - tip.offsetHeight, y))}px`;
    cursor.drawn.point?.(cursor.column, cursor.row);
  }

  function leave() {
    tip.hidden = true;
    cursor.drawn?.point?.(null, null);
  }

  const keys = {
    ArrowLeft: () => point(cursor.column - 1, cursor.row, true),
    ArrowRight: () => point(cursor.column + 1, cursor.row, true),
    ArrowUp: () => point(cursor.column, cursor.row - 1, true),
    ArrowDown: () => point(cursor.column, cursor.row + 1, true),
    Home: () => point(0, cursor.row, true),
    End: () => point(columns - 1, cursor.row, true),
    Enter: () => choose?.(cursor.column),
    Escape: leave,
  };
  stage.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  const at = (event) => {
    const box = stage.getBoundingClientRect();
    return hit(event.clientX - box.left, event.clientY - box.top);
  };
  stage.addEventListener("pointermove", (event) => point(...at(event), true));
  stage.addEventListener("pointerleave", leave);
  stage.addEventListener("blur", leave);
  stage.addEventListener("click", (event) => {
    point(...at(event), true);
    choose?.(cursor.column);
  });

  const figure = el(
    "figure",
    { class: "plot" },
    el("figcaption", {}, el("h4", {}, title), el("span", { class: "controls" }, ...controls)),
    stage,
    el("p", { class: says.length > 330 ? "says unseen" : "says", id: describedBy }, says),
    tableDetails(`table ${key}`, table),
  );
  stage.redraw = (width) => {
    cursor.drawn = draw(width);
    stage.replaceChildren(cursor.drawn.picture, tip);
  };
  point(cursor.column, 0, false);
  observer.observe(stage);
  return { figure, mark: (step) => cursor.drawn?.mark?.(step) };
}

// The table is made when it is opened: a page of many plots would be slow otherwise.
function tableDetails(key, table) {
  const details = el("details", { class: "data", "data-key": key }, el("summary", {}, "Data as a table"));
  const make = () => {
    if (!details.open || details.childElementCount > 1) return;
    const { head, body, caption } = table();
    details.append(
      el(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
        el(
          "table",
          {},
          el("caption", { class: "unseen" }, caption),
          el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
          el("tbody", {}, ...body.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((cell) => el("td", {}, cell))))),
        ),
      ),
    );
  };
  details.addEventListener("toggle", make);
  details.open = ui.open.has(key);
  if (details.open) make();
  return details;
}
