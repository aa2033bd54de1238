// Syntax colours of code blocks, by highlight.js.
import { element } from "./elements.js";

const MAX_CHARACTERS = 100_000; // longer code stays without colours

// Colours growing code again once it is a quarter longer, so that all passes together cost at most five times the last.
export class CodeColours {
  #seen = new WeakMap(); // {length, coloured} of each code element: its characters at the last call, and those with colours

  // Colours code that has grown enough, or that has stopped growing.
  refresh(codes) {
    for (const code of codes) {
      const { length } = code.textContent;
      const seen = this.#seen.get(code) ?? { length: 0, coloured: 0 };
      const grows = length !== seen.length;
      this.#seen.set(code, { ...seen, length });
      if (!grows || 4 * (length - seen.coloured) >= seen.coloured) this.#colour(code);
    }
  }

  // Colours complete code.
  finish(codes) {
    for (const code of codes) this.#colour(code);
  }

  #colour(code) {
    const text = code.textContent;
    const { language } = code.dataset;
    if (this.#seen.get(code)?.coloured === text.length || text.length > MAX_CHARACTERS) return;
    this.#seen.set(code, { length: text.length, coloured: text.length });
    if (!globalThis.hljs.getLanguage(language)) return;
    const { _emitter: tree } = globalThis.hljs.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(...nodesOf(tree.rootNode));
  }
}

// Returns the nodes of highlight.js's tree, whose scopes are names such as "title.function".
function nodesOf({ children }) {
  return children.map((child) => {
    if (typeof child === "string") return child;
    const className = child.scope ? `code-${child.scope.split(".")[0]}` : "";
    return element("span", { className }, ...nodesOf(child));
  });
}
