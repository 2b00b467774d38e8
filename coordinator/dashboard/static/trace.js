// Waterfall and explanation of one request.
import { ApiError, cancelRequest, getTrace } from "./api.js";
import { duration, element, grouped, percent, plural, rate } from "./format.js";
import { isLive, milestones } from "./requests.js";
import { hideTip, notice, showTip } from "./tip.js";

// Workers send spans a few seconds after they end.
const SPANS_DELAY_US = 8e6;
const LANE_PX = 17;
const LABELS_PX = 150;
const CHARACTER_PX = 6.3;
const ORDER = ["body", "prompt", "accept", "response", "intake", "queue", "prefill", "decode", "preemption", "recovery", "hop", "receive", "wait", "compute", "send"];
const MEANING = {
  body: "the gateway reads the request", prompt: "the gateway's chat template and tokenizer", accept: "until the coordinator has accepted it", response: "the gateway sends the output",
  intake: "prompt to tokens, checks", queue: "waiting to be scheduled", prefill: "steps with chunks of the prompt", decode: "steps with one token each",
  preemption: "blocks given to older requests", recovery: "restart of the pipeline", hop: "transfer to the stage", receive: "first byte to whole frame",
  wait: "behind other steps", compute: "the stage's layers", send: "transfer to the next stage, during the next step",
};

export class TraceView {
  constructor(dialog, { find, nowUs, canAct }) {
    Object.assign(this, { dialog, find, nowUs, canAct, id: null });
    this.body = dialog.querySelector("#trace-body");
    this.cancel = dialog.querySelector("#trace-cancel");
    dialog.querySelector("#trace-close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    // The event comes later than the closing: a link may have opened another trace.
    dialog.addEventListener("close", () => { if (!dialog.open) this.#leave(); });
    this.cancel.addEventListener("click", () => this.#cancel());
  }

  open(id) {
    this.id = id;
    this.isWhole = false;
    this.openedUs = this.nowUs();
    this.dialog.querySelector("#trace-title").replaceChildren("Request ", element("span", { class: "id" }, id));
    this.body.replaceChildren(element("p", { class: "note" }, "Reading the trace …"));
    if (!this.dialog.open) this.dialog.showModal();
    return this.refresh();
  }

  // A live request has milestones only; its spans arrive after its end.
  async refresh() {
    if (this.id === null || this.isWhole) return;
    const [id, request] = [this.id, this.find(this.id)];
    const live = Boolean(request) && isLive(request);
    this.cancel.hidden = !(live && this.canAct());
    if (live) return this.#showWithout(request, "The trace is complete after its end");
    // A link may open a request that this page does not know yet.
    this.isWhole = this.nowUs() - (request?.ended_us ?? this.openedUs) > SPANS_DELAY_US;
    try {
      const trace = await getTrace(id);
      if (this.id === id) this.#show(trace);
    } catch (error) {
      const isMissing = error instanceof ApiError && error.status === 404;
      const missing = this.isWhole ? "No trace of this request is stored" : "The spans have not arrived yet";
      const why = isMissing ? missing : `The trace cannot be read (${error.message})`;
      if (this.id === id) this.#showWithout(request, why);
    }
  }

  #leave() {
    this.id = null;
    hideTip();
  }

  async #cancel() {
    try {
      await cancelRequest(this.id);
      this.dialog.close();
      notice("The request is cancelled.");
    } catch (error) {
      notice(`Not cancelled: ${error.message}`);
    }
  }

  #show(trace) {
    const decodeS = trace.attributes["gen_ai.latency.time_in_model_decode"] ?? trace.duration - (trace.time_to_first_token ?? trace.duration);
    const kinds = ORDER.filter((kind) => trace.rows.some((row) => row.segments.some((segment) => segment.kind === kind)));
    this.body.replaceChildren(
      element("p", { class: "sentence" }, trace.explanation),
      facts([
        ["Outcome", trace.outcome || "running"], ["Prompt", plural(trace.prompt_tokens, "token")], ["Output", plural(trace.completion_tokens, "token")],
        ["In queue", duration(trace.time_in_queue)], ["First token", duration(trace.time_to_first_token)],
        ["Rate", decodeS > 0 && trace.completion_tokens > 1 ? `${rate((trace.completion_tokens - 1) / decodeS)} tokens/s` : "–"], ["Total", duration(trace.duration)],
      ]),
      waterfall(trace.rows.map((row) => ({ ...row, note: row.worker })), trace.end_s, trace.slowest_stage),
      legend(kinds),
      trace.rows.some((row) => row.segments.some((segment) => segment.is_share))
        ? element("p", { class: "note" }, "Decode spans cover many steps: their segments are as long as what they stand for took together, drawn one after another.") : null,
      trace.stages.length ? totals(trace) : null,
      element("p", { class: "note" }, "Trace ", element("span", { class: "id" }, trace.trace_id), " · also: ", element("code", {}, `stageline trace ${trace.request_id}`)),
    );
  }

  #showWithout(request, why) {
    if (!request) return this.body.replaceChildren(element("p", { class: "sentence" }, `${why}.`));
    const now = this.nowUs();
    const times = milestones(request, now);
    const at = (us) => (us - request.accepted_us) / 1e6;
    const endUs = request.ended_us ?? now;
    const rows = [];
    const row = (kind, from, to) => rows.push({ title: kind, segments: [{ kind, start_s: at(from), end_s: at(to) }] });
    row("queue", request.accepted_us, request.started_us ?? endUs);
    if (request.started_us) row("prefill", request.started_us, request.first_token_us ?? endUs);
    if (request.first_token_us) row("decode", request.first_token_us, endUs);
    const share = (seconds) => (times.total_s ? ` (${percent(seconds / times.total_s)})` : "");
    const parts = rows.map(({ title, segments: [{ start_s: from, end_s: to }] }) => `${duration(to - from)} in ${title}${share(to - from)}`);
    this.body.replaceChildren(
      element("p", { class: "sentence" }, `${isLive(request) ? "So far " : ""}${duration(times.total_s)}: ${parts.join("; ")}.`),
      facts([
        ["State", request.phase], ["Prompt", plural(request.num_prompt_tokens, "token")], ["Output", `${grouped(request.num_generated_tokens)} of ${plural(request.max_tokens, "token")}`],
        ["First token", duration(times.first_token_s)], ["Rate", times.rate === null ? "–" : `${rate(times.rate)} tokens/s`],
      ]),
      waterfall(rows, times.total_s, null),
      legend(rows.map((row) => row.title)),
      element("p", { class: "note" }, `${why}; these are milestones from the coordinator.${request.error ? ` It failed with ${request.reason}: ${request.error}` : ""}`),
    );
  }
}

function facts(pairs) {
  return element("dl", { class: "trace-facts" }, ...pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function legend(kinds) {
  return element("ul", { class: "legend", "aria-label": "Kinds of time" },
    ...kinds.map((kind) => element("li", { title: MEANING[kind] }, element("i", { class: `key k-${kind}` }), `${kind}: ${MEANING[kind]}`)));
}

// A recovery can move a stage to another worker, or a worker to other layers.
function isSamePlace(row, place) {
  return Boolean(place) && ["stage", "worker", "layer_begin", "layer_end"].every((name) => row[name] === place[name]);
}

function waterfall(rows, endS, slowest) {
  const made = element("div", { class: "waterfall", role: "img", "aria-label": rows.map((row) => `${row.title} ${duration(total(row))}`).join(", ") });
  const trackPx = document.getElementById("trace-body").clientWidth - LABELS_PX;
  for (const row of rows) {
    const mark = isSamePlace(row, slowest) ? "▲ " : "";
    made.append(element("div", { class: "label" }, `${mark}${row.title}`, row.note ? element("small", {}, row.note) : null));
    made.append(lanes(row, endS, trackPx));
  }
  const axis = element("div", { class: "axis" });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const tick = element("span", {}, share ? duration(endS * share) : "0");
    tick.style.left = `${share * 100}%`;
    axis.append(tick);
  }
  made.append(element("span"), axis);
  return made;
}

const total = (row) => row.segments.reduce((sum, segment) => sum + segment.end_s - segment.start_s, 0);

function lanes(row, endS, trackPx) {
  const ends = [];
  const track = element("div", { class: "lanes" });
  for (const segment of [...row.segments].sort((a, b) => a.start_s - b.start_s)) {
    let lane = ends.findIndex((end) => end <= segment.start_s + 1e-9);
    if (lane < 0) lane = ends.push(0) - 1;
    ends[lane] = segment.end_s;
    track.append(drawn(segment, lane, endS || 1, trackPx));
  }
  track.style.height = `${Math.max(1, ends.length) * LANE_PX + 1}px`;
  return track;
}

// The longest name that fits, or none.
function label(segment, widthPx) {
  const names = [`${segment.kind} ${duration(segment.end_s - segment.start_s)}`, segment.kind];
  return names.find((name) => name.length * CHARACTER_PX + 9 <= widthPx) ?? "";
}

function drawn(segment, lane, endS, trackPx) {
  const share = (segment.end_s - segment.start_s) / endS;
  const made = element("div", { class: `segment k-${segment.kind}${share * trackPx < 12 ? " narrow" : ""}` }, label(segment, share * trackPx));
  made.style.left = `${Math.max(0, segment.start_s / endS) * 100}%`;
  made.style.width = `${share * 100}%`;
  made.style.top = `${lane * LANE_PX + 1}px`;
  made.style.height = `${LANE_PX - 2}px`;
  const lines = [`from ${duration(segment.start_s)} to ${duration(segment.end_s)}`, MEANING[segment.kind]];
  if (segment.steps) lines.push(`${plural(segment.steps, "step")}, ${plural(segment.tokens ?? 0, "token")}`);
  made.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, `${segment.kind}: ${duration(segment.end_s - segment.start_s)}`, lines));
  made.addEventListener("pointerleave", hideTip);
  return made;
}

function totals(trace) {
  const head = ["Stage", "Worker", "Layers", "Steps", "Mean batch", "Hop", "Receive", "Wait", "Compute", "Send"];
  const rows = trace.stages.map((stage) =>
    element("tr", { class: isSamePlace(stage, trace.slowest_stage) ? "slow-row" : "" },
      ...[stage.stage, stage.worker, `${stage.layer_begin}–${stage.layer_end - 1}`, grouped(stage.steps), stage.mean_batch_size?.toFixed(1) ?? "–",
        ...[stage.hop_s, stage.receive_s, stage.wait_s, stage.compute_s, stage.send_s].map(duration)].map((text, index) =>
        element("td", { class: index > 2 ? "number" : "" }, String(text)))));
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text, index) => element("th", { scope: "col", class: index > 2 ? "number" : "" }, text)))),
    element("tbody", {}, ...rows)));
}
