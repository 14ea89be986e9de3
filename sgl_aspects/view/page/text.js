// Elements and texts. Contents of spans are added to the page as text, never as markup.

/** An element; `properties` are set on it ("class", "on…", "aria-…", "kind": its colour), strings become text. */
function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "kind") element.style.background = `var(--${value})`;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const digits = (value) => (value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));

/** Nanoseconds with three digits and a unit: "850 µs", "12.3 ms", "1.24 s". */
function duration(ns) {
  if (ns === null || ns === undefined || Number.isNaN(ns)) return "–";
  if (ns === 0) return "0";
  if (ns < 1e6) return `${digits(ns / 1e3)} µs`;
  if (ns < 1e9) return `${digits(ns / 1e6)} ms`;
  if (ns < 600e9) return `${digits(ns / 1e9)} s`;
  return `${digits(ns / 60e9)} min`;
}

const count = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
const percent = (share) =>
  share === null || share === undefined || Number.isNaN(share) ? "–" : `${(share * 100).toFixed(share < 0.0995 && share > 0 ? 1 : 0)} %`;
const times = (ratio) => `${ratio < 9.95 ? ratio.toFixed(1) : ratio.toFixed(0)}×`;
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

const sum = (items, value) => items.reduce((total, item) => total + (value(item) ?? 0), 0);

/** The q-quantile of numbers that are sorted; null of none. */
function quantile(sorted, q) {
  if (!sorted.length) return null;
  const position = (sorted.length - 1) * q;
  const below = Math.floor(position);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (position - below);
}

const sorted = (numbers) => Float64Array.from(numbers).sort();
const median = (numbers) => quantile(sorted(numbers), 0.5);

/** A colour of the style sheet, as it is now (light or dark). */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A label and a value. */
const fact = (label, value, note) =>
  el("div", { class: "fact" }, el("dt", {}, label), el("dd", {}, value, note ? el("small", {}, ` ${note}`) : null));
