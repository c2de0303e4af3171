// Puts the page together: the feed of what happens now, the box that generates, and the traces.
import { events, get, useToken } from "./api.js";
import { drawAcceptance, drawCounts, drawOrigins, drawRate } from "./charts.js";
import { byId, count, percent } from "./dom.js";
import * as generate from "./generate.js";
import * as live from "./live.js";
import * as pools from "./pools.js";
import * as timeline from "./timeline.js";

const RETRY_MS = 2000;
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
let trace = null;
let follows = true;

async function listen() {
  while (true) {
    try {
      for await (const [name, data] of events()) {
        setConnection("live");
        if (name === "state") showState(data);
        if (name === "tokens") live.show(data);
      }
      setConnection("lost");
    } catch (error) {
      setConnection("lost", error.message);
      if (error.status === 401) byId("token-form").hidden = false;
    }
    await pause(RETRY_MS);
  }
}

function setConnection(state, details = "") {
  byId("connection").className = `chip ${state}`;
  byId("connection").textContent = state === "live" ? "live" : "not connected";
  byId("connection").title = details;
}

function showState(state) {
  const totals = state.totals;
  byId("model").textContent = state.model;
  drawOrigins(totals.tokens_by_origin);
  drawAcceptance(totals.drafted_by_position, totals.accepted_by_position);
  drawCounts("fallbacks", totals.fallbacks_by_reason, "none");
  drawCounts("ends", totals.ends_by_reason, "no request has ended yet");
  pools.draw(state.verifiers, state.drafters);
  live.setNote(state.shows_texts);
  const sum = (numbers) => numbers.reduce((one, other) => one + other, 0);
  const drafted = sum(totals.drafted_by_position);
  const tokens = sum(Object.values(totals.tokens_by_origin));
  byId("tile-rate").textContent = drawRate(state.tokens_per_second).toFixed(0);
  byId("tile-running").textContent = count(state.num_running);
  byId("tile-requests").textContent = count(totals.num_requests);
  byId("tile-acceptance").textContent = drafted ? percent(sum(totals.accepted_by_position) / drafted) : "–";
  byId("tile-length").textContent = totals.num_steps ? (tokens / totals.num_steps).toFixed(2) : "–";
  if (!state.takes_traces)
    byId("timeline-empty").textContent =
      "This gateway takes no traces: they go where OTEL_EXPORTER_OTLP_ENDPOINT says, or nowhere. See dashboard_otlp_listen.";
}

async function listTraces() {
  while (true) {
    // The feed says whether the connection is lost.
    await updateTraces().catch(() => null);
    await pause(RETRY_MS);
  }
}

async function updateTraces() {
  const found = await get("traces");
  const select = byId("request");
  const chosen = select.value;
  select.replaceChildren(
    ...found.map((one) => {
      const time = new Date(1000 * one.time).toLocaleTimeString();
      return new Option(`${time} · ${one.num_output_tokens} tokens · ${one.request_id.slice(0, 8)}`, one.trace_id);
    }),
  );
  if (!found.length) return;
  const stays = !follows && found.some((one) => one.trace_id === chosen);
  select.value = stays ? chosen : found[0].trace_id;
  // Also the one that is shown already: spans of the other services may arrive after the gateway's own.
  const newest = await get(`traces/${select.value}`);
  if (newest.trace_id !== trace?.trace_id || newest.num_spans !== trace.num_spans) show(newest);
}

function show(found) {
  trace = found;
  timeline.draw(trace, Number(byId("zoom").value));
}

// A request that was made here is shown as soon as its spans come, and until the last ones have come.
async function showRequest(id) {
  follows = true;
  let numSpans = 0;
  for (let attempt = 0; attempt < 20; attempt += 1) {
    await pause(300);
    const found = await get(`requests/${encodeURIComponent(id)}/trace`).catch(() => null);
    if (!found) continue;
    await updateTraces().catch(() => null);
    if (found.steps.length && found.num_spans === numSpans && attempt > 4) return;
    numSpans = found.num_spans;
  }
}

byId("request").addEventListener("change", (event) => {
  follows = event.target.selectedIndex === 0;
  updateTraces();
});
byId("zoom").addEventListener("input", () => trace && timeline.draw(trace, Number(byId("zoom").value)));
window.addEventListener("resize", () => trace && timeline.draw(trace, Number(byId("zoom").value)));
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(byId("token").value);
  byId("token-form").hidden = true;
});

generate.setUp(showRequest);
listen();
listTraces();
