// Assembles the page. The open item is in the address (#request=12, #step=34), so that "back" works.

function build(run) {
  const go = (kind, item) => (location.hash = item ? `${kind}=${item.index}` : "");
  const openRequest = (request) => go("request", request);
  const openStep = (step) => go("step", step);
  const close = () => {
    const row = list.element.querySelector("[role=row][tabindex='0']");
    location.hash = "";
    row?.focus();
  };
  const list = requestList(run, openRequest);
  const isOwn = run.others.length > 0 && !run.requests.length && !run.steps.length; // functions traced by name only
  const engine = new Engine(run, openStep);
  const others = otherList(run, (other) => go("trace", other));
  const detail = el("aside", { class: "card detail", "aria-label": "Details" });
  const chips = el("p", { class: "chips", "aria-live": "polite" });
  const search = el("input", {
    type: "search",
    class: "search",
    "aria-label": "Search requests",
    placeholder: "id, adapter, tenant, outcome, >500ms",
    title: "Requests that have all of these words in an id, an attribute (name=value) or their end; >500ms or <2s by duration",
    oninput: () => apply(),
  });
  let range = null;
  let lastRequest = null;

  function filter(title, key, low, high) {
    range = key ? { title, key, low, high } : null;
    apply();
    if (range) list.element.scrollIntoView({ block: "nearest" });
  }

  /** Lists the requests of the chosen range and of the search. */
  function apply() {
    const isWanted = matcher(search.value);
    const isInRange = (request) => !range || (request[range.key] >= range.low && request[range.key] < range.high);
    const found = run.requests.filter((request) => isInRange(request) && isWanted(request));
    list.setItems(found);
    const number = plural(found.length, "request");
    chips.replaceChildren(
      ...(range
        ? [
            el("button", { type: "button", class: "action", onclick: () => filter() }, `${range.title} ${duration(range.low)} to ${duration(range.high)}: ${number}  ×`),
          ]
        : search.value.trim()
          ? [el("span", { class: "muted" }, `${number} of ${count(run.requests.length)}`)]
          : []),
    );
  }

  const section = (name, title, ...children) =>
    el(
      "section",
      { class: "card", "aria-labelledby": `${name}-title` },
      el(
        "div",
        { class: "section-head" },
        el("h2", { id: `${name}-title` }, title),
        name === "requests" ? legend(PHASES.filter((phase) => phase !== "between" && run.requests.some((request) => request.phases[phase] > 0))) : null,
      ),
      children,
    );
  const master = (left) => el("div", { class: "master" }, left, detail);

  function show() {
    const [, kind, index] = /^#(request|step|trace)=(\d+)$/.exec(location.hash) ?? [];
    const item = run.byIndex.get(Number(index)) ?? null;
    const isRequest = kind === "request" && item instanceof Request;
    const isOther = kind === "trace" && item instanceof Other;
    const isStep = kind === "step" && item instanceof Step;
    if (!isStep) lastRequest = isRequest ? item : null;
    if (isRequest) detail.replaceChildren(requestPanel(item, { openStep, close }));
    else if (isStep) detail.replaceChildren(stepPanel(item, { openRequest, openStep, close, from: lastRequest }));
    else if (isOther) detail.replaceChildren(otherPanel(item, { close }));
    else detail.replaceChildren(hint(run, isOwn));
    list.choose(lastRequest);
    engine.list.choose(isStep ? item : null);
    others.choose(isOther ? item : null);
    engine.mark(item ? item.start : null, item?.end);
    if (isRequest || isStep || isOther) {
      detail.querySelector("h2").focus({ preventScroll: true });
      detail.scrollTop = 0;
      const box = detail.getBoundingClientRect();
      if (box.top < 0 || box.top > innerHeight * 0.6) detail.scrollIntoView({ block: "start", behavior: motion() });
    }
  }

  addEventListener("hashchange", show);
  filter();
  document.getElementById("app").replaceChildren(
    header(run),
    el(
      "main",
      {},
      isOwn
        ? master(section("traces", "Traces, slowest first", others.element))
        : [
            numbers(run),
            distributions(run, filter),
            master(
              section(
                "requests",
                "Requests, slowest first",
                run.requests.length ? search : null,
                chips,
                run.requests.length
                  ? list.element
                  : el("p", { class: "muted" }, "No request was recorded: trace from level 1 on, and send one."),
              ),
            ),
            engine.element,
            run.others.length ? section("traces", "Other traces", others.element) : [],
          ],
    ),
    el("footer", { class: "muted" }, `sgl-aspects ${run.version}. Plots: uPlot, MIT licence.`),
  );
  show();
}

const motion = () => (matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth");

/** What to do first. `isOwn`: nothing but functions that were traced by name. */
function hint(run, isOwn) {
  const [kind, items, title] = isOwn ? ["trace", run.others, "No request of an engine was recorded"] : ["request", run.requests, "Find the slow phase"];
  const steps = isOwn
    ? ["Open a function that was traced by name, and see what ran inside it."]
    : [
        "Open a request: the list begins with the slowest. Its colours show where its time went.",
        "Read what stands out against the run's median, and open its slowest step.",
        "See what that step did, and whom else it kept waiting.",
      ];
  const slowest = items.reduce((found, item) => (!found || item.latency > found.latency ? item : found), null);
  const open = () => (location.hash = `${kind}=${slowest.index}`);
  return el(
    "div",
    { class: "panel hint" },
    el("h2", {}, title),
    el("ol", {}, steps.map((text) => el("li", {}, text))),
    slowest ? el("button", { type: "button", class: "action", onclick: open }, `Open the slowest: ${isOwn ? `${slowest.name}, ` : ""}${duration(slowest.duration)}`) : null,
  );
}

unpack()
  .then((data) => build(new Run(data)))
  .catch((error) => {
    document.getElementById("app").replaceChildren(el("p", { class: "notice warning" }, `This page could not be shown: ${error}`));
    throw error;
  });
