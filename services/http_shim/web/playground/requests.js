// Requests to the server, and its streams of events.

class ServerError extends Error {
  // `status` is the HTTP status, or undefined for an error within a stream.
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let key = sessionStorage.getItem("key") ?? ""; // a session's storage belongs to one tab and ends with it

export function hasKey() {
  return key !== "";
}

export function useKey(value) {
  key = value;
  if (key) sessionStorage.setItem("key", key);
  else sessionStorage.removeItem("key");
}

export async function listModels() {
  return (await getJson("v1/models")).data.filter((model) => !model.placeholder);
}

export async function getJson(path, signal) {
  const response = await send(path, { signal });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

export async function postJson(path, body, signal) {
  const response = await send(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
  if (!response.ok) throw await errorOf(response);
  return response.json();
}

// Yields the parsed events of the answer, up to [DONE].
export async function* stream(path, body, signal) {
  const response = await send(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  for await (const event of events(response)) {
    if (event.error) throw new ServerError(event.error.message);
    yield event;
  }
}

export function curl(path, body) {
  const quoted = JSON.stringify({ ...body, stream: true }).replaceAll("'", "'\\''");
  const header = key ? " \\\n  -H \"Authorization: Bearer $API_KEY\"" : "";
  return `curl -N ${new URL(path, location.href)} \\\n  -H 'Content-Type: application/json'${header} \\\n  -d '${quoted}'`;
}

async function* events(response) {
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const lines = (rest + read.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
  throw new ServerError("The stream ended before the answer was complete. The server may have stopped.");
}

// Calls `fetch` with the key in the headers.
export function send(path, options) {
  const authorization = key ? { authorization: `Bearer ${key}` } : {};
  return fetch(path, { ...options, headers: { ...options.headers, ...authorization } });
}

async function errorOf(response) {
  try {
    return new ServerError((await response.json()).error.message, response.status);
  } catch {
    return new ServerError(`${response.status} ${response.statusText}`, response.status);
  }
}
