// The status page: asks every two seconds while it is visible, and draws a card for each model.

import { ModelCard } from "./model_card.js";
import { duration } from "./numbers.js";
import { Polling, ask, say } from "./polling.js";

const INTERVAL_MILLISECONDS = 2000;

const at = (id) => document.getElementById(id);
const cards = new Map(); // by model
let since = -1; // time of the last answer on the server's clock

new Polling(INTERVAL_MILLISECONDS, show, showFailure).now();

async function show() {
  const status = await ask(`status.json?since=${since}`);
  say(`Tokenwire ${status.version}, up for ${duration(status.uptime_seconds)}.`);
  at("models").classList.remove("stale");
  const hasRestarted = status.uptime_seconds < since;
  if (hasRestarted) cards.clear();
  since = hasRestarted ? -1 : status.uptime_seconds;
  for (const model of status.models) {
    if (!cards.has(model.id)) cards.set(model.id, new ModelCard(model.id));
    cards.get(model.id).show(model, status.uptime_seconds);
  }
  const served = new Set(status.models.map((model) => model.id));
  for (const id of [...cards.keys()]) if (!served.has(id)) cards.delete(id);
  const elements = status.models.map((model) => cards.get(model.id).element);
  const shown = [...at("models").children];
  const isSame = shown.length === elements.length && shown.every((each, i) => each === elements[i]);
  if (!isSame) at("models").replaceChildren(...elements);
}

function showFailure(error) {
  at("models").classList.add("stale");
  at("key-form").hidden = error.status !== 401;
}
