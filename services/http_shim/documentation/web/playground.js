// Playground: sends the form's request to the API, and shows the stream as it arrives.

const form = document.getElementById("form");
const fields = form.elements;
const answers = document.getElementById("answers");
const status = document.getElementById("status");
let conversation = []; // messages of the chat so far
let running = null; // AbortController of the request in progress

fields.key.value = sessionStorage.getItem("key") ?? "";
form.addEventListener("input", showCurl);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
fields.key.addEventListener("change", () => {
  sessionStorage.setItem("key", fields.key.value);
  listModels();
});
for (const radio of fields.kind) radio.addEventListener("change", clearConversation);
document.getElementById("clear").addEventListener("click", clearConversation);
document.getElementById("stop").addEventListener("click", () => running?.abort());
await listModels();
showCurl();

async function listModels() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (response.status === 401) document.getElementById("key").hidden = false;
    if (!response.ok) throw await errorOf(response);
    const models = (await response.json()).data.filter((model) => !model.placeholder);
    fields.model.replaceChildren(...models.map((model) => new Option(model.id)));
    showStatus("");
  } catch (error) {
    showStatus(error.message, true);
  }
}

function clearConversation() {
  conversation = [];
  answers.replaceChildren();
  showStatus("");
}

// Returns the path and the body that the form describes. Throws if the further fields are not JSON.
function buildRequest() {
  const isChat = fields.kind.value === "chat";
  const body = { model: fields.model.value, stream: true, stream_options: { include_usage: true } };
  if (isChat) {
    const system = fields.system.value;
    body.messages = [
      ...(system ? [{ role: "system", content: system }] : []),
      ...conversation,
      { role: "user", content: fields.prompt.value },
    ];
  } else {
    body.prompt = fields.prompt.value;
    if (fields.suffix.value) body.suffix = fields.suffix.value;
  }
  for (const name of ["max_tokens", "temperature", "top_p", "top_k", "seed"]) {
    if (fields[name].value !== "") body[name] = Number(fields[name].value);
  }
  if (fields.grammar_type.value) {
    body.grammar = { type: fields.grammar_type.value, value: fields.grammar.value };
  }
  if (fields.logprobs.checked) Object.assign(body, isChat ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
  if (fields.further.value.trim()) {
    try {
      Object.assign(body, JSON.parse(fields.further.value));
    } catch (error) {
      throw new Error(`Further fields: ${error.message}`);
    }
  }
  return { path: isChat ? "v1/chat/completions" : "v1/completions", body };
}

function showCurl() {
  const curl = document.getElementById("curl");
  try {
    const { path, body } = buildRequest();
    const quoted = JSON.stringify(body).replaceAll("'", "'\\''");
    const key = fields.key.value ? " \\\n  -H \"Authorization: Bearer $API_KEY\"" : "";
    curl.textContent = `curl -N ${new URL(path, location.href)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'`;
  } catch (error) {
    curl.textContent = error.message;
  }
}

async function send() {
  if (running) return;
  const controller = (running = new AbortController());
  setRunning(true);
  const began = performance.now();
  try {
    const { path, body } = buildRequest();
    if (body.messages) addBlock("user").textContent = body.messages.at(-1).content;
    else answers.replaceChildren();
    const response = await fetch(path, {
      method: "POST",
      headers: { ...headers(), "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: controller.signal,
    });
    if (!response.ok) throw await errorOf(response);
    const shown = body.stream ? await showStream(response, began) : showWhole(await response.json());
    if (body.messages) {
      conversation.push(body.messages.at(-1), { role: "assistant", content: shown });
      fields.prompt.value = "";
      showCurl();
    }
  } catch (error) {
    showStatus(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
  } finally {
    running = null;
    setRunning(false);
  }
}

// Shows each choice in its own block; returns the text of the first.
async function showStream(response, began) {
  const blocks = new Map();
  let first = null;
  let usage = null;
  let text = "";
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      first ??= performance.now();
      if (!blocks.has(choice.index)) blocks.set(choice.index, addBlock());
      showPart(blocks.get(choice.index), choice);
      if (choice.index === 0) text += choice.text ?? choice.delta.content ?? "";
    }
    if (usage && first) showStatus(speed(usage, first - began, performance.now() - began));
  }
  return text;
}

function showWhole(answer) {
  for (const choice of answer.choices) showPart(addBlock(), { ...choice, delta: choice.message });
  showStatus(`${answer.usage.prompt_tokens} + ${answer.usage.completion_tokens} tokens`);
  const [first] = answer.choices;
  return first.text ?? first.message.content ?? "";
}

function showPart(block, choice) {
  const delta = choice.delta ?? {};
  if (delta.reasoning_content) addText(block, delta.reasoning_content, "thought");
  const text = choice.text ?? delta.content ?? "";
  const tokens = tokensOf(choice);
  if (tokens.map((token) => token.text).join("") === text) {
    for (const token of tokens) addToken(block, token);
  } else {
    addText(block, text); // several tokens that form one character are shown as text
  }
  for (const call of delta.tool_calls ?? []) {
    const name = call.function.name ? `\n${call.function.name} ` : "";
    addText(block, name + (call.function.arguments ?? ""), "thought");
  }
}

// Returns the tokens of a part as {text, logprob, others: [[text, logprob]]}, without tokens that the text omits.
function tokensOf({ logprobs, text }) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      text: token,
      logprob,
      others: top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  const offsets = logprobs.text_offset;
  const end = offsets[0] + [...text].length;
  const tokens = logprobs.tokens.map((token, index) => ({
    text: token,
    logprob: logprobs.token_logprobs[index],
    others: Object.entries(logprobs.top_logprobs?.[index] ?? {}),
  }));
  return tokens.filter((_, index) => (offsets[index + 1] ?? end) > offsets[index]);
}

function addToken(block, { text, logprob, others }) {
  const span = addText(block, text, "token");
  if (logprob === null) return; // the first token of an echoed prompt
  const percent = (value) => `${(100 * Math.exp(value)).toFixed(1)} %`;
  const ranked = others.sort(([, one], [, other]) => other - one);
  span.title = [`${percent(logprob)}  chosen`, ...ranked.map(([other, value]) => `${percent(value)}  ${JSON.stringify(other)}`)].join("\n");
  span.style.backgroundColor = `hsl(${120 * Math.exp(logprob)} 70% 50% / 30%)`;
}

function addText(block, text, kind) {
  const span = document.createElement("span");
  span.textContent = text;
  if (kind) span.className = kind;
  block.append(span);
  return span;
}

function addBlock(kind) {
  const block = document.createElement("div");
  block.className = kind ? `answer ${kind}` : "answer";
  answers.append(block);
  return block;
}

// Yields the parsed events of a server-sent stream up to [DONE].
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
  throw new Error("The stream ended without [DONE].");
}

// The rate covers the whole request, because text that may be a tool call arrives late and at once.
function speed(usage, first, all) {
  const tokens = usage.completion_tokens;
  const rate = Math.round((1000 * tokens) / all);
  return `${usage.prompt_tokens} + ${tokens} tokens in ${Math.round(all)} ms (${rate}/s), first after ${Math.round(first)} ms`;
}

async function errorOf(response) {
  try {
    return new Error((await response.json()).error.message);
  } catch {
    return new Error(`${response.status} ${response.statusText}`);
  }
}

function headers() {
  return fields.key.value ? { authorization: `Bearer ${fields.key.value}` } : {};
}

function setRunning(isRunning) {
  document.getElementById("send").disabled = isRunning;
  document.getElementById("stop").disabled = !isRunning;
}

function showStatus(text, isError = false) {
  status.textContent = text;
  status.classList.toggle("error", isError);
}
