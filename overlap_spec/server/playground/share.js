// The request elsewhere: as curl, as Python, as a link.
import { $ } from "./dom.js";
import { KINDS } from "./examples.js";
import { body, fail, showKind } from "./form.js";
import { server } from "./server.js";

const SHARED = ["kind", "prompt", "source", "temperature", "max-tokens", "seed"];

function asCurl(request) {
  const data = JSON.stringify(request).replaceAll("'", "'\\''");
  const key = $("key").value ? ` -H "Authorization: Bearer $OVERLAP_SPEC_API_KEY"` : "";
  return `curl -s ${location.origin}/v1/chat/completions -H 'Content-Type: application/json'${key} -d '${data}'`;
}

// A JSON text is Python's as well, but for three words, which no string of it may lose.
function asPython({ messages, tools, ...rest }) {
  const literal = (value) => JSON.stringify(value).replace(/"(?:[^"\\]|\\.)*"|true|false|null/g,
    (found) => ({ true: "True", false: "False", null: "None" })[found] ?? found);
  const known = ["temperature", "max_tokens", "seed", "response_format"];
  const given = Object.entries({ messages, tools, ...rest }).filter(([, value]) => value !== undefined);
  const extra = given.filter(([name]) => !["messages", "tools", ...known].includes(name));
  const lines = given.filter((pair) => !extra.includes(pair)).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra))},`);
  const key = $("key").value ? `os.environ["OVERLAP_SPEC_API_KEY"]` : `"none"`;
  return [...($("key").value ? ["import os", ""] : []), "from openai import OpenAI", "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${key})`, "reply = client.chat.completions.create(",
    `    model=${literal(server.served_model_name ?? "overlap-spec")},`, ...lines, ")",
    "print(reply.choices[0].message.tool_calls or reply.choices[0].message.content)"].join("\n");
}

function asLink() {
  const fields = Object.fromEntries(SHARED.map((id) => [id, $(id).value]));
  return `${location.origin}${location.pathname}#${encodeURIComponent(JSON.stringify(fields))}`;
}

// Fills the form from the page's address, and runs nothing: whoever follows a link has not asked for it.
export function readLink() {
  if (!location.hash) return false;
  try {
    const fields = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    if (!Object.hasOwn(KINDS, fields.kind)) throw new Error("there is no such kind");
    for (const id of SHARED) $(id).value = String(fields[id] ?? "");
    showKind();
    $("verdict").textContent = "the link’s request: Run runs it";
  } catch (error) {
    fail(`this link holds no request: ${error.message}`);
  }
  return true;
}

async function copy(make) {
  const whole = body();
  if (!whole) return;
  const { stream, stream_options, ...request } = whole;
  const text = make(request);
  $("code").textContent = text;
  $("code").hidden = false;
  // Pages of other hosts have no clipboard without TLS: the text can be taken from the page.
  const done = navigator.clipboard?.writeText(text).then(() => true, () => false) ?? false;
  $("copied").textContent = (await done) ? "copied" : "select it below";
}

export function addCopying() {
  $("as-curl").onclick = () => copy(asCurl);
  $("as-python").onclick = () => copy(asPython);
  $("as-link").onclick = () => copy(asLink);
}
