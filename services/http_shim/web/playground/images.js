// Images of the next message: chosen, pasted or dropped, as data URLs.
import { button, element } from "./elements.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // types that the server decodes

export class Images {
  #list;
  #urls = [];
  #say;

  constructor({ list, input, box, say }) {
    this.#list = list;
    this.#say = say;
    input.addEventListener("change", () => {
      this.#add(input.files);
      input.value = "";
    });
    box.addEventListener("paste", (event) => this.#add(event.clipboardData.files, event));
    box.addEventListener("dragover", (event) => event.preventDefault());
    box.addEventListener("drop", (event) => this.#add(event.dataTransfer.files, event));
  }

  get count() {
    return this.#urls.length;
  }

  // Returns the images and removes them from the list.
  take() {
    const urls = this.#urls;
    this.#urls = [];
    this.#draw();
    return urls;
  }

  async #add(files, event) {
    if (!files.length) return;
    event?.preventDefault();
    for (const file of [...files]) {
      if (TYPES.includes(file.type)) this.#urls.push(await dataUrl(file));
      else this.#say(`${file.name} is not a PNG, JPEG, WebP or GIF image.`);
    }
    this.#draw();
  }

  #draw() {
    const shown = this.#urls.map((url, index) => {
      const remove = () => {
        this.#urls.splice(index, 1);
        this.#draw();
      };
      return element("span", {}, element("img", { src: url, alt: `Image ${index + 1}` }), button("×", remove, { "aria-label": `Remove image ${index + 1}` }));
    });
    this.#list.replaceChildren(...shown);
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
