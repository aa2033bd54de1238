// A line chart of at most the last ten minutes, with its latest values as text.

import { element } from "../playground/elements.js";
import { SPAN_SECONDS } from "./history.js";

const MIN_SECONDS = 60; // time that the width shows while the history is short
const WIDTH = 300;
const HEIGHT = 60;
const SVG = "http://www.w3.org/2000/svg";

export class Chart {
  #lines; // [key of a sample, name or ""]
  #format;
  #leastTop;
  #value = element("span", { className: "value" });
  #highest = element("span", { className: "quiet" });
  #svg = document.createElementNS(SVG, "svg");
  #paths = [];

  // `leastTop` is the smallest upper end of the scale.
  constructor(title, lines, format, leastTop) {
    this.#lines = lines;
    this.#format = format;
    this.#leastTop = leastTop;
    this.#svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.#svg.setAttribute("preserveAspectRatio", "none");
    this.#svg.setAttribute("aria-hidden", "true"); // the caption has the values as text
    for (let index = 0; index < lines.length; index++) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", `line-${index}`);
      this.#svg.append(path);
      this.#paths.push(path);
    }
    const caption = element("figcaption", {}, element("span", {}, title), this.#value, this.#highest);
    this.element = element("figure", { className: "chart" }, caption, this.#svg);
  }

  show(samples) {
    const last = samples.at(-1);
    const known = this.#lines.flatMap(([key]) => samples.map((each) => each[key])).filter((value) => value !== null);
    const highest = Math.max(0, ...known);
    this.#value.textContent = this.#lines.map(([key, name]) => this.#text(last[key], name)).join(", ");
    this.#highest.textContent = known.length ? `highest ${this.#format(highest)}` : "";
    const top = 1.1 * Math.max(highest, this.#leastTop);
    this.#lines.forEach(([key], index) => {
      this.#paths[index].setAttribute("d", outline(samples, key, last.time, top));
    });
  }

  #text(value, name) {
    const shown = value === null ? "–" : this.#format(value);
    return name ? `${name} ${shown}` : shown;
  }
}

// Returns the path of a line, which is broken where values are unknown.
function outline(samples, key, now, top) {
  const seconds = Math.min(SPAN_SECONDS, Math.max(MIN_SECONDS, now - samples[0].time));
  let isDrawing = false;
  const parts = [];
  for (const sample of samples) {
    if (sample[key] === null) {
      isDrawing = false;
      continue;
    }
    const x = WIDTH * (1 - (now - sample.time) / seconds);
    const y = HEIGHT * (1 - sample[key] / top);
    parts.push(`${isDrawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`);
    isDrawing = true;
  }
  return parts.join("");
}
