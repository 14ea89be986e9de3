// The run: spans in columns (see payload.py), and the requests and steps among them.

async function unpack() {
  const binary = atob(document.getElementById("data").textContent);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// The scheduler's names of batches, and the displayed names of phases. Texts of a trace are looked up in maps only.
const MODES = new Map([["extend", "prefill"], ["mixed", "mixed"], ["decode", "decode"], ["denoise", "denoise"]]);
const IMAGE_PHASES = ["encode", "denoise", "decode_latents"];
const PHASES = ["tokenize", "queue", ...IMAGE_PHASES, "prefill", "between", "decode", "other"];
const PARTS = ["schedule", "forward", "run_batch", "sample", "process_result", "other"];
const LABELS = {
  between: "between chunks",
  other: "elsewhere",
  decode_latents: "decode latents",
  run_batch: "rest of run_batch",
  process_result: "process result",
  kv: "KV cache in use",
  cached: "found of a request's prompt",
};
const labelOf = (name) => LABELS[name] ?? name;

class Run {
  constructor(data) {
    Object.assign(this, data);
    this.size = data.start.length;
    this.columns = data.types.map(([, names]) => new Map(names.map((name, at) => [name, at])));
    this.hasError = new Set(data.errors);
    this._indexChildren();
    this.byIndex = new Map();
    const added = addedTimes(this, data.steps);
    this.steps = data.steps.map((index, at) => new Step(this, index, at, added.get(index)));
    for (const step of this.steps) this.byIndex.set(step.index, step);
    this.requests = data.requests.map((index) => new Request(this, index));
    for (const request of this.requests) this.byIndex.set(request.index, request);
    this._linkSteps();
    this.others = [];
    for (let i = 0; i < this.size; i++)
      if (this.parent[i] < 0 && !this.byIndex.has(i) && this.name(i) !== data.step) this.others.push(new Other(this, i));
    for (const other of this.others) this.byIndex.set(other.index, other);
    this.end = 0;
    for (let i = 0; i < this.size; i++) this.end = Math.max(this.end, this.start[i] + this.duration[i]);
    this._typical();
  }

  name(index) {
    return this.types[this.type[index]][0];
  }

  /** An attribute of a span; null where it is absent. */
  value(index, name) {
    const at = this.columns[this.type[index]].get(name);
    return at === undefined ? null : this.values[index][at];
  }

  number(index, name) {
    const value = this.value(index, name);
    return typeof value === "number" ? value : null;
  }

  attributes(index) {
    return this.types[this.type[index]][1].map((name, at) => [name, this.values[index][at]]);
  }

  /** The spans directly below one, by start. */
  children(index) {
    return this.childList.subarray(this.childStart[index], this.childStart[index + 1]);
  }

  _indexChildren() {
    const starts = new Uint32Array(this.size + 1);
    for (const parent of this.parent) if (parent >= 0) starts[parent + 1]++;
    for (let i = 0; i < this.size; i++) starts[i + 1] += starts[i];
    const next = starts.slice();
    this.childList = new Uint32Array(starts[this.size]);
    this.parent.forEach((parent, index) => {
      if (parent >= 0) this.childList[next[parent]++] = index;
    });
    this.childStart = starts;
  }

  _linkSteps() {
    for (const step of this.steps) {
      for (const target of this.links[step.index] ?? []) {
        const request = this.byIndex.get(target);
        if (request instanceof Request) {
          step.requests.push(request);
          request.steps.push(step);
        }
      }
    }
  }

  /** Medians: what is usual in this run. */
  _typical() {
    const { requests, steps } = this;
    const usual = (items, value) => median(items.map(value).filter((one) => one !== null));
    const modes = [...new Set(steps.map((step) => step.mode))];
    this.typical = {
      phase: Object.fromEntries(PHASES.map((phase) => [phase, usual(requests, (request) => request.phases[phase])])),
      step: new Map(modes.map((mode) => [mode, usual(steps, (step) => (step.mode === mode ? step.duration : null))])),
      tokens: usual(requests, (request) => request.outputTokens ?? 0),
      duration: usual(requests, (request) => request.latency),
      toFirst: usual(requests, (request) => request.toFirst),
      perToken: usual(requests, (request) => request.perToken),
    };
  }
}

/** A span that can be opened: times in nanoseconds. */
class Item {
  constructor(run, index) {
    this.run = run;
    this.index = index;
    this.start = run.start[index];
    this.duration = run.duration[index];
    this.end = this.start + this.duration;
    this.latency = run.value(index, run.names.ATTACHED_FLAG) || run.value(index, run.names.DETACHED_FLAG) ? null : this.duration;
    this.isError = run.hasError.has(index);
  }
}

/** A request: null is what the trace does not have. */
class Request extends Item {
  constructor(run, index) {
    super(run, index);
    const value = (name) => run.value(index, name);
    const number = (name) => run.number(index, name);
    this.id = String(value(run.names.REQUEST_ID) ?? value(run.names.RESPONSE_ID) ?? run.traces[index]);
    this.model = String(value(run.names.REQUEST_MODEL) ?? run.name(index));
    this.promptTokens = number(run.names.INPUT_TOKENS);
    this.cachedTokens = number(run.names.CACHED_TOKENS);
    this.outputTokens = number(run.names.OUTPUT_TOKENS);
    const first = number(run.names.TIME_TO_FIRST_TOKEN);
    this.toFirst = first === null ? null : first * 1e9;
    this.perToken =
      first !== null && this.outputTokens > 1 ? (this.duration - this.toFirst) / (this.outputTokens - 1) : null;
    const status = number(run.names.STATUS_CODE);
    this.isRefused = status >= 400 && status < 500; // the caller's mistake
    this.isLeft = this.isError && run.names.LEFT_ERRORS.includes(value(run.names.ERROR_TYPE)); // given up by its caller
    const reasons = value(run.names.FINISH_REASONS);
    this.outcome = this.isRefused
      ? String(status)
      : this.isError
      ? String(value(run.names.ERROR_TYPE) ?? "error")
      : Array.isArray(reasons) && reasons.length
        ? reasons.join(", ")
        : "–";
    this.steps = [];
    this.segments = [];
    this.phases = Object.fromEntries(PHASES.map((phase) => [phase, 0]));
    this._measure();
  }

  /** What a search looks in. */
  get text() {
    const { run, index } = this;
    const attributes = run.attributes(index).map(([name, value]) => `${name}=${value}`);
    this.found ??= [this.id, run.traces[index], run.name(index), this.outcome, ...attributes].join("\n").toLowerCase();
    return this.found;
  }

  /** Where its time went: `segments` on the line of time, `phases` in total. */
  _measure() {
    const { run } = this;
    let reached = this.start;
    for (const child of run.children(this.index)) {
      const phase = run.name(child);
      if (!["tokenize", "queue", "prefill", "decode", ...IMAGE_PHASES].includes(phase)) continue;
      const start = Math.max(run.start[child], reached);
      const end = Math.min(run.start[child] + run.duration[child], this.end);
      if (phase === "prefill" && start > reached && this.phases.prefill > 0) this._segment("between", reached, start);
      if (end > start) this._segment(phase, start, end);
      reached = Math.max(reached, end);
    }
    const known = PHASES.reduce((sum, phase) => sum + this.phases[phase], 0);
    this.phases.other = Math.max(0, this.duration - known);
  }

  _segment(phase, start, end) {
    this.segments.push([phase, start, end]);
    this.phases[phase] += end - start;
  }

  /** The phase that took most beyond what it usually takes in this run, and how that compares. */
  get standout() {
    let found = null;
    for (const phase of PHASES) {
      const excess = this.phases[phase] - (this.run.typical.phase[phase] ?? 0);
      if (!found || excess > found.excess) found = { phase, excess, time: this.phases[phase] };
    }
    return { ...found, usual: this.run.typical.phase[found.phase] ?? 0 };
  }
}

/** A root that is neither a request nor a step: a function that was traced by name, the loading of a model. */
class Other extends Item {
  get name() {
    return this.run.name(this.index);
  }
}

/** What each step adds, by its index: where an engine overlaps, two are open at once. */
function addedTimes(run, indices) {
  const ends = new Map(); // by process
  const added = new Map();
  const end = (index) => run.start[index] + run.duration[index];
  for (const index of [...indices].sort((a, b) => end(a) - end(b))) {
    const from = Math.max(run.start[index], ends.get(run.process[index]) ?? 0);
    ends.set(run.process[index], Math.max(end(index), from));
    added.set(index, Math.max(0, end(index) - from));
  }
  return added;
}

/** A scheduler's step. */
class Step extends Item {
  /** `added`: the time that it adds, which is its duration wherever steps are counted or compared. */
  constructor(run, index, position, added) {
    super(run, index);
    this.position = position;
    this.duration = added;
    const mode = String(run.value(index, run.names.MODE) ?? "other");
    this.mode = MODES.get(mode) ?? mode;
    this.kind = MODES.has(mode) ? this.mode : "other"; // its colour
    this.number = run.number(index, run.names.STEP_ID);
    this.name = this.number === null ? `${position + 1}` : `${this.number}`;
    this.batchSize = run.number(index, run.names.BATCH_SIZE);
    this.tokens = run.number(index, run.names.BATCH_TOKENS);
    this.waiting = run.number(index, run.names.QUEUE_WAITING);
    this.running = run.number(index, run.names.QUEUE_RUNNING);
    this.kvUsage = run.number(index, run.names.KV_USAGE);
    this.process = run.process[index];
    this.requests = [];
    this.deviceTime = null;
    this.times = new Map();
    this.parts = Object.fromEntries(PARTS.map((part) => [part, 0]));
    this._measure();
  }

  _measure() {
    const { run, parts } = this;
    for (const child of run.children(this.index)) {
      const name = run.name(child);
      if (PARTS.includes(name) && name !== "other") parts[name] += run.duration[child];
      if (name === "run_batch") for (const below of run.children(child)) this._inRunBatch(below);
      else this._device(child);
    }
    const known = PARTS.reduce((sum, part) => sum + parts[part], 0);
    parts.other = Math.max(0, this.duration - known);
  }

  _inRunBatch(child) {
    const { run, parts } = this;
    const name = run.name(child);
    if (name !== "forward" && name !== "sample") return;
    const more = this._adds(child, name, run.duration[child]);
    parts[name] += more;
    parts.run_batch = Math.max(0, parts.run_batch - more);
    this._device(child);
  }

  _device(child) {
    const seconds = this.run.number(child, this.run.names.DEVICE_TIME);
    if (seconds !== null) this.deviceTime = (this.deviceTime ?? 0) + this._adds(child, "device", seconds * 1e9);
  }

  /** What a span adds to its part: of a stage's workers, which run a pass at once, the slowest counts. */
  _adds(child, part, time) {
    const { run, times } = this;
    const stage = `${part} ${/\bpp\d+/.exec(run.value(child, run.names.RANK))}`;
    const own = `${stage} ${run.process[child]}`;
    times.set(own, (times.get(own) ?? 0) + time);
    const before = times.get(stage) ?? 0;
    times.set(stage, Math.max(before, times.get(own)));
    return times.get(stage) - before;
  }

  /** The kernels of a profiled step. */
  get kernels() {
    const { run } = this;
    const below = (span) => [...run.children(span)].flatMap((child) => (run.name(child) === "kernel" ? child : below(child)));
    return below(this.index);
  }

  /** The part that took longest. */
  get mainPart() {
    return PARTS.reduce((main, part) => (this.parts[part] > this.parts[main] ? part : main));
  }

  /** How it compares with the run's median step of its kind. */
  get ratio() {
    return this.duration / Math.max(this.run.typical.step.get(this.mode) ?? this.duration, 1);
  }
}
