// The card of one model: its state in words, its charts, and what its services are.

import { element } from "../playground/elements.js";
import { Chart } from "./chart.js";
import { History } from "./history.js";
import { duration, milliseconds, rounded } from "./numbers.js";

const percent = (share) => `${rounded(100 * share)} %`;
let count = 0;

export class ModelCard {
  #history = new History();
  #state = element("span", { className: "state" });
  #facts = element("p", { className: "quiet" });
  #outcomes = element("p", { className: "quiet outcomes" });
  #charts = [
    new Chart("Generated tokens/s", [["generated", ""]], rounded, 1),
    new Chart("Prompt tokens/s", [["prompt", ""]], rounded, 1),
    new Chart("Sequences", [["running", "running"], ["waiting", "waiting"]], rounded, 1),
    new Chart("KV cache in use", [["kvUsed", ""]], percent, 0.1),
    new Chart("Time to first token", [["p50", "p50"], ["p95", "p95"]], milliseconds, 0.001),
  ];

  constructor(id) {
    const title = element("h2", { id: `model-${count++}` }, id);
    this.element = element(
      "section",
      { className: "card", "aria-labelledby": title.id },
      element("div", { className: "title" }, title, this.#state),
      element("div", { className: "charts" }, ...this.#charts.map((chart) => chart.element)),
      this.#outcomes,
      this.#facts,
    );
  }

  // Shows an answer of status.json about the model. `now` is in seconds.
  show(model, now) {
    this.#history.add(model, now);
    const [kind, words] = stateOf(model);
    this.#state.className = `state ${kind}`;
    this.#state.textContent = words;
    for (const chart of this.#charts) chart.show(this.#history.samples);
    this.#outcomes.textContent = outcomesOf(model);
    this.#facts.textContent = factsOf(model);
  }
}

function stateOf(model) {
  if (!model.reachable) return ["error", "Tokenizer service not reachable"];
  if (!model.engine) return ["error", "Engine not reachable"];
  if (model.engine.draining) return ["error", "Engine is stopping"];
  return ["good", "Serving"];
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
  if (model.engine) facts.push(model.engine.device, model.engine.dtype, `kernels ${model.engine.kernels}`);
  const { count, window_seconds: seconds } = model.first_token;
  facts.push(`times to first token: ${count} in the last ${duration(seconds)}`);
  return facts.join(" · ");
}
