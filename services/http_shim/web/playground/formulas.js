// Formulas in TeX: rules for markdown-it that find them, and KaTeX, which draws them.
// Delimiters: $…$ and \(…\) within a line of text; $$…$$ and \[…\] within it, or as a block.
import { element } from "./elements.js";

const MAX_CHARACTERS = 4000; // a longer formula is shown as its source
const CLOSERS = { "$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$" };
const TRAILING = /^[\s.,;:!?)]*$/; // what may follow a formula on its last line
// "$5 and 10$": a number, then words, and nothing of mathematics
const MONEY = /^\d[\d.,]*(?![^\s]*[\\^_=+*/<>{}])(?=.*[A-Za-z]{2})[^\\^_=+*/<>{}]*$/s;

const drawn = new WeakSet();

export function addFormulas(blockParser, inlineParser) {
  blockParser.block.ruler.before("fence", "formula", blockRule, { alt: ["paragraph", "reference", "blockquote", "list"] });
  inlineParser.inline.ruler.before("escape", "formula", inlineRule);
}

// Returns the element of a formula. It shows the source until `drawFormulas`.
export function formula(source, isBlock) {
  return element(isBlock ? "div" : "span", { className: `formula${isBlock ? " display" : ""}`, "data-source": source }, source);
}

// Returns the element of a formula whose end has not come.
export function openFormula(source) {
  return element("p", { className: "formula-source" }, source);
}

// Draws the formulas below a node that show their source.
export function drawFormulas(root) {
  for (const node of root.querySelectorAll?.(".formula") ?? []) {
    if (drawn.has(node)) continue;
    drawn.add(node);
    draw(node);
  }
}

function draw(node) {
  const source = node.dataset.source;
  const [opener, closer] = delimitersOf(source);
  const displayMode = opener === "$$" || opener === "\\[";
  const tex = source.slice(opener.length, source.length - closer.length);
  if (source.length > MAX_CHARACTERS) return;
  try {
    globalThis.katex.render(tex, node, { displayMode, throwOnError: true, strict: false, errorColor: "currentColor", maxSize: 20, maxExpand: 500 });
    if (displayMode) makeScrollable(node);
  } catch (error) {
    node.replaceChildren(element("code", { title: error.message }, source));
  }
}

// A wide formula scrolls within its line, also by keyboard.
function makeScrollable(node) {
  node.classList.add("display");
  node.tabIndex = 0;
  node.setAttribute("role", "group");
  node.setAttribute("aria-label", "Formula");
}

function delimitersOf(source) {
  const opener = Object.keys(CLOSERS).find((each) => source.startsWith(each));
  return [opener, CLOSERS[opener]];
}

// A block begins with $$ or \[ at the start of a line. It ends at its closing delimiter, or before a blank line, as in TeX.
// It never joins the text before it: a block that streams would otherwise change its neighbour.
function blockRule(state, startLine, endLine, silent) {
  if (state.sCount[startLine] - state.blkIndent >= 4) return false;
  const first = lineOf(state, startLine);
  const opener = ["$$", "\\["].find((each) => first.startsWith(each));
  if (!opener || first.startsWith("$$$")) return false;
  const closer = CLOSERS[opener];
  const ending = first.indexOf(closer, opener.length);
  if (ending >= 0 && !TRAILING.test(first.slice(ending + closer.length))) return false; // a formula within text
  if (silent) return true;

  const lines = [first];
  let closes = ending >= 0;
  let isClean = closes; // nothing but punctuation follows the closing delimiter
  let next = startLine + 1;
  for (; next < endLine && !(closes && isClean); next++) {
    const text = lineOf(state, next);
    if (text.trim() === "" || state.sCount[next] < state.blkIndent) break;
    lines.push(text);
    const at = closes ? -1 : text.indexOf(closer);
    if (at < 0) continue;
    closes = true;
    isClean = TRAILING.test(text.slice(at + closer.length));
  }
  state.line = next;
  push(state, lines.join("\n"), [startLine, next], closes ? (isClean ? "formula" : "text") : "open_formula", closer);
  return true;
}

function push(state, text, map, kind, closer) {
  if (kind === "text") {
    Object.assign(state.push("paragraph_open", "p", 1), { map });
    Object.assign(state.push("inline", "", 0), { content: text, map, children: [] });
    state.push("paragraph_close", "p", -1);
    return;
  }
  const end = kind === "formula" ? text.lastIndexOf(closer) + closer.length : text.length;
  Object.assign(state.push(kind, "", 0), { content: text.slice(0, end), info: text.slice(end).trim(), map, block: true });
}

function lineOf(state, line) {
  return state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
}

function inlineRule(state, silent) {
  const { src, pos, posMax } = state;
  const opener = ["$$", "\\[", "\\(", "$"].find((each) => src.startsWith(each, pos));
  if (!opener) return false;
  const end = opener === "$" ? endOfDollar(src, pos, posMax) : endOf(src, pos, posMax, opener);
  if (end < 0) return false;
  if (!silent) state.push("formula", "", 0).content = src.slice(pos, end);
  state.pos = end;
  return true;
}

function endOf(src, pos, posMax, opener) {
  const closer = CLOSERS[opener];
  const at = src.indexOf(closer, pos + opener.length);
  const end = at + closer.length;
  if (at < 0 || end > posMax || !src.slice(pos + opener.length, at).trim()) return -1;
  return opener === "\\[" && src[end] === "(" ? -1 : end; // \[a\](b) is an escaped link
}

// A dollar opens a formula before a character that is no space, and closes it after one.
// An amount of money does neither: "$5 and $10", "US$5", "5$".
function endOfDollar(src, pos, posMax) {
  if (/\s/.test(src[pos + 1] ?? " ") || /[\p{L}\p{N}\\$]/u.test(src[pos - 1] ?? "")) return -1;
  for (let at = pos + 1; at < posMax; at++) {
    if (src[at] === "\\") at++;
    else if (src[at] === "`") return -1;
    else if (src[at] === "$") {
      const source = src.slice(pos + 1, at);
      const isClosed = source && !/\s$/.test(source) && !source.includes("**") && !/[\d$]/.test(src[at + 1] ?? "") && !MONEY.test(source);
      return isClosed ? at + 1 : -1;
    }
  }
  return -1;
}
