// Starts the page.
import { $ } from "./dom.js";
import { fillForm } from "./form.js";
import { addLive } from "./live.js";
import { race } from "./race.js";
import { addReplay } from "./replay.js";
import { run, stop } from "./run.js";
import { server, showServer } from "./server.js";
import { addCopying, readLink } from "./share.js";
import { showTimeline } from "./timeline.js";
import { explain } from "./words.js";

fillForm();
explain();
addCopying();
addReplay();
addLive();
$("form").onsubmit = (event) => { event.preventDefault(); run(); };
$("race").onclick = race;
$("stop").onclick = stop;
$("refresh").onclick = $("span-steps").onchange = () => showTimeline();
$("key").onchange = showServer;
document.onkeydown = (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
};

const linked = readLink();
showServer().then(() => {
  $("race").hidden = !server.token_origins;
  if (server.status === "ready" && !linked) run(true);
});
