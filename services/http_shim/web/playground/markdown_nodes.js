// Blocks of markdown-it's tokens as DOM nodes. Its HTML is not used: no string is ever parsed as HTML.
import { button, copyText, element } from "./elements.js";
import { addFormulas, formula, openFormula } from "./formulas.js";

const blockParser = globalThis.markdownit();
blockParser.core.ruler.enableOnly(["normalize", "block"]);
const inlineParser = globalThis.markdownit({ linkify: true });
inlineParser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
// Only these schemes: a javascript: link would run in the page, a data: link imitates one.
inlineParser.validateLink = (url) => /^(?:https?:\/\/|mailto:)/i.test(url);
addFormulas(blockParser, inlineParser);

const inlines = new WeakMap(); // inline text of each element that holds one

// Returns the blocks of the text as {line, tokens}, and the targets of links that the text defines.
export function parse(text) {
  const environment = {};
  const blocks = [];
  for (const token of blockParser.parse(text, environment)) {
    if (token.type === "reference_definition") continue;
    if (token.level === 0 && token.nesting >= 0) blocks.push({ line: token.map[0], tokens: [] });
    blocks.at(-1).tokens.push(token);
  }
  return { blocks, definitions: environment.references ?? {} };
}

// Returns the node of one block without its inline texts, which `fill` parses: only changed ones are parsed again.
export function nodeOf({ tokens }) {
  const root = document.createDocumentFragment();
  let parent = root;
  for (const token of tokens) {
    if (token.type === "inline") inlines.set(parent, token.content);
    else if (token.nesting > 0) parent = open(token, parent);
    else if (token.nesting < 0) parent = parent.parentNode;
    else parent.append(leaf(token));
    if (token.type === "table_close") parent = parent.parentNode; // of its frame
  }
  return root.firstChild;
}

// Returns the inline text that an element holds, or undefined if it holds blocks.
export function inlineOf(node) {
  return inlines.get(node);
}

export function setInline(node, text) {
  inlines.set(node, text);
}

// Parses the inline texts of a node and of its descendants.
export function fill(node, definitions) {
  if (inlines.has(node)) appendInline(inlines.get(node), node, definitions);
  else for (const child of node.children ?? []) fill(child, definitions);
}

function appendInline(text, root, definitions) {
  let parent = root;
  const [{ children }] = inlineParser.parseInline(text, { references: definitions });
  for (const token of children) {
    if (token.nesting > 0) parent = open(token, parent);
    else if (token.nesting < 0) parent = parent.parentNode;
    else if (token.type === "image" && parent.closest("a")) parent.append(token.content); // no link within a link
    else parent.append(leaf(token));
  }
}

// Appends the element that a token opens; returns it.
function open(token, parent) {
  const node = elementOf(token);
  // a table is wider than a phone: its frame scrolls
  const frame = token.tag === "table" ? element("div", { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, node) : node;
  parent.append(frame);
  return node;
}

function elementOf(token) {
  if (token.type === "link_open") return link(token.attrGet("href"));
  if (token.type === "heading_open") return element(`h${Math.min(6, Number(token.tag[1]) + 2)}`); // below the page's own headings
  if (token.hidden) return element("span"); // the paragraph of an item in a tight list
  const node = element(token.tag);
  if (token.attrGet("start") !== null) node.start = token.attrGet("start");
  const alignment = /^text-align:(\w+)$/.exec(token.attrGet("style") ?? "");
  if (alignment) node.className = alignment[1]; // the page's policy forbids style attributes
  return node;
}

function leaf(token) {
  switch (token.type) {
    case "text":
      return token.content;
    case "softbreak":
      return "\n";
    case "hardbreak":
      return element("br");
    case "hr":
      return element("hr");
    case "code_inline":
      return element("code", {}, token.content);
    case "fence":
    case "code_block":
      return codeBlock(token.content, token.info.trim().split(/\s/)[0]);
    case "formula":
      return token.block ? blockFormula(token) : formula(token.content, false);
    case "open_formula":
      return openFormula(token.content);
    case "image":
      return link(token.attrGet("src"), token.content || token.attrGet("src")); // the page loads nothing from other servers
    default:
      return token.content;
  }
}

// The punctuation after a formula stays.
function blockFormula(token) {
  return element("div", { className: "formula-block" }, formula(token.content, true), token.info);
}

function link(target, ...children) {
  return element("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

function codeBlock(text, language) {
  const code = element("code", language ? { "data-language": language } : {}, text);
  const copy = button("Copy code", (from) => copyText(code.textContent.replace(/\n$/, ""), from));
  const bar = element("div", { className: "code-bar" }, element("span", {}, language || "code"), copy);
  return element("div", { className: "code-block" }, bar, element("pre", { tabIndex: 0 }, code));
}
