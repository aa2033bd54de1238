// Conversations, their files and settings, stored in this browser only. IndexedDB has room for files; localStorage has not.
import { filesOf, renewed } from "./conversation.js";

const HOUR = 3_600_000; // milliseconds that a file without a conversation stays: a deletion may be undone
const PURGE_MILLISECONDS = 60_000; // after which a deleted conversation leaves the storage at the next visit

function whenDone(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function whenComplete(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
    transaction.onerror = () => reject(transaction.error);
  });
}

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("tokenwire-playground", 2);
  request.onupgradeneeded = ({ oldVersion }) => upgrade(request, oldVersion);
  request.onblocked = () => reject(new Error("Another tab has an earlier version of this page open. Close it, and load this page again."));
  request.onerror = () => reject(request.error);
  request.onsuccess = () => {
    request.result.onversionchange = () => request.result.close(); // a later version of the page waits for this
    resolve(request.result);
  };
});
opened.catch(() => {}); // each caller reports it

// Version 1 kept images within the messages, and nothing else.
function upgrade({ result, transaction }, oldVersion) {
  if (oldVersion < 1) result.createObjectStore("conversations", { keyPath: "id" });
  const files = result.createObjectStore("files", { keyPath: "id" });
  if (oldVersion < 1) return;
  transaction.objectStore("conversations").openCursor().onsuccess = ({ target }) => {
    const cursor = target.result;
    if (!cursor) return;
    const found = [];
    cursor.update(renewed(cursor.value, found));
    for (const file of found) files.put({ ...file, stored: Date.now() });
    cursor.continue();
  };
}

async function stores(mode) {
  const transaction = (await opened).transaction(["conversations", "files"], mode);
  return { transaction, conversations: transaction.objectStore("conversations"), files: transaction.objectStore("files") };
}

// Returns all conversations, the newest first.
export async function loadConversations() {
  const { conversations } = await stores("readonly");
  const all = await whenDone(conversations.getAll());
  return all.filter(({ deleted }) => !deleted).sort((one, other) => other.updated - one.updated);
}

// Stores a conversation and new files of it, {id, data}, or none of them.
export async function saveConversation(conversation, newFiles = []) {
  const { transaction, conversations, files } = await stores("readwrite");
  conversations.put(conversation);
  for (const file of newFiles) files.put({ ...file, stored: Date.now() });
  await whenComplete(transaction);
}

// Marks conversations as deleted, or not. `purge` removes them at a later visit.
export async function markDeleted(deleted, isDeleted) {
  const { transaction, conversations } = await stores("readwrite");
  for (const conversation of deleted) {
    if (isDeleted) conversations.put({ ...conversation, deleted: Date.now() });
    else conversations.put(conversation);
  }
  await whenComplete(transaction);
}

// Returns the data of a file, or null.
export async function loadFile(id) {
  const { files } = await stores("readonly");
  return (await whenDone(files.get(id)))?.data ?? null;
}

// Removes conversations that were deleted a while ago, and files without a conversation.
export async function purge() {
  const { transaction, conversations, files } = await stores("readwrite");
  const used = new Set();
  for (const conversation of await whenDone(conversations.getAll())) {
    if (conversation.deleted && Date.now() - conversation.deleted > PURGE_MILLISECONDS) conversations.delete(conversation.id);
    else for (const { id } of filesOf(conversation)) used.add(id);
  }
  files.openCursor().onsuccess = ({ target }) => {
    const cursor = target.result;
    if (!cursor) return;
    if (!used.has(cursor.value.id) && Date.now() - cursor.value.stored > HOUR) cursor.delete();
    cursor.continue();
  };
  await whenComplete(transaction);
}

const SETTINGS = "tokenwire.settings";
const PREFILLED = { temperature: "0.2", max_tokens: "512" }; // which earlier versions stored although nobody had set them

export function loadSettings() {
  const stored = loadItem(SETTINGS, {});
  if (stored.version) return stored;
  for (const [name, value] of Object.entries(PREFILLED)) if (stored[name] === value) delete stored[name];
  return stored;
}

export function saveSettings(settings) {
  saveItem(SETTINGS, { ...settings, version: 2 });
}

export function loadItem(name, empty) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? empty;
  } catch {
    return empty;
  }
}

export function saveItem(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // a full or forbidden storage only loses the settings at the next load
  }
}
