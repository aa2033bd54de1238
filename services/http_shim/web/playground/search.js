// Search over conversations: titles, texts and file names, in all versions of the messages.
import { allMessages, nameOf } from "./conversation.js";

const AROUND = 40; // characters of a snippet before its match
const SNIPPET = 120; // characters of a snippet

const indexed = new WeakMap(); // {updated, title, texts} of a conversation; each text is {shown, folded}

// Returns the conversations that have all words of the query, as {conversation, snippet}.
// A snippet is {before, match, after}, or null if the title has a word.
export function search(conversations, query) {
  const words = wordsOf(query);
  if (!words.length) return conversations.map((conversation) => ({ conversation, snippet: null }));
  return conversations.flatMap((conversation) => {
    const { title, texts } = indexOf(conversation);
    const has = (word) => title.folded.includes(word) || texts.some(({ folded }) => folded.includes(word));
    if (!words.every(has)) return [];
    return [{ conversation, snippet: words.some((word) => title.folded.includes(word)) ? null : snippetOf(texts, words) }];
  });
}

export function wordsOf(query) {
  return fold(query).split(/\s+/).filter(Boolean);
}

// Returns the places of the words in a text, as [start, end], in order and apart.
export function matchesIn(text, words) {
  const folded = fold(text);
  const found = words.flatMap((word) => {
    const places = [];
    for (let at = folded.indexOf(word); at >= 0; at = folded.indexOf(word, at + word.length)) places.push([at, at + word.length]);
    return places;
  });
  const ordered = found.sort(([one], [other]) => one - other);
  return ordered.filter(([start], index) => index === 0 || start >= ordered[index - 1][1]);
}

function indexOf(conversation) {
  const known = indexed.get(conversation);
  if (known?.updated === conversation.updated && known.name === conversation.name) return known;
  const texts = [...allMessages(conversation)].flatMap(({ content, attachments }) => [content, ...(attachments ?? []).map(({ name }) => name)]);
  const entry = { updated: conversation.updated, name: conversation.name, title: indexedText(nameOf(conversation)), texts: texts.map(indexedText) };
  indexed.set(conversation, entry);
  return entry;
}

function indexedText(shown) {
  return { shown, folded: fold(shown) };
}

// Lower case without a change of length, so that a place in one text is a place in the other.
function fold(text) {
  const lower = text.toLowerCase();
  return lower.length === text.length ? lower : [...text].map((each) => (each.toLowerCase().length === each.length ? each.toLowerCase() : each)).join("");
}

function snippetOf(texts, words) {
  const { shown, folded } = texts.find(({ folded }) => words.some((word) => folded.includes(word)));
  const [word, at] = words.map((each) => [each, folded.indexOf(each)]).find(([, place]) => place >= 0);
  const start = Math.max(0, at - AROUND);
  const end = at + word.length;
  return {
    before: `${start ? "…" : ""}${shown.slice(start, at)}`,
    match: shown.slice(at, end),
    after: shown.slice(end, start + SNIPPET),
  };
}
