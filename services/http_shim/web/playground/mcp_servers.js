// MCP servers that the user added: their list in the settings, and their tools.
import { button, element } from "./elements.js";
import { McpClient } from "./mcp_client.js";
import { loadItem, saveItem } from "./storage.js";

const STORED = "tokenwire.mcp"; // [{url, isOn}] in localStorage; tokens are in sessionStorage, as the API key is
const MAX_TOOLS = 128; // of all servers
const NAME_CHARACTERS = 64;

export class McpServers {
  #list;
  #servers = []; // {url, isOn, state, error, client, tools, controller}
  #changed;

  constructor({ list, form }, changed) {
    this.#list = list;
    this.#changed = changed;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#add(form.elements.url.value.trim(), form.elements.token.value.trim());
      form.reset();
    });
    for (const { url, isOn } of loadItem(STORED, [])) if (URL.canParse(url)) this.#servers.push({ url, isOn, tools: [] });
  }

  // Connects to the servers that the user left on.
  start() {
    for (const server of this.#servers) if (server.isOn) this.#connect(server);
    this.#draw();
  }

  // Tools of the connected servers in the form of a chat request
  get definitions() {
    return this.#named().map(({ name, tool }) => ({
      type: "function",
      function: { name, description: tool.description ?? tool.title ?? "", parameters: tool.inputSchema ?? { type: "object" } },
    }));
  }

  // Returns {key, title, call(parameters, signal)} of the tool that the model knows as `name`, or null.
  find(name) {
    const found = this.#named().find((each) => each.name === name);
    if (!found) return null;
    const { server, tool } = found;
    return {
      key: `${server.url} ${tool.name}`,
      title: `${tool.name} at ${new URL(server.url).host}`,
      call: (parameters, signal) => server.client.call(tool, parameters, signal),
    };
  }

  // Gives each tool a name that chat requests allow, and that no other tool has.
  #named() {
    const names = new Set();
    const all = this.#servers.flatMap((server) => (server.isOn ? server.tools.map((tool) => ({ server, tool })) : []));
    return all.slice(0, MAX_TOOLS).map(({ server, tool }) => {
      const base = tool.name.replace(/[^\w-]/g, "_").slice(0, NAME_CHARACTERS);
      let name = base;
      for (let number = 2; names.has(name); number++) name = `${base.slice(0, NAME_CHARACTERS - 4)}_${number}`;
      names.add(name);
      return { name, server, tool };
    });
  }

  #add(url, token) {
    if (token) sessionStorage.setItem(`mcp ${url}`, token);
    let server = this.#servers.find((each) => each.url === url);
    if (!server) this.#servers.push((server = { url, tools: [] }));
    server.isOn = true;
    this.#store();
    this.#connect(server);
  }

  async #connect(server) {
    server.controller?.abort();
    const controller = (server.controller = new AbortController());
    const client = new McpClient(server.url, sessionStorage.getItem(`mcp ${server.url}`));
    Object.assign(server, { client, state: "connecting", error: null, tools: [] });
    this.#draw();
    try {
      await client.connect(controller.signal);
      const tools = await client.listTools(controller.signal);
      if (controller.signal.aborted) return;
      Object.assign(server, { state: "connected", tools: tools.filter(({ name }) => typeof name === "string") });
    } catch (error) {
      if (controller.signal.aborted) return;
      Object.assign(server, { state: "failed", error: error.message });
    }
    this.#draw();
  }

  #switch(server, isOn) {
    server.isOn = isOn;
    this.#store();
    if (isOn) return this.#connect(server);
    this.#disconnect(server);
    this.#draw();
  }

  #disconnect(server) {
    server.controller?.abort();
    server.client?.close();
    Object.assign(server, { state: "off", error: null, tools: [] });
  }

  #remove(server) {
    this.#disconnect(server);
    sessionStorage.removeItem(`mcp ${server.url}`);
    this.#servers = this.#servers.filter((other) => other !== server);
    this.#store();
    this.#draw();
  }

  #store() {
    saveItem(STORED, this.#servers.map(({ url, isOn }) => ({ url, isOn })));
  }

  #draw() {
    this.#list.replaceChildren(...this.#servers.map((server) => this.#row(server)));
    this.#changed();
  }

  #row(server) {
    const { url, isOn, error, state, tools } = server;
    const toggle = element("input", { type: "checkbox", checked: Boolean(isOn) });
    toggle.addEventListener("change", () => this.#switch(server, toggle.checked));
    const line = error ?? { connecting: "Connecting…", connected: `${tools.length} tools` }[state] ?? "Off";
    const names = tools.map(({ name, description }) => element("li", {}, element("strong", {}, name), description ? ` ${description}` : ""));
    const shown = tools.length
      ? element("details", {}, element("summary", {}, line), element("ul", {}, ...names))
      : element("p", { className: error ? "error" : "quiet", role: "status" }, line);
    const again = error ? button("Try again", () => this.#connect(server)) : null;
    const remove = button("Remove", () => this.#remove(server), { "aria-label": `Remove ${url}` });
    return element("li", {}, element("label", {}, toggle, ` ${url}`), shown, element("div", { className: "row" }, again, remove));
  }
}
