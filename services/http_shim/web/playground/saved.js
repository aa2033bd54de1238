// The list of saved conversations: open, rename, delete, export, import.
import { asMarkdown, fromJson, nameOf } from "./conversation.js";
import { button, element } from "./elements.js";
import { deleteOldest, deleteConversation, loadConversations, saveConversation } from "./storage.js";

export class SavedConversations {
  #list;
  #open;
  #say;
  #all = [];
  #current = null;

  constructor(list, { open, say }) {
    this.#list = list;
    this.#open = open;
    this.#say = say;
  }

  // Returns the conversation of the last visit, if there is one.
  async load() {
    try {
      this.#all = await loadConversations();
    } catch {
      this.#say("This browser stores nothing for this page. Conversations are lost when it closes.");
    }
    this.draw();
    return this.#all[0] ?? null;
  }

  current(conversation) {
    this.#current = conversation;
    this.draw();
  }

  // Returns whether the conversation is stored. Tells the user why not.
  async save(conversation) {
    if (!conversation.children.length && !this.#all.includes(conversation)) return true;
    conversation.updated = Date.now();
    this.#all = [conversation, ...this.#all.filter((other) => other !== conversation)];
    this.draw();
    try {
      await saveConversation(conversation);
      this.#all = await deleteOldest(this.#all);
      return true;
    } catch (error) {
      this.#say(`The conversation is not saved: ${error?.message}`);
      return false;
    }
  }

  // Stores an answer that still grows: the page may be closed before its end.
  saveGrowing(conversation) {
    saveConversation(conversation).catch(() => {}); // `save` reports it
  }

  draw() {
    this.#list.replaceChildren(...this.#all.map((conversation) => this.#row(conversation)));
  }

  export(conversation, kind) {
    const isJson = kind === "json";
    const text = isJson ? JSON.stringify({ conversation }, null, 2) : asMarkdown(conversation);
    const url = URL.createObjectURL(new Blob([text], { type: isJson ? "application/json" : "text/markdown" }));
    const name = nameOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";
    element("a", { href: url, download: `${name}.${isJson ? "json" : "md"}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  async import(file) {
    try {
      const conversation = fromJson(await file.text());
      await this.save(conversation);
      this.#open(conversation);
    } catch (error) {
      this.#say(`${file.name} can't be imported. ${error.message}`);
    }
  }

  #row(conversation) {
    const name = nameOf(conversation);
    const title = button(name, () => this.#open(conversation), { className: "title" });
    if (conversation === this.#current) title.setAttribute("aria-current", "true");
    const row = element("li", {}, title);
    const rename = button("Rename", () => this.#rename(conversation, title), { "aria-label": `Rename ${name}` });
    const remove = button("Delete", () => this.#delete(conversation), { "aria-label": `Delete ${name}` });
    row.append(rename, remove);
    return row;
  }

  #rename(conversation, title) {
    const box = element("input", { value: nameOf(conversation), maxLength: 100, "aria-label": "Name of the conversation" });
    const leave = (isKept) => {
      if (!box.isConnected) return;
      if (isKept && box.value.trim()) conversation.name = box.value.trim();
      box.replaceWith(title);
      this.save(conversation);
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

  async #delete(conversation) {
    this.#all = this.#all.filter((other) => other !== conversation);
    this.draw();
    if (conversation === this.#current) this.#open(null);
    await deleteConversation(conversation.id).catch(() => {}); // it was not stored
  }
}
