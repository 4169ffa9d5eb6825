// Lines by round, with bands; and seconds by phase, stacked.

const EDGE = { left: 48, right: 12, top: 10, bottom: 34 };

// lines: [{label, slot, steps, values, std?, n?, thin?}]; stages: [{name, first}]; span: the steps that the
// axis covers; named: the lines have a key of their own
function linePlot({ key, title, unit, lines, stages = [], stageOf, choose, picked, from = null, span = null, controls = [], named = false }) {
  const bold = lines.filter((line) => !line.thin);
  const steps = [...new Set(lines.flatMap((line) => line.steps.filter((_, i) => line.values[i] !== null)))].sort((a, b) => a - b);
  const height = 230;
  let scale = null;

  function draw(width) {
    scale = lineScale(lines, span ?? steps, unit, from, width, height);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", class: "lines" });
    picture.append(axes(scale, unit), stageMarks(scale, stages));
    for (const line of bold) if (line.std) picture.append(svg("path", { class: `band ${styleOf(line.slot)}`, d: bandPath(line, scale) }));
    for (const line of lines) {
      picture.append(svg("path", { class: `line ${styleOf(line.slot)}${line.thin ? " thin" : ""}`, d: linePath(line, scale) }));
      if (!line.thin) picture.append(lonePoints(line, scale));
    }
    const pickedMark = svg("line", { class: "picked", y1: EDGE.top, y2: height - EDGE.bottom, visibility: "hidden" });
    const cross = svg("line", { class: "cross", y1: EDGE.top, y2: height - EDGE.bottom, visibility: "hidden" });
    const dots = svg("g", {});
    picture.append(pickedMark, cross, dots);
    const mark = (step) => placeLine(pickedMark, step !== null && step >= scale.x0 && step <= scale.x1 ? scale.x(step) : null);
    mark(picked());
    return {
      picture,
      mark,
      place: (column) => {
        // The words stand where the lines are not.
        const [low, high] = extent(bold.map((line) => valueAt(line, steps[column]))) ?? [0, 0];
        const upper = scale.y((low + high) / 2) < height / 2;
        return { x: scale.x(steps[column]), y: upper ? height : EDGE.top };
      },
      point: (column) => {
        placeLine(cross, column === null ? null : scale.x(steps[column]));
        dots.replaceChildren();
        for (const line of column === null ? [] : bold) {
          const value = valueAt(line, steps[column]);
          if (value !== null) dots.append(svg("circle", { class: `dot ${styleOf(line.slot)}`, cx: scale.x(steps[column]), cy: scale.y(value), r: 4 }));
        }
      },
    };
  }

  return plotFigure({
    key,
    title,
    controls: named ? [...keysFor(lines.map((line) => [line.label, line.slot])), ...controls] : controls,
    columns: steps.length,
    says: sayLines(bold, unit),
    table: () => lineTable(title, unit, bold, steps, stageOf),
    draw,
    hit: (x) => [scale && steps.length ? nearestIndex(steps, scale.step(x)) : 0, 0],
    tell: (column) => [
      steps.length ? stageOf(steps[column]) : "no value yet",
      ...bold.map((line) => ({ label: line.label, style: styleOf(line.slot), value: tellValue(line, steps[column], unit) })),
    ],
    choose: (column) => choose(steps[column]),
  });
}

function keysFor(entries) {
  return entries.map(([name, slot]) => el("span", { class: "key" }, el("i", { class: `swatch ${styleOf(slot)}` }), name));
}

function styleOf(slot) {
  return `c${slot % 8}${slot >= 8 ? " dashed" : ""}`;
}

function valueAt(line, step) {
  const i = line.steps.indexOf(step);
  return i < 0 ? null : line.values[i];
}

function tellValue(line, step, unit) {
  const i = line.steps.indexOf(step);
  if (i < 0 || line.values[i] === null) return "–";
  if (!line.std) return show(line.values[i], unit);
  return `${showSpread({ mean: line.values[i], std: line.std[i] }, unit)} (${line.n[i]} ${line.n[i] === 1 ? "run" : "runs"})`;
}

function lineScale(lines, steps, unit, from, width, height) {
  const reach = lines.flatMap((line) =>
    line.values.flatMap((value, i) => (value === null ? [] : line.std?.[i] ? [value - line.std[i], value + line.std[i]] : [value])),
  );
  let [low, high] = extent(reach) ?? [0, 1];
  if (from !== null) low = Math.min(low, from);
  if (unit === "share") [low, high] = [Math.max(low, 0), Math.min(high, Math.max(1, extent(lines.flatMap((l) => l.values))?.[1] ?? 1))];
  if (low === high) [low, high] = [low >= 0 ? Math.max(0, low * 0.95) : low * 1.05, high + (Math.abs(high) || 1) * 0.05];
  const ticks = niceTicks(low, high, 5);
  [low, high] = [Math.min(low, ticks[0]), Math.max(high, ticks[ticks.length - 1])];
  const [x0, x1] = steps.length ? [steps[0], steps[steps.length - 1]] : [0, 1];
  const across = width - EDGE.left - EDGE.right;
  const down = height - EDGE.top - EDGE.bottom;
  return {
    width,
    height,
    ticks,
    x0,
    x1,
    x: (step) => EDGE.left + (x1 > x0 ? ((step - x0) / (x1 - x0)) * across : across / 2),
    y: (value) => EDGE.top + down - ((value - low) / (high - low)) * down,
    step: (x) => x0 + ((x - EDGE.left) / across) * (x1 - x0),
  };
}

function axes(scale, unit) {
  const group = svg("g", { class: "axes" });
  for (const tick of scale.ticks) {
    const y = scale.y(tick);
    group.append(svg("line", { class: "rule", x1: EDGE.left, x2: scale.width - EDGE.right, y1: y, y2: y }));
    group.append(svg("text", { x: EDGE.left - 6, y: y + 4, "text-anchor": "end" }, tickText(tick, unit)));
  }
  for (const round of roundTicks(scale.x0 + 1, scale.x1 + 1, (scale.width - 60) / 55)) {
    group.append(svg("text", { x: scale.x(round - 1), y: scale.height - EDGE.bottom + 16, "text-anchor": "middle" }, String(round)));
  }
  group.append(svg("text", { class: "name", x: scale.width - EDGE.right, y: scale.height - 4, "text-anchor": "end" }, "round"));
  return group;
}

function tickText(tick, unit) {
  if (unit === "share") return `${Number((100 * tick).toPrecision(6))} %`;
  if (unit === "bytes") return showBytes(tick).replace(".0 ", " ");
  if (unit === "seconds") return `${tick} s`;
  return String(tick);
}

function stageMarks(scale, stages) {
  const group = svg("g", { class: "stage-marks" });
  for (const stage of stages) {
    if (stage.first <= scale.x0 || stage.first > scale.x1) continue;
    const x = scale.x(stage.first - 0.5);
    group.append(svg("line", { x1: x, x2: x, y1: EDGE.top, y2: scale.height - EDGE.bottom }));
    group.append(svg("text", { x: x + 4, y: scale.height - EDGE.bottom - 5 }, `${stage.name} ▸`));
  }
  return group;
}

function placeLine(line, x) {
  line.setAttribute("visibility", x === null ? "hidden" : "visible");
  if (x === null) return;
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
}

const at = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;

function linePath(line, scale) {
  return line.steps.map((step, i) => (line.values[i] === null ? "" : at(scale.x(step), scale.y(line.values[i])))).reduce(
    // Rounds without evaluation are bridged; the line does not fall to zero there.
    (path, place) => (place ? `${path}${path ? "L" : "M"}${place}` : path),
    "",
  );
}

function bandPath(line, scale) {
  const there = line.steps.map((step, i) => ({ step, value: line.values[i], std: line.std[i] })).filter((p) => p.value !== null && p.std !== null);
  if (there.length < 2) return "";
  const upper = there.map((p) => at(scale.x(p.step), scale.y(p.value + p.std)));
  const lower = there.reverse().map((p) => at(scale.x(p.step), scale.y(p.value - p.std)));
  return `M${[...upper, ...lower].join("L")}Z`;
}

// A single value is no line: it is drawn as a dot.
function lonePoints(line, scale) {
  const there = line.steps.map((_, i) => i).filter((i) => line.values[i] !== null);
  const group = svg("g", {});
  if (there.length > 1) return group;
  for (const i of there) group.append(svg("circle", { class: `dot ${styleOf(line.slot)}`, cx: scale.x(line.steps[i]), cy: scale.y(line.values[i]), r: 3.5 }));
  return group;
}

function sayLines(lines, unit) {
  if (lines.length > 8) return `${lines.length} lines. The values are in the table.`;
  const sentences = lines.map((line) => {
    const there = line.steps.map((_, i) => i).filter((i) => line.values[i] !== null);
    if (!there.length) return `${line.label}: no value yet.`;
    const [first, last] = [there[0], there[there.length - 1]];
    const best = there.reduce((a, b) => (line.values[b] > line.values[a] ? b : a));
    return `${line.label}: ${show(line.values[first], unit)} in round ${line.steps[first] + 1}, ${show(line.values[last], unit)} in round ${line.steps[last] + 1}, highest ${show(line.values[best], unit)} in round ${line.steps[best] + 1}.`;
  });
  return sentences.join(" ") || "Nothing is chosen to be shown.";
}

function lineTable(title, unit, lines, steps, stageOf) {
  return {
    caption: title,
    head: ["round", ...lines.map((line) => line.label)],
    body: steps.map((step) => [stageOf(step), ...lines.map((line) => tellValue(line, step, unit))]),
  };
}

// parts: {name: [value by round]}, drawn on top of each other
function stackPlot({ key, title, unit, steps, parts, stageOf, choose, picked }) {
  const names = Object.keys(parts);
  const totals = steps.map((_, i) => names.reduce((sum, name) => sum + (parts[name][i] ?? 0), 0));
  const height = 230;
  let scale = null;

  function draw(width) {
    scale = lineScale([{ values: totals }], steps, unit, 0, width, height);
    const inner = (width - EDGE.left - EDGE.right) / Math.max(1, steps.length);
    const left = (i) => EDGE.left + i * inner;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", class: "lines" });
    scale.x = (step) => left(nearestIndex(steps, step)) + inner / 2;
    picture.append(axes(scale, unit));
    const bottoms = steps.map(() => 0);
    names.forEach((name, slot) => {
      const boxes = steps.map((_, i) => {
        const value = parts[name][i] ?? 0;
        const [y1, y2] = [scale.y(bottoms[i]), scale.y(bottoms[i] + value)];
        bottoms[i] += value;
        return `M${at(left(i) + inner * 0.08, y1)}V${y2.toFixed(1)}H${(left(i) + inner * 0.92).toFixed(1)}V${y1.toFixed(1)}Z`;
      });
      picture.append(svg("path", { class: `fill ${styleOf(slot)}`, d: boxes.join("") }));
    });
    const pickedMark = svg("line", { class: "picked", y1: EDGE.top, y2: height - EDGE.bottom, visibility: "hidden" });
    const cross = svg("line", { class: "cross", y1: EDGE.top, y2: height - EDGE.bottom, visibility: "hidden" });
    picture.append(pickedMark, cross);
    const mark = (step) => placeLine(pickedMark, step === null || !steps.length ? null : scale.x(step));
    mark(picked());
    return {
      picture,
      mark,
      place: (column) => ({ x: left(column) + inner / 2, y: EDGE.top }),
      point: (column) => placeLine(cross, column === null ? null : left(column) + inner / 2),
    };
  }

  const sums = names.map((name) => parts[name].reduce((sum, value) => sum + (value ?? 0), 0));
  const whole = sums.reduce((a, b) => a + b, 0) || 1;
  return plotFigure({
    key,
    title,
    columns: steps.length,
    controls: keysFor(names.map((name, slot) => [name, slot])),
    says: `Of the rounds shown: ${names.map((name, i) => `${name} ${show(sums[i], unit)} (${Math.round((100 * sums[i]) / whole)} %)`).join(", ")}.`,
    table: () => ({
      caption: title,
      head: ["round", ...names],
      body: steps.map((step, i) => [stageOf(step), ...names.map((name) => show(parts[name][i], unit))]),
    }),
    draw,
    hit: (x) => [Math.floor(((x - EDGE.left) / (scale.width - EDGE.left - EDGE.right)) * steps.length), 0],
    tell: (column) => [
      steps.length ? stageOf(steps[column]) : "no value yet",
      ...names.map((name, slot) => ({ label: name, style: styleOf(slot), value: show(parts[name][column], unit) })),
    ],
    choose: (column) => choose(steps[column]),
  });
}
