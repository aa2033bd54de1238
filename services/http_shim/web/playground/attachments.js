// Files of the next message: images, PDFs and texts that are chosen, pasted or dropped.
import { newId } from "./conversation.js";
import { button, element } from "./elements.js";

const MIB = 2 ** 20;
const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // types that the server decodes
const MAX_FILES = 16; // images of a request
const LIMITS = { image: 20 * MIB, PDF: 5 * MIB, text: MIB / 2 }; // bytes of a file; a body without its images has 8 MiB
const MAX_DOCUMENT_BYTES = 5 * MIB; // of all PDFs and texts of a message

export class Attachments {
  #list;
  #files = []; // {id, name, type, size, data}
  #accepts;
  #say;
  #changed;

  // `box` takes pasted files, `area` dropped ones, if `accepts()`.
  constructor({ list, input, box, area, accepts, say, changed }) {
    this.#list = list;
    this.#accepts = accepts;
    this.#say = say;
    this.#changed = changed;
    input.addEventListener("change", () => {
      this.#add([...input.files]);
      input.value = "";
    });
    box.addEventListener("paste", (event) => {
      const hasText = event.clipboardData.types.includes("text/plain"); // word processors add a picture of their text
      if (!hasText) this.#take(event, event.clipboardData);
    });
    area.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      area.classList.add("dropping");
    });
    area.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) area.classList.remove("dropping");
    });
    area.addEventListener("drop", (event) => {
      area.classList.remove("dropping");
      this.#take(event, event.dataTransfer);
    });
  }

  get count() {
    return this.#files.length;
  }

  // Texts of the attached text files.
  get texts() {
    return this.#files.filter(({ type }) => type === "text/plain").map(({ data }) => data);
  }

  // Returns the files and removes them from the list.
  take() {
    const files = this.#files;
    this.#files = [];
    this.#draw();
    return files;
  }

  #take(event, { files }) {
    if (!files.length) return;
    event.preventDefault(); // the browser would leave the page for the file
    if (this.#accepts()) this.#add([...files]);
    else this.#say("Files go with the messages of a chat.");
  }

  async #add(files) {
    const refusals = [];
    for (const file of files) {
      try {
        this.#files.push(await this.#read(file));
      } catch (error) {
        refusals.push(`${file.name}: ${error.message}`);
      }
    }
    this.#draw();
    this.#say(refusals.join(" "));
  }

  async #read(file) {
    if (this.#files.length === MAX_FILES) throw new Error(`a message has at most ${MAX_FILES} files.`);
    const kind = IMAGE_TYPES.includes(file.type) ? "image" : file.type === "application/pdf" ? "PDF" : "text";
    if (file.size > LIMITS[kind]) throw new Error(`it has ${sizeText(file.size)}; a${kind === "image" ? "n" : ""} ${kind} may have ${sizeText(LIMITS[kind])}.`);
    const documents = this.#files.filter(({ type }) => !type.startsWith("image/"));
    const bytes = documents.reduce((sum, { size }) => sum + size, file.size);
    if (kind !== "image" && bytes > MAX_DOCUMENT_BYTES) throw new Error(`the documents of a message may have ${sizeText(MAX_DOCUMENT_BYTES)} together.`);
    const data = kind === "text" ? await textOf(file) : await dataUrl(file);
    return { id: newId(), name: file.name || "pasted file", type: kind === "text" ? "text/plain" : file.type, size: file.size, data };
  }

  #draw() {
    const shown = this.#files.map((file) => {
      const remove = () => {
        this.#files = this.#files.filter((other) => other !== file);
        this.#draw();
      };
      return element("li", {}, shownFile(file, file.data), button("×", remove, { "aria-label": `Remove ${file.name}` }));
    });
    this.#list.replaceChildren(...shown);
    this.#list.hidden = shown.length === 0;
    this.#changed();
  }
}

// Returns the element of an attached file: an image, or a name that opens the text.
export function shownFile({ name, type, size }, data) {
  if (type.startsWith("image/")) return element("img", { src: data, alt: name });
  const label = `${name} (${sizeText(size)})`;
  if (type === "application/pdf") return element("span", { className: "attached-file" }, label);
  const text = element("pre", { tabIndex: 0, "aria-label": name });
  const details = element("details", { className: "attached-file" }, element("summary", {}, label), text);
  details.addEventListener("toggle", () => (text.textContent = details.open ? data : ""));
  return details;
}

function sizeText(bytes) {
  if (bytes >= MIB) return `${(bytes / MIB).toFixed(1).replace(/\.0$/, "")} MiB`;
  return bytes >= 1024 ? `${Math.round(bytes / 1024)} KiB` : `${bytes} bytes`;
}

async function textOf(file) {
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text;
  } catch {
    // reported below
  }
  throw new Error("it is neither a PNG, JPEG, WebP or GIF image, nor a PDF, nor a text in UTF-8.");
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
