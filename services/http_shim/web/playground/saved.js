// The list of saved conversations: search, open, rename, delete, export, import.
import { asMarkdown, filesOf, fromJson, nameOf } from "./conversation.js";
import { button, element } from "./elements.js";
import { holdFile, storedFiles } from "./files.js";
import { search, wordsOf } from "./search.js";
import { loadConversations, markDeleted, purge, saveConversation } from "./storage.js";

const STEPS = { ArrowDown: 1, ArrowUp: -1 };
const DATE = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "numeric", minute: "2-digit" });

export class SavedConversations {
  #list;
  #search;
  #count;
  #host; // {open(conversation, words), say(text), toast, renamed()}
  #all = [];
  #deleted = new Set(); // conversations of this visit; an answer that ends later must not store them again
  #current = null;

  constructor({ list, search: box, count }, host) {
    this.#list = list;
    this.#search = box;
    this.#count = count;
    this.#host = host;
    box.addEventListener("input", () => this.draw());
    box.addEventListener("keydown", (event) => this.#searchKey(event));
    list.addEventListener("keydown", (event) => this.#listKey(event));
  }

  // Returns the conversation of the last visit, if there is one.
  async load() {
    try {
      this.#all = await loadConversations();
      purge().catch(() => {}); // the next visit tries again
    } catch (error) {
      this.#host.say(`This browser stores nothing for this page: ${error?.message} Conversations are lost when it closes.`);
    }
    this.draw();
    return this.#all[0] ?? null;
  }

  current(conversation) {
    this.#current = conversation;
    this.draw();
  }

  // Returns whether the conversation and its new files are stored. Tells the user why not.
  async save(conversation, newFiles = []) {
    if (this.#deleted.has(conversation)) return true;
    const isKnown = this.#all.includes(conversation);
    if (!conversation.children.length && !isKnown) return true;
    conversation.updated = Date.now();
    this.#all = [conversation, ...this.#all.filter((other) => other !== conversation)];
    this.draw();
    try {
      await saveConversation(conversation, newFiles);
      return true;
    } catch (error) {
      const reason = error?.name === "QuotaExceededError" ? "the browser's storage is full. Delete conversations, or export this one." : error?.message;
      this.#host.say(`The conversation is not saved: ${reason}`);
      return false;
    }
  }

  // Stores an answer that still grows: the page may be closed before its end.
  saveGrowing(conversation) {
    if (!this.#deleted.has(conversation)) saveConversation(conversation).catch(() => {}); // `save` reports it
  }

  focusSearch() {
    this.#search.focus();
    this.#search.select();
  }

  draw() {
    const words = wordsOf(this.#search.value);
    const found = search(this.#all, this.#search.value);
    this.#list.replaceChildren(...found.map(({ conversation, snippet }) => this.#row(conversation, snippet, words)));
    this.#count.textContent = words.length ? `${found.length} of ${this.#all.length} conversations` : "";
  }

  async export(conversation, kind) {
    const isJson = kind === "json";
    const files = isJson ? await storedFiles(conversation) : [];
    if (isJson && files.length < filesOf(conversation).length) this.#host.say("Some attached files are no longer stored. The export is without them.");
    const text = isJson ? JSON.stringify({ conversation, files }, null, 2) : asMarkdown(conversation);
    const url = URL.createObjectURL(new Blob([text], { type: isJson ? "application/json" : "text/markdown" }));
    const name = nameOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";
    element("a", { href: url, download: `${name}.${isJson ? "json" : "md"}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  async import(file) {
    try {
      const { conversation, files } = fromJson(await file.text());
      files.forEach(holdFile);
      await this.save(conversation, files);
      this.#host.open(conversation, []);
    } catch (error) {
      this.#host.say(`${file.name} can't be imported. ${error.message}`);
    }
  }

  async deleteAll() {
    if (this.#all.length) await this.#delete([...this.#all], `Deleted ${this.#all.length} conversations.`);
  }

  #row(conversation, snippet, words) {
    const name = nameOf(conversation);
    const title = button(name, () => this.#host.open(conversation, words), { className: "title" });
    if (snippet) title.append(element("span", { className: "snippet" }, snippet.before, element("mark", {}, snippet.match), snippet.after));
    if (conversation === this.#current) title.setAttribute("aria-current", "true");
    const row = element("li", {}, title);
    const rename = button("Rename", () => this.#rename(conversation, title), { "aria-label": `Rename ${name}` });
    const remove = button("Delete", () => this.#delete([conversation], `Deleted “${name}”.`), { "aria-label": `Delete ${name}` });
    row.append(element("div", { className: "row" }, element("time", {}, DATE.format(conversation.updated)), rename, remove));
    return row;
  }

  // From the box, Enter opens the first match, and the arrow leads into the list.
  #searchKey(event) {
    const first = this.#list.querySelector(".title");
    if (event.key === "Enter") first?.click();
    else if (event.key === "ArrowDown") first?.focus();
    else if (event.key === "Escape" && this.#search.value) {
      this.#search.value = "";
      this.draw();
      event.stopPropagation();
    } else return;
    event.preventDefault();
  }

  #listKey(event) {
    const step = STEPS[event.key];
    if (!step || !event.target.matches(".title")) return;
    event.preventDefault();
    const titles = [...this.#list.querySelectorAll(".title")];
    const next = titles[titles.indexOf(event.target) + step];
    if (next) next.focus();
    else if (step < 0) this.#search.focus();
  }

  #rename(conversation, title) {
    const box = element("input", { value: nameOf(conversation), maxLength: 100, "aria-label": "Name of the conversation" });
    const leave = (isKept) => {
      if (!box.isConnected) return;
      if (isKept && box.value.trim()) conversation.name = box.value.trim();
      box.replaceWith(title);
      this.save(conversation);
      this.#host.renamed();
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") leave(true);
      if (event.key === "Escape") leave(false);
      if (event.key === "Escape" || event.key === "Enter") event.stopPropagation();
    });
    box.addEventListener("blur", () => leave(true));
    title.replaceWith(box);
    box.select();
  }

  async #delete(deleted, text) {
    const before = this.#all;
    const current = this.#current;
    this.#all = before.filter((other) => !deleted.includes(other));
    for (const conversation of deleted) this.#deleted.add(conversation);
    this.draw();
    if (deleted.includes(current)) this.#host.open(null, []);
    const restore = async () => {
      for (const conversation of deleted) this.#deleted.delete(conversation);
      this.#all = [...this.#all.filter((other) => !before.includes(other)), ...before];
      this.draw();
      await markDeleted(deleted, false).catch(() => {}); // it was not stored
      if (deleted.includes(current)) this.#host.open(current, []);
    };
    this.#host.toast.show(text, restore);
    await markDeleted(deleted, true).catch(() => {}); // it was not stored
  }
}
