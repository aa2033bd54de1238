// The status page: asks every two seconds while it is visible, and draws a card for each model.

import { getJson, useKey } from "../playground/requests.js";
import { ModelCard } from "./model_card.js";
import { duration } from "./numbers.js";

const INTERVAL_MILLISECONDS = 2000;
const TIMEOUT_MILLISECONDS = 10_000;

const at = (id) => document.getElementById(id);
const cards = new Map(); // by model
let timer = null;
let isAsking = false;
let since = -1; // time of the last answer on the server's clock

document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value.trim());
  at("key").value = "";
  poll();
});
poll();

async function poll() {
  if (isAsking) return; // the answer under way starts the timer
  isAsking = true;
  clearTimeout(timer);
  try {
    show(await getJson(`status.json?since=${since}`, AbortSignal.timeout(TIMEOUT_MILLISECONDS)));
  } catch (error) {
    showFailure(error);
  }
  isAsking = false;
  if (!document.hidden) timer = setTimeout(poll, INTERVAL_MILLISECONDS);
}

function show(status) {
  say(`Tokenwire ${status.version}, up for ${duration(status.uptime_seconds)}.`);
  at("key-form").hidden = true;
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
  const answered = error.status !== undefined;
  say(answered ? error.message : "The server does not answer. The page keeps asking.", true);
}

// Screen readers announce each assignment, so an unchanged text is not assigned.
function say(text, isError = false) {
  at("server").classList.toggle("error", isError);
  if (at("server").textContent !== text) at("server").textContent = text;
}
