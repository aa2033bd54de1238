// Scrolling to the end of a growing answer while the reader is there.

const NEAR = 48; // distance in pixels that still counts as the end

export class Scroller {
  #box;
  #follows = true;
  #last = 0;

  constructor(box) {
    this.#box = box;
    box.addEventListener("scroll", () => this.#update(), { passive: true });
    new ResizeObserver(() => this.follow()).observe(box); // a line below the box takes its room
  }

  follow() {
    if (this.#follows) this.#box.scrollTop = this.#box.scrollHeight;
  }

  toEnd() {
    this.#follows = true;
    this.follow();
  }

  // Only the reader scrolls upwards. New text also moves the end out of sight, but leaves scrollTop alone.
  #update() {
    const { scrollTop, scrollHeight, clientHeight } = this.#box;
    if (scrollHeight - scrollTop - clientHeight < NEAR) this.#follows = true;
    else if (scrollTop < this.#last) this.#follows = false;
    this.#last = scrollTop;
  }
}
