// The admin page: models, usage and keys, for whoever has an admin key.

import { duration } from "../status/numbers.js";
import { Polling, ask, say } from "../status/polling.js";
import { showKeys } from "./keys.js";
import { showModels } from "./models.js";
import { showUsage } from "./usage.js";

const INTERVAL_MILLISECONDS = 3000;
const RECENT_SECONDS = 30; // longer than the time between two samples of the server
const KEYS_EVERY = 10; // turns between two requests for usage and keys

const at = (id) => document.getElementById(id);
const polling = new Polling(INTERVAL_MILLISECONDS, show, showFailure);
let turn = 0;
let clock = 0; // time of the last answer on the server's clock

at("usage-form").addEventListener("change", askAll);
at("usage-form").addEventListener("submit", (event) => event.preventDefault());
polling.now();

function askAll() {
  turn = 0;
  polling.now();
}

async function show() {
  if (turn % KEYS_EVERY === 0) {
    showKeys(await ask("v1/keys"));
    await askUsage();
  }
  const since = clock - RECENT_SECONDS; // the last sample alone is shown
  const [status, cards] = [await ask(`status.json?since=${since}`), await ask("v1/models")];
  clock = status.uptime_seconds;
  showModels(status, cards.data, askAll);
  say(`Tokenwire ${status.version}, up for ${duration(status.uptime_seconds)}.`);
  at("content").hidden = false;
  at("content").classList.remove("stale");
  turn += 1;
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
  if (needsKey) {
    at("content").hidden = true;
    turn = 0; // another key may see other usage
  }
  at("content").classList.add("stale");
}
