// The table of models: state, load, and buttons that load and unload.

import { button, element } from "../playground/elements.js";
import { postJson } from "../playground/requests.js";
import { servingOf } from "../status/history.js";
import { bytes, rounded } from "../status/numbers.js";

const at = (id) => document.getElementById(id);
const rows = new Map(); // by model

// Shows answers of status.json and v1/models. `again` asks for all figures anew.
export function showModels(status, cards, again) {
  const byId = new Map(cards.map((card) => [card.id, card]));
  const shown = status.models.map((model) => rowOf(model, byId.get(model.id), again));
  const isSame = shown.length === at("models").children.length && shown.every((row, i) => row === at("models").children[i]);
  if (!isSame) at("models").replaceChildren(...shown);
}

function rowOf(model, card, again) {
  if (!rows.has(model.id)) rows.set(model.id, new Row(model.id, again));
  const row = rows.get(model.id);
  row.show(model, card);
  return row.element;
}

class Row {
  #cells = Array.from({ length: 5 }, (_, index) => element("td", { className: index ? "number" : "" }));
  #load;
  #unload;

  constructor(id, again) {
    const act = (verb) => async (from) => {
      from.disabled = true;
      try {
        await postJson(`v1/models/${verb}`, { model: id });
        at("action").textContent = `${id}: ${verb === "load" ? "loaded" : "unloaded"}.`;
      } catch (error) {
        at("action").textContent = error.message;
      }
      from.disabled = false;
      again();
    };
    this.#load = button("Load", act("load"), { "aria-label": `Load ${id}` });
    this.#unload = button("Unload", act("unload"), { "aria-label": `Unload ${id}` });
    this.element = element("tr", {}, element("th", { scope: "row" }, id), ...this.#cells, element("td", {}, this.#load, this.#unload));
  }

  show(model, card) {
    const status = card?.status ?? model.status;
    const serving = servingOf(model);
    const sum = (field) => (serving.length ? rounded(serving.reduce((total, engine) => total + engine[field], 0)) : "–");
    const rate = model.history.at(-1)?.generated_per_second ?? null;
    const texts = [stateOf(model, status), memoryOf(model, status), sum("running_sequences"), sum("waiting_sequences"), rate === null ? "–" : rounded(rate)];
    texts.forEach((text, index) => (this.#cells[index].textContent = text));
    this.#load.hidden = !["idle", "failed"].includes(status?.value);
    this.#unload.hidden = status?.value !== "loaded" || status.memory_bytes === null; // null = not on demand
  }
}

function stateOf(model, status) {
  if (status?.value === "loading") return status.progress === null ? "loading" : `loading ${Math.floor(100 * status.progress)} %`;
  if (status?.value === "failed") return `failed: ${status.error}`;
  if (status?.value === "idle") return "idle";
  if (!model.reachable) return "not reachable";
  return servingOf(model).length ? "serving" : "no engine serves";
}

// Returns what the engines take, or what a load would take.
function memoryOf(model, status) {
  const pools = servingOf(model).flatMap((engine) => engine.memory);
  const count = pools.length ? pools.reduce((total, pool) => total + pool.bytes, 0) : (status?.memory_bytes ?? null);
  return count === null ? "–" : bytes(count);
}
