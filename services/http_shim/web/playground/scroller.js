// Scrolling along with an answer, while the reader is at the end.

const NEAR = 48; // pixels from the end that still count as the end

export class Scroller {
  #box;
  #follows = true;
  #last = 0;

  constructor(box) {
    this.#box = box;
    box.addEventListener("scroll", () => this.#note(), { passive: true });
  }

  follow() {
    if (this.#follows) this.#box.scrollTop = this.#box.scrollHeight;
  }

  toEnd() {
    this.#follows = true;
    this.follow();
  }

  // Only a move upwards is the reader's: text that arrives also puts the end out of sight.
  #note() {
    const { scrollTop, scrollHeight, clientHeight } = this.#box;
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.#follows = true;
    else if (scrollTop < this.#last) this.#follows = false;
    this.#last = scrollTop;
  }
}
