// Syntax colours of code, line by line. A family of languages shares one lexer: exact grammars would be
// larger than the rest of the playground.
import { element } from "./elements.js";

const HASH = { line: "#", triple: true };
const SLASH = { line: "//", open: "/*", close: "*/" };
const FAMILIES = {
  python: HASH, py: HASH, sh: HASH, bash: HASH, shell: HASH, yaml: HASH, yml: HASH, toml: HASH, ruby: HASH, r: HASH,
  sql: { line: "--", open: "/*", close: "*/" }, lua: { line: "--" }, haskell: { line: "--" },
  html: { open: "<!--", close: "-->" }, xml: { open: "<!--", close: "-->" },
  css: { open: "/*", close: "*/" }, text: null, txt: null, plaintext: null, markdown: null, md: null, diff: null,
};
const KEYWORDS = new Set(
  (
    "abstract and as assert async await bool boolean break case catch char class const constexpr continue def default del " +
    "delete do double elif else end enum except export extends extern false False final finally float fn for foreach from " +
    "func function global if impl implements import in include instanceof int interface is lambda let local long loop match " +
    "mod module mut namespace new nil None nonlocal not null operator or override package pass private protected public " +
    "pub raise ref return self short signed sizeof static string struct super switch template then this throw throws trait " +
    "true True try type typedef typeof undefined union unsafe unsigned until use using var virtual void volatile where while " +
    "with yield SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT INNER ON GROUP BY ORDER " +
    "LIMIT AND OR NOT NULL AS"
  ).split(" "),
);
const WORD = /[\p{L}_$][\p{L}\p{N}_$]*/uy;
const NUMBER = /(?:0[xob][\da-f_]+|\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?)[a-z]*/iy;
const STRING = /"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?|`(?:\\.|[^`\\])*`?/y;

// Remembers an open comment or string between lines, so that each line is read once.
export class Highlighter {
  #family;
  #until = null; // {end, kind} of what the previous lines left open

  constructor(language) {
    const name = language.toLowerCase();
    this.#family = name in FAMILIES ? FAMILIES[name] : SLASH;
  }

  // Appends the coloured line to `parent`.
  line(text, parent) {
    if (this.#family === null) return parent.append(text);
    let plain = "";
    let at = 0;
    const add = (kind, end) => {
      if (plain) parent.append(plain);
      plain = "";
      parent.append(element("span", { className: `code-${kind}` }, text.slice(at, end)));
      at = end;
    };
    while (at < text.length) {
      const [kind, end] = this.#next(text, at);
      if (kind) add(kind, end);
      else {
        plain += text.slice(at, end);
        at = end;
      }
    }
    if (plain) parent.append(plain);
  }

  #next(text, at) {
    if (this.#until) return this.#closed(text, at);
    const { line, open, close, triple } = this.#family;
    if (line && text.startsWith(line, at)) return ["comment", text.length];
    if (open && text.startsWith(open, at)) {
      this.#until = { end: close, kind: "comment" };
      return this.#closed(text, at, open.length);
    }
    for (const quotes of triple ? ['"""', "'''"] : []) {
      if (!text.startsWith(quotes, at)) continue;
      this.#until = { end: quotes, kind: "string" };
      return this.#closed(text, at, 3);
    }
    for (const [pattern, kind] of [[STRING, "string"], [NUMBER, "number"], [WORD, "word"]]) {
      pattern.lastIndex = at;
      const found = pattern.exec(text)?.[0];
      if (!found) continue;
      const shown = kind === "word" ? (KEYWORDS.has(found) ? "keyword" : null) : kind;
      return [shown, at + found.length];
    }
    return [null, at + 1];
  }

  #closed(text, at, opening = 0) {
    const { end, kind } = this.#until;
    const found = text.indexOf(end, at + opening);
    if (found < 0) return [kind, text.length];
    this.#until = null;
    return [kind, found + end.length];
  }
}
