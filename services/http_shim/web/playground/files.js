// Data of the attached files: texts, and data URLs of images and PDFs. Those of the open conversation are in memory.
import { filesOf } from "./conversation.js";
import { loadFile } from "./storage.js";

const held = new Map(); // data by id

export function holdFile({ id, data }) {
  held.set(id, data);
}

// Returns the data of a file. Throws with the reason if the browser no longer has it.
export async function fileData({ id, name }) {
  if (!held.has(id)) {
    const data = await loadFile(id).catch(() => null);
    if (data === null) throw new Error(`This browser no longer has ${name}. Delete the message, and attach the file again.`);
    held.set(id, data);
  }
  return held.get(id);
}

// Returns the files of a conversation as {id, data}, without those that are lost.
export async function storedFiles(conversation) {
  const found = filesOf(conversation).map(async (file) => ({ id: file.id, data: await fileData(file).catch(() => null) }));
  return (await Promise.all(found)).filter(({ data }) => data !== null);
}

// Drops the files of other conversations from the memory.
export function holdOnly(conversation) {
  const kept = new Set(filesOf(conversation).map(({ id }) => id));
  for (const id of held.keys()) if (!kept.has(id)) held.delete(id);
}
