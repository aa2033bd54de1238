// The playground: connects the parts of the page, and keeps the state of the mode that is not shown.
import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { newConversation, shownMessages } from "./conversation.js";
import { Images } from "./images.js";
import { Panels } from "./panels.js";
import { curl, hasKey, listModels, useKey } from "./requests.js";
import { SavedConversations } from "./saved.js";
import { Scroller } from "./scroller.js";
import { Settings } from "./settings.js";

const at = (id) => document.getElementById(id);
const settings = new Settings(at("settings-form"));
const scroller = new Scroller(at("scroll"));
const host = {
  settings,
  scroller,
  model: () => at("model").value,
  changed: (conversation) => saved.save(conversation),
  grown: (conversation) => saved.saveGrowing(conversation),
  running: showRunning,
  say,
  focus: () => mode() === "chat" && at("box").focus(),
};
const chat = new Chat(at("messages"), host);
const completion = new Completion(at("completion"), at("completion-output"), host);
const saved = new SavedConversations(at("conversations"), { open, say });
const images = new Images({ list: at("attached"), input: at("images"), box: at("composer"), say });
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
  if (event.key !== "Escape") return;
  if (current().running) current().stop();
  else panels.close();
});
at("modes").addEventListener("change", showMode);
at("new").addEventListener("click", () => open(null));
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
at("settings-form").addEventListener("input", showCurl);
await showModels();
const last = await saved.load();
if (!chat.conversation.children.length) open(last); // no message was sent while it was loaded

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
  if (!content.trim() && !images.count) return at("box").focus();
  at("box").value = "";
  say("");
  chat.send(content, images.take());
  saved.current(chat.conversation);
}

function open(conversation) {
  chat.stop();
  chat.open(conversation ?? newConversation());
  saved.current(chat.conversation);
  panels.close();
  host.focus();
}

function showMode() {
  const isChat = mode() === "chat";
  for (const [id, isShown] of [["chat", isChat], ["completion", !isChat], ["box", isChat], ["attach", isChat], ["attached", isChat]]) {
    at(id).hidden = !isShown;
  }
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

function showCurl() {
  if (!at("curl-details").open) return;
  try {
    const request = mode() === "chat" ? chat.request(shownMessages(chat.conversation)) : completion.request();
    at("curl").textContent = curl(...request);
  } catch (error) {
    at("curl").textContent = error.message;
  }
}

async function showModels() {
  at("key-state").textContent = hasKey() ? "A key is in use, for this tab alone." : "No key is in use.";
  try {
    const models = await listModels();
    const chosen = at("model").value;
    at("model").replaceChildren(...models.map((model) => new Option(model.id)));
    if (models.some((model) => model.id === chosen)) at("model").value = chosen;
    say("");
  } catch (error) {
    at("key-state").textContent = error.message;
    say(error.message);
  }
}
