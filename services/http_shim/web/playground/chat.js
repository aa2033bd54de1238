// The chat: the conversation on the page, and the request that extends it.
import {
  addVersion, extendMessage, lastOf, newConversation, newMessage, parentOf, removeMessage, requestMessages, shownMessages,
} from "./conversation.js";
import { MessageView } from "./message_view.js";
import { stream, Usage } from "./requests.js";
import { tokensOf } from "./tokens.js";

const DRAW_MILLISECONDS = 30; // between two draws of a growing answer
const DRAW_SHARE = 0.2; // largest share of the time that draws take
const SAVE_MILLISECONDS = 2000; // between two writes of a growing answer to the browser's storage

export class Chat {
  conversation = newConversation();
  #list;
  #host; // {settings, model(), scroller, changed(conversation), grown(conversation), running(bool), say(text), focus()}
  #views = new Map();
  #run = null; // {controller, message, conversation}

  constructor(list, host) {
    this.#list = list;
    this.#host = host;
  }

  get running() {
    return this.#run !== null;
  }

  open(conversation) {
    this.conversation = conversation;
    this.#views.clear();
    this.draw();
    this.#host.scroller.toEnd();
  }

  stop() {
    this.#run?.controller.abort();
  }

  send(content, images) {
    addVersion(lastOf(this.conversation), newMessage("user", { content, images }));
    this.#answer();
  }

  // Returns path and body of the request for an answer. Throws with the reason if a setting is not valid.
  request(messages, fields = {}) {
    const { settings, model } = this.#host;
    const body = { ...settings.common(model()), ...settings.chat(), ...fields };
    return ["v1/chat/completions", { ...body, messages: requestMessages(settings.system, messages) }];
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
    if (this.#run) this.#host.say("An answer is on its way. Wait for its end, or stop it.");
    return !this.#run;
  }

  edit(message, content) {
    if (!this.mayChange()) return;
    const parent = parentOf(this.conversation, message);
    addVersion(parent, newMessage(message.role, { content, images: message.images }));
    if (message.role === "user") this.#answer();
    else this.#change();
  }

  regenerate(message) {
    if (this.#run) return;
    const parent = parentOf(this.conversation, message);
    if (!message.content && !message.calls) removeMessage(this.conversation, message); // a failed attempt is not a version
    this.#answer(parent);
  }

  extend(message) {
    if (this.#run) return;
    delete message.error;
    delete message.note;
    this.#views.delete(message);
    this.#generate(message, { add_generation_prompt: false, continue_final_message: true });
  }

  remove(message) {
    if (this.#run) this.stop();
    removeMessage(this.conversation, message);
    this.#change();
  }

  answerCalls(message, results) {
    if (this.#run) return;
    let last = message;
    for (const [index, content] of results.entries()) {
      last = addVersion(last, newMessage("tool", { content, callId: message.calls[index].id }));
    }
    this.#answer();
  }

  #change() {
    this.draw();
    this.#host.changed(this.conversation);
    this.#host.focus();
  }

  #answer(parent = lastOf(this.conversation)) {
    this.#generate(addVersion(parent, newMessage("assistant")));
  }

  async #generate(message, fields = {}) {
    const controller = new AbortController();
    const { conversation } = this;
    const path = shownMessages(conversation);
    const run = (this.#run = { controller, message, conversation });
    this.#host.running(true);
    this.draw();
    this.#host.scroller.toEnd();
    this.#host.changed(conversation);
    this.#host.focus();
    try {
      await this.#receive(run, this.request(path, fields));
    } catch (error) {
      if (error.name === "AbortError") message.note = "Stopped.";
      else message.error = error instanceof TypeError ? `The server does not answer: ${error.message}` : error.message;
    }
    if (this.#run === run) this.#run = null;
    this.#views.get(message)?.finish();
    this.#host.running(false);
    if (conversation === this.conversation) this.draw();
    const isSaved = await this.#host.changed(conversation);
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
    for await (const event of stream(path, body, controller.signal)) {
      message.usage = usage.record(event) ?? message.usage;
      for (const choice of event.choices) {
        if (choice.index !== 0) continue; // a conversation continues from one answer
        extendMessage(message, choice.delta);
        this.#views.get(message)?.addTokens(tokensOf(choice));
        if (choice.finish_reason === "length") message.note = "Cut at max_tokens.";
      }
      timer ||= setTimeout(draw, pause); // animation frames would stop in hidden tabs
    }
  }
}
