// The top of the page: what run this is, its numbers, and the distributions of the three latencies.

function header(run) {
  const models = [...new Set(run.requests.filter((request) => !request.isRefused).map((request) => request.model))];
  const processes = new Set(run.process).size;
  return el(
    "header",
    {},
    el("h1", {}, models.length ? models.slice(0, 3).join(", ") : "Trace report"),
    el(
      "p",
      { class: "muted" },
      [
        `${new Date(run.t0_ms).toLocaleString("en-GB")}, ${duration(run.end)}`,
        plural(run.requests.length, "request"),
        plural(run.steps.length, "step"),
        plural(run.size, "span"),
        `${processes} process${processes === 1 ? "" : "es"}`,
        run.source,
        run.is_live ? "still running when this was written" : null,
      ]
        .filter(Boolean)
        .join(" · "),
    ),
    losses(run),
    run.clocks.length ? el("p", { class: "muted" }, `Clocks: ${run.clocks.join("; ")}.`) : null, // of several hosts
  );
}

/** A note on missing records, so that the numbers are not taken as complete. */
function losses(run) {
  const unfinished = run.errors.filter((index) => run.value(index, run.names.UNFINISHED_FLAG) === true).length;
  const parts = [
    run.dropped ? `${plural(run.dropped, "span")} dropped: a process was a whole ring ahead of its collector` : null,
    run.damaged ? `${plural(run.damaged, "record")} could not be read` : null,
    unfinished ? `${plural(unfinished, "span")} unfinished: still open, or their process ended first` : null,
  ].filter(Boolean);
  return parts.length ? el("p", { class: "notice warning" }, `Incomplete: ${parts.join("; ")}.`) : null;
}

function numbers(run) {
  const { requests, steps } = run;
  const span = requests.length ? requests.reduce((end, request) => Math.max(end, request.end), 0) - requests[0].start : run.end;
  const output = sum(requests, (request) => request.outputTokens);
  const prompt = sum(requests, (request) => request.promptTokens);
  const cached = sum(requests, (request) => request.cachedTokens);
  const inSteps = sum(steps, (step) => step.duration) / new Set(steps.map((step) => step.process)).size; // of a scheduler
  const measured = steps.filter((step) => step.deviceTime !== null);
  const onDevice = sum(measured, (step) => step.deviceTime);
  const failed = requests.filter((request) => request.isError && !request.isLeft).length;
  const others = { refused: requests.filter((request) => request.isRefused), left: requests.filter((request) => request.isLeft) };
  const told = Object.entries(others).map(([how, found]) => (found.length ? `, ${count(found.length)} ${how}` : ""));
  return el(
    "dl",
    { class: "facts wide" },
    fact("Requests", count(requests.length), `${failed ? count(failed) : "none"} failed${told.join("")}`),
    fact("Output tokens/s", span ? digits(output / (span / 1e9)) : "–", `${count(output)} tokens`),
    fact("Prompt tokens/s", span ? digits(prompt / (span / 1e9)) : "–", `${count(prompt)} tokens`),
    fact("Prefix-cache hits", prompt ? percent(cached / prompt) : "–", `${count(cached)} prompt tokens`),
    fact(
      "Device time",
      measured.length ? percent(onDevice / sum(measured, (step) => step.duration)) : "–",
      measured.length ? ofSteps(measured.length, steps.length) : "recorded at level 3",
    ),
    fact("In scheduler steps", steps.length ? percent(Math.min(1, inSteps / run.end)) : "–", "of the run's time"),
    fact("Dropped spans", count(run.dropped), run.dropped === null ? "not counted in a file of spans" : ""),
  );
}

/** Of short replayed graphs one in several is timed below level 4. */
function ofSteps(timed, all) {
  return timed === all ? "of the time in steps" : `of the time in the ${count(timed)} of ${count(all)} steps that are timed`;
}

const LATENCIES = [
  ["toFirst", "Time to first token", "queue"],
  ["perToken", "Time per output token", "decode"],
  ["latency", "Duration", "forward"],
];

/** `filter(what, key, low, high)` is called for the bar that is clicked. */
function distributions(run, filter) {
  return el(
    "section",
    { class: "cards three", "aria-label": "Latency distributions" },
    LATENCIES.map(([key, title, fill]) => {
      const values = run.requests.map((request) => request[key]).filter((value) => value !== null);
      const ordered = sorted(values);
      const quantiles = [0.5, 0.95, 0.99].map((q) => [`p${q * 100}`, duration(quantile(ordered, q))]);
      const host = el("div", { class: "plot" });
      requestAnimationFrame(() =>
        histogram(host, values, { fill, choose: (low, high) => filter(title, key, low, high) }),
      );
      return el(
        "figure",
        { class: "card" },
        el("figcaption", {}, el("h2", {}, title)),
        el("dl", { class: "facts" }, quantiles.map(([name, value]) => fact(name, value))),
        values.length
          ? el("div", { role: "img", "aria-label": `${title}: ${quantiles.map((pair) => pair.join(" ")).join(", ")}` }, host)
          : el("p", { class: "muted" }, "No finished request has it."),
      );
    }),
  );
}
