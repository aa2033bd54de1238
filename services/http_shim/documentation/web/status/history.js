// What the page has seen of a model. The server keeps no history; a reload starts a new one.

export const SPAN_SECONDS = 600;

export class History {
  samples = []; // the oldest first; a null value is unknown
  #last = null;

  // Adds an answer of status.json about the model. `now` is in seconds.
  add(model, now) {
    const engine = model.engine;
    this.samples.push({
      time: now,
      generated: this.#rate(model, now, "completion_tokens"),
      prompt: this.#rate(model, now, "prompt_tokens"),
      running: engine?.running_sequences ?? null,
      waiting: engine?.waiting_sequences ?? null,
      kvUsed: engine?.kv_blocks ? engine.kv_used_blocks / engine.kv_blocks : null,
      p50: model.first_token?.p50_seconds ?? null,
      p95: model.first_token?.p95_seconds ?? null,
    });
    this.#last = { ...model, time: now };
    while (this.samples[0].time < now - SPAN_SECONDS) this.samples.shift();
  }

  // Returns a counter's increase per second; null after a start of the service, when it begins anew.
  #rate(model, now, counter) {
    const before = this.#last?.[counter] ?? null;
    if (before === null || model[counter] === null || model[counter] < before) return null;
    return (model[counter] - before) / (now - this.#last.time);
  }
}
