// One request's steps: what the drafter, the network and the target did, and when.
import { byId, duration, element, svg } from "./dom.js";

const LANES = [
  ["request", "Request"],
  ["draft", "Drafter"],
  ["wire", "Network"],
  ["verify", "Target"],
];
const NAMES = {
  admission: "waiting at the gateway",
  tokenize: "tokenizing",
  queue: "waiting at the verifier",
  prefill: "prompt",
  preempted: "preempted",
  recompute: "computing again",
  draft: "waiting for the drafter",
  wire: "on the network",
  turn: "waiting for a turn",
  verify: "target's steps",
  other: "everything else",
};
const ORDER = ["admission", "tokenize", "queue", "prefill", "preempted", "recompute", "draft", "wire", "turn", "verify", "other"];
const LABELS = 72;
const LANE = 30;
const GAP = 6;
const AXIS = 22;

export function draw(trace, zoom) {
  byId("timeline-empty").hidden = true;
  byId("timeline-body").hidden = false;
  drawTotals(trace);
  const lanes = byId("lanes");
  const width = Math.max(320, lanes.clientWidth - LABELS - 8) * 2 ** zoom;
  lanes.replaceChildren(drawing(trace, width));
  byId("timeline-facts").textContent = facts(trace);
  byId("timeline-events").replaceChildren(...trace.events.map(eventLine));
  drawTable(trace.steps);
}

function drawTotals(trace) {
  const kinds = ORDER.filter((kind) => trace.totals[kind] > 0.0005 * trace.seconds);
  byId("time-bar").replaceChildren(
    ...kinds.map((kind) => {
      const part = element("span", { class: `k-${kind}`, title: `${NAMES[kind]}: ${duration(trace.totals[kind])}` });
      part.style.flexGrow = trace.totals[kind];
      return part;
    }),
  );
  byId("time-legend").replaceChildren(
    ...kinds.map((kind) =>
      element("li", { class: `k-${kind}` }, `${NAMES[kind]} `, element("b", {}, duration(trace.totals[kind]))),
    ),
  );
}

function drawing(trace, width) {
  const height = LANES.length * (LANE + GAP) + AXIS;
  const x = (time) => LABELS + (Math.max(0, time) / trace.seconds) * width;
  const picture = svg("svg", { width: LABELS + width + 8, height, role: "img", "aria-label": facts(trace) });
  LANES.forEach(([lane, name], index) => {
    const y = index * (LANE + GAP);
    picture.append(svg("rect", { class: "lane-back", x: LABELS, y, width, height: LANE, rx: 4 }));
    picture.append(svg("text", { class: "lane-name", x: 0, y: y + LANE / 2 + 4 }, name));
  });
  picture.append(axis(trace.seconds, x, height - AXIS));
  LANES.forEach(([lane], index) => {
    const group = svg("g", { class: "lane", "data-lane": lane });
    for (const piece of pieces(trace, lane)) group.append(...drawn(piece, x, index * (LANE + GAP)));
    picture.append(group);
  });
  for (const event of trace.events) picture.append(mark(event, x, height - AXIS));
  return picture;
}

function* pieces(trace, lane) {
  if (lane === "request") {
    for (const phase of trace.phases)
      yield { kind: phase.kind, start: phase.start, end: phase.end, title: NAMES[phase.kind] };
    return;
  }
  if (lane === "draft")
    for (const draft of trace.drafts) {
      const folded = draft.num_steps > 1;
      const what = folded ? `${draft.num_steps} drafts of` : "draft of";
      const title = `${what} ${draft.num_draft_tokens} tokens from position ${draft.position} on`;
      yield { kind: "draft", start: draft.start, end: draft.end, folded, title };
    }
  for (const step of trace.steps) {
    const folded = step.num_steps > 1;
    if (lane === "verify") {
      if (!folded && step.turn_seconds)
        yield { kind: "turn", start: step.start - step.turn_seconds, end: step.start, title: NAMES.turn };
      yield { kind: "verify", start: step.start, end: step.end, folded, title: stepTitle(step), label: label(step) };
    }
    if (lane === "draft" && step.draft) {
      const title = `draft of ${step.num_draft_tokens} tokens for position ${step.position}, as the verifier saw it`;
      yield { kind: "draft", start: step.draft[0], end: step.draft[1], title };
    }
    if (lane === "wire")
      for (const [start, end] of step.wire) yield { kind: "wire", start, end, title: NAMES.wire };
  }
}

function drawn(piece, x, y) {
  const left = x(piece.start);
  const width = Math.max(1, x(piece.end) - left - 0.5);
  const height = piece.kind === "turn" ? LANE / 3 : LANE - 6;
  const rect = svg(
    "rect",
    {
      class: `piece k-${piece.kind}${piece.folded ? " folded" : ""}`,
      x: left,
      y: y + (LANE - height) / 2,
      width,
      height,
      rx: Math.min(3, width / 3),
    },
    svg("title", {}, `${piece.title}, ${duration(piece.end - piece.start)}`),
  );
  if (!piece.label || width < 9 * piece.label.length) return [rect];
  return [rect, svg("text", { class: "count", x: left + width / 2, y: y + LANE / 2 + 3.5 }, piece.label)];
}

function axis(seconds, x, y) {
  const group = svg("g", { class: "axis" });
  const wanted = (x(seconds) - x(0)) / 90;
  const rough = seconds / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  for (let time = 0; time <= seconds; time += step) {
    group.append(svg("line", { x1: x(time), x2: x(time), y1: 0, y2: y + 4 }));
    if (x(seconds) - x(time) > 50) group.append(svg("text", { x: x(time) + 3, y: y + 16 }, tick(time, step)));
  }
  return group;
}

// As few digits as tell one tick from the next.
function tick(time, step) {
  const [size, unit] = step >= 0.5 ? [time, "s"] : [1000 * time, "ms"];
  const digits = Math.max(0, -Math.floor(Math.log10(step >= 0.5 ? step : 1000 * step)));
  return time ? `${size.toFixed(digits)} ${unit}` : "0";
}

function mark(event, x, height) {
  const at = x(event.time);
  const line = svg("line", { x1: at, x2: at, y1: 0, y2: height });
  return svg("g", { class: `mark ${event.name}` }, line, svg("title", {}, event.name));
}

function eventLine(event) {
  const details = Object.entries(event.attributes).map(([name, value]) => `${name.split(".").pop()} ${shown(name, value)}`);
  const bad = ["fallback", "preempted", "draft_late", "rerouted", "slow_client"].includes(event.name);
  return element(
    "li",
    bad ? { class: "bad" } : {},
    element("time", {}, duration(event.time)),
    `${event.name.replaceAll("_", " ")}${details.length ? `: ${details.join(", ")}` : ""}`,
  );
}

const shown = (name, value) => (name.endsWith("seconds") ? duration(value) : value);
const label = (step) => (step.num_steps > 1 ? `${step.num_steps} steps` : step.num_draft_tokens ? `${step.num_accepted_tokens}/${step.num_draft_tokens}` : "");

function stepTitle(step) {
  if (step.num_steps > 1)
    return `${step.num_steps} steps from position ${step.position}, ${step.num_accepted_tokens} of ${step.num_draft_tokens} draft tokens accepted, busy ${duration(step.verify_seconds)}, slowest ${duration(step.slowest_step_seconds)}`;
  const drafted = step.num_draft_tokens ? `${step.num_accepted_tokens} of ${step.num_draft_tokens} draft tokens accepted` : "without a draft";
  const others = step.num_other_prefill_tokens ? `, beside ${step.num_other_prefill_tokens} prompt tokens of others` : "";
  return `step at position ${step.position}, ${drafted}, batch of ${step.batch_size}${others}`;
}

function facts(trace) {
  const parts = [
    `${trace.num_prompt_tokens} prompt tokens and ${trace.num_output_tokens} output tokens in ${duration(trace.seconds)}`,
    `first token after ${duration(trace.time_to_first_token_seconds)}`,
  ];
  if (trace.acceptance_rate != null) parts.push(`${Math.round(100 * trace.acceptance_rate)}% of draft tokens accepted, ${trace.verification} verification`);
  if (trace.mean_acceptance_length) parts.push(`${trace.mean_acceptance_length.toFixed(2)} tokens a step`);
  if (trace.client_wait_seconds > 0.05) parts.push(`${duration(trace.client_wait_seconds)} held up by the client`);
  parts.push(`trace ${trace.trace_id}`);
  return parts.join(" · ");
}

function drawTable(steps) {
  const columns = [
    ["position", (step) => step.position],
    ["steps", (step) => step.num_steps],
    ["drafted", (step) => step.num_draft_tokens],
    ["accepted", (step) => step.num_accepted_tokens],
    ["draft", (step) => duration(step.draft_seconds)],
    ["network", (step) => duration(step.wire_seconds)],
    ["turn", (step) => duration(step.turn_seconds)],
    ["verify", (step) => duration(step.verify_seconds)],
    ["batch", (step) => step.batch_size ?? ""],
  ];
  const head = element("tr", {}, ...columns.map(([name]) => element("th", { scope: "col" }, name)));
  const rows = steps.map((step) => element("tr", {}, ...columns.map(([, value]) => element("td", {}, String(value(step))))));
  byId("steps").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}
