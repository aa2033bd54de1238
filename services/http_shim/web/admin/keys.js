// The table of keys, and the choice of a key whose usage is shown.

import { element } from "../playground/elements.js";
import { rounded } from "../status/numbers.js";

const at = (id) => document.getElementById(id);

// Shows an answer of v1/keys.
export function showKeys(list) {
  at("keys-note").textContent = noteOf(list);
  at("keys").replaceChildren(...list.data.map((key) => rowOf(key)));
  const chosen = at("of").value;
  const options = list.data.map((key) => element("option", { value: key.id }, key.name ? `${key.name} (${key.id})` : key.id));
  at("of").replaceChildren(element("option", { value: "" }, "all keys"), ...options);
  at("of").value = list.data.some((key) => key.id === chosen) ? chosen : "";
}

function noteOf(list) {
  if (!list.data.length) return "This server has no keys: start it with --keys.";
  const reset = `Budgets begin anew on ${new Date(1000 * list.month_ends_at).toISOString().slice(0, 10)} (UTC).`;
  const more = list.has_more ? ` The first ${list.data.length} keys are shown.` : "";
  return `${list.usage_error ?? reset}${more} Keys are made and revoked on the server, by the command tokenwire keys.`;
}

function rowOf(key) {
  const state = key.revoked_at ? `revoked ${dateOf(key.revoked_at)}` : key.admin ? "active, admin" : "active";
  const limits = Object.entries(key.limits).map(([name, value]) => `${name.replaceAll("_", " ")}: ${Array.isArray(value) ? value.join(", ") : rounded(value)}`);
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, key.name || "–"),
    element("td", {}, element("code", {}, key.id)),
    element("td", {}, key.tier),
    element("td", {}, state),
    element("td", {}, limits.join("; ") || "none"),
    element("td", {}, key.last_used_at ? dateOf(key.last_used_at) : "never"),
    monthOf(key),
  );
}

function monthOf(key) {
  if (key.month_tokens === null) return element("td", {}, "–");
  const requests = `${rounded(key.month_requests)} requests`;
  if (key.monthly_tokens === null) return element("td", {}, `${rounded(key.month_tokens)} tokens, ${requests}`);
  const meter = element("progress", { max: key.monthly_tokens, value: key.month_tokens, "aria-label": `Budget of ${key.name || key.id}` });
  return element("td", {}, `${rounded(key.month_tokens)} of ${rounded(key.monthly_tokens)} tokens, ${requests}`, meter);
}

function dateOf(seconds) {
  return new Date(1000 * seconds).toISOString().slice(0, 10);
}
