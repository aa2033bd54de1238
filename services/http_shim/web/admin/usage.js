// Usage by day: bars of tokens, and a table of sums by model or key.

import { element } from "../playground/elements.js";
import { rounded } from "../status/numbers.js";

const WIDTH = 600;
const HEIGHT = 100;
const SVG = "http://www.w3.org/2000/svg";
const FIELDS = ["num_model_requests", "num_failed_requests", "input_tokens", "input_cached_tokens", "output_tokens"];

const at = (id) => document.getElementById(id);

// Shows the buckets of v1/usage, one for a day.
export function showUsage(buckets) {
  const byKey = at("by").value === "key";
  const days = mergedDays(buckets);
  const sums = new Map();
  for (const result of days.flatMap((day) => day.results)) {
    const name = byKey ? result.api_key_name || result.api_key_id || "(no key)" : result.model || "(no model)";
    const sum = sums.get(name) ?? Object.fromEntries(FIELDS.map((field) => [field, 0]));
    for (const field of FIELDS) sum[field] += result[field];
    sums.set(name, sum);
  }
  at("by-title").textContent = byKey ? "Key" : "Model";
  const total = (field) => [...sums.values()].reduce((all, sum) => all + sum[field], 0);
  at("usage-caption").replaceChildren(
    `Tokens by day (UTC): ${rounded(total("input_tokens"))} in, ${rounded(total("output_tokens"))} out`,
    element("span", { className: "legend" }, "input"),
    element("span", { className: "legend output" }, "output"),
  );
  at("bars").replaceChildren(...bars(days));
  const ordered = [...sums].sort(([, one], [, other]) => tokens(other) - tokens(one));
  at("sums").replaceChildren(...ordered.map(([name, sum]) => rowOf(name, sum)));
}

const tokens = (sum) => sum.input_tokens + sum.output_tokens;

// Joins the parts of a day that a page has cut.
function mergedDays(buckets) {
  const days = new Map();
  for (const bucket of buckets) {
    const day = days.get(bucket.start_time) ?? { start: bucket.start_time, results: [] };
    day.results.push(...bucket.results);
    days.set(bucket.start_time, day);
  }
  return [...days.values()];
}

function rowOf(name, sum) {
  const cells = FIELDS.map((field) => element("td", { className: "number" }, rounded(sum[field])));
  return element("tr", {}, element("th", { scope: "row" }, name), ...cells);
}

function bars(days) {
  const totals = days.map(({ results }) => ({
    input: results.reduce((all, result) => all + result.input_tokens, 0),
    output: results.reduce((all, result) => all + result.output_tokens, 0),
  }));
  const top = Math.max(1, ...totals.map(({ input, output }) => input + output));
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const step = WIDTH / days.length;
  totals.forEach(({ input, output }, index) => {
    const low = (HEIGHT * input) / top;
    const high = (HEIGHT * output) / top;
    svg.append(bar("input", index * step, HEIGHT - low, step, low), bar("output", index * step, HEIGHT - low - high, step, high));
  });
  const date = (day) => new Date(1000 * day.start).toISOString().slice(0, 10);
  const scale = element("div", { className: "scale" }, element("span", {}, `most ${rounded(top)} tokens a day`));
  const ends = element("div", { className: "scale" }, element("span", {}, date(days[0])), element("span", {}, date(days.at(-1))));
  return [scale, svg, ends];
}

function bar(kind, x, y, width, height) {
  const rect = document.createElementNS(SVG, "rect");
  rect.setAttribute("class", kind);
  for (const [name, value] of Object.entries({ x: x + 0.1 * width, y, width: 0.8 * width, height })) rect.setAttribute(name, value.toFixed(2));
  return rect;
}
