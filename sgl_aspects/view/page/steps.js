// The scheduler's steps: over time, as a list, and one step in detail.

function stepList(steps, open, { label, from }) {
  const longest = steps.reduce((most, step) => Math.max(most, step.duration), 1);
  const list = new VirtualList({
    label,
    open,
    rowHeight: 32,
    sortedBy: "duration",
    className: "steps",
    columns: [
      {
        key: "start",
        title: "Began",
        hint: "since the request or the run began",
        className: "number hide-narrow",
        text: (start) => duration(Math.max(start - from, 0)),
      },
      {
        key: "mode",
        title: "Step",
        className: "mode",
        draw: (cell, step) => cell.append(el("i", { kind: step.kind }), `${step.mode} ${step.name}`),
      },
      { key: "duration", title: "Duration", className: "number strong", text: duration },
      {
        key: "parts",
        title: "Parts",
        hint: "sorted by the time outside forward",
        className: "wide",
        value: (step) => step.duration - step.parts.forward,
        draw: (cell, step) => bars(cell, partSegments(step), 0, longest),
      },
      { key: "batchSize", title: "Batch", hint: "requests in it", className: "number small" },
      { key: "tokens", title: "Tokens", hint: "that the model was fed", className: "number small hide-narrow" },
    ],
  });
  list.setItems(steps);
  return list;
}

/** A step's parts one after the other, from 0. */
function partSegments(step) {
  let at = 0;
  return PARTS.filter((part) => step.parts[part] > 0).map((part) => [part, at, (at += step.parts[part])]);
}

function stepVerdict(step) {
  const main = step.mainPart;
  const share = step.parts[main] / Math.max(step.duration, 1);
  const text = [
    el("strong", {}, `${times(step.ratio)} the median ${step.mode} step: `),
    `${duration(step.duration)}, ${percent(share)} of it in ${labelOf(main)}`,
    step.tokens === null ? "." : `, for ${plural(step.tokens, "token")} of ${plural(step.batchSize ?? step.requests.length, "request")}.`,
  ];
  if (step.mode === "mixed")
    text.push(" A mixed step prefills new requests while the others wait for their next token.");
  return text;
}

/** `from`: the request that led here, or null. */
function stepPanel(step, { openRequest, openStep, close, from }) {
  const { run } = step;
  const neighbour = (by, text) => {
    const other = run.steps[step.position + by];
    return el("button", { type: "button", class: "action", disabled: !other, onclick: () => openStep(other) }, text);
  };
  const requests = requestList({ requests: step.requests }, openRequest);
  requests.setItems(step.requests);
  requests.element.classList.add("brief");
  requests.element.setAttribute("aria-label", "Requests in this step");
  return panel(
    `Step ${step.name}, ${step.mode}`,
    close,
    el("p", { class: "verdict" }, stepVerdict(step)),
    el(
      "p",
      { class: "buttons" },
      from ? el("button", { type: "button", class: "action", onclick: () => openRequest(from) }, "↑ Back to the request") : null,
      neighbour(-1, "← Step before"),
      neighbour(1, "Step after →"),
    ),
    el(
      "dl",
      { class: "facts" },
      fact("Duration", duration(step.duration)),
      fact("On the device", duration(step.deviceTime), step.deviceTime === null ? "not timed: see Device time" : ""),
      fact("Batch", count(step.batchSize)),
      fact("Tokens", count(step.tokens)),
      fact("Waiting", count(step.waiting)),
      fact("Running", count(step.running)),
      fact("KV cache", percent(step.kvUsage)),
    ),
    waterfall(run, step, step.start, step.end),
    deviceTable(step),
    el("h3", {}, `${plural(step.requests.length, "request")} in it`),
    step.requests.length ? requests.element : el("p", { class: "muted" }, "None of them was recorded."),
    attributeTable([["process", step.process], ...run.attributes(step.index)]),
  );
}

/** What the device did in the step's forward passes, where they were profiled: by operator and by layer. */
function deviceTable(step) {
  const { run, kernels } = step;
  if (!kernels.length) return null;
  const { names } = run;
  const idle = [
    ["idle: the host was late", names.IDLE_HOST],
    ["idle: a transfer", names.IDLE_TRANSFER],
    ["idle: the launch", names.IDLE_LAUNCH],
  ].map(([name, key]) => ({ name, count: 0, time: sum(kernels, (kernel) => run.number(kernel, key)) * 1e9 }));
  const parts = (name) =>
    kernels.map((kernel) => ({ name: String(run.value(kernel, name) ?? "no module"), count: run.number(kernel, names.KERNEL_COUNT) ?? 1, time: run.duration[kernel] }));
  const operators = totals([...parts(names.OPERATOR_NAME), ...idle.filter((part) => part.time)]);
  const layers = totals(parts(names.KERNEL_LAYER), (layer) => layer.replace(/\.\d+(?=\.|$)/g, ".*"));
  const total = sum(operators, (part) => part.time) || 1;
  const row = (cell, ...texts) => el("tr", {}, texts.map((text, at) => el(cell, at ? { class: "number" } : {}, text)));
  const table = (what, found) =>
    el(
      "table",
      { class: "kernels", "aria-label": `Kernels by ${what}` },
      row("th", what, "kernels", "time", "share"),
      found.map((part) => row("td", partName(part), part.count ? count(part.count) : "", duration(part.time), percent(part.time / total))),
    );
  return [
    el("h3", {}, `On the device: ${duration(total)}`),
    table("operator", operators),
    kernels.some((kernel) => run.value(kernel, names.KERNEL_LAYER)) ? table("layer", layers) : null,
  ];
}

/** Sums by name, or by what `groupOf` makes of it, with the parts of each; the longest first, the rest in one. */
function totals(parts, groupOf = null) {
  const found = new Map();
  for (const { name, count, time } of parts) {
    const group = groupOf ? groupOf(name) : name;
    if (!found.has(group)) found.set(group, { name: group, count: 0, time: 0, parts: [] });
    const total = found.get(group);
    total.count += count;
    total.time += time;
    total.parts.push({ name, count, time });
  }
  const ranked = [...found.values()].sort((a, b) => b.time - a.time);
  for (const total of ranked) total.parts = groupOf ? totals(total.parts) : [];
  const rest = ranked.splice(MOST_OPERATORS);
  if (rest.length) ranked.push({ name: `${rest.length} others`, count: sum(rest, (part) => part.count), time: sum(rest, (part) => part.time), parts: [] });
  return ranked;
}

/** A name, which opens to its parts where there are several. */
const partName = ({ name, parts }) =>
  parts.length < 2 ? name : el("details", {}, el("summary", {}, name), parts.map((part) => el("div", {}, `${part.name}: ${duration(part.time)}`)));

const MOST_OPERATORS = 15;

const BINS = 160;
const MILLISECONDS = { range: (_, __, high) => [0, (high || 1) * 1.05], text: (ms) => duration(ms * 1e6) };

/** Steps over time, and below them the batch, the queue and the KV cache, on the same line of time. */
class Engine {
  constructor(run, openStep) {
    this.run = run;
    this.openStep = openStep;
    this.shown = null; // [start, end] that is marked
    this.readout = el("p", { class: "muted readout" }, "Point at a step, click to open it; drag to zoom.");
    const { steps } = run;
    this.seconds = steps.map((step) => step.start / 1e9);
    this.range = [0, Math.max(run.end / 1e9, 1e-6)];
    this.kinds = [...new Set(steps.map((step) => step.kind))];
    const charts = [
      ["Time of each step", this.kinds, () => this._steps(), `Step times: ${this._inWords()}`],
      ["Where a step's time goes, on average", PARTS.filter((part) => steps.some((step) => step.parts[part] > 0)), () => this._parts(), this._partsInWords()],
      ["Batch and queue", ["running", "waiting", "batch"], () => this._counts(), `Requests: at most ${most(steps, "running")} running, ${most(steps, "waiting")} waiting`],
      ["KV cache and prefix cache", ["kv", "cached"], () => this._kv(), `KV cache: at most ${percent(most(steps, "kvUsage"))} in use`],
    ];
    this.plots = [];
    this.list = stepList(steps, openStep, { label: "All steps", from: 0 });
    this.element = el(
      "section",
      { class: "card", "aria-labelledby": "engine-title" },
      el("div", { class: "section-head" }, el("h2", { id: "engine-title" }, "Scheduler steps"), el("button", { type: "button", class: "action", onclick: () => this._zoomOut() }, "Whole run")),
      steps.length
        ? [
            this.readout,
            charts.map(([title, kinds, make, words]) => this._chart(title, kinds, make, words)),
            el("h3", {}, "All steps, slowest first"),
            this.list.element,
          ]
        : el("p", { class: "muted" }, "No scheduler step was recorded: trace at level 2 or more (sgl-aspects control --level 3)."),
    );
  }

  /** Marks a stretch of time in all plots. */
  mark(start, end) {
    this.shown = start === null ? null : [start / 1e9, end / 1e9];
    for (const plot of this.plots) plot.uplot?.redraw();
  }

  _chart(title, kinds, make, words) {
    const host = el("div", { class: "plot" });
    const plot = new Plot(host, make);
    this.plots.push(plot);
    requestAnimationFrame(() => plot.draw());
    return el(
      "figure",
      {},
      el("figcaption", {}, el("h3", {}, title), legend([...new Set(kinds)])),
      el("div", { role: "img", "aria-label": words }, host),
    );
  }

  _hooks(more = {}) {
    const mark = (u) => {
      if (!this.shown) return;
      const [left, right] = this.shown.map((at) => u.valToPos(at, "x", true));
      u.ctx.save();
      u.ctx.fillStyle = colour("mark");
      u.ctx.fillRect(left, u.bbox.top, Math.max(right - left, 2 * devicePixelRatio), u.bbox.height);
      u.ctx.restore();
    };
    return { drawClear: [mark], ...more };
  }

  _steps() {
    const { steps } = this.run;
    const columns = this.kinds.map((kind) => steps.map((step) => (step.kind === kind ? step.duration / 1e6 : null)));
    const dots = this.kinds.map((kind) => this._dots(kind, steps.length > 5000 ? 3 : 6));
    const hooks = this._hooks({ setCursor: [(u) => this._point(u)], ready: [(u) => this._clicks(u)] });
    return this._overTime([this.seconds, ...columns], { height: 220, y: MILLISECONDS, series: dots, hooks });
  }

  _overTime(data, options) {
    return { data, options: overTime({ range: this.range, hooks: this._hooks(), ...options }) };
  }

  /** The step that is nearest to the pointer, within some pixels; null where there is none. */
  _near(u) {
    const { left, top } = u.cursor;
    if (left === null || left < 0 || top === null || top < 0) return null;
    const low = u.posToVal(left - 12, "x");
    const high = u.posToVal(left + 12, "x");
    let near = null;
    let least = 24;
    for (let at = lowerBound(this.seconds, low); at < this.seconds.length && this.seconds[at] <= high; at++) {
      const step = this.run.steps[at];
      const distance = Math.hypot(u.valToPos(this.seconds[at], "x") - left, u.valToPos(step.duration / 1e6, "y") - top);
      if (distance < least) [near, least] = [step, distance];
    }
    return near;
  }

  _point(u) {
    const step = this._near(u);
    u.over.style.cursor = step ? "pointer" : "";
    if (!step) return;
    this.readout.textContent =
      `Step ${step.name} at ${duration(step.start)}: ${step.mode}, ${duration(step.duration)}, ` +
      `batch ${count(step.batchSize)}, ${plural(step.tokens ?? 0, "token")}, ${count(step.waiting)} waiting, KV ${percent(step.kvUsage)}`;
  }

  _clicks(u) {
    let pressed = 0;
    u.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    u.over.addEventListener("click", (event) => {
      const step = Math.abs(event.clientX - pressed) < 4 ? this._near(u) : null;
      if (step) this.openStep(step);
    });
  }

  /** Means over stretches of time, stacked: the last of the columns is the lowest. */
  _parts() {
    const parts = PARTS.filter((part) => this.run.steps.some((step) => step.parts[part] > 0));
    const bins = this._bins();
    const means = parts.map((part) => bins.map((steps) => mean(steps, (step) => step.parts[part] / 1e6)));
    const stacked = means.map((_, at) => bins.map((steps, bin) => (steps.length ? means.slice(0, at + 1).reduce((sum, column) => sum + column[bin], 0) : null)));
    const width = this.range[1] / BINS;
    const series = [...parts].reverse().map((part) => ({
      fill: colour(part),
      stroke: colour(part),
      width: 0,
      paths: uPlot.paths.bars({ size: [0.95, 40] }),
      points: { show: false },
    }));
    const middles = bins.map((_, bin) => (bin + 0.5) * width);
    return this._overTime([middles, ...stacked.reverse()], { height: 120, y: MILLISECONDS, series });
  }

  _bins() {
    const bins = Array.from({ length: BINS }, () => []);
    for (const step of this.run.steps) bins[Math.min(BINS - 1, Math.floor((step.start / 1e9 / this.range[1]) * BINS))].push(step);
    return bins;
  }

  _line(name) {
    return { stroke: colour(name), width: 1.5, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } };
  }

  _dots(name, size) {
    return { paths: () => null, points: { show: true, size, width: 0, fill: colour(name), stroke: colour(name) } };
  }

  _counts() {
    const columns = ["running", "waiting", "batchSize"].map((key) => this.run.steps.map((step) => step[key]));
    const y = { range: (_, __, high) => [0, Math.max(high ?? 0, 1) * 1.1], text: (value) => (Number.isInteger(value) ? count(value) : "") };
    const series = [this._line("running"), this._line("waiting"), { ...this._line("batch"), dash: [4, 3] }];
    return this._overTime([this.seconds, ...columns], { height: 110, y, series });
  }

  _kv() {
    const { steps, requests } = this.run;
    const cached = new Map(); // share of cached prompt tokens, shown at each request's first step
    for (const request of requests)
      if (request.steps.length && request.promptTokens) cached.set(request.steps[0], (request.cachedTokens ?? 0) / request.promptTokens);
    const series = [{ ...this._line("kv"), fill: `${colour("kv")}33` }, this._dots("cached", 5)];
    const data = [this.seconds, steps.map((step) => step.kvUsage), steps.map((step) => cached.get(step) ?? null)];
    return this._overTime(data, { height: 130, last: true, y: { range: [0, 1.02], text: percent }, series });
  }

  _zoomOut() {
    for (const { uplot } of this.plots) uplot?.setScale("x", { min: this.range[0], max: this.range[1] });
  }

  _inWords() {
    return this.kinds
      .map((kind) => {
        const ordered = sorted(this.run.steps.filter((step) => step.kind === kind).map((step) => step.duration));
        return `${kind} median ${duration(quantile(ordered, 0.5))}, longest ${duration(quantile(ordered, 1))}`;
      })
      .join("; ");
  }

  _partsInWords() {
    const total = sum(this.run.steps, (step) => step.duration) || 1;
    return PARTS.map((part) => `${labelOf(part)} ${percent(sum(this.run.steps, (step) => step.parts[part]) / total)}`).join(", ");
  }
}

const mean = (items, value) => (items.length ? sum(items, value) / items.length : 0);
const most = (items, key) => items.reduce((high, item) => Math.max(high, item[key] ?? 0), 0);

function lowerBound(ascending, value) {
  let low = 0;
  let high = ascending.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ascending[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
