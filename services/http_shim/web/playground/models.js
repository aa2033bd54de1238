// The model picker: which model answers, and whether it is in memory.
import { bytes } from "../status/numbers.js";
import { button } from "./elements.js";
import { listModels, postJson } from "./requests.js";

const LOADING_MILLISECONDS = 1000; // between two looks while a model loads
const RESTING_MILLISECONDS = 15_000; // between two looks otherwise, if the server unloads models

export class ModelPicker {
  #select;
  #line;
  #host; // {say(text), changed()}
  #cards = [];
  #timer = 0;

  constructor(select, line, host) {
    this.#select = select;
    this.#line = line;
    this.#host = host;
    select.addEventListener("change", () => this.#draw());
    select.addEventListener("focus", () => this.#look());
    document.addEventListener("visibilitychange", () => this.#look());
  }

  // Id of the chosen model
  get id() {
    return this.#select.value;
  }

  // Card of the chosen model, or null
  get card() {
    return this.#cards.find(({ id }) => id === this.id) ?? null;
  }

  // Reads the models again. Throws with the reason.
  async refresh() {
    clearTimeout(this.#timer);
    this.#cards = await listModels();
    this.#draw();
    if (this.#cards.some(({ status }) => status)) this.#timer = setTimeout(() => this.#look(), this.#pause);
  }

  // Calls `tell` with the state of the chosen model until `signal` is aborted, while it is not in memory.
  async watch(tell, signal) {
    const hasToWait = this.card?.status && this.card.status.value !== "loaded";
    while (!signal.aborted && this.card?.status && this.card.status.value !== "loaded") {
      tell(progressText(this.card));
      await new Promise((resolve) => setTimeout(resolve, LOADING_MILLISECONDS));
      if (!signal.aborted) await this.refresh().catch(() => {}); // the request itself reports it
    }
    tell("");
    if (hasToWait) this.#look(); // the answer began before the next look
  }

  get #pause() {
    return this.#cards.some(({ status }) => status?.value === "loading") ? LOADING_MILLISECONDS : RESTING_MILLISECONDS;
  }

  #look() {
    if (document.hidden || !this.#cards.some(({ status }) => status)) return;
    this.refresh().catch((error) => this.#host.say(error.message));
  }

  // Options that stay are changed in place: an open list would close.
  #draw() {
    const chosen = this.id;
    const ids = this.#cards.map(({ id }) => id);
    const options = [...this.#select.options];
    if (ids.join("\n") !== options.map(({ value }) => value).join("\n")) {
      this.#select.replaceChildren(...ids.map((id) => new Option(id, id)));
      if (ids.includes(chosen)) this.#select.value = chosen;
    }
    for (const [index, card] of this.#cards.entries()) {
      const label = `${card.id}${stateText(card)}`;
      if (this.#select.options[index].text !== label) this.#select.options[index].text = label;
    }
    this.#drawLine();
    this.#host.changed();
  }

  #drawLine() {
    const { card } = this;
    const text = card ? effectText(card) : "";
    this.#line.hidden = text === "";
    if (this.#line.firstChild?.textContent === text) return;
    const isLoadable = ["idle", "failed"].includes(card?.status?.value);
    this.#line.replaceChildren(text, ...(isLoadable ? [" ", button("Load now", () => this.#load(card.id))] : []));
  }

  // The answer comes once the model is loaded; meanwhile its progress is shown.
  async #load(model) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#look(), LOADING_MILLISECONDS);
    try {
      await postJson("v1/models/load", { model });
    } catch (error) {
      this.#host.say(error.message);
    }
    this.#look();
  }
}

function percent({ progress }) {
  return typeof progress === "number" ? ` ${Math.round(100 * progress)} %` : "";
}

function stateText({ status }) {
  if (!status || status.value === "loaded") return "";
  return status.value === "loading" ? ` · loading${percent(status)}` : ` · ${status.value}`;
}

function progressText({ id, status }) {
  return status.value === "loading" ? `${id} is loading${percent(status)}` : `Waiting until ${id} is loaded`;
}

// Returns what a message does to a model that is not in memory.
function effectText({ id, status }) {
  if (!status || status.value === "loaded") return "";
  const memory = status.memory_bytes ? ` (${bytes(status.memory_bytes)})` : "";
  if (status.value === "idle") return `${id} is not in memory${memory}. A message loads it, and waits until it can answer.`;
  if (status.value === "loading") return `${id} is loading${percent(status)}. A message waits until it can answer.`;
  return `${id} could not be loaded: ${status.error ?? "no reason is known."} A message tries again.`;
}
