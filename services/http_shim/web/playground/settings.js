// Settings: the fields of the side panel, which the browser stores, and their form in a request.
import { loadSettings, saveSettings } from "./storage.js";

const NUMBERS = [
  "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
  "frequency_penalty", "presence_penalty", "repetition_penalty",
];
const DEFAULT_COMPLETION_TOKENS = 16; // of /v1/completions without max_tokens

export class Settings {
  #fields;

  constructor(form) {
    this.#fields = form.elements;
    const stored = loadSettings();
    for (const field of this.#stored()) {
      if (!(field.name in stored)) continue;
      if (field.type === "checkbox") field.checked = stored[field.name];
      else field.value = stored[field.name];
    }
    form.addEventListener("input", () => this.save());
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  save() {
    const values = [...this.#stored()].map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]);
    saveSettings(Object.fromEntries(values));
  }

  get system() {
    return this.#fields.system.value;
  }

  get probabilities() {
    return this.#fields.logprobs.checked;
  }

  // Shows what the server does without max_tokens.
  showLimit(isChat, card) {
    const field = this.#fields.max_tokens;
    const isBounded = card?.max_output_length < card?.max_model_len;
    if (!isChat) field.placeholder = `${DEFAULT_COMPLETION_TOKENS}`;
    else field.placeholder = isBounded ? `up to ${card.max_output_length.toLocaleString()}` : "rest of context";
  }

  // Returns the fields that chats and completions share. Throws with the reason if one is not valid.
  common(model) {
    const body = { model };
    for (const name of NUMBERS) {
      const field = this.#fields[name];
      if (!field.checkValidity()) throw new Error(`${name}: ${field.validationMessage}`);
      if (field.value !== "") body[name] = Number(field.value);
    }
    const stops = this.#fields.stop.value.split("\n").filter(Boolean);
    if (stops.length) body.stop = stops.map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
    return { ...body, ...this.#constraint(), ...this.#json("further", "Further fields") };
  }

  // `servedTools` are those of MCP servers.
  chat(servedTools) {
    const written = this.#json("tools", "Tools", []);
    const own = Array.isArray(written) ? written.map((tool) => (tool.type ? tool : { type: "function", function: tool })) : [];
    const body = own.length + servedTools.length ? { tools: [...own, ...servedTools] } : {};
    if (body.tools && this.#fields.tool_choice.value) body.tool_choice = this.#fields.tool_choice.value;
    if (this.#fields.reasoning_effort.value) body.reasoning_effort = this.#fields.reasoning_effort.value;
    if (this.probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    return body;
  }

  #constraint() {
    const type = this.#fields.constraint.value;
    const text = this.#fields.grammar.value;
    if (type === "") return {};
    if (type === "json_object") return { response_format: { type } };
    if (type !== "json_schema") return { grammar: { type, value: text } };
    return { response_format: { type, json_schema: { name: "answer", schema: this.#json("grammar", "JSON schema") } } };
  }

  #json(name, title, empty = {}) {
    const text = this.#fields[name].value.trim();
    try {
      return text ? JSON.parse(text) : empty;
    } catch (error) {
      throw new Error(`${title}, in the settings: ${error.message}`);
    }
  }

  *#stored() {
    for (const field of this.#fields) if (field.name && field.name !== "key") yield field;
  }
}
