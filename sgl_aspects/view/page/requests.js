// The list of requests, slowest first, and one request in detail.

/** Bars on a line of time: segments [[kind, start, end], …] from `from`, `width` nanoseconds in all. */
function bars(host, segments, from, width) {
  const track = el("span", { class: "track" });
  for (const [kind, start, end] of segments) {
    const bar = el("span", { class: "bar", kind });
    bar.style.left = `${(100 * (start - from)) / width}%`;
    bar.style.width = `max(2px, ${(100 * (end - start)) / width}%)`;
    track.append(bar);
  }
  host.append(track);
}

const legend = (kinds) =>
  el("p", { class: "legend" }, kinds.map((kind) => el("span", {}, el("i", { kind }), labelOf(kind))));

function requestList(run, open) {
  const longest = run.requests.reduce((most, request) => Math.max(most, request.duration), 1);
  return new VirtualList({
    label: "Requests",
    open,
    sortedBy: "latency",
    className: "requests",
    columns: [
      { key: "start", title: "Started", hint: "since the run began", className: "number hide-narrow", text: duration },
      { key: "latency", title: "Duration", className: "number strong", draw: (cell, { duration: all }) => (cell.textContent = duration(all)) },
      {
        key: "standout",
        title: "Phases",
        hint: "where the time went; sorted by the time beyond what the phase usually takes",
        className: "wide",
        value: (request) => request.standout.excess,
        draw: (cell, request) => {
          bars(cell, request.segments, request.start, longest);
          cell.setAttribute("aria-label", `mostly ${labelOf(largestPhase(request))}`);
        },
      },
      { key: "toFirst", title: "TTFT", hint: "time to first token", className: "number", text: duration },
      { key: "perToken", title: "TPOT", hint: "time per output token", className: "number hide-narrow", text: duration },
      { key: "promptTokens", title: "In", hint: "prompt tokens", className: "number small hide-narrow", text: count },
      { key: "cachedTokens", title: "Cached", hint: "prompt tokens found in the prefix cache", className: "number small hide-narrow", text: count },
      { key: "outputTokens", title: "Out", hint: "output tokens", className: "number small", text: count },
      {
        key: "outcome",
        title: "End",
        className: "end hide-narrow",
        draw: (cell, request) => {
          cell.textContent = request.outcome;
          cell.classList.toggle("error", request.isError);
        },
      },
    ],
  });
}

const UNITS = { ms: 1e6, s: 1e9, min: 60e9 };

/** A test of whether a request has all words of a query: texts, or its duration as in ">500ms" and "<2s". */
function matcher(query) {
  const tests = query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [, sign, number, unit] = /^([<>])(\d+(?:\.\d+)?)(ms|s|min)$/.exec(word) ?? [];
    if (!sign) return (request) => request.text.includes(word);
    const limit = Number(number) * UNITS[unit];
    return sign === ">" ? (request) => request.duration > limit : (request) => request.duration < limit;
  });
  return (request) => tests.every((test) => test(request));
}

const largestPhase = (request) =>
  PHASES.reduce((main, phase) => (request.phases[phase] > request.phases[main] ? phase : main));

/** A summary in a sentence or two. */
function verdict(request) {
  const { run, duration: total } = request;
  const { phase, excess, time, usual } = request.standout;
  const share = total ? time / total : 0;
  if (run.requests.length < 3 || excess < 0.1 * run.typical.duration || total < 1.1 * run.typical.duration) {
    const main = largestPhase(request);
    const late = request.toFirst === null ? 0 : request.toFirst / Math.max(run.typical.toFirst, 1);
    if (late > 1.5 && run.requests.length > 2)
      return [
        el("strong", {}, `Its first token is late, ${times(late)} the median: `),
        `${duration(request.toFirst)}, with ${duration(request.phases.queue)} in the queue and `,
        `${duration(request.phases.prefill + request.phases.between)} for the prefill. Its duration is usual.`,
      ];
    const [cause, time] = run.causes[request.index]?.[0] ?? [labelOf(main), request.phases[main]];
    return [
      `${times(total / Math.max(run.typical.duration, 1))} the median duration, `,
      `${percent(time / Math.max(total, 1))} of it: ${cause}.`,
    ];
  }
  const parts = [
    el("strong", {}, `${times(total / Math.max(run.typical.duration, 1))} the median duration, mostly because of ${labelOf(phase)}: `),
    `${duration(time)}, ${percent(share)} of its time; `,
    usual > 0 ? `the median request spends ${duration(usual)} there.` : "most requests spend no time there.",
  ];
  if (phase === "decode" && request.perToken !== null) {
    const rate = request.perToken / Math.max(run.typical.perToken, 1);
    const length = request.outputTokens / Math.max(run.typical.tokens, 1);
    parts.push(
      rate < 1.3 && length > 1.3
        ? ` It is long, not slow: ${count(request.outputTokens)} output tokens (median ${count(run.typical.tokens)}) at a usual time per token.`
        : ` A token takes ${duration(request.perToken)} (median ${duration(run.typical.perToken)}).`,
    );
  }
  return parts;
}

/** The panel of one request; `openStep(step)` goes on to a step. */
function requestPanel(request, { openStep, close }) {
  const { run } = request;
  const slowest = request.steps.reduce((found, step) => (!found || step.duration > found.duration ? step : found), null);
  const steps = stepList(request.steps, openStep, { label: "Steps of this request", from: request.start });
  const traceId = run.traces[request.index];
  return panel(
    `Request ${request.id}`,
    close,
    el("p", { class: "verdict" }, verdict(request)),
    slowest
      ? el(
          "p",
          {},
          el(
            "button",
            { type: "button", class: "action", id: "slowest-step", onclick: () => openStep(slowest) },
            `Its slowest step: ${slowest.name} (${slowest.mode}), ${duration(slowest.duration)}`,
            slowest.ratio > 1.5 ? `, ${times(slowest.ratio)} the median` : "",
          ),
        )
      : el("p", { class: "muted" }, "No scheduler step is linked to it: steps are recorded from level 2 on."),
    el(
      "dl",
      { class: "facts" },
      fact("Duration", duration(request.duration)),
      fact("First token", duration(request.toFirst)),
      fact("Per token", duration(request.perToken)),
      fact("Prompt", count(request.promptTokens), request.cachedTokens ? `${count(request.cachedTokens)} cached` : ""),
      fact("Output", count(request.outputTokens)),
      fact("End", request.outcome),
    ),
    causes(request),
    waterfall(run, request, request.start, request.end),
    request.steps.length ? el("h3", {}, plural(request.steps.length, "step")) : null,
    request.steps.length ? steps.element : null,
    attributeTable([["trace id", traceId], ["model", request.model], ...run.attributes(request.index)]),
  );
}

/** What its time was spent on, and the requests that delayed it. */
function causes(request) {
  const { run } = request;
  const found = (run.causes[request.index] ?? []).filter(([, time]) => time > 0.001 * request.duration);
  if (!found.length) return null;
  const culprit = ([index, time]) => {
    const { id } = run.byIndex.get(index) ?? { id: "a request" };
    const open = () => (location.hash = `request=${index}`);
    const name = id.length > 16 ? `${id.slice(0, 8)}…` : id;
    return [" ", el("button", { type: "button", class: "link", title: id, onclick: open }, name), ` (${duration(time)})`];
  };
  return [
    el("h3", {}, "Why it took so long"),
    el(
      "dl",
      { class: "causes" },
      found.map(([cause, time, culprits]) => [
        el("dt", {}, cause),
        el("dd", { class: "number" }, `${duration(time)}, ${percent(time / Math.max(request.duration, 1))}`),
        el("dd", { class: "muted" }, culprits.length ? ["because of", culprits.map(culprit)] : ""),
      ]),
    ),
  ];
}

const MOST_ROWS = 200;

/** The spans below a request or step as bars, indented as they are nested. */
function waterfall(run, { index }, from, to) {
  const rows = [];
  const visit = (span, depth) => {
    if (rows.length >= MOST_ROWS || depth > 8 || run.name(span) === "kernel") return;
    rows.push([span, depth]);
    for (const child of run.children(span)) if (!run.byIndex.has(child)) visit(child, depth + 1);
  };
  for (const child of run.children(index)) if (!run.byIndex.has(child)) visit(child, 0);
  const width = Math.max(to - from, 1);
  return el(
    "div",
    { class: "waterfall", role: "list", "aria-label": "Spans" },
    rows.map(([span, depth]) => {
      const name = run.name(span);
      const track = el("div", { class: "wide" });
      const start = Math.min(Math.max(run.start[span], from), to);
      const end = Math.min(Math.max(run.start[span] + run.duration[span], start), to);
      bars(track, [[kindOf(name), start, end]], from, width);
      const busy = run.number(span, run.names.DETOKENIZE_BUSY_TIME);
      if (busy !== null) track.querySelector(".bar").classList.add("thin"); // it reaches from piece to piece
      const label = el("div", { class: `label${run.hasError.has(span) ? " error" : ""}`, title: name }, name);
      label.style.paddingInlineStart = `${depth * 12}px`;
      return el(
        "div",
        { class: "waterfall-row", role: "listitem" },
        label,
        track,
        el("div", { class: "number" }, busy === null ? duration(run.duration[span]) : el("small", {}, `busy ${duration(busy * 1e9)}`)),
        kindOf(name) === "other" ? about(run.attributes(span)) : null,
      );
    }),
    rows.length >= MOST_ROWS ? el("p", { class: "muted", role: "listitem" }, `The first ${MOST_ROWS} spans are shown.`) : null,
  );
}

/** A traced function's recorded arguments and results, in a line. */
function about(pairs) {
  if (!pairs.length) return null;
  const text = pairs.map(([name, value]) => `${name.replace(/^sgl_aspects\./, "")} ${textOf(value)}`).join(" · ");
  return el("small", { class: "about", title: text }, text);
}

const textOf = (value) => (Array.isArray(value) ? value.join(", ") : String(value));

const KINDS = new Set([...PHASES, ...PARTS, "detokenize"]);
const kindOf = (name) => (KINDS.has(name) ? name : "other");

function attributeTable(pairs, isOpen = false) {
  return el(
    "details",
    { open: isOpen },
    el("summary", {}, "Attributes"),
    el(
      "dl",
      { class: "attributes" },
      pairs.map(([name, value]) => [el("dt", {}, name), el("dd", {}, textOf(value))]),
    ),
  );
}

function panel(title, close, ...children) {
  return el(
    "div",
    { class: "panel", onkeydown: (event) => event.key === "Escape" && close() },
    el(
      "div",
      { class: "panel-head" },
      el("h2", { tabindex: "-1" }, title),
      el("button", { type: "button", class: "close", "aria-label": "Close", onclick: close }, "×"),
    ),
    children,
  );
}
