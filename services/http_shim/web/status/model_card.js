// The card of one model: its state in words, its charts, and facts of its services.

import { element } from "../playground/elements.js";
import { Chart } from "./chart.js";
import { History, servingOf } from "./history.js";
import { bytes, duration, milliseconds, rounded } from "./numbers.js";

const perSecond = (value) => `${rounded(value)}/s`;
const percent = (share) => `${rounded(100 * share)} %`;
let count = 0;

export class ModelCard {
  #history = new History();
  #state = element("span", { className: "state" });
  #facts = element("p", { className: "quiet" });
  #outcomes = element("p", { className: "quiet outcomes" });
  #memory = element("ul", { className: "quiet memory" });
  #engines = element("ul", { className: "quiet engines" });
  #charts = [
    new Chart("Generated tokens", [["generated_per_second", ""]], perSecond, 1),
    new Chart("Prompt tokens", [["prompt_per_second", ""]], perSecond, 1),
    new Chart("Sequences", [["running_sequences", "running"], ["waiting_sequences", "waiting"]], rounded, 1),
    new Chart("KV cache in use", [["kv_used_share", ""]], percent, 0.1),
    new Chart("Time to first token", [["p50_seconds", "p50"], ["p95_seconds", "p95"]], milliseconds, 0.001),
  ];

  constructor(id) {
    const title = element("h2", { id: `model-${count++}` }, id);
    this.element = element(
      "section",
      { className: "card", "aria-labelledby": title.id },
      element("div", { className: "title" }, title, this.#state),
      element("div", { className: "charts" }, ...this.#charts.map((chart) => chart.element)),
      this.#memory,
      this.#engines,
      this.#outcomes,
      this.#facts,
    );
  }

  // Shows an answer of status.json about the model. `now` is in seconds.
  show(model, now) {
    this.#history.add(model.history, now);
    const [kind, words] = stateOf(model);
    this.#state.className = `state ${kind}`;
    this.#state.textContent = words;
    for (const chart of this.#charts) chart.show(this.#history.samples, now);
    this.#engines.replaceChildren(...enginesOf(model).map((line) => element("li", {}, line)));
    this.#memory.replaceChildren(...memoryOf(model));
    this.#outcomes.textContent = outcomesOf(model);
    this.#facts.textContent = factsOf(model);
  }
}

function stateOf(model) {
  if (!model.reachable) return ["error", "Tokenizer service not reachable"];
  const { engines } = model;
  const serving = servingOf(model);
  const refused = engines.find((engine) => engine.state === "refused");
  if (!serving.length) return ["error", refused ? refused.reason : "Engine not reachable"];
  if (serving.every((engine) => engine.draining)) return ["error", "Engine is stopping"];
  if (engines.length === 1) return ["good", "Serving"];
  return [serving.length < engines.length ? "error" : "good", `${serving.length} of ${engines.length} engines serve`];
}

// Lines about the engines, where there are several.
function enginesOf({ engines }) {
  if (!engines || engines.length < 2) return [];
  return engines.map((engine) => {
    if (engine.state !== "serving") return `${engine.target}: ${engine.reason ?? "not reachable"}`;
    const share = engine.kv_blocks ? engine.kv_used_blocks / engine.kv_blocks : 0;
    const state = engine.draining ? "is stopping" : `${engine.running_sequences} running, ${engine.waiting_sequences} waiting`;
    return `${engine.target}: ${state}, ${percent(share)} of the KV cache`;
  });
}

// Returns a line for each part of the memory, summed over the engines.
function memoryOf(model) {
  const pools = new Map();
  for (const pool of servingOf(model).flatMap((engine) => engine.memory)) {
    const name = nameOf(pool);
    const sum = pools.get(name) ?? { kind: pool.kind, bytes: 0, used_bytes: 0, cached_bytes: 0 };
    for (const field of ["bytes", "used_bytes", "cached_bytes"]) sum[field] += pool[field];
    pools.set(name, sum);
  }
  return [...pools].map(([name, pool]) => {
    if (["weights", "adapters"].includes(pool.kind)) return element("li", {}, `${name}: ${bytes(pool.bytes)}`);
    const shares = `${bytes(pool.used_bytes)} used, ${bytes(pool.cached_bytes)} cached prefixes`;
    const meter = element("progress", { max: pool.bytes, value: pool.used_bytes + pool.cached_bytes, "aria-label": name });
    return element("li", {}, `${name}: ${shares}, of ${bytes(pool.bytes)}`, meter);
  });
}

function nameOf({ kind, window }) {
  const words = { weights: "Weights", adapters: "Adapters", states: "States", kv_cache: "KV cache" };
  return window ? `KV cache of the last ${rounded(window)} tokens` : (words[kind] ?? kind);
}

function outcomesOf(model) {
  if (!model.reachable) return "";
  const counts = Object.entries(model.requests).map(([outcome, number]) => `${rounded(number)} ${outcome}`);
  const tokens = `${rounded(model.prompt_tokens)} prompt and ${rounded(model.completion_tokens)} generated tokens`;
  return `Requests: ${counts.join(", ") || "none"}; ${model.running_requests} running. ${tokens}.`;
}

function factsOf(model) {
  if (!model.reachable) return "";
  const facts = [`version ${model.version}`, `up for ${duration(model.uptime_seconds)}`];
  for (const { device, dtype, kernels } of servingOf(model).slice(0, 1)) facts.push(device, dtype, `kernels ${kernels}`);
  const { count, window_seconds: seconds } = model.first_token;
  facts.push(`times to first token: ${count} in the last ${duration(seconds)}`);
  return facts.join(" · ");
}
