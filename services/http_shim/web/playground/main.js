// The playground: connects the parts of the page, and keeps the state of the mode that is not shown.
import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { newConversation, shownMessages } from "./conversation.js";
import { ConversationHead } from "./conversation_head.js";
import { Gauge } from "./gauge.js";
import { McpServers } from "./mcp_servers.js";
import { ModelPicker } from "./models.js";
import { Panels } from "./panels.js";
import { curl, hasKey, useKey } from "./requests.js";
import { SavedConversations } from "./saved.js";
import { Scroller } from "./scroller.js";
import { Settings } from "./settings.js";
import { Toast } from "./toast.js";

const START_MILLISECONDS = 3000; // between two looks for the models of a server that starts

const at = (id) => document.getElementById(id);
const settings = new Settings(at("settings-form"));
const scroller = new Scroller(at("scroll"));
const toast = new Toast(at("toast"), () => host.focus());
const models = new ModelPicker(at("model"), at("model-state"), { say, changed: showModel });
const tools = new McpServers({ list: at("mcp-servers"), form: at("mcp-form") }, showTools);
const gauge = new Gauge(
  { box: at("context"), warning: at("context-warning") },
  { isShown: () => mode() === "chat", card: () => models.card, model: () => models.id, typed: typedText },
);
const host = {
  settings, scroller, models, tools, toast, say,
  changed: (conversation, newFiles) => {
    showConversation();
    return saved.save(conversation, newFiles);
  },
  grown: (conversation) => saved.saveGrowing(conversation),
  running: showRunning,
  focus: () => mode() === "chat" && at("box").focus(),
};
const chat = new Chat(at("messages"), host);
const completion = new Completion(at("completion"), at("completion-output"), host);
const saved = new SavedConversations(
  { list: at("conversations"), search: at("search"), count: at("found") },
  { open, say, toast, renamed: showConversation },
);
const head = new ConversationHead(
  { title: at("title"), suggest: at("suggest"), system: at("system"), summary: at("system-summary") },
  {
    say, toast,
    model: () => models.id,
    changed: () => saved.save(chat.conversation),
    defaultSystem: () => settings.system,
  },
);
const attachments = new Attachments({
  list: at("attached"), input: at("files"), box: at("box"), area: document.body, say,
  accepts: () => mode() === "chat",
  changed: () => gauge.typed(),
});
const panels = new Panels();

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("box").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // an input method's Enter chooses a word
  event.preventDefault();
  send();
});
at("completion").addEventListener("submit", (event) => event.preventDefault());
at("completion").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
});
at("stop").addEventListener("click", () => {
  current().stop();
  host.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    panels.open("saved");
    saved.focusSearch();
  }
  if (event.key !== "Escape") return;
  if (current().running) current().stop();
  else panels.close();
});
at("modes").addEventListener("change", showMode);
at("new").addEventListener("click", () => open(null, []));
at("delete-all").addEventListener("click", () => saved.deleteAll());
at("box").addEventListener("input", () => gauge.typed());
at("export-json").addEventListener("click", () => saved.export(chat.conversation, "json"));
at("export-markdown").addEventListener("click", () => saved.export(chat.conversation, "markdown"));
at("import").addEventListener("change", (event) => saved.import(event.target.files[0]));
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value.trim());
  at("key").value = "";
  showModels();
});
at("forget-key").addEventListener("click", () => {
  useKey("");
  showModels();
});
at("curl-details").addEventListener("toggle", showCurl);
at("settings-form").addEventListener("input", () => {
  showCurl();
  showConversation();
});
head.open(chat.conversation);
tools.start();
await showModels();
const last = await saved.load();
if (!chat.conversation.children.length) open(last, []); // no message was sent while it was loaded

function mode() {
  return document.querySelector("[name=mode]:checked").value;
}

function current() {
  return mode() === "chat" ? chat : completion;
}

function send() {
  if (current().running) return;
  if (mode() === "completion") return completion.send();
  const content = at("box").value;
  if (!content.trim() && !attachments.count) return at("box").focus();
  at("box").value = "";
  say("");
  chat.send(content, attachments.take());
  gauge.typed();
  saved.current(chat.conversation);
}

function open(conversation, words) {
  chat.stop();
  chat.open(conversation ?? newConversation(), words);
  head.open(chat.conversation);
  showConversation();
  saved.current(chat.conversation);
  panels.close();
  host.focus();
}

function showMode() {
  const isChat = mode() === "chat";
  for (const [id, isShown] of [["chat", isChat], ["head", isChat], ["completion", !isChat], ["box", isChat], ["attach", isChat]]) {
    at(id).hidden = !isShown;
  }
  at("attached").hidden = !isChat || !attachments.count;
  showModel();
  showRunning();
  showCurl();
}

function showRunning() {
  const { running } = current();
  at("send").hidden = running;
  at("stop").hidden = !running;
}

function say(text) {
  at("status").textContent = text;
}

function typedText() {
  return [at("box").value, ...attachments.texts].join("");
}

function showConversation() {
  head.draw();
  gauge.show(chat.conversation, chat.conversation.system ?? settings.system);
}

function showModel() {
  settings.showLimit(mode() === "chat", models.card);
  gauge.draw();
}

function showTools() {
  chat.renewCalls();
  showCurl();
}

async function showCurl() {
  if (!at("curl-details").open) return;
  try {
    const request = mode() === "chat" ? await chat.request(shownMessages(chat.conversation)) : completion.request();
    at("curl").textContent = curl(...request);
  } catch (error) {
    at("curl").textContent = error.message;
  }
}

async function showModels() {
  at("key-state").textContent = hasKey() ? "A key is in use, for this tab alone." : "No key is in use.";
  try {
    await models.refresh();
    say("");
  } catch (error) {
    at("key-state").textContent = error.message;
    say(error.message);
    const isStarting = error.status === undefined || error.status >= 500;
    if (isStarting) setTimeout(showModels, START_MILLISECONDS);
  }
}
