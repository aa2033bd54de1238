// Markdown as DOM nodes, while it streams. Each finished line changes only the block at the end of the
// text, so a long answer costs no more per token than a short one.
import { button, copyText, element } from "./elements.js";
import { Highlighter } from "./highlight.js";
import { addInline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+)(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const DEPTH = 6; // of lists and quotes in each other
const LIVE = 2000; // characters of an unfinished line that are drawn with their emphasis

export class Markdown {
  #blocks;
  #partial = "";
  #tail = null;

  constructor(parent) {
    this.#blocks = new Blocks(parent, 0);
  }

  append(text) {
    const lines = text.split("\n");
    for (const [index, line] of lines.entries()) {
      if (index) {
        this.#removeTail();
        this.#blocks.line(this.#partial.replace(/\r$/, ""));
        this.#partial = "";
      }
      this.#partial += line;
      if (index === lines.length - 1) this.#showTail(line);
    }
  }

  end() {
    this.#removeTail();
    if (this.#partial) this.#blocks.line(this.#partial);
    this.#partial = "";
    this.#blocks.close();
  }

  #showTail(added) {
    if (!this.#partial) return;
    const { parent, isCode } = this.#blocks.leaf();
    if (!this.#tail) parent.append((this.#tail = element("span", { className: "tail" })));
    if (isCode || this.#partial.length > LIVE) {
      if (this.#tail.dataset.plain) this.#tail.append(added);
      else this.#tail.replaceChildren(this.#partial);
      this.#tail.dataset.plain = "yes";
      return;
    }
    this.#tail.replaceChildren();
    const text = this.#partial.replace(/^\s*[-*+]\s+/, "• ").replace(/^#{1,6}\s+|^>\s?/, "");
    addInline(text, this.#tail);
  }

  #removeTail() {
    this.#tail?.remove();
    this.#tail = null;
  }
}

// The blocks of a document, of a quote or of a list item.
class Blocks {
  #parent;
  #depth;
  #open = null;

  constructor(parent, depth) {
    this.#parent = parent;
    this.#depth = depth;
  }

  line(text) {
    if (this.#open?.line(text)) return;
    this.close();
    if (text.trim() === "") return;
    this.#open = this.#begin(text);
  }

  close() {
    this.#open?.close?.();
    this.#open = null;
  }

  leaf() {
    return this.#open?.leaf() ?? { parent: this.#parent, isCode: false };
  }

  #begin(text) {
    const fence = FENCE.exec(text);
    if (fence) return new CodeBlock(this.#parent, fence[1], fence[2]);
    const heading = HEADING.exec(text);
    if (heading) {
      const made = element(`h${Math.min(6, heading[1].length + 2)}`); // below the page's own headings
      addInline(heading[2], made);
      this.#parent.append(made);
      return null;
    }
    if (RULE.test(text)) {
      this.#parent.append(element("hr"));
      return null;
    }
    if (this.#depth < DEPTH && QUOTE.test(text)) return new Quote(this.#parent, this.#depth, text);
    if (this.#depth < DEPTH && ITEM.test(text)) return new List(this.#parent, this.#depth, text);
    return new Paragraph(this.#parent, text);
  }
}

class CodeBlock {
  #fence;
  #code = element("code");
  #highlighter;

  constructor(parent, fence, language) {
    this.#fence = fence;
    this.#highlighter = new Highlighter(language);
    const copy = button("Copy code", (from) => copyText(this.#code.textContent.replace(/\n$/, ""), from));
    const bar = element("div", { className: "code-bar" }, element("span", {}, language || "code"), copy);
    parent.append(element("div", { className: "code-block" }, bar, element("pre", { tabIndex: 0 }, this.#code)));
  }

  line(text) {
    if (this.#fence === null) return false;
    const end = text.trim();
    if (end.startsWith(this.#fence) && !end.replaceAll(this.#fence[0], "")) {
      this.#fence = null;
      return true;
    }
    this.#highlighter.line(text, this.#code);
    this.#code.append("\n");
    return true;
  }

  leaf() {
    return this.#fence === null ? null : { parent: this.#code, isCode: true };
  }
}

class Quote {
  #blocks;

  constructor(parent, depth, text) {
    const quote = element("blockquote");
    parent.append(quote);
    this.#blocks = new Blocks(quote, depth + 1);
    this.line(text);
  }

  line(text) {
    const inner = QUOTE.exec(text);
    if (inner) this.#blocks.line(inner[1]);
    return inner !== null;
  }

  close() {
    this.#blocks.close();
  }

  leaf() {
    return this.#blocks.leaf();
  }
}

class List {
  #list;
  #ordered;
  #depth;
  #indent = 0;
  #item = null;
  #blank = false;

  constructor(parent, depth, text) {
    const [, , mark] = ITEM.exec(text);
    this.#ordered = mark.length > 1;
    this.#list = element(this.#ordered ? "ol" : "ul");
    if (this.#ordered) this.#list.start = parseInt(mark, 10);
    this.#depth = depth;
    parent.append(this.#list);
    this.line(text);
  }

  line(text) {
    if (text.trim() === "") {
      this.#blank = true;
      this.#item.line("");
      return true;
    }
    const indent = text.length - text.trimStart().length;
    if (this.#item && indent >= this.#indent) {
      this.#item.line(text.slice(this.#indent));
    } else {
      const item = ITEM.exec(text);
      if (!item || item[2].length > 1 !== this.#ordered) {
        // a line without indentation continues the item's paragraph, unless it begins a block
        if (this.#blank || FENCE.test(text) || HEADING.test(text) || item) return false;
        this.#item.line(text);
        return true;
      }
      this.#item?.close();
      this.#indent = item[1].length + item[2].length + Math.min(item[3].length, 4);
      const made = element("li");
      this.#list.append(made);
      this.#item = new Blocks(made, this.#depth + 1);
      this.#item.line(item[4]);
    }
    this.#blank = false;
    return true;
  }

  close() {
    this.#item.close();
  }

  leaf() {
    return this.#item.leaf();
  }
}

class Paragraph {
  #element = element("p");
  #first;
  #lines = 0;
  #table = null;

  constructor(parent, text) {
    parent.append(this.#element);
    this.#first = text;
    this.#add(text);
  }

  line(text) {
    if (this.#table) return this.#row(text);
    if (text.trim() === "" || FENCE.test(text) || HEADING.test(text) || QUOTE.test(text)) return false;
    if (this.#lines === 1 && this.#first.includes("|") && TABLE_RULE.test(text)) {
      this.#beginTable();
      return true;
    }
    if (RULE.test(text) || ITEM.test(text)) return false;
    this.#element.append(" ");
    this.#add(text);
    return true;
  }

  leaf() {
    return { parent: this.#element, isCode: false };
  }

  // Each line has its own emphasis: the lines before it are not read again.
  #add(text) {
    addInline(text.trim(), this.#element);
    if (text.endsWith("  ")) this.#element.append(element("br"));
    this.#lines += 1;
  }

  #beginTable() {
    const head = element("tr", {}, ...cells(this.#first, "th"));
    this.#table = element("tbody");
    const table = element("table", {}, element("thead", {}, head), this.#table);
    const frame = element("div", { className: "table", tabIndex: 0, role: "region", "aria-label": "Table" }, table);
    this.#element.replaceWith(frame);
    this.#element = frame;
  }

  #row(text) {
    if (!text.includes("|")) return false;
    this.#table.append(element("tr", {}, ...cells(text, "td")));
    return true;
  }
}

function cells(text, tag) {
  const inner = text.trim().replace(/^\||\|$/g, "");
  return inner.split(/(?<!\\)\|/).map((cell) => {
    const made = element(tag);
    addInline(cell.trim(), made);
    return made;
  });
}
