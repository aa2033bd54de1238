// DOM elements. Text enters the page only here, as text nodes: no string is ever parsed as HTML.

// Returns an element; `properties` are DOM properties, or attributes if their name has a dash.
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function button(text, action, properties = {}) {
  const made = element("button", { type: "button", ...properties }, text);
  made.addEventListener("click", () => action(made));
  return made;
}

// Copies text, and says so in the button. Without a secure context there is no clipboard API.
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
