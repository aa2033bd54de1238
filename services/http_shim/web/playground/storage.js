// Conversations and settings, kept in this browser alone. IndexedDB has room for images, localStorage has not.

const MOST = 100; // conversations; the oldest give way
const MOST_CHARACTERS = 64 * 2 ** 20; // of all conversations as JSON

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
opened.catch(() => {}); // each use reports it

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

// Deletes the oldest conversations beyond the bounds; returns those that remain.
export async function boundConversations(newestFirst) {
  const remaining = [];
  let characters = 0;
  for (const conversation of newestFirst) {
    characters += JSON.stringify(conversation).length;
    const fits = remaining.length < MOST && (characters <= MOST_CHARACTERS || remaining.length === 0);
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
    // a full or forbidden storage loses the settings at reload, nothing else
  }
}
