// One message of the conversation, with its buttons. The chat supplies `actions`, which the buttons call.
import { button, copyText, element } from "./elements.js";
import { Markdown } from "./markdown.js";
import { TokenRow } from "./tokens.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };

export class MessageView {
  #message;
  #actions;
  #markdown = null;
  #content = element("div", { className: "content" });
  #thoughts = element("div", { className: "thoughts" });
  #reasoning = element("details", { hidden: true }, element("summary", {}, "Reasoning"), this.#thoughts);
  #calls = element("div");
  #tokens = null;
  #bottom = element("div", { className: "bottom" });
  #drawn = { content: 0, reasoning: 0 };

  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.element = element("article", { className: `message ${message.role}`, "aria-label": NAMES[message.role] });
    const parts = [this.#reasoning, this.#content, this.#calls, this.#bottom];
    this.element.append(element("h2", {}, NAMES[message.role]), ...parts);
    if (message.role === "assistant") this.#markdown = new Markdown(this.#content);
    for (const url of message.images ?? []) this.#content.append(element("img", { src: url, alt: "Attached image" }));
    this.update();
    if (!actions.isRunning(message)) this.finish();
  }

  // Draws what the message gained since the last call.
  update() {
    const { content, reasoning = "", calls } = this.#message;
    const added = content.slice(this.#drawn.content);
    if (added && this.#markdown) this.#markdown.append(added);
    else if (added) this.#content.append(element("div", { className: "plain" }, added));
    this.#thoughts.append(reasoning.slice(this.#drawn.reasoning));
    this.#reasoning.hidden = reasoning === "";
    this.#drawn = { content: content.length, reasoning: reasoning.length };
    if (calls) this.#calls.replaceChildren(...calls.map(shownCall));
    this.element.setAttribute("aria-busy", this.#actions.isRunning(this.#message));
  }

  addTokens(tokens) {
    if (!tokens.length) return;
    if (!this.#tokens) {
      this.#tokens = new TokenRow();
      this.#bottom.before(element("details", { className: "probabilities" }, element("summary", {}, "Token probabilities"), this.#tokens.element));
    }
    for (const token of tokens) this.#tokens.add(token);
  }

  // Draws the end of the message: its error, usage and buttons. `isLast`: the message ends the conversation.
  finish() {
    this.update();
    this.#markdown?.end();
    this.#markdown = null;
    this.refresh(false);
  }

  refresh(isLast) {
    const message = this.#message;
    if (this.#actions.isRunning(message)) return;
    const { role, error, note, usage, calls } = message;
    const actions = this.#actions;
    const row = element("div", { className: "actions", role: "group", "aria-label": "Actions" });
    row.append(...this.#versions(), button("Copy", (from) => copyText(message.content, from)));
    if (role !== "tool") row.append(button("Edit", () => this.#edit()));
    if (role === "assistant" && !error) row.append(button("Regenerate", () => actions.regenerate(message)));
    if (role === "assistant" && isLast && message.content && !calls?.length) row.append(button("Continue", () => actions.extend(message)));
    row.append(button("Delete", () => actions.remove(message)));
    const failure = error && element("div", { className: "failure", role: "alert" }, element("p", {}, error), button("Retry", () => actions.regenerate(message)));
    const line = [note, usage].filter(Boolean).join(" ");
    this.#bottom.replaceChildren(
      ...[failure, isLast && calls?.length ? this.#results(calls) : null, line && element("p", { className: "usage" }, line), row].filter(Boolean),
    );
  }

  #versions() {
    const { index, count } = this.#actions.versionsOf(this.#message);
    if (count < 2) return [];
    const turn = (text, label, to) => button(text, () => this.#actions.show(this.#message, to), { "aria-label": label, disabled: to < 0 || to >= count });
    return [turn("‹", "Previous version", index - 1), element("span", { className: "quiet" }, `${index + 1}/${count}`), turn("›", "Next version", index + 1)];
  }

  #edit() {
    const box = element("textarea", { value: this.#message.content, rows: 5, "aria-label": "Edited message" });
    const isUser = this.#message.role === "user";
    const close = () => {
      editor.replaceWith(this.#content);
      this.element.querySelector(".actions button")?.focus();
    };
    const save = () => {
      if (!this.#actions.mayChange()) return;
      editor.replaceWith(this.#content);
      this.#actions.edit(this.#message, box.value);
    };
    const editor = element("div", { className: "editor" }, box, button(isUser ? "Send edited" : "Save", save), button("Cancel", close));
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    if (this.#content.isConnected) this.#content.replaceWith(editor);
    box.focus();
  }

  #results(calls) {
    const boxes = calls.map((call) => element("textarea", { rows: 2, required: true, "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}` }));
    const form = element("form", { className: "results" }, ...boxes, element("button", {}, "Send results"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#actions.answerCalls(this.#message, boxes.map((box) => box.value));
    });
    return form;
  }
}

function shownCall(call) {
  return element("div", { className: "call" }, element("strong", {}, `Calls ${call.name}`), element("pre", { tabIndex: 0 }, call.arguments));
}
