// One row per stage with steps as blocks; gaps are bubbles.
import { clock, duration, percent, plural } from "./format.js";
import { hideTip, showTip } from "./tip.js";

const AXIS_PX = 18;
const KIND_WORDS = { prefill: "prefill", decode: "decode", mixed: "prefill and decode", empty: "records only" };

export class Timeline {
  constructor(canvas, readout, store) {
    this.canvas = canvas;
    this.readout = readout;
    this.store = store;
    this.windowUs = 5e6;
    this.heldUs = null;
    this.chosen = null;
    this.pointed = null;
    this.blocks = [];
    this.workers = [];
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.readColours();
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#unpoint());
    canvas.addEventListener("keydown", (event) => this.#key(event));
    window.addEventListener("themechange", () => this.#recolour());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#recolour());
    new ResizeObserver(() => this.draw()).observe(canvas);
    const tick = () => {
      if (!this.still.matches && this.heldUs === null) this.draw();
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  // Called with new steps; redraws if animation is off.
  refresh(workers) {
    this.workers = workers;
    if (this.still.matches && this.heldUs === null) this.draw();
  }

  hold(wanted) {
    this.heldUs = wanted ? this.#endUs() : null;
    if (!wanted) this.chosen = null;
    this.onHold?.(wanted);
    this.draw();
  }

  showSeconds(seconds) {
    this.windowUs = seconds * 1e6;
    this.draw();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["text", "muted", "line", "track", "hatch", "decode", "prefill", "mixed", "warn", "on-block", "panel"];
    this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  #recolour() {
    this.readColours();
    this.draw();
  }

  #endUs() {
    return this.store.nowUs() - this.store.lagUs;
  }

  #layout(width) {
    const stages = Math.max(1, this.store.numStages, this.workers.length);
    const pitch = stages <= 6 ? 30 : stages <= 16 ? 22 : 13;
    const narrow = width < 620;
    return {
      stages, pitch, block: pitch - (pitch > 14 ? 6 : 3), left: narrow ? 34 : 132, right: narrow ? 40 : 58, narrow,
      height: stages * pitch + AXIS_PX,
    };
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const layout = this.#layout(width);
    const ratio = devicePixelRatio || 1;
    if (this.canvas.height !== Math.round(layout.height * ratio) || this.canvas.width !== Math.round(width * ratio)) {
      this.canvas.style.height = `${layout.height}px`;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(layout.height * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, layout.height);
    pen.font = "11px system-ui, sans-serif";
    const endUs = this.heldUs ?? this.#endUs();
    const beginUs = endUs - this.windowUs;
    const plot = { ...layout, width: width - layout.left - layout.right, beginUs, endUs };
    plot.x = (timeUs) => layout.left + ((timeUs - beginUs) / this.windowUs) * plot.width;
    this.#rows(pen, plot);
    this.#blocks(pen, plot);
    this.#axis(pen, plot);
    this.#labels(pen, plot, width);
  }

  #rows(pen, plot) {
    const colours = this.colours;
    this.gaps = this.#withoutEpoch(plot);
    for (let stage = 0; stage < plot.stages; stage++) {
      const y = stage * plot.pitch + (plot.pitch - plot.block) / 2;
      pen.fillStyle = colours.track;
      pen.fillRect(plot.left, y, plot.width, plot.block);
      pen.fillStyle = colours.hatch;
      for (const gap of this.gaps) this.#hatch(pen, gap.left, y, gap.right - gap.left, plot.block);
    }
  }

  // Intervals without an epoch: before the first one, and between two.
  #withoutEpoch(plot) {
    const gaps = [];
    let [freeFromUs, reason] = [-Infinity, "the pipeline has not started yet"];
    const add = (untilUs) => gaps.push({ beginUs: freeFromUs, endUs: untilUs, reason });
    for (const epoch of this.store.epochs) {
      if (epoch.started_us > freeFromUs) add(epoch.started_us);
      freeFromUs = epoch.stopped_us ?? Infinity;
      reason = `epoch ${epoch.epoch} ended (${epoch.cause}): ${epoch.detail}`;
    }
    add(Infinity);
    return gaps
      .filter((gap) => gap.endUs > gap.beginUs && gap.endUs > plot.beginUs && gap.beginUs < plot.endUs)
      .map((gap) => ({ ...gap, left: plot.x(Math.max(gap.beginUs, plot.beginUs)), right: plot.x(Math.min(gap.endUs, plot.endUs)) }));
  }

  #hatch(pen, x, y, width, height) {
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width, height);
    pen.clip();
    for (let at = x - height; at < x + width; at += 7) {
      pen.beginPath();
      pen.moveTo(at, y + height);
      pen.lineTo(at + 3, y + height);
      pen.lineTo(at + 3 + height, y);
      pen.lineTo(at + height, y);
      pen.fill();
    }
    pen.restore();
  }

  #blocks(pen, plot) {
    this.blocks = [];
    const marked = this.pointed ?? this.chosen;
    pen.save();
    pen.beginPath();
    pen.rect(plot.left, 0, plot.width, plot.height);
    pen.clip();
    for (const step of this.store.steps) {
      if (step.answered_us < plot.beginUs || step.sent_us > plot.endUs || step.kind === "empty") continue;
      for (let stage = 0; 2 * stage < step.computed_us.length; stage++) {
        const begin = plot.x(step.sent_us + step.computed_us[2 * stage]);
        const end = plot.x(step.sent_us + step.computed_us[2 * stage + 1]);
        if (end < plot.left || begin > plot.left + plot.width) continue;
        pen.globalAlpha = marked && marked.number !== step.number ? 0.25 : 1;
        this.#block(pen, plot, step, stage, begin, end);
      }
    }
    pen.restore();
    this.canvas.dataset.blocks = String(this.blocks.length);
  }

  #block(pen, plot, step, stage, begin, end) {
    const top = stage * plot.pitch + (plot.pitch - plot.block) / 2;
    const gap = end - begin > 4 ? 1 : end - begin > 2 ? 0.5 : 0;
    const width = Math.max(0.75, end - begin - gap);
    const isDecode = step.kind === "decode";
    const y = isDecode ? top + plot.block * 0.18 : top;
    const height = isDecode ? plot.block * 0.64 : plot.block;
    pen.fillStyle = this.colours[step.kind === "prefill" || step.kind === "mixed" ? "prefill" : "decode"];
    pen.fillRect(begin, y, width, height);
    if (step.kind === "mixed") {
      pen.fillStyle = this.colours.decode;
      pen.fillRect(begin, top + plot.block * 0.45, width, plot.block * 0.55);
    }
    this.blocks.push({ step, stage, left: begin, right: begin + Math.max(width, 3), top, bottom: top + plot.block });
    if (width < 24 || plot.block < 15) return;
    const text = step.kind === "decode" ? `${step.num_decodes} seq` : `${step.num_chunk_tokens} tok`;
    const shown = pen.measureText(text).width + 6 <= width ? text : text.split(" ")[0];
    if (pen.measureText(shown).width + 4 > width) return;
    pen.fillStyle = this.colours["on-block"];
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    pen.fillText(shown, Math.max(begin, plot.left) + 3, step.kind === "mixed" ? top + plot.block * 0.27 : y + height / 2 + 0.5);
  }

  #axis(pen, plot) {
    const y = plot.stages * plot.pitch;
    const tickUs = this.windowUs <= 2e6 ? 2e5 : 1e6;
    const offsetUs = this.store.unixOffset * 1e6;
    pen.textBaseline = "top";
    pen.textAlign = "center";
    const first = Math.ceil((plot.beginUs + offsetUs) / tickUs) * tickUs;
    for (let at = first; at <= plot.endUs + offsetUs; at += tickUs) {
      const x = plot.x(at - offsetUs);
      pen.fillStyle = this.colours.line;
      pen.fillRect(Math.round(x), 0, 1, y + 3);
      const isSecond = Math.round(at / 1e5) % 10 === 0;
      if (x < plot.left + 20 || x > plot.left + plot.width - 20) continue;
      pen.fillStyle = this.colours.muted;
      pen.fillText(isSecond ? clock(Math.round(at / 1e6)) : `.${Math.round(at / 1e5) % 10}`, x, y + 5);
    }
  }

  #labels(pen, plot, width) {
    pen.textBaseline = "middle";
    for (let stage = 0; stage < plot.stages; stage++) {
      const y = stage * plot.pitch + plot.pitch / 2;
      const isSlowest = stage === this.store.slowest;
      pen.fillStyle = isSlowest ? this.colours.warn : this.colours.text;
      pen.font = `${isSlowest ? "600 " : ""}${plot.pitch > 14 ? 12 : 10}px system-ui, sans-serif`;
      pen.textAlign = "left";
      const mark = isSlowest ? "▲ " : "";
      pen.fillText(clipped(pen, plot.narrow ? `${mark}${stage}` : `${mark}${stage}  ${this.workers[stage] ?? ""}`, plot.left - 8), 0, y);
      const load = this.store.loads[stage];
      if (!load) continue;
      pen.textAlign = "right";
      pen.fillStyle = isSlowest ? this.colours.warn : this.colours.muted;
      pen.fillText(percent(load.busy_share), width, y);
    }
    pen.textAlign = "right";
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = this.colours.muted;
    pen.textBaseline = "top";
    pen.fillText("busy", width, plot.stages * plot.pitch + 5);
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const block = this.blocks.find((block) => x >= block.left && x <= block.right && y >= block.top && y <= block.bottom);
    if (!block) return this.#pointAtGap(event, x);
    this.pointed = block.step;
    const { step, stage } = block;
    const [begin, end] = step.computed_us.slice(2 * stage, 2 * stage + 2);
    showTip(event.clientX, event.clientY, `Step ${step.step_id} on stage ${stage}: ${duration((end - begin) / 1e6)}`, describe(step));
    if (this.heldUs !== null || this.still.matches) this.draw();
  }

  #pointAtGap(event, x) {
    this.#unpoint();
    const gap = this.gaps?.find((gap) => x >= gap.left && x <= gap.right);
    if (!gap) return;
    const length = gap.endUs - gap.beginUs;
    showTip(event.clientX, event.clientY, `No steps${Number.isFinite(length) ? ` for ${duration(length / 1e6)}` : ""}`, [gap.reason]);
  }

  #unpoint() {
    hideTip();
    if (!this.pointed) return;
    this.pointed = null;
    if (this.heldUs !== null || this.still.matches) this.draw();
  }

  #key(event) {
    if (event.key === " ") this.hold(this.heldUs === null);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") this.#choose(event.key === "ArrowLeft" ? -1 : 1);
    else if (event.key === "Escape" && this.chosen) this.hold(false);
    else return;
    event.preventDefault();
  }

  #choose(direction) {
    if (this.heldUs === null) this.hold(true);
    const shown = this.store.steps.filter(
      (step) => step.kind !== "empty" && step.answered_us <= this.heldUs && step.sent_us >= this.heldUs - this.windowUs,
    );
    if (!shown.length) return;
    const at = this.chosen ? shown.findIndex((step) => step.number === this.chosen.number) : shown.length;
    this.chosen = shown[Math.max(0, Math.min(shown.length - 1, (at < 0 ? shown.length : at) + direction))];
    const stages = [];
    for (let stage = 0; 2 * stage < this.chosen.computed_us.length; stage++) {
      stages.push(`stage ${stage} ${duration((this.chosen.computed_us[2 * stage + 1] - this.chosen.computed_us[2 * stage]) / 1e6)}`);
    }
    this.readout.textContent = `Step ${this.chosen.step_id}: ${describe(this.chosen).join(", ")}; ${stages.join(", ")}.`;
    this.draw();
  }
}

function clipped(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let cut = text;
  while (cut.length > 1 && pen.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}

function describe(step) {
  const parts = [`${KIND_WORDS[step.kind]}, epoch ${step.epoch}`];
  if (step.num_decodes) parts.push(`${plural(step.num_decodes, "sequence")} decoding`);
  if (step.num_chunks) parts.push(`${plural(step.num_chunks, "chunk")} of ${plural(step.num_chunk_tokens, "prompt token")}`);
  parts.push(`${duration((step.answered_us - step.sent_us) / 1e6)} from sending to the result`);
  return parts;
}
