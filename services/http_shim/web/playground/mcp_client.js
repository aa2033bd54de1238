// One MCP server over streamable HTTP, by the revisions of the Model Context Protocol that have it.
// From 2026-07-28 on each request stands alone; earlier revisions open a session with `initialize`.

const MODERN = "2026-07-28";
const HANDSHAKES = ["2025-11-25", "2025-06-18", "2025-03-26"];
const CLIENT = { name: "Tokenwire playground", version: "1" };
const META = "io.modelcontextprotocol/";
const CONNECT_MILLISECONDS = 15_000; // longest wait for an answer that is not a tool's
const CALL_MILLISECONDS = 120_000; // longest run of a tool
const MAX_CHARACTERS = 4 * 2 ** 20; // of one answer
const MAX_PAGES = 20; // of the list of tools
const METHOD_NOT_FOUND = -32601;

const blocked = new Set(); // origins that the page's policy refused
document.addEventListener("securitypolicyviolation", ({ blockedURI }) => {
  if (URL.canParse(blockedURI)) blocked.add(new URL(blockedURI).origin);
});

class McpError extends Error {
  constructor(message, { code, status } = {}) {
    super(message);
    this.code = code; // of JSON-RPC
    this.status = status; // of HTTP
  }
}

export class McpClient {
  #url;
  #token;
  #version = null; // the revision in use; null before `connect`
  #session = null;
  #lastId = 0;

  constructor(url, token) {
    this.#url = url;
    this.#token = token;
  }

  // Agrees on a revision. Throws with the reason.
  async connect(signal) {
    this.#version = null;
    this.#session = null;
    if (await this.#isModern(signal)) this.#version = MODERN;
    else await this.#initialize(signal);
  }

  // Returns the tools of the server, as the protocol has them.
  async listTools(signal) {
    const tools = [];
    let cursor;
    for (let page = 0; page < MAX_PAGES; page++) {
      const result = await this.#request("tools/list", cursor ? { cursor } : {}, { signal });
      tools.push(...(Array.isArray(result.tools) ? result.tools : []));
      cursor = result.nextCursor;
      if (!cursor) break;
    }
    return tools;
  }

  // Runs a tool. Returns {text, isFailed}. Throws with the reason if the server gives no result.
  async call(tool, parameters, signal) {
    const options = { signal, milliseconds: CALL_MILLISECONDS, headers: this.#version === MODERN ? parameterHeaders(tool.inputSchema, parameters) : {} };
    const result = await this.#request("tools/call", { name: tool.name, arguments: parameters }, options);
    if (result.resultType === "input_required") throw new McpError("The tool asks for further input, which this page does not offer.");
    return { text: resultText(result), isFailed: result.isError === true };
  }

  // Ends the session, if there is one.
  close() {
    if (this.#session) fetch(this.#url, { method: "DELETE", headers: this.#headers() }).catch(() => {}); // the server ends it later
    this.#session = null;
  }

  async #isModern(signal) {
    try {
      const { supportedVersions } = await this.#request("server/discover", {}, { signal, version: MODERN });
      return Array.isArray(supportedVersions) && supportedVersions.includes(MODERN);
    } catch (error) {
      if (error.name === "AbortError" || blocked.has(new URL(this.#url).origin) || [401, 403].includes(error.status)) throw error;
      return false; // an earlier server refuses the method, or the headers
    }
  }

  async #initialize(signal) {
    const params = { protocolVersion: HANDSHAKES[0], capabilities: {}, clientInfo: CLIENT };
    const { protocolVersion } = await this.#request("initialize", params, { signal });
    if (!HANDSHAKES.includes(protocolVersion)) throw new McpError(`The server speaks the revision ${protocolVersion} of the protocol; this page speaks ${[MODERN, ...HANDSHAKES].join(", ")}.`);
    this.#version = protocolVersion;
    await this.#notify("notifications/initialized");
  }

  // Returns the result of a request. Begins a new session, once, if the server has ended ours.
  async #request(method, params, { signal, version = this.#version, milliseconds = CONNECT_MILLISECONDS, headers = {} } = {}) {
    const id = ++this.#lastId;
    const hadSession = this.#session !== null;
    const meta = { [`${META}protocolVersion`]: MODERN, [`${META}clientInfo`]: CLIENT, [`${META}clientCapabilities`]: {} };
    const isModern = version === MODERN;
    const message = { jsonrpc: "2.0", id, method, params: isModern ? { ...params, _meta: meta } : params };
    const routing = isModern ? { "mcp-method": method, ...(params.name ? { "mcp-name": headerValue(params.name) } : {}) } : {};
    const timeout = AbortSignal.timeout(milliseconds);
    const either = AbortSignal.any([timeout, ...(signal ? [signal] : [])]);
    try {
      return await this.#exchange(message, either, { ...this.#headers(version), ...routing, ...headers });
    } catch (error) {
      if (either.aborted && !isModern && method === "tools/call") this.#notify("notifications/cancelled", { requestId: id });
      if (timeout.aborted) throw new McpError(`The server did not answer within ${milliseconds / 1000} s.`);
      if (!(error.status === 404 && hadSession)) throw error;
      this.#session = null;
      await this.#initialize(signal);
      return this.#request(method, params, { signal, milliseconds, headers });
    }
  }

  async #exchange(message, signal, headers) {
    const response = await this.#post(message, signal, headers);
    this.#session = response.headers.get("mcp-session-id") ?? this.#session;
    const isStream = response.headers.get("content-type")?.startsWith("text/event-stream");
    if (!response.ok && !response.headers.get("content-type")?.startsWith("application/json")) throw statusError(response, this.#session);
    for await (const answer of isStream ? streamed(response) : whole(response)) {
      if (answer.method && answer.id !== undefined) this.#refuse(answer);
      if (answer.method || (answer.id !== message.id && response.ok)) continue; // a notification, or the answer to nothing of ours
      if (answer.error) throw new McpError(answer.error.message, { code: answer.error.code, status: response.status });
      if (!response.ok) throw statusError(response, this.#session);
      return answer.result ?? {};
    }
    throw new McpError("The server ended its answer without a result.");
  }

  async #post(message, signal, headers) {
    try {
      return await fetch(this.#url, { method: "POST", headers, body: JSON.stringify(message), signal, credentials: "omit" });
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      await new Promise((resolve) => setTimeout(resolve)); // the browser reports a refusal of the policy after the error
      const { origin } = new URL(this.#url);
      if (blocked.has(origin)) throw new McpError(`This page may not reach ${origin}. Start the server with --mcp-origins ${origin}.`);
      throw new McpError(`${origin} does not answer, or does not allow pages of ${location.origin} (CORS).`);
    }
  }

  async #notify(method, params = {}) {
    const signal = AbortSignal.timeout(CONNECT_MILLISECONDS);
    await this.#post({ jsonrpc: "2.0", method, params }, signal, this.#headers()).catch(() => {}); // it has no answer
  }

  // Answers a request of the server: this page offers it nothing.
  #refuse({ id, method }) {
    const answer = method === "ping" ? { result: {} } : { error: { code: METHOD_NOT_FOUND, message: `${method} is not offered.` } };
    this.#post({ jsonrpc: "2.0", id, ...answer }, AbortSignal.timeout(CONNECT_MILLISECONDS), this.#headers()).catch(() => {});
  }

  #headers(version = this.#version) {
    return {
      "content-type": "application/json", accept: "application/json, text/event-stream",
      ...(version ? { "mcp-protocol-version": version } : {}),
      ...(this.#session ? { "mcp-session-id": this.#session } : {}),
      ...(this.#token ? { authorization: `Bearer ${this.#token}` } : {}),
    };
  }
}

async function* pieces(response) {
  let count = 0;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) {
      count += read.value.length;
      if (count > MAX_CHARACTERS) throw new McpError(`The answer has more than ${MAX_CHARACTERS.toLocaleString()} characters.`);
      yield read.value;
    }
  } finally {
    reader.cancel().catch(() => {}); // the stream may have failed
  }
}

async function* whole(response) {
  let text = "";
  for await (const piece of pieces(response)) text += piece;
  yield parsed(text);
}

async function* streamed(response) {
  let rest = "";
  for await (const piece of pieces(response)) {
    const events = (rest + piece).replaceAll("\r\n", "\n").split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.some(Boolean)) yield parsed(data.join("\n"));
    }
  }
}

function parsed(text) {
  try {
    const value = JSON.parse(text);
    if (typeof value === "object" && value !== null) return value;
  } catch {
    // reported below
  }
  throw new McpError("The server answered with something that is not JSON-RPC.");
}

function statusError({ status, statusText }, session) {
  const hints = {
    400: session ? "" : " If the server opens sessions, its CORS must expose the header Mcp-Session-Id.",
    401: " Give the server's token.",
    404: " Check the path of the URL.",
  };
  return new McpError(`The server answered ${status} ${statusText}.${hints[status] ?? ""}`, { status });
}

// Returns the headers of parameters that the tool's schema marks with x-mcp-header.
function parameterHeaders(schema, value) {
  const headers = {};
  for (const [name, property] of Object.entries(schema?.properties ?? {})) {
    const given = value?.[name];
    if (given === undefined || given === null) continue;
    if (property["x-mcp-header"] && typeof given !== "object") headers[`Mcp-Param-${property["x-mcp-header"]}`] = headerValue(`${given}`);
    if (typeof given === "object") Object.assign(headers, parameterHeaders(property, given));
  }
  return headers;
}

function headerValue(text) {
  const isPlain = /^[\x20-\x7e]*$/.test(text) && text === text.trim() && !/^=\?base64\?.*\?=$/.test(text);
  return isPlain ? text : `=?base64?${btoa(String.fromCharCode(...new TextEncoder().encode(text)))}?=`;
}

function resultText({ content = [], structuredContent }) {
  const texts = content.map(partText).filter(Boolean);
  if (texts.length) return texts.join("\n");
  return structuredContent === undefined ? "" : JSON.stringify(structuredContent);
}

function partText({ type, text, mimeType, uri, name, resource }) {
  if (type === "text") return text;
  if (type === "resource_link") return `${name ?? "resource"}: ${uri}`;
  if (type === "resource") return resource?.text ?? `(${resource?.mimeType ?? "data"} at ${resource?.uri})`;
  return `(${mimeType ?? type}, which this page does not show)`;
}
