// Completions: text after a prompt, infill before a suffix, and the token probabilities.
import { element } from "./elements.js";
import { stream } from "./requests.js";
import { TokenRow, tokensOf } from "./tokens.js";
import { Usage, usageText } from "./usage.js";

export class Completion {
  #form;
  #output;
  #host;
  #controller = null;

  constructor(form, output, host) {
    this.#form = form;
    this.#output = output;
    this.#host = host;
  }

  get running() {
    return this.#controller !== null;
  }

  stop() {
    this.#controller?.abort();
  }

  request() {
    const { prompt, suffix, echo } = this.#form.elements;
    const { settings, models } = this.#host;
    const body = { ...settings.common(models.id), prompt: prompt.value };
    if (suffix.value) body.suffix = suffix.value;
    if (echo.checked) body.echo = true;
    if (settings.probabilities) body.logprobs = 5;
    return ["v1/completions", body];
  }

  async send() {
    const controller = (this.#controller = new AbortController());
    this.#host.running(true);
    this.#output.replaceChildren();
    const usage = element("p", { className: "usage" });
    const choices = new Map();
    try {
      const times = new Usage();
      for await (const event of stream(...this.request(), controller.signal)) {
        const figures = times.record(event);
        if (figures) usage.textContent = usageText(figures);
        for (const choice of event.choices) this.#choice(choices, choice.index).add(choice);
        this.#host.scroller.follow();
      }
      this.#host.say("The answer is complete.");
    } catch (error) {
      if (error.name === "AbortError") usage.textContent = "Stopped.";
      else this.#fail(error);
    }
    this.#output.append(usage);
    this.#controller = null;
    this.#host.running(false);
  }

  #choice(choices, index) {
    if (!choices.has(index)) {
      const choice = new Choice();
      choices.set(index, choice);
      this.#output.append(choice.element);
    }
    return choices.get(index);
  }

  #fail(error) {
    const retry = element("button", { type: "button" }, "Retry");
    retry.addEventListener("click", () => this.send());
    this.#output.append(element("div", { className: "failure", role: "alert" }, element("p", {}, error.message), retry));
  }
}

class Choice {
  #text = element("pre", { className: "output", tabIndex: 0 });
  #row = null;

  constructor() {
    this.element = element("div", {}, this.#text);
  }

  add(choice) {
    this.#text.append(choice.text);
    for (const token of tokensOf(choice)) {
      if (!this.#row) this.element.append((this.#row = new TokenRow()).element);
      this.#row.add(token);
    }
  }
}
