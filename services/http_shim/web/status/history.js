// Samples of a model since the page was loaded. The server keeps no history.

export const SPAN_SECONDS = 600;

// Returns the model's engines that take requests.
export function servingOf({ engines }) {
  return (engines ?? []).filter((engine) => engine.state === "serving");
}

export class History {
  samples = []; // the oldest first; a null value is unknown
  #last = null;

  // Adds an answer of status.json about the model. `now` is in seconds.
  add(model, now) {
    const serving = servingOf(model);
    const sum = (field) => (serving.length ? serving.reduce((total, engine) => total + engine[field], 0) : null);
    const blocks = sum("kv_blocks");
    this.samples.push({
      time: now,
      generated: this.#rate(model, now, "completion_tokens"),
      prompt: this.#rate(model, now, "prompt_tokens"),
      running: sum("running_sequences"),
      waiting: sum("waiting_sequences"),
      kvUsed: blocks ? sum("kv_used_blocks") / blocks : null,
      p50: model.first_token?.p50_seconds ?? null,
      p95: model.first_token?.p95_seconds ?? null,
    });
    this.#last = { ...model, time: now };
    while (this.samples[0].time < now - SPAN_SECONDS) this.samples.shift();
  }

  // Returns a counter's increase per second; null after a restart of the service, which resets its counters.
  #rate(model, now, counter) {
    const before = this.#last?.[counter] ?? null;
    if (before === null || model[counter] === null || model[counter] < before) return null;
    return (model[counter] - before) / (now - this.#last.time);
  }
}
