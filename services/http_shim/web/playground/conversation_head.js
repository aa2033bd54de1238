// The line above the messages: title and system prompt of the conversation.
import { defaultName, shortTitle, shownMessages } from "./conversation.js";
import { stream } from "./requests.js";

const EXCERPT = 1500; // characters of each message that a title is made from
const TITLE_TOKENS = 256; // a model that reasons spends most of them before the title

export class ConversationHead {
  #fields; // {title, suggest, system, details, summary}
  #host; // {model(), changed(), defaultSystem(), say(text), toast}
  #conversation = null;
  #making = null; // AbortController of a request for a title

  constructor(fields, host) {
    this.#fields = fields;
    this.#host = host;
    fields.title.addEventListener("change", () => this.#rename(fields.title.value.trim()));
    fields.title.addEventListener("keydown", (event) => {
      if (event.key === "Enter") fields.title.blur();
    });
    fields.suggest.addEventListener("click", () => this.#suggest());
    fields.system.addEventListener("input", () => {
      this.#conversation.system = fields.system.value;
      this.#drawSummary();
    });
    fields.system.addEventListener("change", () => this.#host.changed());
  }

  open(conversation) {
    this.#making?.abort();
    this.#conversation = conversation;
    this.draw();
  }

  draw() {
    const { title, suggest, system } = this.#fields;
    const conversation = this.#conversation;
    if (document.activeElement !== title) title.value = conversation.name;
    title.placeholder = defaultName(conversation);
    suggest.disabled = this.#making !== null || !conversation.children.length;
    if (document.activeElement !== system) system.value = conversation.system ?? this.#host.defaultSystem();
    this.#drawSummary();
  }

  #drawSummary() {
    const text = this.#fields.system.value.trim();
    this.#fields.summary.textContent = text ? `System prompt: ${text}` : "System prompt: none";
  }

  #rename(name) {
    this.#conversation.name = name;
    this.draw();
    this.#host.changed();
  }

  async #suggest() {
    const conversation = this.#conversation;
    const before = conversation.name;
    this.#making = new AbortController();
    this.draw();
    this.#host.say("The model makes a title.");
    try {
      const made = await madeTitle(conversation, this.#host.model(), this.#making.signal);
      if (conversation !== this.#conversation) return;
      this.#rename(made);
      this.#host.say("");
      this.#host.toast.show(`Title: ${made}`, () => this.#rename(before));
    } catch (error) {
      if (error.name !== "AbortError") this.#host.say(`No title was made: ${error.message}`);
    } finally {
      this.#making = null;
      this.draw();
    }
  }
}

async function madeTitle(conversation, model, signal) {
  const excerpt = shownMessages(conversation).slice(0, 2).map(({ role, content }) => `${role}: ${content.slice(0, EXCERPT)}`);
  const request = `Write a title of at most six words for this conversation. Reply with the title alone.\n\n${excerpt.join("\n\n")}`;
  const body = { model, messages: [{ role: "user", content: request }], max_tokens: TITLE_TOKENS, temperature: 0, reasoning_effort: "none" };
  let text = "";
  for await (const { choices } of stream("v1/chat/completions", body, signal)) text += choices[0]?.delta.content ?? "";
  const line = text.split("\n").find((each) => each.trim()) ?? "";
  const title = line.replace(/^(?:title:\s*)?["'“*#\s]*|["'”*.\s]*$/gi, "");
  if (!title) throw new Error("the model wrote nothing.");
  return shortTitle(title);
}
