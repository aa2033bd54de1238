// The admin page: models, usage and keys, for whoever has an admin key.

import { getJson, useKey } from "../playground/requests.js";
import { duration } from "../status/numbers.js";
import { showKeys } from "./keys.js";
import { showModels } from "./models.js";
import { showUsage } from "./usage.js";

const INTERVAL_MILLISECONDS = 3000;
const TIMEOUT_MILLISECONDS = 10_000;
const KEYS_EVERY = 10; // turns between two requests for usage and keys

const at = (id) => document.getElementById(id);
let timer = null;
let turn = 0;
let isAsking = false;

document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value.trim());
  at("key").value = "";
  askAll();
});
at("usage-form").addEventListener("change", askAll);
at("usage-form").addEventListener("submit", (event) => event.preventDefault());
poll();

function askAll() {
  turn = 0;
  return poll();
}

async function poll() {
  if (isAsking) return; // the answer under way starts the timer
  isAsking = true;
  clearTimeout(timer);
  try {
    if (turn % KEYS_EVERY === 0) {
      showKeys(await ask("v1/keys"));
      await askUsage();
    }
    const [status, cards] = [await ask("status.json?since=-1"), await ask("v1/models")];
    showModels(status, cards.data, askAll);
    say(`Tokenwire ${status.version}, up for ${duration(status.uptime_seconds)}.`);
    at("content").hidden = false;
    at("key-form").hidden = true;
    at("content").classList.remove("stale");
    turn += 1;
  } catch (error) {
    showFailure(error);
  }
  isAsking = false;
  if (!document.hidden) timer = setTimeout(poll, INTERVAL_MILLISECONDS);
}

function ask(path) {
  return getJson(path, AbortSignal.timeout(TIMEOUT_MILLISECONDS));
}

// A server without the jobs service has no usage, and shows the rest.
async function askUsage() {
  try {
    showUsage(await usage());
  } catch (error) {
    if (![501, 503].includes(error.status)) throw error;
    at("usage-caption").textContent = error.message;
  }
}

// Returns the buckets of the chosen days, of all pages.
async function usage() {
  const start = Math.floor(Date.now() / 1000) - 86_400 * (Number(at("days").value) - 1);
  const query = new URLSearchParams({ start, group_by: `day,${at("by").value}`, limit: at("days").value });
  if (at("of").value) query.set("key", at("of").value);
  const buckets = [];
  for (;;) {
    const page = await ask(`v1/usage?${query}`);
    buckets.push(...page.data);
    if (!page.has_more) return buckets;
    query.set("page", page.next_page);
  }
}

function showFailure(error) {
  const needsKey = error.status === 401 || error.status === 403;
  at("key-form").hidden = !needsKey;
  if (needsKey) at("content").hidden = true;
  at("content").classList.add("stale");
  const answered = error.status !== undefined;
  say(answered ? error.message : "The server does not answer. The page keeps asking.", true);
}

// Screen readers announce each assignment, so an unchanged text is not assigned.
function say(text, isError = false) {
  at("server").classList.toggle("error", isError);
  if (at("server").textContent !== text) at("server").textContent = text;
}
