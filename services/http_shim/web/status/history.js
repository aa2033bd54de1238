// Samples of a model, which the server keeps for ten minutes.

export const SPAN_SECONDS = 600;

// Returns the model's engines that take requests.
export function servingOf({ engines }) {
  return (engines ?? []).filter((engine) => engine.state === "serving");
}

export class History {
  samples = []; // the oldest first; a null value is unknown

  // Adds the samples of an answer of status.json. `now` is the answer's time on the samples' clock, in seconds.
  add(samples, now) {
    const last = this.samples.at(-1)?.time ?? -1;
    this.samples.push(...samples.filter((sample) => sample.time > last));
    while (this.samples.length && this.samples[0].time < now - SPAN_SECONDS) this.samples.shift();
  }
}
