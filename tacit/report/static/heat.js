// Heat maps: each cell is one pixel of an image that is drawn large. So 500 rounds × 100 classes cost little.

const RAMPS = {
  light: [[246, 244, 235], [178, 214, 190], [74, 158, 173], [38, 92, 145], [24, 34, 84]],
  dark: [[30, 35, 48], [33, 76, 124], [44, 136, 156], [134, 199, 148], [250, 240, 170]],
};

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function colourAt(share) {
  const ramp = RAMPS[isDark() ? "dark" : "light"];
  const place = Math.min(Math.max(share, 0), 1) * (ramp.length - 1);
  const i = Math.min(Math.floor(place), ramp.length - 2);
  return ramp[i].map((low, part) => Math.round(low + (ramp[i + 1][part] - low) * (place - i)));
}

function pixels(width, height, colour) {
  const canvas = el("canvas", { width, height });
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(width, height);
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      const found = colour(x, y);
      if (found) image.data.set([...found, 255], 4 * (y * width + x));
    }
  }
  pen.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

// values[row][column]; columnNames for the tick marks and headings; steps if the columns are rounds.
function heatPlot({ key, title, unit, rows, columns, values, domain, tellColumn, choose, picked, steps = null, controls, says, across = "round" }) {
  const [low, high] = domain ?? extent(values.flat()) ?? [0, 1];
  const share = (value) => (high > low ? (value - low) / (high - low) : value ? 0.5 : 0);
  const cellHeight = rows.length <= 12 ? 22 : rows.length <= 30 ? 16 : rows.length <= 60 ? 10 : Math.max(2, Math.floor(480 / rows.length));
  const longest = Math.max(0, ...rows.map((row) => row.length), 4);
  let box = null;

  function draw(width) {
    const left = Math.min(Math.max(34, longest * 6.6 + 10), width * 0.3, 150);
    const cellWidth = Math.min((width - left - 4) / Math.max(1, columns.length), 90);
    const upright = !steps && Math.max(...columns.map((name) => name.length)) * 6.6 > cellWidth - 4;
    const top = steps ? 6 : upright ? Math.min(90, Math.max(...columns.map((name) => name.length)) * 6.6 + 8) : 20;
    const broad = cellWidth * columns.length;
    const down = cellHeight * rows.length;
    const height = top + down + (steps ? 58 : 40);
    box = { left, top, cellWidth };
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", class: "heat" });
    const paint = (x, y) => (values[y][x] === null ? null : colourAt(share(values[y][x])));
    picture.append(
      hatch(left, top, broad, down),
      svg("image", { x: left, y: top, width: broad, height: down, preserveAspectRatio: "none", href: pixels(Math.max(1, columns.length), Math.max(1, rows.length), paint) }),
    );
    if (cellWidth >= 6 && cellHeight >= 6) picture.append(lattice(left, top, cellWidth, cellHeight, columns.length, rows.length));
    if (cellWidth >= 38 && cellHeight >= 16) {
      rows.forEach((_, y) =>
        columns.forEach((_, x) => {
          if (values[y][x] === null) return;
          const strong = share(values[y][x]) > 0.5;
          picture.append(svg("text", { class: strong ? "in strong" : "in", x: left + (x + 0.5) * cellWidth, y: top + (y + 0.5) * cellHeight + 4, "text-anchor": "middle" }, shortNumber(values[y][x], unit)));
        }),
      );
    }
    rowNames(rows, left, top, cellHeight).forEach((name) => picture.append(name));
    const below = top + down;
    if (steps) {
      for (const i of roundPlaces(steps, broad)) picture.append(svg("text", { x: left + (i + 0.5) * cellWidth, y: below + 16, "text-anchor": "middle" }, String(steps[i] + 1)));
    } else {
      columns.forEach((name, i) => {
        if (cellWidth < 9 && i % Math.ceil(9 / cellWidth)) return;
        const x = left + (i + 0.5) * cellWidth;
        const turned = { x, y: top - 6, transform: `rotate(-90 ${x + 4} ${top - 6})` };
        picture.append(svg("text", upright ? { ...turned, x: x + 4 } : { x, y: top - 6, "text-anchor": "middle" }, name.length > 13 && upright ? `${name.slice(0, 12)}…` : name));
      });
    }
    picture.append(legend(left, below + (steps ? 30 : 12), width - left - 4, low, high, unit, steps ? across : ""));
    const pickedMark = svg("rect", { class: "picked", y: top, width: Math.max(cellWidth, 2), height: down, visibility: "hidden" });
    const cross = svg("rect", { class: "cell", width: Math.max(cellWidth, 3), height: Math.max(cellHeight, 3), visibility: "hidden" });
    picture.append(pickedMark, cross);
    const mark = (step) => {
      if (!steps || !steps.length) return;
      pickedMark.setAttribute("visibility", step === null ? "hidden" : "visible");
      if (step !== null) pickedMark.setAttribute("x", left + nearestIndex(steps, step) * cellWidth);
    };
    mark(picked ? picked() : null);
    return {
      picture,
      mark,
      place: (column, row) => ({ x: left + (column + 0.5) * cellWidth, y: top + (row + 1) * cellHeight + 2 }),
      point: (column, row) => {
        cross.setAttribute("visibility", column === null ? "hidden" : "visible");
        if (column === null) return;
        cross.setAttribute("x", left + column * cellWidth);
        cross.setAttribute("y", top + row * cellHeight);
      },
    };
  }

  return plotFigure({
    key,
    title,
    controls,
    says,
    columns: columns.length,
    rows: rows.length,
    table: () => ({ caption: title, head: ["", ...columns], body: rows.map((name, y) => [name, ...values[y].map((value) => show(value, unit))]) }),
    draw,
    hit: (x, y) => [Math.floor((x - box.left) / box.cellWidth), Math.floor((y - box.top) / cellHeight)],
    tell: (column, row) => [tellColumn(column), { label: rows[row] ?? "", value: show(values[row]?.[column], unit) }],
    choose: choose ? (column) => choose(column) : undefined,
  });
}

function shortNumber(value, unit) {
  if (unit === "share") return String(Math.round(100 * value));
  if (Math.abs(value) >= 10000) return value.toExponential(0);
  return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(2)));
}

function rowNames(rows, left, top, cellHeight) {
  const step = Math.max(1, Math.ceil(12 / cellHeight));
  const most = Math.floor((left - 8) / 6.2);
  return rows.flatMap((name, i) => {
    if (i % step) return [];
    const short = name.length > most ? `${name.slice(0, Math.max(1, most - 1))}…` : name;
    return [svg("text", { x: left - 6, y: top + (i + 0.5) * cellHeight + 4, "text-anchor": "end" }, short)];
  });
}

// The columns that stand at round numbers, so many as have room.
function roundPlaces(steps, width) {
  if (!steps.length) return [];
  const wanted = roundTicks(steps[0] + 1, steps[steps.length - 1] + 1, width / 50);
  return [...new Set(wanted.map((round) => nearestIndex(steps, round - 1)))];
}

function lattice(left, top, cellWidth, cellHeight, columns, rows) {
  let path = "";
  for (let x = 1; x < columns; x += 1) path += `M${(left + x * cellWidth).toFixed(1)} ${top}v${rows * cellHeight}`;
  for (let y = 1; y < rows; y += 1) path += `M${left} ${top + y * cellHeight}h${columns * cellWidth}`;
  return svg("path", { class: "lattice", d: path });
}

// Where there is no value, stripes show through.
function hatch(x, y, width, height) {
  let path = "";
  for (let offset = 6; offset < width + height; offset += 6) {
    const [x1, y1] = offset <= height ? [0, offset] : [offset - height, height];
    const [x2, y2] = offset <= width ? [offset, 0] : [width, offset - width];
    path += `M${(x + x1).toFixed(1)} ${(y + y1).toFixed(1)}L${(x + x2).toFixed(1)} ${(y + y2).toFixed(1)}`;
  }
  return svg("path", { class: "hatch", d: path });
}

function legend(left, top, width, low, high, unit, across) {
  const long = Math.min(120, width * 0.4);
  const text = (x, label, anchor) => svg("text", { x, y: top + 21, "text-anchor": anchor }, label);
  return svg(
    "g",
    { class: "legend" },
    svg("image", { x: left, y: top, width: long, height: 8, preserveAspectRatio: "none", href: pixels(60, 1, (x) => colourAt(x / 59)) }),
    text(left, show(low, unit), "start"),
    text(left + long, show(high, unit), "end"),
    across ? svg("text", { class: "name", x: left + width, y: top + 8, "text-anchor": "end" }, across) : null,
  );
}

function sayHeat(rows, steps, values, unit) {
  if (!steps.length) return "No value yet.";
  const last = values.map((row, i) => ({ name: rows[i], value: row[row.length - 1] })).filter((entry) => entry.value !== null);
  if (!last.length) return `No value in round ${steps[steps.length - 1] + 1}.`;
  const sorted = [...last].sort((a, b) => a.value - b.value);
  const [lowest, highest] = [sorted[0], sorted[sorted.length - 1]];
  const round = `In round ${steps[steps.length - 1] + 1}`;
  if (lowest.value === highest.value) return `${round} all have ${show(lowest.value, unit)}.`;
  return `${round}: lowest ${show(lowest.value, unit)} (${lowest.name}), highest ${show(highest.value, unit)} (${highest.name}).`;
}
