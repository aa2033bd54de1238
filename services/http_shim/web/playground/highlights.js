// Marks of searched words in the shown messages. They are ranges, so that no node changes.
import { matchesIn } from "./search.js";

const MAX_MARKS = 1000;

// Marks the words in the elements, and shows the first mark. Without words it removes the marks.
export function highlight(elements, words) {
  if (!globalThis.CSS?.highlights) return; // an older browser shows no marks
  const ranges = words.length ? elements.flatMap((each) => rangesIn(each, words)).slice(0, MAX_MARKS) : [];
  CSS.highlights.set("found", new Highlight(...ranges));
  ranges[0]?.startContainer.parentElement.scrollIntoView({ block: "center" });
}

function rangesIn(root, words) {
  const ranges = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    for (const [start, end] of matchesIn(node.data, words)) {
      const range = new Range();
      range.setStart(node, start);
      range.setEnd(node, end);
      ranges.push(range);
    }
  }
  return ranges;
}
