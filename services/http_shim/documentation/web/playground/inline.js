// Inline markdown: code, emphasis, links. Repetitions are bounded, so hostile text costs linear time.
import { element } from "./elements.js";

const INLINE = new RegExp(
  [
    /\\(?<escaped>[!-/:-@[-`{-~])/,
    /(?<ticks>`{1,3})(?<code>.{1,400}?)\k<ticks>(?!`)/,
    /\*\*(?<strong>(?! )[^\n]{1,400}?[^ ])\*\*/,
    /(?<![\w*])[*_](?<em>(?![ *_])[^*_\n]{1,400}?)[*_](?![\w*])/,
    /~~(?<struck>[^~\n]{1,400}?)~~/,
    /!?\[(?<label>[^[\]\n]{0,400})\]\((?<target>[^()\s]{1,1000})(?: "[^"\n]{0,200}")?\)/,
    /(?<bare>https?:\/\/[^\s<>()[\]"'`]{1,1000}[^\s<>()[\]"'`.,;:!?*_])/,
  ].map((part) => part.source).join("|"),
  "gs",
);
const DEPTH = 4;

export function addInline(text, parent, depth = 0) {
  let at = 0;
  for (const match of depth < DEPTH ? text.matchAll(INLINE) : []) {
    parent.append(text.slice(at, match.index));
    parent.append(node(match, depth));
    at = match.index + match[0].length;
  }
  parent.append(text.slice(at));
}

function node({ 0: whole, groups }, depth) {
  if (groups.escaped) return groups.escaped;
  if (groups.code) return element("code", {}, groups.code);
  if (groups.bare) return link(groups.bare, groups.bare, whole, DEPTH);
  if (groups.target) return link(groups.target, groups.label, whole, depth);
  const [tag, inner] = groups.strong ? ["strong", groups.strong] : groups.em ? ["em", groups.em] : ["del", groups.struck];
  const made = element(tag);
  addInline(inner, made, depth + 1);
  return made;
}

// Only these schemes: a javascript: link would run in the page, a data: link imitates one.
function link(target, label, whole, depth) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(target)) return whole;
  const made = element("a", { href: target, target: "_blank", rel: "noopener noreferrer" });
  addInline(label || target, made, depth + 1);
  return made;
}
