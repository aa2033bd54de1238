// The side panels: columns on a wide screen, drawers over the page on a narrow one.

const WIDE = matchMedia("(min-width: 1100px)");
const NAMES = ["saved", "settings"];

export class Panels {
  constructor() {
    for (const name of NAMES) {
      button(name).addEventListener("click", () => this.#show(name, panel(name).hidden));
      panel(name).querySelector(".close").addEventListener("click", () => this.#show(name, false));
    }
    WIDE.addEventListener("change", () => this.#arrange());
    this.#arrange();
  }

  open(name) {
    this.#show(name, true);
  }

  close() {
    for (const name of NAMES) if (!panel(name).hidden && !WIDE.matches) this.#show(name, false);
  }

  #arrange() {
    for (const name of NAMES) this.#set(name, WIDE.matches);
  }

  // An opened drawer takes the focus. Its button takes the focus back.
  #show(name, isShown) {
    if (isShown && !WIDE.matches) for (const other of NAMES) if (other !== name) this.#set(other, false);
    this.#set(name, isShown);
    (isShown ? panel(name).querySelector("button, input") : button(name)).focus();
  }

  #set(name, isShown) {
    panel(name).hidden = !isShown;
    button(name).setAttribute("aria-expanded", isShown);
    const covers = !WIDE.matches && NAMES.some((each) => !panel(each).hidden);
    document.querySelector("main").inert = covers; // nothing behind a drawer takes the focus
  }
}

function panel(name) {
  return document.getElementById(name);
}

function button(name) {
  return document.getElementById(`show-${name}`);
}
