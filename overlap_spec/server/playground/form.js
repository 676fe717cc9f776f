// The form: what is asked for, as a body of /v1/chat/completions.
import { $ } from "./dom.js";
import { EXAMPLES, KINDS } from "./examples.js";
import { server } from "./server.js";

// Fields of a body and where they are edited; all others come from the constraint's editor.
const FIELDS = { messages: "prompt", temperature: "temperature", max_tokens: "max-tokens", seed: "seed" };

export function fillForm() {
  $("example").append(...Object.keys(EXAMPLES).map((name) => new Option(name)));
  $("kind").append(...Object.entries(KINDS).map(([kind, [title]]) => new Option(title, kind)));
  $("example").onchange = showExample;
  $("kind").onchange = changeKind;
  showExample();
}

export function showKind() {
  const label = KINDS[$("kind").value][1];
  $("source-field").hidden = label === null;
  if (label) document.querySelector("label[for=source]").textContent = label;
}

function showExample() {
  [$("kind").value, $("prompt").value, $("source").value] = EXAMPLES[$("example").value];
  showKind();
}

// Another kind brings its example, unless that would undo what somebody has written.
function changeKind() {
  const [, prompt, source] = EXAMPLES[$("example").value];
  const fits = Object.keys(EXAMPLES).find((name) => EXAMPLES[name][0] === $("kind").value);
  if (fits && prompt === $("prompt").value && source === $("source").value) {
    $("example").value = fits;
    showExample();
  } else showKind();
}

// The body, and undefined where what was written is none, which is told beside its field.
export function body({ trees = false } = {}) {
  fail("");
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const options = { include_usage: true };
  if (server.token_origins) options[trees ? "include_draft_trees" : "include_token_origins"] = true;
  const kind = KINDS[$("kind").value];
  try {
    return { messages: [{ role: "user", content: $("prompt").value }], stream: true, stream_options: options,
      temperature: number("temperature"), max_tokens: number("max-tokens"), seed: number("seed"),
      ...kind[2]($("source").value) };
  } catch (error) {
    return fail(`${kind[1]}: ${error.message}`, "source");
  }
}

export function fail(message, param) {
  $("error").textContent = message;
  const field = param && (FIELDS[param.split(/[.[]/)[0]] ?? "source");
  // Beside what is at fault, else beneath the buttons.
  (field ? $(field).closest("form > div") : $("code")).after($("error"));
  for (const id of ["source", ...Object.values(FIELDS)]) $(id).setAttribute("aria-invalid", id === field);
  if (field) $(field).focus();
}
