// A page of figures that asks again while it is visible: timer, form of the key, and the line about the server.

import { getJson, useKey } from "../playground/requests.js";

const TIMEOUT_MILLISECONDS = 10_000;

const at = (id) => document.getElementById(id);

export class Polling {
  #milliseconds;
  #show;
  #fail;
  #timer = null;
  #isAsking = false;

  // `show` asks for the figures and draws them; `fail` draws its error.
  constructor(milliseconds, show, fail) {
    this.#milliseconds = milliseconds;
    this.#show = show;
    this.#fail = fail;
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(this.#timer) : this.now()));
    at("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      useKey(at("key").value.trim());
      at("key").value = "";
      this.now();
    });
  }

  async now() {
    if (this.#isAsking) return; // the answer under way starts the timer
    this.#isAsking = true;
    clearTimeout(this.#timer);
    try {
      await this.#show();
      at("key-form").hidden = true;
    } catch (error) {
      const answered = error.status !== undefined;
      say(answered ? error.message : "The server does not answer. The page keeps asking.", true);
      this.#fail(error);
    }
    this.#isAsking = false;
    if (!document.hidden) this.#timer = setTimeout(() => this.now(), this.#milliseconds);
  }
}

export function ask(path) {
  return getJson(path, AbortSignal.timeout(TIMEOUT_MILLISECONDS));
}

// Screen readers announce each assignment, so an unchanged text is not assigned.
export function say(text, isError = false) {
  at("server").classList.toggle("error", isError);
  if (at("server").textContent !== text) at("server").textContent = text;
}
