// The calls of the last answer. A tool of an MCP server runs once the user agrees; the result of any other is written by the user.
import { button, element } from "./elements.js";

const DECLINED = "The user declined this call.";

export class ToolCalls {
  #message;
  #actions; // {toolOf(call), isAllowed(tool), allow(tool), runCall(tool, call), answerCalls(message, results)}
  #results = []; // {content, isFailed} of the calls that have one
  #rows;
  #send = element("button", {}, "Send results");

  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.#rows = message.calls.map((call, index) => this.#row(call, index));
    this.element = element("form", { className: "results" }, ...this.#rows, this.#send);
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#finish();
    });
    this.#send.hidden = !this.#boxes.length;
  }

  // Runs the calls that the user has allowed before.
  runAllowed() {
    for (const [index, call] of this.#message.calls.entries()) {
      const tool = this.#actions.toolOf(call);
      if (tool && this.#actions.isAllowed(tool)) this.#run(tool, call, index);
    }
  }

  get #boxes() {
    return [...this.element.querySelectorAll("textarea")];
  }

  #row(call, index) {
    const tool = this.#actions.toolOf(call);
    const row = element("div", { className: "call-result", role: "group", "aria-label": `Call of ${call.name}` });
    if (tool) this.#ask(row, tool, call, index);
    else row.append(element("textarea", { rows: 2, required: true, "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}`, name: `${index}` }));
    return row;
  }

  #ask(row, tool, call, index, note = `Run ${tool.title} with these arguments?`) {
    const run = () => this.#run(tool, call, index);
    const allow = () => {
      this.#actions.allow(tool);
      run();
    };
    row.replaceChildren(
      element("p", { role: "status" }, note),
      element(
        "div", { className: "row" },
        button("Run", run),
        button("Run, and allow in this conversation", allow),
        button("Decline", () => this.#put(index, { content: DECLINED, isFailed: true })),
      ),
    );
  }

  async #run(tool, call, index) {
    const row = this.#rows[index];
    row.replaceChildren(element("p", { role: "status" }, `${tool.title} runs. Stop (Esc) cancels it.`));
    try {
      this.#put(index, await this.#actions.runCall(tool, call));
    } catch (error) {
      if (error.name === "AbortError") this.#ask(row, tool, call, index, "The call was cancelled. Run it again?");
      else this.#put(index, { content: `The call failed: ${error.message}`, isFailed: true });
    }
  }

  #put(index, result) {
    this.#results[index] = result;
    this.#rows[index].replaceChildren(element("p", { role: "status", className: result.isFailed ? "error" : "quiet" }, result.isFailed ? result.content : "The tool has answered."));
    if (!this.#boxes.length) this.#finish();
  }

  #finish() {
    for (const box of this.#boxes) this.#results[Number(box.name)] = { content: box.value };
    const { calls } = this.#message;
    if (calls.every((_, index) => this.#results[index])) this.#actions.answerCalls(this.#message, this.#results);
  }
}
