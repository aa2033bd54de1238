// A line chart of the last minutes with axes and units, and its latest values as text.

import { element } from "../playground/elements.js";
import { SPAN_SECONDS } from "./history.js";

const WIDTH = 300;
const HEIGHT = 60;
const SVG = "http://www.w3.org/2000/svg";
const MINUTE_TICKS = [10, 8, 6, 4, 2, 0];

export class Chart {
  #lines; // [key of a sample, name or ""]
  #format;
  #leastTop;
  #value = element("span", { className: "value" });
  #highest = element("span", { className: "quiet" });
  #top = element("span");
  #svg = document.createElementNS(SVG, "svg");
  #paths = [];

  // `leastTop` is the smallest upper end of the scale.
  constructor(title, lines, format, leastTop) {
    this.#lines = lines;
    this.#format = format;
    this.#leastTop = leastTop;
    this.#svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.#svg.setAttribute("preserveAspectRatio", "none");
    this.#grid();
    for (let index = 0; index < lines.length; index++) this.#paths.push(this.#line(`line-${index}`));
    const caption = element("figcaption", {}, element("span", {}, title), this.#value, this.#highest);
    const scale = element("div", { className: "scale" }, this.#top, element("span", {}, format(0)));
    const times = MINUTE_TICKS.map((minutes) => element("span", {}, minutes ? `\u2212${minutes}` : "0 min"));
    // the caption has the values as text
    const plot = element("div", { className: "plot", "aria-hidden": "true" }, scale, this.#svg, element("div", { className: "times" }, ...times));
    this.element = element("figure", { className: "chart" }, caption, plot);
  }

  // `now` is the time at the right end, on the samples' clock.
  show(samples, now) {
    const last = samples.at(-1);
    const known = this.#lines.flatMap(([key]) => samples.map((each) => each[key])).filter((value) => value !== null);
    const highest = Math.max(0, ...known);
    this.#value.textContent = this.#lines.map(([key, name]) => this.#text(last?.[key] ?? null, name)).join(", ");
    this.#highest.textContent = known.length ? `highest ${this.#format(highest)}` : "";
    const top = roundTop(Math.max(highest, this.#leastTop));
    this.#top.textContent = this.#format(top);
    this.#lines.forEach(([key], index) => this.#paths[index].setAttribute("d", outline(samples, key, now, top)));
  }

  #grid() {
    const columns = MINUTE_TICKS.map((minutes) => `M${(WIDTH * (1 - (60 * minutes) / SPAN_SECONDS)).toFixed(1)} 0V${HEIGHT}`);
    this.#line("grid").setAttribute("d", `${columns.join("")}M0 0H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}`);
  }

  #line(name) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    this.#svg.append(path);
    return path;
  }

  #text(value, name) {
    const shown = value === null ? "–" : this.#format(value);
    return name ? `${name} ${shown}` : shown;
  }
}

// Returns the least of 1, 2 and 5 times a power of ten that is not below the value.
function roundTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value * (1 - 1e-9));
}

// Returns the path of a line, which is broken where values are unknown.
function outline(samples, key, now, top) {
  let isDrawing = false;
  const parts = [];
  for (const sample of samples) {
    if (sample[key] === null) {
      isDrawing = false;
      continue;
    }
    const x = WIDTH * (1 - (now - sample.time) / SPAN_SECONDS);
    const y = HEIGHT * (1 - sample[key] / top);
    parts.push(`${isDrawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`);
    isDrawing = true;
  }
  return parts.join("");
}
