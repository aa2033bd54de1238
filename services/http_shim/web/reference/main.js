// The API reference: examples with the address of this server, and a form that sends each example.

import { button, copyText, element } from "../playground/elements.js";
import { hasKey, listModels, useKey } from "../playground/requests.js";
import { Trial } from "./trial.js";

const ADDRESS = "http://127.0.0.1:8000"; // address in the examples of the served page
const here = new URL(".", location.href).href.replace(/\/$/, "");

for (const example of document.querySelectorAll("pre[data-method]")) {
  example.textContent = example.textContent.replace(ADDRESS, here);
  const copy = button("Copy", (from) => copyText(example.textContent, from));
  example.after(element("div", { className: "row" }, copy), new Trial(example.dataset, servedModel).element);
}
document.querySelector(".contents").before(keyForm());

let model = null;

// Returns the id of a model that the server has, or "default" if the list of models is not available.
async function servedModel() {
  try {
    model ??= (await listModels())[0]?.id;
  } catch {
    // the answer to the tried request shows the reason
  }
  return model ?? "default";
}

function keyForm() {
  const input = element("input", { id: "key", type: "password", autocomplete: "off" });
  const state = element("span", { className: "quiet", role: "status" });
  const form = element(
    "form",
    { className: "row" },
    element("label", {}, "API key, if the server wants one ", input),
    element("button", {}, "Use key"),
    button("Forget key", () => use("")),
    state,
  );
  const use = (key) => {
    useKey(key);
    input.value = "";
    state.textContent = hasKey() ? "A key is in use, for this tab alone." : "";
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    use(input.value.trim());
  });
  state.textContent = hasKey() ? "A key is in use, for this tab alone." : "";
  return form;
}
