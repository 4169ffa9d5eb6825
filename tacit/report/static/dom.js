// Elements and numbers. Text is only ever set as text, never as HTML: names and notes may hold anything.

const SVG = "http://www.w3.org/2000/svg";

function fillElement(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function el(name, attributes = {}, ...children) {
  return fillElement(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fillElement(document.createElementNS(SVG, name), attributes, children);
}

// --- Numbers for people -------------------------------------------------------------------------------

function show(value, unit = "number") {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return `${(100 * value).toFixed(1)} %`;
  if (unit === "bytes") return showBytes(value);
  if (unit === "seconds") return showSeconds(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 0.001 && Math.abs(value) < 1e6 ? String(Number(value.toPrecision(3))) : value.toExponential(2);
}

function showBytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${power ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
}

function showSeconds(value) {
  if (value < 60) return `${Number(value.toPrecision(3))} s`;
  const whole = Math.round(value);
  const two = (part) => String(part).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}:${two(whole % 60)} min`;
  return `${Math.floor(whole / 3600)}:${two(Math.floor((whole % 3600) / 60))} h`;
}

function showSpread(result, unit) {
  if (!result) return "–";
  if (result.std === null || result.std === undefined) return show(result.mean, unit);
  if (unit === "share") return `${(100 * result.mean).toFixed(1)} ± ${(100 * result.std).toFixed(1)} %`;
  return `${show(result.mean, unit)} ± ${show(result.std, unit)}`;
}

// Round numbers that cover low … high, about so many of them.
function niceTicks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.999);
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i * step <= high + step * 0.999; i += 1) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

// At most so many of the whole numbers low … high, at round places.
function roundTicks(low, high, count) {
  const raw = Math.max(1, (high - low) / Math.max(1, count));
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
  return ticks;
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

function nearestIndex(sorted, wanted) {
  let best = 0;
  for (let i = 1; i < sorted.length; i += 1) if (Math.abs(sorted[i] - wanted) < Math.abs(sorted[best] - wanted)) best = i;
  return best;
}
