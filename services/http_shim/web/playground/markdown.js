// Markdown as DOM nodes, while it streams. A complete block is not parsed again as the answer grows.
import { CodeColours } from "./code_colours.js";
import { drawFormulas } from "./formulas.js";
import { fill, inlineOf, nodeOf, parse, setInline } from "./markdown_nodes.js";

const MARKS = /^[\s>\-+*=_#|:~`\d.)]*$/; // such a line is drawn later: it does not show yet which block it begins

export class Markdown {
  #parent;
  #whole = "";
  #open = ""; // text from the start of the last block, which may still change
  #closed = 0; // number of complete blocks, each of which is one child node
  #colours = new CodeColours();
  #hasDefinitions = false;

  // `parent` is an empty element.
  constructor(parent) {
    this.#parent = parent;
  }

  append(text) {
    const added = text.replaceAll("\r", "");
    this.#whole += added;
    this.#open += added;
    const end = this.#open.lastIndexOf("\n") + 1;
    const isUnclear = MARKS.test(this.#open.slice(end));
    this.#draw(isUnclear ? this.#open.slice(0, end) : this.#open);
    for (const block of this.#openNodes()) this.#colours.refresh(codesIn(block));
  }

  end() {
    // a link may stand before the line that defines its target
    if (this.#hasDefinitions) {
      this.#parent.replaceChildren();
      this.#open = this.#whole;
      this.#closed = 0;
    }
    this.#draw(this.#open);
    this.#colours.finish(codesIn(this.#parent));
  }

  #draw(text) {
    const { blocks, definitions } = parse(text);
    this.#hasDefinitions ||= Object.keys(definitions).length > 0;
    patch(this.#parent, blocks.map(nodeOf), definitions, this.#closed);
    for (const block of this.#openNodes()) drawFormulas(block);
    this.#close(text, blocks);
  }

  // Complete lines end all blocks but their last. A line that is not complete may still continue that one.
  #close(text, blocks) {
    const starts = [0];
    for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
    const last = blocks.findLastIndex(({ line }) => line < starts.length - 1);
    if (last < 1) return;
    for (const block of this.#openNodes().slice(0, last)) this.#colours.finish(codesIn(block));
    this.#closed += last;
    this.#open = this.#open.slice(starts[blocks[last].line]);
  }

  #openNodes() {
    return [...this.#parent.childNodes].slice(this.#closed);
  }
}

function codesIn(node) {
  return [...node.querySelectorAll("pre code")];
}

// Makes the child nodes of `parent` from `first` on like `nodes`. Nodes that stay keep focus and selection.
function patch(parent, nodes, definitions, first = 0) {
  for (const [index, node] of nodes.entries()) {
    const old = parent.childNodes[first + index];
    if (old && isAlike(old, node)) {
      update(old, node, definitions);
      continue;
    }
    fill(node, definitions);
    if (old) old.replaceWith(node);
    else parent.append(node);
  }
  while (parent.childNodes.length > first + nodes.length) parent.lastChild.remove();
}

function update(old, node, definitions) {
  if (old.nodeType === Node.TEXT_NODE) return updateText(old, node.data);
  if (old.tagName === "BUTTON" || old.matches(".formula")) return; // it may say "Copied", or be drawn
  if (old.matches("pre code")) return updateCode(old, node.textContent);
  const inline = inlineOf(node);
  if (inline !== undefined) {
    if (inlineOf(old) === inline) return;
    fill(node, definitions);
    setInline(old, inline);
  }
  patch(old, [...node.childNodes], definitions);
}

function isAlike(old, node) {
  if (old.nodeType === Node.TEXT_NODE) return node.nodeType === Node.TEXT_NODE;
  if (old.matches?.(".formula")) return node.nodeName === old.nodeName && old.dataset.source === node.dataset.source;
  if (old.nodeName !== node.nodeName || old.attributes.length !== node.attributes.length) return false;
  return [...node.attributes].every(({ name, value }) => old.getAttribute(name) === value);
}

function updateText(old, text) {
  if (old.data !== text) old.data = text;
}

// Appends to code that grows: its colours stay.
function updateCode(old, text) {
  const shown = old.textContent;
  if (text.startsWith(shown)) old.append(text.slice(shown.length));
  else old.textContent = text;
}
