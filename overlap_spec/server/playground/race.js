// A race: the same request with and without speculation.
import { $ } from "./dom.js";
import { begin, exclusively, failed, finish, read, request } from "./run.js";
import { shown } from "./steps.js";

export async function race() {
  const reply = await exclusively(both);
  if (reply) await finish(reply);
}

// Both answers; the one with drafts is the page's output too.
async function both(signal) {
  const asked = request();
  if (!asked) return undefined;
  const reply = begin(), plain = { steps: [] };
  const lost = new AbortController();
  const either = AbortSignal.any([signal, lost.signal]);
  $("race-card").hidden = false;
  $("race-note").textContent = "running …";
  $("race-card").scrollIntoView({ block: "nearest" });
  try {
    const ends = await Promise.all([follow("race-with", reply, { ...asked, speculate: true }, either),
      follow("race-without", plain, { ...asked, speculate: false }, either)]);
    const same = ends[0].text === ends[1].text;
    $("race-note").textContent = `${ends[0].steps} steps against ${ends[1].steps}; ${
      same ? "the same text" : "another text (sampled without a seed, or in half precision)"}`;
  } catch (error) {
    lost.abort();
    failed(reply, error);
    $("race-note").textContent = reply.fault ? `failed: ${reply.fault}` : "stopped";
  }
  return reply;
}

async function follow(pane, reply, asked, signal) {
  const start = performance.now(), end = { text: "", steps: 0 };
  let tokens = 0;
  $(pane).replaceChildren();
  $(`${pane}-note`).textContent = "";
  await read(reply, asked, signal, (event) => {
    const made = event.overlap_spec?.tokens ?? [];
    tokens += made.length;
    end.steps += made.length > 0;
    end.text += made.map(({ text }) => text).join("");
    $(pane).append(...made.map(shown));
    if (made.length) {
      $(`${pane}-note`).textContent = `${tokens} tokens in ${end.steps} steps, ${(performance.now() - start).toFixed(0)} ms`;
    }
  });
  return end;
}
