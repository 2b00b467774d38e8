// Table of requests, live ones first, with keyboard navigation.
import { duration, element, grouped, plural, rate, shortId } from "./format.js";

const PHASE_CLASS = { decode: "quiet decode", prefill: "quiet prefill", waiting: "quiet", preempted: "warn", recovering: "warn", finished: "quiet", cancelled: "warn", failed: "bad" };

const LIVE = new Set(["waiting", "prefill", "decode", "preempted", "recovering"]);

export const isLive = (request) => LIVE.has(request.phase);

export class Requests {
  constructor(body, empty, filter, onOpen) {
    Object.assign(this, { body, empty, filter, onOpen, rows: new Map(), list: [], nowUs: 0, current: null });
    filter.addEventListener("input", () => this.#draw());
    body.addEventListener("keydown", (event) => this.#key(event));
    body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) this.#open(row);
    });
    body.addEventListener("focusin", (event) => this.#makeCurrent(event.target.closest("tr")));
  }

  show(requests, nowUs) {
    const live = requests.filter(isLive).sort((a, b) => b.accepted_us - a.accepted_us);
    this.list = [...live, ...requests.filter((request) => !isLive(request))];
    this.nowUs = nowUs;
    this.#draw();
  }

  find(id) {
    return this.list.find((request) => request.request_id === id);
  }

  #draw() {
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = this.list.filter((request) => !wanted || request.request_id.includes(wanted) || request.phase.includes(wanted));
    const rows = shown.map((request) => this.#row(request));
    const focused = document.activeElement;
    if (rows.length !== this.body.children.length || rows.some((row, index) => this.body.children[index] !== row)) {
      this.body.replaceChildren(...rows);
      if (focused instanceof HTMLTableRowElement && focused.isConnected) focused.focus({ preventScroll: true });
    }
    const kept = new Set(shown.map((request) => request.request_id));
    for (const id of this.rows.keys()) if (!kept.has(id)) this.rows.delete(id);
    if (!this.current?.isConnected) this.#makeCurrent(rows[0] ?? null);
    this.empty.hidden = rows.length > 0;
    if (wanted && !rows.length) this.empty.textContent = `No request matches “${wanted}”.`;
  }

  #row(request) {
    let row = this.rows.get(request.request_id);
    if (!row) {
      row = element("tr", { tabindex: "-1", "data-id": request.request_id, "aria-haspopup": "dialog" });
      for (let cell = 0; cell < 10; cell++) row.append(element("td", { class: cell > 1 && cell < 9 ? "number" : cell === 9 ? "remarks" : "" }));
      row.children[0].append(element("span", { class: "pill" }));
      row.children[1].append(element("span", { class: "id", title: request.request_id }, shortId(request.request_id)));
      this.rows.set(request.request_id, row);
    }
    const pill = row.children[0].firstChild;
    const pillClass = `pill ${PHASE_CLASS[request.phase]}`;
    if (pill.className !== pillClass) pill.className = pillClass;
    setText(pill, request.phase);
    const times = milestones(request, this.nowUs);
    setText(row.children[2], grouped(request.num_prompt_tokens));
    setText(row.children[3], request.num_cached_tokens ? grouped(request.num_cached_tokens) : "–");
    setText(row.children[4], `${grouped(request.num_generated_tokens)} / ${grouped(request.max_tokens)}`);
    setText(row.children[5], duration(times.queue_s));
    setText(row.children[6], duration(times.first_token_s));
    setText(row.children[7], times.rate === null ? "–" : rate(times.rate));
    setText(row.children[8], duration(times.total_s));
    setText(row.children[9], remarks(request));
    return row;
  }

  #makeCurrent(row) {
    if (this.current) this.current.tabIndex = -1;
    this.current = row;
    if (row) row.tabIndex = 0;
  }

  #open(row) {
    this.#makeCurrent(row);
    row.focus({ preventScroll: true });
    this.onOpen(row.dataset.id);
  }

  #key(event) {
    const row = event.target.closest("tr");
    const rows = [...this.body.children];
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -rows.length, End: rows.length };
    if (event.key === "Enter" || event.key === " ") this.#open(row);
    else if (event.key in moves) {
      const index = Math.max(0, Math.min(rows.length - 1, rows.indexOf(row) + moves[event.key]));
      rows[index].focus();
    } else return;
    event.preventDefault();
  }
}

function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

export function milestones(request, nowUs) {
  const endUs = request.ended_us ?? nowUs;
  const between = (from, to) => (from === null || to === null ? null : Math.max(0, to - from) / 1e6);
  const decodeS = between(request.first_token_us, endUs);
  return {
    queue_s: between(request.accepted_us, request.started_us ?? (isLive(request) ? nowUs : null)),
    first_token_s: between(request.accepted_us, request.first_token_us),
    total_s: between(request.accepted_us, endUs),
    rate: decodeS && request.num_generated_tokens > 1 ? (request.num_generated_tokens - request.num_choices) / decodeS : null,
  };
}

function remarks(request) {
  const parts = [];
  if (request.num_choices > 1) parts.push(plural(request.num_choices, "choice"));
  if (request.num_restarts) parts.push(`recomputed ${request.num_restarts === 1 ? "once" : `${request.num_restarts} times`}`);
  if (request.error) parts.push(`${request.reason}: ${request.error}`);
  return parts.join("; ");
}
