// The context gauge: tokens of the conversation, and of the text being typed, in the context of the model.
import { shownMessages } from "./conversation.js";
import { postJson } from "./requests.js";

const PAUSE_MILLISECONDS = 400; // after the last key, before the text is counted
const FULL = 0.85; // share of the context that counts as nearly full
const MAX_CHARACTERS = 250_000; // a longer text is estimated
const CHARACTERS_PER_TOKEN = 4;

export class Gauge {
  #box;
  #meter;
  #text;
  #warning;
  #host; // {isShown(), card(), model(), typed()}
  #timer = 0;
  #counting = null; // AbortController of the request
  #typed = { text: "", tokens: 0 };
  #used = 0;

  constructor({ box, warning }, host) {
    this.#box = box;
    this.#meter = box.querySelector("meter");
    this.#text = box.querySelector("span");
    this.#warning = warning;
    this.#host = host;
  }

  // Shows the tokens up to the last answer whose usage is known.
  show(conversation, system) {
    const known = shownMessages(conversation).findLast(({ usage }) => usage)?.usage;
    this.#used = known ? known.prompt + known.output : Math.ceil((system ?? "").length / CHARACTERS_PER_TOKEN);
    this.draw();
  }

  // Counts what is typed, once the user pauses.
  typed() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#count(), PAUSE_MILLISECONDS);
  }

  draw() {
    const length = this.#host.card()?.max_model_len;
    const isShown = this.#host.isShown() && length > 0;
    this.#box.hidden = !isShown;
    if (!isShown) this.#warning.hidden = true;
    if (!isShown) return;
    const used = this.#used + this.#typed.tokens;
    const share = used / length;
    Object.assign(this.#meter, { max: length, high: FULL * length, value: Math.min(used, length) });
    this.#text.textContent = `${used.toLocaleString()} of ${length.toLocaleString()} tokens`;
    this.#meter.setAttribute("aria-valuetext", this.#text.textContent);
    const warning = share >= 1 ? tooLong(used - length) : share >= FULL ? nearlyFull(length - used) : "";
    if (this.#warning.textContent !== warning) this.#warning.textContent = warning;
    this.#warning.hidden = warning === "";
  }

  async #count() {
    const text = this.#host.typed();
    if (text === this.#typed.text) return this.draw();
    this.#counting?.abort();
    const counting = (this.#counting = new AbortController());
    let tokens = Math.ceil(text.length / CHARACTERS_PER_TOKEN);
    const { status } = this.#host.card() ?? {};
    const isLoaded = !status || status.value === "loaded"; // counting would load the model
    if (text && isLoaded && text.length <= MAX_CHARACTERS) {
      const body = { model: this.#host.model(), prompt: text, add_special_tokens: false };
      try {
        tokens = (await postJson("tokenize", body, counting.signal)).count;
      } catch {
        // the estimate stands
      }
    }
    if (counting.signal.aborted) return;
    this.#typed = { text, tokens };
    this.draw();
  }
}

function nearlyFull(left) {
  return `The context is nearly full: about ${left.toLocaleString()} tokens are left for your message and the answer, which is cut there. A longer message is refused. Delete messages, or start a new conversation.`;
}

function tooLong(excess) {
  return `The conversation is about ${excess.toLocaleString()} tokens longer than the context, so that the server refuses it. Shorten the message, delete messages, or start a new conversation.`;
}
