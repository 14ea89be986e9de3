// Plots with uPlot, in the colours of the page: drawn again where the width or the colour scheme changes.

const plots = [];

/** A plot that fills `host`'s width. `make(width)` returns uPlot's options and data. */
class Plot {
  constructor(host, make) {
    this.host = host;
    this.make = make;
    this.uplot = null;
    plots.push(this);
    new ResizeObserver(() => this._fit()).observe(host);
  }

  draw() {
    this.uplot?.destroy();
    const width = this.host.clientWidth;
    if (!width) return;
    const { options, data } = this.make(width);
    this.uplot = new uPlot({ width, ...options, legend: { show: false } }, data, this.host);
    this.uplot.root.setAttribute("aria-hidden", "true"); // its figure has a label in words
  }

  _fit() {
    const width = this.host.clientWidth;
    if (!this.uplot) this.draw();
    else if (width && width !== this.uplot.width) this.uplot.setSize({ width, height: this.uplot.height });
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.draw()));

const FONT = '11px system-ui, "Segoe UI", Roboto, sans-serif';

const axis = (more = {}) => ({
  stroke: colour("muted"),
  font: FONT,
  grid: { stroke: colour("line"), width: 1 },
  ticks: { show: false },
  gap: 4,
  ...more,
});

/** A histogram on a scale of equal ratios, with the 50th, 95th and 99th percentile. `choose(low, high)` on a click. */
function histogram(host, values, { fill, choose }) {
  const numbers = sorted(values.filter((value) => value > 0));
  if (!numbers.length) return;
  const low = numbers[0];
  const ratio = Math.max(numbers[numbers.length - 1] / low, 1.02);
  const bins = Math.min(32, Math.max(8, Math.ceil(Math.sqrt(numbers.length) * 1.5)));
  const edge = (bin) => low * ratio ** (bin / bins);
  const binOf = (value) => (Math.log(value / low) / Math.log(ratio)) * bins;
  const counts = new Array(bins).fill(0);
  for (const value of numbers) counts[Math.min(bins - 1, Math.floor(binOf(value)))]++;
  const marks = [0.5, 0.95, 0.99].map((q) => [`p${q * 100}`, binOf(quantile(numbers, q))]);
  new Plot(host, () => ({
    data: [counts.map((_, bin) => bin + 0.5), counts],
    options: {
      height: 132,
      padding: [16, 22, 0, 0],
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: false, range: [0, bins] }, y: { range: (_, __, most) => [0, Math.max(most, 1)] } },
      axes: [
        axis({
          size: 24,
          grid: { show: false },
          splits: () => [0, bins / 3, (2 * bins) / 3, bins].map((at) => at),
          values: (_, splits) => splits.map((at) => duration(edge(at))),
        }),
        axis({ size: (_, texts) => Math.max(34, 10 + 6 * Math.max(0, ...(texts ?? []).map((text) => text.length))), values: (_, splits) => splits.map((at) => (Number.isInteger(at) ? count(at) : "")) }),
      ],
      series: [
        {},
        {
          fill: colour(fill),
          stroke: colour(fill),
          width: 0,
          paths: uPlot.paths.bars({ size: [0.86, 64], radius: 0.15 }),
          points: { show: false },
        },
      ],
      hooks: {
        draw: [(u) => drawMarks(u, marks)],
        ready: [
          (u) =>
            u.over.addEventListener("click", () => {
              const bin = Math.floor(u.posToVal(u.cursor.left, "x"));
              if (counts[bin]) choose(edge(bin) * (bin ? 1 : 0.999), edge(bin + 1) * (bin === bins - 1 ? 1.001 : 1));
            }),
        ],
      },
    },
  })).draw();
}

function drawMarks(u, marks) {
  const { ctx } = u;
  const scale = devicePixelRatio;
  let free = -Infinity;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("text");
  ctx.font = `${11 * scale}px system-ui, sans-serif`;
  ctx.lineWidth = scale;
  for (const [name, at] of marks) {
    const x = Math.round(u.valToPos(at, "x", true)) + 0.5;
    ctx.setLineDash([3 * scale, 3 * scale]);
    ctx.beginPath();
    ctx.moveTo(x, u.bbox.top);
    ctx.lineTo(x, u.bbox.top + u.bbox.height);
    ctx.stroke();
    const width = ctx.measureText(name).width;
    const left = Math.min(x - width / 2, u.bbox.left + u.bbox.width - width + 8 * scale);
    if (left > free) {
      ctx.fillText(name, left, u.bbox.top - 4 * scale);
      free = left + width + 4 * scale;
    }
  }
  ctx.restore();
}

/** Cursors and zooms of these plots move together. */
const timeline = uPlot.sync("timeline");

/** Whether these are the limits of a plot's own data: plots of one line of time begin with the same limits. */
const isWhole = (u, low, high) => low === null || (low === u.data[0][0] && high === u.data[0].at(-1));

/** Options of a plot over the run's time, in seconds. */
function overTime({ height, series, y, hooks = {}, last = false, range = [0, 1] }) {
  return {
    height,
    padding: [8, 10, 0, 0],
    cursor: {
      sync: { key: timeline.key, scales: ["x", null] },
      y: false,
      points: { show: false },
      drag: { x: true, y: false, setScale: true },
    },
    scales: { x: { time: false, range: (u, low, high) => (isWhole(u, low, high) ? range : high > low ? [low, high] : [low, low + 1]) }, y },
    axes: [
      axis({ size: last ? 26 : 8, values: (_, splits) => splits.map((at) => (last ? `${+at.toFixed(6)} s` : "")) }),
      axis({ size: 58, space: 24, values: (_, splits) => splits.map(y.text) }),
    ],
    series: [{}, ...series],
    hooks,
  };
}
