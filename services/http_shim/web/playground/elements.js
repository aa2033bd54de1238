// DOM elements. Text enters the page only here, as text nodes: no string is ever parsed as HTML.

// Returns an element; `properties` are DOM properties, or attributes if their name has a dash.
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function button(text, action, properties = {}) {
  const node = element("button", { type: "button", ...properties }, text);
  node.addEventListener("click", () => action(node));
  return node;
}

// Copies text, and shows the outcome in the button. Only secure contexts have the clipboard API.
export async function copyText(text, from) {
  const label = from.textContent;
  try {
    await navigator.clipboard.writeText(text);
    from.textContent = "Copied";
  } catch {
    from.textContent = "The browser refused";
  }
  setTimeout(() => (from.textContent = label), 1500);
}
