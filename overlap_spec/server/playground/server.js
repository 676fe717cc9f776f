// What the page asks of the server.
import { $ } from "./dom.js";

// What /server_info said last.
export let server = {};

export async function call(path, options = {}) {
  const key = $("key").value;
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  if (response.status === 401) $("connection").open = true;
  throw fault(body?.error ?? { message: `${path}: HTTP ${response.status}` });
}

const fault = ({ message, param }) => Object.assign(new Error(message), { param });

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream broke off");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw fault(event.error);
      yield event;
    }
  }
}

export async function showServer() {
  try {
    server = await (await call("/server_info")).json();
    $("server").textContent = [server.served_model_name, `speculation ${server.speculative_algorithm}`,
      `overlap ${server.overlap}`, `context ${server.max_model_len}`, server.status].join(" · ");
  } catch (error) {
    $("server").textContent = error.message;
  }
}
