// The chat: the conversation on the page, and the request that extends it.
import {
  addVersion, extendMessage, lastOf, newConversation, newMessage, parentOf, removeMessage, requestMessages, shownMessages,
} from "./conversation.js";
import { fileData, holdFile, holdOnly } from "./files.js";
import { highlight } from "./highlights.js";
import { MessageView } from "./message_view.js";
import { stream } from "./requests.js";
import { tokensOf } from "./tokens.js";
import { Usage } from "./usage.js";

const DRAW_MILLISECONDS = 30; // between two draws of a growing answer
const DRAW_SHARE = 0.2; // largest share of the time that draws take
const MAX_RESULT = 200_000; // characters of a tool's result
const MAX_ROUNDS = 16; // answers with calls that run without the user, after one message
const SAVE_MILLISECONDS = 2000; // between two writes of a growing answer to the browser's storage

export class Chat {
  conversation = newConversation();
  #list;
  #host; // {settings, models, tools, toast, scroller, changed(conversation, newFiles), grown(conversation), running(bool), say(text), focus()}
  #views = new Map();
  #run = null; // {controller, message, conversation}
  #toolRuns = new Set(); // AbortControllers of running tools

  constructor(list, host) {
    this.#list = list;
    this.#host = host;
  }

  get running() {
    return this.#run !== null || this.#toolRuns.size > 0;
  }

  // Shows a conversation, and marks these words in it.
  open(conversation, words = []) {
    this.conversation = conversation;
    holdOnly(conversation);
    this.#views.clear();
    this.draw();
    this.#host.scroller.toEnd();
    highlight(this.#contents(), words);
  }

  stop() {
    this.#run?.controller.abort();
    for (const controller of this.#toolRuns) controller.abort();
  }

  send(content, files) {
    files.forEach(holdFile);
    this.conversation.system ??= this.#host.settings.system; // later changes of the default leave this conversation alone
    const attachments = files.map(({ id, name, type, size }) => ({ id, name, type, size }));
    addVersion(lastOf(this.conversation), newMessage("user", attachments.length ? { content, attachments } : { content }));
    this.#answer(lastOf(this.conversation), files.map(({ id, data }) => ({ id, data })));
  }

  // Returns path and body of the request for an answer. Throws with the reason if a setting is not valid.
  async request(messages, fields = {}) {
    const { settings, models, tools } = this.#host;
    const body = { ...settings.common(models.id), ...settings.chat(tools.definitions), ...fields };
    const system = this.conversation.system ?? settings.system;
    return ["v1/chat/completions", { ...body, messages: await requestMessages(system, messages, fileData) }];
  }

  renewCalls() {
    if (!this.running) this.#views.get(lastOf(this.conversation))?.renewCalls();
  }

  draw() {
    const messages = shownMessages(this.conversation);
    const elements = messages.map((message, index) => {
      if (!this.#views.has(message)) this.#views.set(message, new MessageView(message, this));
      const view = this.#views.get(message);
      view.refresh(index === messages.length - 1);
      return view.element;
    });
    // elements that stay are not moved, because a moved element loses the focus
    for (const old of [...this.#list.children]) if (!elements.includes(old)) old.remove();
    for (const [index, node] of elements.entries()) {
      if (this.#list.children[index] !== node) this.#list.insertBefore(node, this.#list.children[index] ?? null);
    }
    this.#list.classList.toggle("empty", messages.length === 0);
    this.#host.scroller.follow();
  }

  // ---- actions of the messages ----
  isRunning(message) {
    return this.#run?.message === message;
  }

  versionsOf(message) {
    const { children } = parentOf(this.conversation, message);
    return { index: children.indexOf(message), count: children.length };
  }

  show(message, index) {
    parentOf(this.conversation, message).shown = index;
    this.#change();
  }

  // Returns whether messages may change. Tells the user why not while an answer runs.
  mayChange() {
    if (this.running) this.#host.say("An answer is on its way. Wait for its end, or stop it.");
    return !this.running;
  }

  edit(message, content) {
    if (!this.mayChange()) return;
    const parent = parentOf(this.conversation, message);
    addVersion(parent, newMessage(message.role, { ...kept(message), content }));
    if (message.role === "user") this.#answer();
    else this.#change();
  }

  regenerate(message) {
    if (this.running) return;
    const parent = parentOf(this.conversation, message);
    if (!message.content && !message.calls) removeMessage(this.conversation, message); // a failed attempt is not a version
    this.#answer(parent);
  }

  extend(message) {
    if (this.running) return;
    delete message.error;
    delete message.note;
    this.#views.delete(message);
    this.#generate(message, { add_generation_prompt: false, continue_final_message: true });
  }

  remove(message) {
    this.stop();
    const { conversation } = this;
    const path = shownMessages(conversation);
    const after = path.length - path.indexOf(message) - 1;
    const restore = removeMessage(conversation, message);
    this.#change(conversation);
    this.#host.toast.show(after ? `Deleted the message and ${after} after it.` : "Deleted the message.", () => {
      restore();
      this.#change(conversation);
    });
  }

  // ---- calls of tools ----
  toolOf(call) {
    return this.#host.tools.find(call.name);
  }

  isAllowed({ key }) {
    return this.conversation.allowedTools.includes(key);
  }

  allow({ key }) {
    if (this.isAllowed({ key })) return;
    this.conversation.allowedTools.push(key);
    this.#host.changed(this.conversation);
  }

  // Returns {content, isFailed}. Throws with the reason if the tool gives no result.
  async runCall(tool, call) {
    const controller = new AbortController();
    this.#toolRuns.add(controller);
    this.#host.running(true);
    try {
      const { text, isFailed } = await tool.call(JSON.parse(call.arguments || "{}"), controller.signal);
      return { content: shortened(text), isFailed };
    } finally {
      this.#toolRuns.delete(controller);
      this.#host.running(this.running);
    }
  }

  answerCalls(message, results) {
    if (this.running || !shownMessages(this.conversation).includes(message)) return;
    let last = message;
    for (const [index, { content, isFailed }] of results.entries()) {
      const { id: callId, name: toolName } = message.calls[index];
      last = addVersion(last, newMessage("tool", { content, callId, toolName, ...(isFailed ? { isFailed } : {}) }));
    }
    this.#answer();
  }

  // Without the user, a model could call tools for ever.
  #mayRunAllowed() {
    const path = shownMessages(this.conversation);
    const rounds = path.slice(path.findLastIndex(({ role }) => role === "user")).filter(({ calls }) => calls?.length);
    return rounds.length <= MAX_ROUNDS;
  }

  #contents() {
    return shownMessages(this.conversation).map((message) => this.#views.get(message).element.querySelector(".content"));
  }

  #change(conversation = this.conversation) {
    if (conversation === this.conversation) this.draw();
    this.#host.changed(conversation);
    this.#host.focus();
  }

  #answer(parent = lastOf(this.conversation), newFiles = []) {
    this.#generate(addVersion(parent, newMessage("assistant")), {}, newFiles);
  }

  async #generate(message, fields = {}, newFiles = []) {
    const controller = new AbortController();
    const { conversation } = this;
    const path = shownMessages(conversation);
    const run = (this.#run = { controller, message, conversation });
    this.#host.running(true);
    this.draw();
    this.#host.scroller.toEnd();
    this.#host.changed(conversation, newFiles);
    this.#host.focus();
    try {
      const request = await this.request(path, fields);
      await this.#receive(run, request);
    } catch (error) {
      if (error.name === "AbortError") message.note = "Stopped.";
      else message.error = error instanceof TypeError ? `The server does not answer: ${error.message}` : error.message;
    }
    if (this.#run === run) this.#run = null;
    this.#views.get(message)?.finish();
    this.#host.running(false);
    if (conversation === this.conversation) this.draw();
    const isSaved = await this.#host.changed(conversation);
    if (message.calls && conversation === this.conversation && this.#mayRunAllowed()) this.#views.get(message)?.runAllowedCalls();
    if (isSaved) this.#host.say(message.error ? "The request failed." : (message.note ?? "The answer is complete."));
  }

  async #receive({ message, conversation, controller }, [path, body]) {
    const usage = new Usage();
    let timer = 0;
    let pause = DRAW_MILLISECONDS;
    let savedAt = Date.now();
    const draw = () => {
      timer = 0;
      const began = performance.now();
      this.#views.get(message)?.update();
      this.#host.scroller.follow();
      pause = Math.max(DRAW_MILLISECONDS, (performance.now() - began) / DRAW_SHARE);
      if (Date.now() - savedAt < SAVE_MILLISECONDS) return;
      savedAt = Date.now();
      this.#host.grown(conversation);
    };
    const begun = new AbortController(); // aborted at the first event, and at the end
    const tell = (text) => {
      this.#views.get(message)?.tell(text);
      this.#host.scroller.follow();
    };
    this.#host.models.watch(tell, begun.signal);
    controller.signal.addEventListener("abort", () => begun.abort());
    try {
      for await (const event of stream(path, body, controller.signal)) {
        begun.abort();
        this.#take(message, event, usage);
        timer ||= setTimeout(draw, pause); // animation frames would stop in hidden tabs
      }
    } finally {
      begun.abort();
    }
  }

  #take(message, event, usage) {
    message.usage = usage.record(event) ?? message.usage;
    for (const choice of event.choices) {
      if (choice.index !== 0) continue; // a conversation continues from one answer
      extendMessage(message, choice.delta);
      this.#views.get(message)?.addTokens(tokensOf(choice));
      if (choice.finish_reason === "length") message.note = "Cut at the limit of tokens.";
    }
  }
}

// Returns the fields of a message that an edited version keeps.
function kept({ attachments, calls, callId, toolName }) {
  return Object.fromEntries(Object.entries({ attachments, calls, callId, toolName }).filter(([, value]) => value));
}

function shortened(text) {
  return text.length <= MAX_RESULT ? text : `${text.slice(0, MAX_RESULT)}\n(cut after ${MAX_RESULT.toLocaleString()} characters)`;
}
