// Polls the coordinator once a second and updates the page.
import { drainWorker, forgetToken, getActivity, getStatus, logOut, token, useToken } from "./api.js";
import { Chart } from "./charts.js";
import { clock, digits, duration, element, grouped, percent, plural, rate } from "./format.js";
import { Requests } from "./requests.js";
import { StepStore } from "./step_store.js";
import { Timeline } from "./timeline.js";
import { notice } from "./tip.js";
import { hasStage, kvBlocks, Topology } from "./topology.js";
import { TraceView } from "./trace.js";

const POLL_MS = 1000;
const HISTORY_US = 300e6;
const STATE_CLASS = { serving: "ok", "waiting for workers": "warn", loading: "warn", "starting epoch": "warn", checking: "warn", blocked: "bad" };
const byId = (id) => document.getElementById(id);

const store = new StepStore();
const seconds = new Map();
let status = null;
let activity = null;
let heardMs = null;

const canAct = () => Boolean(status?.can_act && (status.user || token()));
const timeline = new Timeline(byId("timeline"), byId("step"), store);
const topology = new Topology(byId("stages"), byId("others"), drain);
const trace = new TraceView(byId("trace"), { find: (id) => requests.find(id), nowUs: () => activity.now_us, canAct });
const requests = new Requests(byId("rows"), byId("no-requests"), byId("filter"), (id) => trace.open(id));
const charts = [
  throughputChart("generated", "Generated", "c-decode", (second) => second.generated_tokens),
  throughputChart("prefilled", "Prefilled", "c-prefill", (second) => second.prefill_tokens),
  latencyChart("first-token", "Time to first token", (second) => second.first_token, "c-mixed"),
  latencyChart("inter-token", "Between tokens", (second) => second.inter_token, "c-decode"),
];

function throughputChart(id, title, className, value) {
  return new Chart(byId(id), { title, unit: "tokens/s", whole: 0, format: rate, lines: [{ label: "", className, isArea: true, value }] });
}

function latencyChart(id, title, of, className) {
  return new Chart(byId(id), {
    title, unit: "of each second", format: (value) => (value === 0 ? "0" : duration(value)),
    lines: [
      { label: "p50", className, value: (second) => of(second).p50_s },
      { label: "p95", className: `${className} dashed`, isDashed: true, value: (second) => of(second).p95_s },
    ],
  });
}

async function poll() {
  try {
    const newest = Math.max(0, ...seconds.keys());
    const [nextStatus, nextActivity] = await Promise.all([getStatus(), getActivity(store.lastNumber, Math.max(0, newest - 2e6))]);
    heardMs = performance.now();
    if (activity && nextActivity.uptime < activity.uptime) {
      // The coordinator restarted: its clock and steps are new.
      seconds.clear();
      store.clear();
      activity = null;
      return setTimeout(poll, 0);
    }
    [status, activity] = [nextStatus, nextActivity];
    store.take(activity, heardMs);
    show();
    openLinkedTrace();
  } catch (error) {
    if (error instanceof TypeError || error.name === "TimeoutError" || error.status) showStale(error);
    else throw error;
  }
  return setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

// Opens the trace that the address names as #trace=REQUEST_ID, once.
function openLinkedTrace() {
  const [, id] = /^#trace=([0-9a-f-]+)$/.exec(location.hash) ?? [];
  if (id === undefined || activity === null) return;
  history.replaceState(null, "", location.pathname);
  trace.open(id);
}

function show() {
  document.body.classList.remove("stale");
  showHead();
  const placed = topology.show(status, activity, { canAct: canAct() });
  const summary = byId("summary");
  summary.textContent = activity.summary.replace(" x ", " × ");
  summary.classList.toggle("slow", activity.slowest_stage !== null);
  timeline.refresh(placed.map((worker) => worker.name));
  showFigures();
  showCharts();
  requests.show(activity.requests, activity.now_us);
  trace.refresh();
  const counts = status.requests;
  byId("request-counts").textContent =
    `${grouped(counts.waiting)} waiting · ${grouped(counts.prefill)} in prefill · ${grouped(counts.decode)} in decode · ` +
    `${grouped(counts.finished)} finished · ${grouped(counts.cancelled)} cancelled · ${grouped(counts.failed)} failed`;
}

function showHead() {
  const state = byId("state");
  const isDraining = status.health === "draining";
  state.textContent = isDraining ? "draining" : status.state;
  state.className = `pill ${isDraining ? "warn" : STATE_CLASS[status.state] ?? ""}`;
  byId("state-detail").textContent = status.detail;
  byId("model").textContent = status.model;
  const wire = status.wire_dtype !== "unspecified" ? ` (${status.wire_dtype} between stages)` : "";
  const numPlaced = status.workers.filter(hasStage).length;
  const lag = status.loop_lag ? ` · loop lag p99 ${duration(status.loop_lag.p99)}` : "";
  const few = numPlaced > 0 && numPlaced < status.num_stages ? `${numPlaced} of ` : "";
  byId("model-facts").textContent = `${status.dtype}${wire} · ${few}${plural(status.num_stages, "stage")} · epoch ${status.epoch} · up ${duration(activity.uptime)}${lag}`;
  byId("freshness").textContent = clock(Date.parse(activity.now) / 1000);
  showUser();
  const unlock = byId("unlock");
  unlock.hidden = Boolean(status.user) || !status.can_act;
  unlock.textContent = token() ? "Lock actions" : "Unlock actions";
  document.title = `${status.model} · Stageline`;
}

function showUser() {
  if (status.user) forgetToken();
  byId("user").hidden = byId("logout").hidden = !status.user;
  byId("user").textContent = status.user ? `${status.user.role}: ${status.user.name}` : "";
}

function showStale(error) {
  document.body.classList.add("stale");
  byId("state").textContent = error.status ? "error" : "no answer";
  byId("state").className = "pill bad";
  const ago = heardMs === null ? "" : `since ${duration((performance.now() - heardMs) / 1000)}; `;
  byId("state-detail").textContent = error.status ? error.message : `${ago}asking again`;
}

function showFigures() {
  const { rates } = activity;
  const counts = status.requests;
  const oldest = activity.in_flight[0];
  const hits = counts.prompt_tokens ? counts.cached_tokens / counts.prompt_tokens : null;
  byId("figures").replaceChildren(
    figure("Generated", rate(rates.generated_tokens), "tokens/s", `${rate(rates.steps)} steps/s`),
    figure("Prefilled", rate(rates.prefill_tokens), "tokens/s", hits === null ? "no prompt yet" : `${percent(hits)} of prompts from cache`),
    figure("Requests", grouped(counts.prefill + counts.decode), "running", `${grouped(counts.waiting)} waiting · ${digits(rates.requests_finished)} done/s`),
    figure("Time to first token", duration(rates.first_token.p50_s), "p50", `p95 ${duration(rates.first_token.p95_s)} · p99 ${duration(rates.first_token.p99_s)}`),
    figure("Between tokens", duration(rates.inter_token.p50_s), "p50", `p95 ${duration(rates.inter_token.p95_s)} · p99 ${duration(rates.inter_token.p99_s)}`),
    figure("Steps in flight", grouped(counts.steps_in_flight), "", oldest ? `oldest for ${duration((activity.now_us - oldest.sent_us) / 1e6)}` : "none waits"),
    figure("Bubbles", percent(activity.bubble_share), "", "of stages’ time, steps in flight"),
    figure("KV blocks", percent(kvShare()), "in use", `${grouped(counts.preemptions)} preemption${counts.preemptions === 1 ? "" : "s"}`),
  );
}

function kvShare() {
  const shares = status.workers.filter(hasStage).map((worker) => {
    const { active, inactive, free } = kvBlocks(worker);
    return active / Math.max(1, active + inactive + free);
  });
  return shares.length ? Math.max(...shares) : null;
}

function figure(name, value, unit, more) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, value, " ", element("small", {}, unit)), element("dd", { class: "sub" }, more));
}

function showCharts() {
  for (const second of activity.seconds) seconds.set(second.start_us, second);
  const oldest = activity.now_us - HISTORY_US - 2e6;
  for (const start of seconds.keys()) if (start < oldest) seconds.delete(start);
  const lastUs = Math.floor(activity.now_us / 1e6) * 1e6 - 1e6;
  const spanS = [60, 120, 300].find((span) => span >= activity.uptime) ?? 300;
  for (const chart of charts) chart.show(seconds, lastUs, store.unixOffset, spanS);
}

async function drain(name) {
  try {
    await drainWorker(name);
    notice(`${name} drains: it stops once its layers have moved.`);
  } catch (error) {
    notice(`${name} is not drained: ${error.message}`);
  }
}

byId("pause").addEventListener("click", () => timeline.hold(timeline.heldUs === null));
timeline.onHold = (held) => {
  byId("pause").setAttribute("aria-pressed", String(held));
  byId("pause").textContent = held ? "Resume" : "Pause";
};
for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => {
    timeline.showSeconds(Number(button.dataset.window));
    for (const other of document.querySelectorAll("[data-window]")) other.setAttribute("aria-pressed", String(other === button));
  });
}
window.addEventListener("hashchange", openLinkedTrace);
byId("logout").addEventListener("click", () => logOut().catch((error) => notice(`Not logged out: ${error.message}`)));
byId("unlock").addEventListener("click", () => {
  if (token()) {
    forgetToken();
    show();
  } else byId("token-dialog").showModal();
});
byId("token-cancel").addEventListener("click", () => byId("token-dialog").close());
byId("token-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = byId("token");
  try {
    await useToken(field.value.trim());
    byId("token-error").textContent = "";
    byId("token-dialog").close();
    show();
  } catch (error) {
    byId("token-error").textContent = error.message;
  }
  field.value = "";
});

poll();
