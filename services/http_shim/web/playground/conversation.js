// Conversations: trees of messages. An edit or a new answer is a sibling of the old one, so the old one stays.
// The page shows and sends one path from the root.

export function newConversation() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, name: "", updated: Date.now(), children: [], shown: 0 };
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

// Removes this version of the message and the messages after it.
export function removeMessage(conversation, message) {
  const parent = parentOf(conversation, message);
  parent.children.splice(parent.children.indexOf(message), 1);
  parent.shown = Math.max(0, Math.min(parent.shown, parent.children.length - 1));
}

// Returns the messages of a chat request.
export function requestMessages(system, messages) {
  const sent = messages.filter(({ role, content, calls }) => role !== "assistant" || content || calls?.length);
  return [...(system ? [{ role: "system", content: system }] : []), ...sent.map(requestMessage)];
}

function requestMessage({ role, content, images, calls, reasoning, callId }) {
  const message = { role, content };
  if (images?.length) {
    const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
    message.content = [...(content ? [{ type: "text", text: content }] : []), ...parts];
  }
  if (calls?.length) {
    message.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    message.content = content || null;
  }
  if (reasoning) message.reasoning_content = reasoning;
  if (callId) message.tool_call_id = callId;
  return message;
}

// Adds a delta of the stream to an answer.
export function extendMessage(message, delta) {
  message.content += delta.content ?? "";
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

export function nameOf(conversation) {
  const first = shownMessages(conversation)[0]?.content.trim().split("\n")[0];
  return conversation.name || first?.slice(0, 60) || "New conversation";
}

export function asMarkdown(conversation) {
  const parts = [`# ${nameOf(conversation)}`];
  for (const { role, content, reasoning, calls } of shownMessages(conversation)) {
    parts.push(`## ${role}`);
    if (reasoning) parts.push(reasoning.replace(/^/gm, "> "));
    if (content) parts.push(content);
    for (const call of calls ?? []) parts.push(`\`\`\`json\n{"name": ${JSON.stringify(call.name)}, "arguments": ${call.arguments}}\n\`\`\``);
  }
  return `${parts.join("\n\n")}\n`;
}

// Returns the conversation of an exported file. Throws with the reason if the file is not one.
export function fromJson(text) {
  const { conversation } = JSON.parse(text);
  if (!Array.isArray(conversation?.children)) throw new Error('The file has no "conversation". Import a file that this page exported.');
  return { ...newConversation(), name: String(conversation.name ?? ""), ...checkedChildren(conversation) };
}

function checkedChildren({ children, shown }) {
  const messages = (Array.isArray(children) ? children : []).map((child) => {
    if (!["user", "assistant", "tool"].includes(child.role)) throw new Error(`The file has a message of the role ${child.role}.`);
    const images = (child.images ?? []).filter((url) => /^data:image\//.test(url));
    const calls = (child.calls ?? []).map((call) => ({ id: `${call.id}`, name: `${call.name}`, arguments: `${call.arguments}` }));
    const fields = { content: `${child.content ?? ""}`, images, calls };
    for (const name of ["reasoning", "callId", "error"]) if (child[name]) fields[name] = `${child[name]}`;
    return { ...newMessage(child.role, fields), ...checkedChildren(child) };
  });
  return { children: messages, shown: Math.max(0, Math.min(Number(shown) || 0, messages.length - 1)) };
}
