// All streams of the server as they run: polled while somebody looks.
import { $, element, shape } from "./dom.js";
import { call } from "./server.js";

const POLL_MS = 1000, KEPT = 60;
const STATES = { compiling: "its grammar is compiled", waiting: "waits for a row or for pages",
  prefill: "its prompt is computed", decode: "its output is generated" };

// The last answers; the timer of the next, and whether one is asked for.
let history = [], timer = null, asking = false;

const watched = () => $("live").open && !document.hidden;

async function poll() {
  clearTimeout(timer);
  if (asking || !watched()) return;
  asking = true;
  try {
    take(await (await call("/requests")).json());
  } catch (error) {
    $("live-note").textContent = error.message;
  }
  asking = false;
  timer = setTimeout(poll, POLL_MS);
}

function take(now) {
  const last = history.at(-1);
  // A server that has started again counts anew.
  if (last && (now.time_ms <= last.time_ms || now.totals.output_tokens < last.totals.output_tokens)) history = [];
  const before = history.at(-1);
  const seconds = before && (now.time_ms - before.time_ms) / 1e3;
  now.rate = before ? (now.totals.output_tokens - before.totals.output_tokens) / seconds : null;
  history = [...history, now].slice(-KEPT);
  showTotals(now);
  showStreams(now, before, seconds);
}

// Totals --------------------------------------------------------------------------------------------
const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

function showTotals({ totals, rate }) {
  const used = totals.pages_in_use / totals.pages;
  const tiles = [
    ["Running", `${totals.running}`, `of ${totals.max_running_requests}`, ({ totals: t }) => t.running],
    ["Waiting", `${totals.waiting + totals.compiling}`, totals.compiling ? `${totals.compiling} compiling` : "",
      ({ totals: t }) => t.waiting + t.compiling],
    ["Tokens a second", fixed(rate, 0), "", ({ rate: r }) => r ?? 0],
    ["Accept length", fixed(totals.accept_length, 2), "tokens a verify", ({ totals: t }) => t.accept_length ?? 0],
    ["Draft length", `${totals.draft_nodes - 1}`, `in ${totals.draft_steps} steps`, ({ totals: t }) => t.draft_nodes - 1],
    ["KV cache", `${(100 * used).toFixed(used < 0.1 ? 1 : 0)}%`, `${totals.pages_in_use} of ${totals.pages}`,
      ({ totals: t }) => t.pages_in_use / t.pages],
  ];
  $("live-totals").replaceChildren(...tiles.map(([name, value, note, of]) => element("div", { className: "tile" },
    element("dt", {}, name), element("dd", {}, value, " ", element("span", { className: "soft" }, note)), spark(history.map(of)))));
}

// The last minute as a line, the newest at the right.
function spark(values) {
  const width = 120, height = 26, top = Math.max(...values, 1e-9);
  const x = (index) => width - 2 - ((values.length - 1 - index) * (width - 4)) / (KEPT - 1);
  const y = (value) => height - 2 - (value / top) * (height - 4);
  const line = values.map((value, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const chart = shape("svg", { viewBox: `0 0 ${width} ${height}`, class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" });
  chart.append(shape("path", { class: "area", d: `${line}V${height}H${x(0).toFixed(1)}Z` }), shape("path", { class: "line", d: line }));
  return chart;
}

// Streams -------------------------------------------------------------------------------------------
function showStreams({ requests, totals, not_shown: hidden, is_admin: isAdmin }, before, seconds) {
  const earlier = new Map((before?.requests ?? []).map((row) => [keyOf(row), row.output_tokens]));
  $("streams").tBodies[0].replaceChildren(...requests.map((row) => rowOf(row, totals, earlier.get(keyOf(row)), seconds)));
  $("streams").hidden = !requests.length;
  const parts = [requests.length ? `${requests.length} shown` : totals.open ? "" : "nothing runs now"];
  if (hidden) parts.push(`${hidden} more ${isAdmin ? "than are listed" : "of other clients: their rows need the administrator’s key"}`);
  $("live-note").textContent = parts.filter(Boolean).join(" · ");
}

const keyOf = ({ client, id, age_ms: age, prompt_tokens: prompt }) => `${client} ${id} ${id === null ? age : ""} ${prompt}`;

function rowOf(row, totals, earlier, seconds) {
  const rate = earlier === undefined ? row.output_tokens / (row.age_ms / 1e3) : (row.output_tokens - earlier) / seconds;
  const writes = row.state === "decode";
  const cells = [
    ["stream", element("span", { className: "mono", title: row.id ?? "the server’s own" }, row.id ? shortened(row.id) : "probe"),
      element("span", { className: "soft" }, row.own ? " yours" : ` ${row.client}`)],
    ["state", element("span", { className: `pill ${row.state}`, title: STATES[row.state] }, row.state), row.constrained ? "" : " free text"],
    ["age", `${(row.age_ms / 1e3).toFixed(1)} s`],
    ["prompt", `${row.prompt_tokens}`, element("span", { className: "soft" }, row.cached_tokens ? ` ${row.cached_tokens} cached` : "")],
    ["output", `${row.output_tokens}`],
    ["rate", writes ? rate.toFixed(0) : "–"],
    ["accept", fixed(row.accept_length, 2)],
    ["draft", fixed(row.draft_length, 1)],
    ["kv", meter(row.pages, totals.pages)],
  ];
  return element("tr", {}, ...cells.map(([name, ...inside]) => element("td", { className: name }, ...inside)));
}

const shortened = (id) => (id.length > 20 ? `${id.slice(0, 9)}…${id.slice(-6)}` : id);

function meter(pages, all) {
  const box = element("span", { className: "meter", title: `${pages} of ${all} pages` });
  const fill = element("span");
  fill.style.width = `${Math.min(100, Math.max(pages ? 2 : 0, (100 * pages) / all))}%`;
  box.append(fill);
  return element("span", { className: "metered" }, box, ` ${pages}`);
}

export function addLive() {
  $("live").ontoggle = poll;
  document.addEventListener("visibilitychange", poll);
}
