// Tokens and speed of one answer.

const TOKENS_PER_ARRIVAL = 8; // at most, if the text came as it was generated
const SAME_MILLISECONDS = 0.5; // events that are closer arrived together

export class Usage {
  #began = performance.now();
  #first = null;
  #last = null;
  #arrivals = 0; // of text

  // Takes each event of the stream. Returns the figures once the server has sent the usage, else null.
  record(event) {
    const now = performance.now();
    if (event.choices.some(hasText)) {
      this.#first ??= now;
      if (now - (this.#last ?? -Infinity) > SAME_MILLISECONDS) this.#arrivals++;
      this.#last = now;
    }
    if (!event.usage) return null;
    const { prompt_tokens: prompt, completion_tokens: output, prompt_tokens_details: details } = event.usage;
    const first = this.#first ?? now;
    return {
      prompt, output, cached: details?.cached_tokens ?? 0,
      tokensPerSecond: this.#rate(output, this.#last ?? now),
      firstMilliseconds: Math.round(first - this.#began),
    };
  }

  // The rate after the first token. A text that may be a tool call comes all at once: its rate is that of the whole request.
  #rate(output, last) {
    const spread = last - (this.#first ?? last);
    const isGradual = spread > 0 && this.#arrivals > 1 && output <= TOKENS_PER_ARRIVAL * this.#arrivals;
    const [tokens, milliseconds] = isGradual ? [output - output / this.#arrivals, spread] : [output, last - this.#began];
    return milliseconds > 0 ? (1000 * tokens) / milliseconds : 0;
  }
}

function hasText({ delta, text }) {
  return Boolean(text || delta?.content || delta?.reasoning_content || delta?.tool_calls);
}

// Returns the figures as a line of text.
export function usageText({ prompt, cached, output, tokensPerSecond, firstMilliseconds }) {
  const reused = cached ? ` (${cached.toLocaleString()} cached)` : "";
  const rate = tokensPerSecond.toLocaleString(undefined, { maximumSignificantDigits: 3 });
  return `${prompt.toLocaleString()} prompt${reused} + ${output.toLocaleString()} answer tokens, ${rate} tokens/s, first token after ${secondsText(firstMilliseconds)}`;
}

function secondsText(milliseconds) {
  return milliseconds < 1000 ? `${milliseconds} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
