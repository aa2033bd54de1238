// Token probabilities: a row of tokens, and the candidates of the current one. Touch, keyboard and screen readers
// reach each token. The line below a token shows the band of its probability by form and colour.
import { element } from "./elements.js";

// Returns the tokens of a chunk's choice as {text, logprob, others: [[text, logprob]]}.
export function tokensOf({ logprobs, text }) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      text: token, logprob, others: top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  const offsets = logprobs.text_offset;
  const end = offsets[0] + [...text].length;
  const tokens = logprobs.tokens.map((token, index) => ({
    text: token, logprob: logprobs.token_logprobs[index], others: Object.entries(logprobs.top_logprobs?.[index] ?? {}),
  }));
  return tokens.filter((_, index) => (offsets[index + 1] ?? end) > offsets[index]); // tokens without a place of their own are not in the text
}

export class TokenRow {
  #row = element("div", { className: "tokens", role: "toolbar", "aria-label": "Tokens; the arrow keys move" });
  #details = element("div", { className: "token-details", "aria-live": "polite" }, "Choose a token to see its candidates.");
  #current = null;

  constructor() {
    this.element = element("div", {}, this.#row, this.#details);
    this.#row.addEventListener("keydown", (event) => this.#move(event));
  }

  add(token) {
    const node = element("button", { type: "button", className: `token ${band(token.logprob)}`, tabIndex: this.#current ? -1 : 0 }, token.text);
    node.setAttribute("aria-label", `${visible(token.text)}, ${percent(token.logprob)}`);
    node.addEventListener("focus", () => this.#show(node, token));
    node.addEventListener("click", () => node.focus()); // Safari does not focus a clicked button
    this.#current ??= node;
    this.#row.append(node);
  }

  // Only one token is in the tab order: a long answer would take hundreds of presses of Tab.
  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const tokens = this.#row.children;
    let next = null;
    if (step) next = step > 0 ? this.#current.nextElementSibling : this.#current.previousElementSibling;
    if (event.key === "Home") next = tokens[0];
    if (event.key === "End") next = tokens[tokens.length - 1];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  #show(node, { text, logprob, others }) {
    this.#current.tabIndex = -1;
    this.#current.classList.remove("current");
    this.#current = node;
    node.tabIndex = 0;
    node.classList.add("current");
    const ranked = others.sort(([, one], [, other]) => other - one);
    const rows = ranked.map(([other, value]) =>
      element("li", {}, element("code", {}, visible(other)), ` ${percent(value)}`, element("meter", { min: 0, max: 1, value: Math.exp(value) })),
    );
    this.#details.replaceChildren(element("p", {}, "Chosen: ", element("code", {}, visible(text)), ` ${percent(logprob)}`), element("ol", {}, ...rows));
  }
}

function band(logprob) {
  if (logprob === null) return "unscored";
  const probability = Math.exp(logprob);
  return probability >= 0.9 ? "likely" : probability >= 0.5 ? "fair" : "unlikely";
}

// The first token of an echoed prompt has no score.
function percent(logprob) {
  return logprob === null ? "without a score" : `${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

function visible(text) {
  return JSON.stringify(text);
}
