// The line that says what was deleted, with a button that undoes it.
import { button, element } from "./elements.js";

const SHOWN_MILLISECONDS = 12_000; // while neither the pointer nor the keyboard's focus is on it

export class Toast {
  #box;
  #leave;
  #timer = 0;

  // `leave` takes the focus when the line that has it goes.
  constructor(box, leave) {
    this.#box = box;
    this.#leave = leave;
    for (const name of ["mouseenter", "focusin"]) box.addEventListener(name, () => clearTimeout(this.#timer));
    for (const name of ["mouseleave", "focusout"]) box.addEventListener(name, () => this.#wait());
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.#close();
    });
  }

  // Shows what was done. The button that was pressed is gone, so that Undo takes the focus.
  show(text, undo) {
    const undone = button("Undo", async () => {
      this.#close();
      await undo();
    });
    const close = button("×", () => this.#close(), { "aria-label": "Dismiss" });
    this.#box.replaceChildren(element("span", { role: "status" }, text), undone, close);
    this.#box.hidden = false;
    undone.focus();
    if (!undone.matches(":focus-visible")) this.#wait();
  }

  #wait() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#close(), SHOWN_MILLISECONDS);
  }

  #close() {
    const hadFocus = this.#box.contains(document.activeElement);
    clearTimeout(this.#timer);
    this.#box.hidden = true;
    this.#box.replaceChildren();
    if (hadFocus) this.#leave();
  }
}
