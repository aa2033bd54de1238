// Conversations: trees of messages. An edit or a new answer is a sibling of the old one, so the old one stays.
// The page shows and sends one path from the root.

const TITLE_CHARACTERS = 60;

export function newId() {
  return crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`; // plain HTTP beyond loopback has no randomUUID
}

export function newConversation() {
  return { id: newId(), name: "", updated: Date.now(), system: null, allowedTools: [], children: [], shown: 0 };
}

export function newMessage(role, fields = {}) {
  return { role, content: "", ...fields, children: [], shown: 0 };
}

export function shownMessages(conversation) {
  const path = [];
  for (let at = conversation.children[conversation.shown]; at; at = at.children[at.shown]) path.push(at);
  return path;
}

export function lastOf(conversation) {
  return shownMessages(conversation).at(-1) ?? conversation;
}

export function parentOf(conversation, message) {
  const path = shownMessages(conversation);
  return path[path.indexOf(message) - 1] ?? conversation;
}

export function addVersion(parent, message) {
  parent.shown = parent.children.push(message) - 1;
  return message;
}

// Removes this version of the message and the messages after it. Returns a function that puts them back.
export function removeMessage(conversation, message) {
  const parent = parentOf(conversation, message);
  const index = parent.children.indexOf(message);
  const { shown } = parent;
  parent.children.splice(index, 1);
  parent.shown = Math.max(0, Math.min(shown, parent.children.length - 1));
  return () => {
    parent.children.splice(index, 0, message);
    parent.shown = shown;
  };
}

// Yields every message, also those of other versions.
export function* allMessages({ children }) {
  for (const message of children) {
    yield message;
    yield* allMessages(message);
  }
}

// Returns the attached files of all messages, as {id, name, type, size}.
export function filesOf(conversation) {
  return [...allMessages(conversation)].flatMap(({ attachments }) => attachments ?? []);
}

// Returns the messages of a chat request. `dataOf` returns the data of a file.
export async function requestMessages(system, messages, dataOf) {
  const sent = messages.filter(({ role, content, calls }) => role !== "assistant" || content || calls?.length);
  const made = await Promise.all(sent.map((message) => requestMessage(message, dataOf)));
  return [...(system ? [{ role: "system", content: system }] : []), ...made];
}

async function requestMessage({ role, content, attachments, calls, reasoning, callId }, dataOf) {
  const message = { role, content };
  if (attachments?.length) {
    const files = await Promise.all(attachments.map(async (file) => [file.type, part(file, await dataOf(file))]));
    const text = content ? [{ type: "text", text: content }] : [];
    const images = files.filter(([type]) => type.startsWith("image/")).map(([, each]) => each);
    const documents = files.filter(([type]) => !type.startsWith("image/")).map(([, each]) => each);
    message.content = [...documents, ...text, ...images]; // a question after its documents is answered better
  }
  if (calls?.length) {
    message.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    message.content = content || null;
  }
  if (reasoning) message.reasoning_content = reasoning;
  if (callId) message.tool_call_id = callId;
  return message;
}

function part({ name, type }, data) {
  if (type.startsWith("image/")) return { type: "image_url", image_url: { url: data } };
  if (type === "application/pdf") return { type: "file", file: { filename: name, file_data: data } };
  return { type: "text", text: `File ${name}:\n${fenced(data)}\n\n` };
}

function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
}

// Adds a delta of the stream to an answer.
export function extendMessage(message, delta) {
  message.content += delta.content ?? "";
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const piece of delta.tool_calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= piece.id ?? "";
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
}

// Returns the title: the user's, or the first words of the first message.
export function nameOf(conversation) {
  return conversation.name || defaultName(conversation);
}

export function defaultName(conversation) {
  const first = shownMessages(conversation)[0];
  const words = first?.content.replace(/[\s#*`>_]+/g, " ").trim() || first?.attachments?.[0]?.name || "";
  return shortTitle(words) || "New conversation";
}

// Returns the text, or its first words.
export function shortTitle(text) {
  if (text.length <= TITLE_CHARACTERS) return text;
  const cut = text.slice(0, TITLE_CHARACTERS);
  const end = cut.lastIndexOf(" ");
  return `${end > TITLE_CHARACTERS / 2 ? cut.slice(0, end) : cut}…`;
}

export function asMarkdown(conversation) {
  const parts = [`# ${nameOf(conversation)}`];
  if (conversation.system) parts.push("## system", conversation.system);
  for (const { role, content, reasoning, calls, attachments } of shownMessages(conversation)) {
    parts.push(`## ${role}`);
    for (const { name } of attachments ?? []) parts.push(`(File: ${name})`);
    if (reasoning) parts.push(reasoning.replace(/^/gm, "> "));
    if (content) parts.push(content);
    for (const call of calls ?? []) parts.push(`\`\`\`json\n{"name": ${JSON.stringify(call.name)}, "arguments": ${call.arguments}}\n\`\`\``);
  }
  return `${parts.join("\n\n")}\n`;
}

// Returns a conversation of the first format in today's: images become files, which are added to `files`.
export function renewed(conversation, files) {
  const renew = ({ images = [], usage, ...message }) => {
    const attachments = images.map((data, index) => {
      const type = /^data:([^;,]+)/.exec(data)?.[1] ?? "image/png";
      const file = { id: newId(), name: `image ${index + 1}.${type.slice(6)}`, type, size: Math.floor((data.length * 3) / 4) };
      files.push({ id: file.id, data });
      return file;
    });
    const figures = typeof usage === "string" ? { note: [message.note, usage].filter(Boolean).join(" ") } : usage ? { usage } : {};
    return { ...message, ...figures, ...(attachments.length ? { attachments } : {}), children: message.children.map(renew) };
  };
  return { system: null, allowedTools: [], ...conversation, children: conversation.children.map(renew) };
}

const IMAGE = /^data:image\/(?:png|jpeg|webp|gif);base64,/;
const PDF = /^data:application\/pdf;base64,/;

// Returns the conversation of an exported file, and its files as {id, data}. Throws with the reason if the file is not one.
export function fromJson(text) {
  const { conversation, files = [] } = JSON.parse(text);
  if (!Array.isArray(conversation?.children)) throw new Error('The file has no "conversation". Import a file that this page exported.');
  const exported = new Map(Array.isArray(files) ? files.map(({ id, data }) => [id, `${data}`]) : []);
  const made = []; // under new ids: an import never replaces a file of another conversation
  const takeFile = ({ id, name, type, size }) => {
    const data = exported.get(id);
    const isKnown = data !== undefined && (IMAGE.test(data) ? data.startsWith(`data:${type};`) : PDF.test(data) ? type === "application/pdf" : type === "text/plain");
    if (!isKnown) return [];
    made.push({ id: newId(), data });
    return [{ id: made.at(-1).id, name: `${name}`, type, size: Number(size) || 0 }];
  };
  const earlier = [];
  const inner = renewed({ children: [], ...checkedChildren(conversation, takeFile) }, earlier);
  const system = typeof conversation.system === "string" ? conversation.system : null;
  const whole = { ...newConversation(), name: String(conversation.name ?? ""), system, children: inner.children, shown: inner.shown };
  return { conversation: whole, files: [...made, ...earlier] };
}

function checkedChildren({ children, shown }, takeFile) {
  const messages = (Array.isArray(children) ? children : []).map((child) => {
    if (!["user", "assistant", "tool"].includes(child.role)) throw new Error(`The file has a message of the role ${child.role}.`);
    const images = (child.images ?? []).filter((url) => IMAGE.test(url));
    const attachments = (child.attachments ?? []).flatMap(takeFile);
    const calls = (child.calls ?? []).map((call) => ({ id: `${call.id}`, name: `${call.name}`, arguments: `${call.arguments}` }));
    const fields = { content: `${child.content ?? ""}`, images };
    if (attachments.length) fields.attachments = attachments;
    if (calls.length) fields.calls = calls;
    for (const name of ["reasoning", "callId", "error", "note", "toolName"]) if (child[name]) fields[name] = `${child[name]}`;
    if (child.isFailed === true) fields.isFailed = true;
    fields.usage = typeof child.usage === "string" ? child.usage : checkedUsage(child.usage);
    return { ...newMessage(child.role, fields), ...checkedChildren(child, takeFile) };
  });
  return { children: messages, shown: Math.max(0, Math.min(Number(shown) || 0, messages.length - 1)) };
}

function checkedUsage(usage) {
  if (typeof usage !== "object" || usage === null) return undefined;
  const names = ["prompt", "cached", "output", "tokensPerSecond", "firstMilliseconds"];
  return Object.fromEntries(names.map((name) => [name, Number(usage[name]) || 0]));
}
