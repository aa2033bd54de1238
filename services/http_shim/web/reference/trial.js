// "Try it": a form for one operation, and the server's answer below it.

import { button, element } from "../playground/elements.js";
import { send } from "../playground/requests.js";

const MAX_CHARACTERS = 500_000; // the rest of a longer answer is not shown

export class Trial {
  #operation;
  #parameters = new Map(); // inputs by name
  #body = null;
  #send = element("button", {}, "Send");
  #stop = button("Stop", () => this.#abort.abort(), { disabled: true });
  #state = element("p", { role: "status" });
  #answer = element("pre", { className: "answer", tabIndex: 0, role: "region", "aria-label": "Answer" });
  #abort = null;
  #isBusy = false;

  // operation: {method, path, parameters, body}; servedModel: returns a promise of a model's id.
  constructor(operation, servedModel) {
    this.#operation = operation;
    const form = element("form", { className: "request" });
    for (const name of operation.parameters.split(" ").filter(Boolean)) {
      const input = element("input", { name, required: operation.path.includes(`{${name}}`) });
      this.#parameters.set(name, input);
      form.append(element("label", {}, `${name} `, input));
    }
    if (operation.body !== undefined) {
      const rows = operation.body.split("\n").length + 1;
      this.#body = element("textarea", { rows, spellcheck: false, value: operation.body });
      form.append(element("label", {}, "Body ", this.#body));
    }
    form.append(element("div", { className: "row" }, this.#send, this.#stop));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.#isBusy) this.#try();
    });
    const summary = element("summary", {}, "Try it");
    this.element = element("details", { className: "try" }, summary, form, this.#state, this.#answer);
    this.element.addEventListener("toggle", () => this.#fill(servedModel), { once: true });
  }

  async #fill(servedModel) {
    if (this.#body === null && !this.#parameters.has("model")) return;
    const model = await servedModel();
    if (this.#parameters.has("model")) this.#parameters.get("model").value = model;
    const isTouched = document.activeElement === this.#body || this.#body?.value !== this.#operation.body;
    if (this.#body && !isTouched) {
      this.#body.value = this.#body.value.replace('"default"', JSON.stringify(model));
    }
  }

  async #try() {
    const began = performance.now();
    this.#abort = new AbortController();
    this.#setBusy(true);
    this.#state.classList.remove("error");
    this.#state.textContent = "Waiting for the answer.";
    this.#answer.textContent = "";
    try {
      const response = await send(this.#url(), {
        method: this.#operation.method,
        headers: this.#body ? { "content-type": "application/json" } : {},
        body: this.#body?.value,
        signal: this.#abort.signal,
      });
      const head = this.#headOf(response);
      this.#state.textContent = head;
      await this.#show(response);
      this.#state.textContent = `${head} after ${Math.round(performance.now() - began)} ms`;
    } catch (error) {
      const isStopped = this.#abort.signal.aborted;
      this.#state.classList.toggle("error", !isStopped);
      this.#state.textContent = isStopped ? "Stopped." : `The server does not answer: ${error.message}`;
    }
    this.#setBusy(false);
  }

  #url() {
    let path = this.#operation.path.slice(1); // a relative path keeps the prefix of a proxy
    const query = new URLSearchParams();
    for (const [name, input] of this.#parameters) {
      const isInPath = path.includes(`{${name}}`);
      if (isInPath) path = path.replace(`{${name}}`, input.value.split("/").map(encodeURIComponent).join("/"));
      else if (input.value) query.set(name, input.value);
    }
    return query.size ? `${path}?${query}` : path;
  }

  #headOf(response) {
    this.#state.classList.toggle("error", !response.ok);
    const id = response.headers.get("x-request-id");
    return `${response.status} ${response.statusText}${id ? `, x-request-id ${id}` : ""}`;
  }

  // Shows text as it arrives, and formats a complete JSON answer.
  async #show(response) {
    let text = "";
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let read = await reader.read(); !read.done; read = await reader.read()) {
      text += read.value;
      this.#answer.append(read.value);
      if (text.length > MAX_CHARACTERS) {
        this.#answer.append("\n… The rest is not shown.");
        await reader.cancel();
        return;
      }
    }
    if (response.headers.get("content-type")?.startsWith("application/json")) {
      this.#answer.textContent = JSON.stringify(JSON.parse(text), null, 2);
    }
  }

  #setBusy(isBusy) {
    this.#isBusy = isBusy;
    this.#send.setAttribute("aria-disabled", isBusy); // a disabled button would lose the focus
    this.#stop.disabled = !isBusy;
  }
}
