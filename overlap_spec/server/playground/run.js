// A run: the request, its stream of events, and the verdict.
import { showSteps } from "./charts.js";
import { $, element, parseLines, pretty, swatch } from "./dom.js";
import { body, fail } from "./form.js";
import { showReplay } from "./replay.js";
import { call, events, server, showServer } from "./server.js";
import { acceptLength, msBetween, shown, stepsBack } from "./steps.js";
import { showTimeline } from "./timeline.js";
import { ORIGINS, WORDS } from "./words.js";

const narrow = matchMedia("(max-width: 800px)");
let stopping = null;
let newest = null;

// What `work` gives, with a signal that Stop sends; one at a time.
export async function exclusively(work) {
  if (stopping || !$("form").reportValidity()) return undefined;
  stopping = new AbortController();
  setBusy(true);
  try {
    return await work(stopping.signal);
  } finally {
    stopping = null;
    setBusy(false);
  }
}

export const stop = () => stopping?.abort();

function setBusy(busy) {
  $("run").disabled = $("race").disabled = busy;
  $("stop").disabled = !busy;
}

export async function run(quiet = false) {
  const reply = await exclusively((signal) => answer(signal, quiet));
  if (reply) await finish(reply);
}

// Shows what a reply came to, and what ran when.
export async function finish(reply) {
  showReply(reply);
  const [spans] = await Promise.all([showTimeline(stepsBack(reply.steps)), showServer()]);
  if (reply !== newest) return;
  showFigures(reply, spans);
  showReplay(reply.steps, spans);
}

async function answer(signal, quiet) {
  const asked = request();
  if (!asked) return undefined;
  const reply = begin();
  if (narrow.matches && !quiet) $("output-title").scrollIntoView({ block: "start" });
  try {
    // What nobody asked for is shown as a warm server answers it: a first request pays for grammar and recordings.
    if (quiet) await read({}, asked, signal, () => {});
    await read(reply, asked, signal);
  } catch (error) {
    failed(reply, error);
  }
  return reply;
}

// The form's request; where it has none, the output says so too.
export function request() {
  const asked = body({ trees: true });
  if (asked) return asked;
  clear();
  $("verdict").textContent = `not sent: ${$("error").textContent}`;
  return undefined;
}

export function begin() {
  newest = { kind: $("kind").value, content: "", calls: [], steps: [], counts: {} };
  clear();
  return newest;
}

// Reads an answer into the page, or to `seen` alone where the reply is not the page's.
export async function read(reply, asked, signal, seen = () => {}) {
  reply.start = performance.now();
  const options = { method: "POST", body: JSON.stringify(asked), signal };
  for await (const event of events(await call("/v1/chat/completions", options))) {
    if (reply === newest) take(reply, event);
    seen(event);
  }
  reply.end = performance.now();
}

export function failed(reply, error) {
  reply.end = performance.now();
  if (error.name === "AbortError") reply.reason = "stopped";
  else fail(reply.fault = error.message, error.param);
}

function clear() {
  for (const id of ["output", "figures", "origins", "accept", "accept-note", "tier", "tier-note"]) $(id).replaceChildren();
  $("value").hidden = true;
  $("verdict").textContent = "running …";
  showSteps([]);
  showReplay([], []);
}

function take(reply, event) {
  const told = event.overlap_spec;
  const choice = event.choices[0];
  if (event.usage) {
    reply.tokens = event.usage.completion_tokens;
    reply.narrowed = event.usage.completion_tokens_details?.narrowed_tokens;
  }
  const pieces = choice ? readDelta(reply, choice.delta) : [];
  if (choice?.finish_reason) reply.reason = choice.finish_reason;
  const tokens = told ? told.tokens : pieces;
  if (tokens.length && reply.first === undefined) [reply.first, reply.atFirst] = [performance.now(), tokens.length];
  for (const token of tokens) showToken(reply, token);
  if (told) reply.steps.push(told);
  // Many pieces may come in one frame of the screen.
  reply.drawing ??= requestAnimationFrame(() => showProgress(reply));
}

function showProgress(reply) {
  reply.drawing = undefined;
  const known = Object.keys(ORIGINS).filter((origin) => reply.counts[origin]);
  $("origins").replaceChildren(...known.map((origin) => origin === "unknown"
    ? element("span", { className: "soft" }, ORIGINS.unknown)
    : swatch(`var(--${origin})`, `${ORIGINS[origin]} (${reply.counts[origin]})`)));
  if (reply.steps.length) showSteps(reply.steps);
}

function readDelta(reply, delta) {
  const pieces = [];
  if (delta.reasoning_content) pieces.push({ text: delta.reasoning_content, thinking: true });
  if (delta.content) {
    reply.content += delta.content;
    pieces.push({ text: delta.content });
  }
  for (const { index, function: { name, arguments: text } } of delta.tool_calls ?? []) {
    const made = (reply.calls[index] ??= { name: "", arguments: "" });
    made.name += name ?? "";
    made.arguments += text ?? "";
    if (name) pieces.push({ text: `${index ? "\n" : ""}${name} ` });
    if (text) pieces.push({ text });
  }
  // A server that tells how tokens came shows each of them; here there are pieces alone.
  return server.token_origins ? [] : pieces;
}

function showToken(reply, token) {
  const output = $("output"), origin = token.origin ?? "unknown";
  const follows = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
  reply.counts[origin] = (reply.counts[origin] ?? 0) + 1;
  output.append(shown(token));
  if (follows) output.scrollTop = output.scrollHeight;
}

// `spans` have the server's own clock: on its way here what was written apart may come at once.
function showFigures(reply, spans = []) {
  const { steps } = reply;
  const total = reply.tokens ?? steps.reduce((sum, step) => sum + step.tokens.length, 0);
  // Tokens that came with the first one took no time of their own.
  const later = total - reply.atFirst;
  const took = msBetween(steps, spans) ?? reply.end - reply.first;
  const figures = { Tokens: total, "First token": `${(reply.first - reply.start).toFixed(0)} ms`,
    "Each token": later > 0 ? `${(took / later).toFixed(1)} ms` : undefined, "Accept length": acceptLength(steps)?.toFixed(2) };
  $("figures").replaceChildren(...Object.entries(figures)
    .filter(([, value]) => value !== undefined && !/NaN|Infinity/.test(value))
    .map(([name, value]) => element("div", {}, element("dt", {}, named(name)), element("dd", {}, String(value)))));
}

function showReply(reply) {
  const { steps } = reply;
  showProgress(reply);
  showFigures(reply);
  if (!steps.length && !server.token_origins) {
    $("accept-note").textContent = $("tier-note").textContent = "(this server does not tell)";
  }
  const [verdict, value] = judge(reply);
  const narrowed = reply.narrowed ? `; ${reply.narrowed} tokens chosen so that it ends within max tokens` : "";
  $("verdict").textContent = verdict + narrowed;
  $("value").hidden = value === undefined;
  $("parsed").textContent = value === undefined ? "" : pretty(value);
}

// A figure's name, with its meaning where that has a word.
function named(name) {
  const title = WORDS[name.toLowerCase()];
  return title ? element("abbr", { title }, name) : name;
}

function judge({ kind, content, calls, reason, fault }) {
  if (reason === undefined) return [`failed: ${fault}`];
  if (reason === "length") return ["cut at max tokens (finish_reason length)"];
  if (reason === "stopped") return ["stopped"];
  const end = `(finish_reason ${reason})`;
  try {
    if (calls.length) {
      const made = calls.map(({ name, arguments: text }) => ({ name, arguments: JSON.parse(text) }));
      return [`✓ ${made.length} whole tool call${made.length > 1 ? "s" : ""} ${end}`, made];
    }
    if (kind.startsWith("json")) return [`✓ whole JSON ${end}`, JSON.parse(content)];
  } catch (error) {
    return [`✗ no JSON: ${error.message} ${end}`];
  }
  if (kind !== "choice") return [`done ${end}`];
  return [`${parseLines($("source").value).includes(content) ? "✓ one" : "✗ none"} of the choices ${end}`];
}
