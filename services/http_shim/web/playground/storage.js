// Conversations and settings, stored in this browser only. Conversations are in IndexedDB: localStorage has no room for images.

const MAX_CONVERSATIONS = 100; // the oldest are deleted
const MAX_CHARACTERS = 64 * 2 ** 20; // of all conversations as JSON

function whenDone(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const opened = (() => {
  const request = indexedDB.open("tokenwire-playground", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
  return whenDone(request);
})();
opened.catch(() => {}); // each caller of `store` reports it

async function store(mode) {
  return (await opened).transaction("conversations", mode).objectStore("conversations");
}

// Returns all conversations, the newest first.
export async function loadConversations() {
  const all = await whenDone((await store("readonly")).getAll());
  return all.sort((one, other) => other.updated - one.updated);
}

export async function saveConversation(conversation) {
  await whenDone((await store("readwrite")).put(conversation));
}

export async function deleteConversation(id) {
  await whenDone((await store("readwrite")).delete(id));
}

// Deletes the oldest conversations until the bounds hold; returns those that remain.
export async function deleteOldest(newestFirst) {
  const remaining = [];
  let characters = 0;
  for (const conversation of newestFirst) {
    characters += JSON.stringify(conversation).length;
    const fits = remaining.length < MAX_CONVERSATIONS && (characters <= MAX_CHARACTERS || remaining.length === 0);
    if (fits) remaining.push(conversation);
    else await deleteConversation(conversation.id);
  }
  return remaining;
}

export function loadSettings() {
  try {
    return JSON.parse(localStorage.getItem("tokenwire.settings")) ?? {};
  } catch {
    return {};
  }
}

export function saveSettings(settings) {
  try {
    localStorage.setItem("tokenwire.settings", JSON.stringify(settings));
  } catch {
    // a full or forbidden storage only loses the settings at the next load
  }
}
