// One message of the conversation, with its buttons. The chat supplies `actions`, which the buttons call.
import { shownFile } from "./attachments.js";
import { button, copyText, element } from "./elements.js";
import { fileData } from "./files.js";
import { Markdown } from "./markdown.js";
import { TokenRow } from "./tokens.js";
import { ToolCalls } from "./tool_calls.js";
import { usageText } from "./usage.js";

const ROLES = { user: "You", assistant: "Assistant", tool: "Tool result" };

export class MessageView {
  #message;
  #actions;
  #markdown = null;
  #content = element("div", { className: "content" });
  #thoughts = element("div", { className: "thoughts" });
  #reasoning = element("details", { hidden: true }, element("summary", {}, "Reasoning"), this.#thoughts);
  #calls = element("div");
  #tokens = null;
  #toolCalls = null; // the form that asks for results, while the message is the last one
  #progress = element("p", { className: "progress quiet", role: "status", hidden: true });
  #bottom = element("div", { className: "bottom" });
  #drawn = { content: 0, reasoning: 0 };

  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    const name = message.toolName ? `${message.isFailed ? "Failure" : "Result"} of ${message.toolName}` : ROLES[message.role];
    this.element = element("article", { className: `message ${message.role}`, "aria-label": name });
    const parts = [this.#progress, this.#reasoning, this.#content, this.#calls, this.#bottom];
    this.element.append(element("h2", {}, name), ...parts);
    if (message.role === "assistant") this.#markdown = new Markdown(this.#content);
    this.#content.append(...(message.attachments ?? []).map(attachment));
    this.update();
    if (!actions.isRunning(message)) this.finish();
  }

  // Draws what the message gained since the last call.
  update() {
    const { content, reasoning = "", calls } = this.#message;
    const added = content.slice(this.#drawn.content);
    if (added && this.#markdown) this.#markdown.append(added);
    else if (added) this.#content.append(element("div", { className: "plain", ...(this.#message.role === "tool" ? { tabIndex: 0 } : {}) }, added));
    this.#thoughts.append(reasoning.slice(this.#drawn.reasoning));
    this.#reasoning.hidden = reasoning === "";
    this.#drawn = { content: content.length, reasoning: reasoning.length };
    if (calls) this.#calls.replaceChildren(...calls.map(shownCall));
    this.element.setAttribute("aria-busy", this.#actions.isRunning(this.#message));
  }

  // Shows a line in place of the answer that has not begun; an empty text removes it.
  tell(text) {
    if (this.#progress.textContent !== text) this.#progress.textContent = text;
    this.#progress.hidden = text === "";
  }

  // Runs the calls that the user has allowed before.
  runAllowedCalls() {
    this.#toolCalls?.runAllowed();
  }

  // Asks for the results of the calls again: the tools have changed.
  renewCalls() {
    if (!this.#toolCalls) return;
    this.#toolCalls = null;
    this.refresh(true);
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
    this.tell("");
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
    const line = [note, usage && usageText(usage)].filter(Boolean).join(" ");
    this.#toolCalls = isLast && calls?.length && !error ? (this.#toolCalls ?? new ToolCalls(message, actions)) : null;
    const shown = [failure, this.#toolCalls?.element, line && element("p", { className: "usage" }, line), row].filter(Boolean);
    const isShown = this.#toolCalls && this.#bottom.contains(this.#toolCalls.element);
    if (!isShown) return this.#bottom.replaceChildren(...shown);
    for (const old of [...this.#bottom.children]) if (!shown.includes(old)) old.remove(); // a moved form loses the focus
    this.#toolCalls.element.after(...shown.slice(shown.indexOf(this.#toolCalls.element) + 1));
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
}

// Returns the element of an attached file, whose data may have to be read first.
function attachment(file) {
  const place = element("div", { className: "attachment" });
  fileData(file)
    .then((data) => place.append(shownFile(file, data)))
    .catch((error) => place.append(element("p", { className: "error" }, error.message)));
  return place;
}

function shownCall(call) {
  const text = indented(call.arguments);
  const shown = ["", "{}"].includes(text) ? " without arguments" : element("pre", { tabIndex: 0, "aria-label": `Arguments of ${call.name}` }, text);
  return element("div", { className: "call" }, element("strong", {}, `Calls ${call.name}`), shown);
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it still grows, or the model made an error
  }
}
