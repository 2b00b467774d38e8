// Stages with worker, layers, load, memory and links.
import { bytes, digits, duration, element, grouped, percent, plural } from "./format.js";

const WORKER_CLASS = { ready: "ok", loading: "warn", suspect: "warn", draining: "warn", joining: "warn", lost: "bad", quarantined: "bad" };

export const hasStage = (worker) => worker.stage !== null;

// Null before the first heartbeat.
export function kvBlocks({ kv }) {
  return { active: kv?.blocks_active ?? 0, inactive: kv?.blocks_inactive ?? 0, free: kv?.blocks_free ?? 0 };
}

// Of models with recurrent layers.
function recurrentStates({ kv }) {
  const { states_live: live = 0, states_saved: saved = 0, states_free: free = 0 } = kv ?? {};
  return live + saved + free ? `; recurrent states: ${live} live, ${saved} saved, ${free} free` : "";
}

export class Topology {
  constructor(stages, others, onDrain) {
    this.stages = stages;
    this.others = others;
    this.onDrain = onDrain;
    this.drawn = "";
  }

  // Cards are rebuilt only if more than numbers has changed, to keep the focus.
  show(status, activity, { canAct }) {
    const placed = status.workers.filter(hasStage).sort((a, b) => a.stage - b.stage);
    const shape = JSON.stringify([placed.map((worker) => [worker.name, worker.stage, worker.role, worker.layer_begin, worker.layer_end, worker.state, worker.device, worker.kernels]), canAct]);
    if (shape !== this.drawn) {
      this.stages.classList.toggle("many", placed.length > 8);
      this.stages.replaceChildren(...placed.map((worker) => this.#card(worker, canAct)));
      this.drawn = shape;
    }
    placed.forEach((worker, index) => {
      const card = this.stages.children[index];
      this.#update(card, worker, activity);
      card.querySelector(".links").replaceChildren(...hops(worker, placed[index + 1], status.links));
    });
    const others = status.workers.filter((worker) => !hasStage(worker));
    this.others.replaceChildren(...others.map((worker) => element("li", {}, `${worker.name}: ${worker.state}${worker.detail ? `, ${worker.detail}` : ""}`)));
    return placed;
  }

  #card(worker, canAct) {
    const { stage: index, role, layer_begin: begin, layer_end: end } = worker;
    const layers = end - begin === 1 ? `layer ${begin}` : `layers ${begin}–${end - 1} (${end - begin})`;
    const card = element("li", { class: "stage" },
      element("header", {},
        element("b", {}, `Stage ${index}`), element("span", { class: "name", title: worker.address }, worker.name),
        element("span", { class: `pill ${WORKER_CLASS[worker.state] ?? ""}` }, worker.state)),
      element("p", { class: "place", title: `${role}, process ${worker.pid} at ${worker.address}` }, [layers, role, worker.device, worker.kernels].filter(Boolean).join(" · ")),
      element("div", { class: "bars" }, ...bar("Busy", "busy", ["load"]), ...bar("Memory", "memory", ["weights", "kv"]), ...bar("KV blocks", "blocks", ["active", "inactive"])),
      element("p", { class: "times" }),
      element("p", { class: "links" }),
      element("p", { class: "gpu" }),
      element("footer", {}));
    if (canAct) card.lastChild.append(this.#drainButton(worker.name));
    return card;
  }

  #drainButton(name) {
    const button = element("button", { type: "button", class: "danger" }, "Drain…");
    button.addEventListener("click", () => {
      if (button.dataset.armed) return this.onDrain(name);
      button.dataset.armed = "yes";
      button.textContent = `Move its layers and stop ${name}?`;
      setTimeout(() => { delete button.dataset.armed; button.textContent = "Drain…"; }, 5000);
    });
    return button;
  }

  #update(card, worker, activity) {
    const load = activity?.stages[worker.stage];
    card.classList.toggle("slowest", activity?.slowest_stage === worker.stage);
    set(card, "busy", load ? percent(load.busy_share) : "–", [load?.busy_share ?? 0], "of the last 10 s");
    const held = worker.weight_bytes + worker.kv_bytes;
    const memory = worker.memory_bytes || held || 1;
    set(card, "memory", held ? `${bytes(held)}${worker.memory_bytes ? ` of ${bytes(worker.memory_bytes)}` : ""}` : "–",
      [worker.weight_bytes / memory, worker.kv_bytes / memory], `weights ${bytes(worker.weight_bytes)}, KV cache ${bytes(worker.kv_bytes)}, process ${bytes(worker.resident_bytes)}${deviceMemory(worker.device_memory)}`);
    const { active, inactive, free } = kvBlocks(worker);
    const blocks = active + inactive + free || 1;
    set(card, "blocks", `${percent(active / blocks)} of ${blocks === 1 ? "–" : plural(blocks, "block")}`, [active / blocks, inactive / blocks],
      `${plural(active, "block")} active, ${inactive} cached, ${free} free${recurrentStates(worker)}`);
    card.querySelector(".times").replaceChildren(...times(load, worker));
    card.querySelector(".gpu").replaceChildren(...device(worker));
  }
}

function deviceMemory(memory) {
  if (!memory) return "";
  return `; GPU ${bytes(memory.allocated_bytes)} in tensors, at most ${bytes(memory.peak_bytes)}, ${bytes(memory.reserved_bytes)} reserved, ${bytes(memory.free_bytes)} free`;
}

// Speed as measured or given, and CUDA graphs.
function device({ rates, cuda_graphs: graphs }) {
  const parts = [];
  if (rates) {
    parts.push(element("span", { title: "memory and matrix products, as measured at start or given" },
      element("b", {}, `${digits(rates.bytes_per_second / 1e9)} GB/s`), ` ${digits(rates.operations_per_second / 1e12)} TFLOP/s`));
  }
  if (graphs) parts.push(cudaGraphs(graphs));
  return parts;
}

function cudaGraphs({ num_replayed, eager, sizes, num_failed, pool_bytes }) {
  const steps = eager.reduce((sum, { num_steps }) => sum + num_steps, num_replayed);
  const count = sizes.reduce((sum, { num_graphs }) => sum + num_graphs, 0);
  const reasons = eager.map(({ reason, num_steps }) => `${grouped(num_steps)} ${reason.replace("EAGER_REASON_", "").toLowerCase().replace("_", " ")}`);
  const ofSizes = sizes.map(({ num_tokens, has_prompts }) => `${num_tokens}${has_prompts ? " with prompts" : ""}`);
  const title = [`${plural(num_replayed, "step")} replayed`, `eager: ${reasons.join(", ") || "none"}`, `${plural(count, "graph")} of ${bytes(pool_bytes)}`,
    `tokens: ${ofSizes.join(", ") || "–"}`, `${num_failed} failed`].join("; ");
  return element("span", { title }, "CUDA graphs ", element("b", {}, steps ? percent(num_replayed / steps) : "–"), " of steps");
}

// The ways to this stage from the coordinator, and from this stage. Links are measured between hosts only.
function hops(worker, next, links) {
  const link = (from, to) => links.find(({ from_worker, to_worker }) => from_worker === from && to_worker === to);
  const back = next ? null : hop("to the coordinator", link(worker.name, ""));
  return [hop("from the coordinator", link("", worker.name)), next ? hop(`to ${next.name}`, link(worker.name, next.name), worker) : back].filter(Boolean);
}

function hop(label, link, { hop_transport: transport, same_host_fallback: fallback } = {}) {
  const way = transport && transport !== "unspecified" ? transport : "";
  if (!link && !way) return null;
  const rate = link?.bytes_per_second ? `${bytes(link.bytes_per_second)}/s` : "";
  const numbers = [link && duration(link.round_trip), rate].filter(Boolean).join(", ");
  const title = [link && `round trip${rate ? " and rate" : "; rate not measured yet"}`, link?.advice, fallback && `${["tcp", "grpc"].includes(way) ? "not in shared memory" : "copied once more"}: ${fallback}`].filter(Boolean).join("; ");
  return element("span", { title: title || null }, label, numbers && " ", numbers && element("b", {}, numbers), way && ` ${way}`);
}

function times(load, worker) {
  if (worker.fetch) {
    const { done_bytes: done, total_bytes: total, bytes_per_second: rate, is_prefetch: isAhead } = worker.fetch;
    const left = rate > 0 ? `, ${duration((total - done) / rate)} left` : "";
    const title = isAhead ? "Layers that it would get if another worker was lost" : null;
    return [element("span", { title }, `${isAhead ? "prefetches" : "fetches"} ${bytes(done)} of ${bytes(total)}, ${bytes(rate)}/s${left}`)];
  }
  if (worker.state === "loading") return [element("span", {}, `loading, ${percent(worker.load_progress)} read`)];
  if (!load || !load.num_steps) return [element("span", {}, "no steps in the last 10 s")];
  return [["compute", load.compute_us / 1e6], ["wait", load.wait_us / 1e6], ["hop", load.hop_us / 1e6]].map(([name, value]) =>
    element("span", { title: `${name}: mean of ${plural(load.num_steps, "step")}` }, `${name} `, element("b", {}, duration(value))));
}

function bar(label, name, parts) {
  return [
    element("span", { class: "what" }, label),
    element("span", { class: "bar", "data-bar": name }, ...parts.map((part) => element("i", { class: part }))),
    element("span", { class: "value", "data-value": name }),
  ];
}

function set(card, name, text, shares, title) {
  const place = card.querySelector(`[data-bar="${name}"]`);
  place.title = title;
  shares.forEach((share, index) => { place.children[index].style.width = `${digits(Math.min(1, share) * 100)}%`; });
  const value = card.querySelector(`[data-value="${name}"]`);
  if (value.textContent !== text) value.textContent = text;
}
