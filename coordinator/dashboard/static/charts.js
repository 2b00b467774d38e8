// Lines over the last minutes, five at most, with the values under the pointer or the arrow keys.
import { clock, element } from "./format.js";

const HEIGHT = 150;
const MARGIN = { left: 46, right: 8, top: 8, bottom: 20 };

function svg(tag, attributes = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// `lines`: {label, className, isDashed, isArea, value(second) -> number | null}. `whole`: what nothing counts as.
export class Chart {
  constructor(figure, { title, unit, lines, format, whole = null }) {
    Object.assign(this, { lines, format, whole, title, cursor: null, points: [] });
    this.legend = element("ul", { class: "legend" });
    this.svg = svg("svg", { role: "img", tabindex: "0", "aria-label": title });
    const caption = element("figcaption", {}, element("h2", {}, title, " ", element("span", { class: "unit" }, unit)), this.legend);
    figure.replaceChildren(caption, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.#moveTo(event));
    this.svg.addEventListener("pointerleave", () => this.#setCursor(null));
    this.svg.addEventListener("blur", () => this.#setCursor(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(figure);
  }

  // `seconds`: start_us -> second; `lastUs`: the last whole second of `spanS`; `unixOffset`: from that clock to the wall's.
  show(seconds, lastUs, unixOffset, spanS) {
    if (spanS !== this.spanS) this.cursor = null;
    this.spanS = spanS;
    this.points = [];
    for (let age = spanS - 1; age >= 0; age--) {
      const startUs = lastUs - age * 1e6;
      const second = seconds.get(startUs);
      const values = this.lines.map((line) => (second ? line.value(second) : null) ?? this.whole);
      this.points.push({ at: startUs / 1e6 + unixOffset, values });
    }
    this.#draw();
  }

  #draw() {
    const width = this.svg.clientWidth;
    if (!width || !this.points.length) return;
    const plotWidth = width - MARGIN.left - MARGIN.right;
    const plotHeight = HEIGHT - MARGIN.top - MARGIN.bottom;
    const most = Math.max(0, ...this.points.flatMap((point) => point.values.map((value) => value ?? 0)));
    const [top, tick] = scale(most);
    const x = (index) => MARGIN.left + (index / (this.spanS - 1)) * plotWidth;
    const y = (value) => MARGIN.top + plotHeight - (value / top) * plotHeight;
    this.plot = { x, plotWidth };
    const parts = [];
    for (let value = 0; value <= top + tick / 2; value += tick) {
      parts.push(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }));
      parts.push(svg("text", { x: MARGIN.left - 6, y: y(value) + 3.5, "text-anchor": "end" }, this.format(value).replace(/\.0+(?=\D|$)/, "")));
    }
    for (let age = 0; age <= this.spanS; age += this.spanS > 120 ? 60 : this.spanS / 4) {
      const at = MARGIN.left + (1 - age / this.spanS) * plotWidth;
      const text = age === 0 ? "now" : age % 60 ? `−${age}\u202fs` : `−${age / 60}\u202fmin`;
      parts.push(svg("text", { x: at, y: HEIGHT - 5, "text-anchor": age === 0 ? "end" : "middle" }, text));
    }
    this.lines.forEach((line, which) => parts.push(...this.#line(line, which, x, y)));
    if (this.cursor !== null) {
      parts.push(svg("line", { class: "cursor", x1: x(this.cursor), x2: x(this.cursor), y1: MARGIN.top, y2: y(0) }));
    }
    this.svg.replaceChildren(...parts);
    this.#values();
  }

  #line(line, which, x, y) {
    const runs = [];
    let run = [];
    this.points.forEach((point, index) => {
      if (point.values[which] === null) {
        if (run.length) runs.push(run);
        run = [];
      } else run.push([x(index), y(point.values[which])]);
    });
    if (run.length) runs.push(run);
    return runs.flatMap((points) => {
      if (points.length === 1) points = [[points[0][0] - 1, points[0][1]], [points[0][0] + 1, points[0][1]]];
      const path = points.map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`).join("L");
      const drawn = [svg("path", { class: `line ${line.className} ${line.isDashed ? "dashed" : ""}`, d: `M${path}` })];
      if (line.isArea) {
        drawn.unshift(svg("path", { class: `area ${line.className}`, d: `M${path}L${points.at(-1)[0].toFixed(1)},${y(0)}L${points[0][0].toFixed(1)},${y(0)}Z` }));
      }
      return drawn;
    });
  }

  #values() {
    const point = this.points[this.cursor ?? this.points.length - 1];
    const when = this.cursor === null ? [] : [element("li", {}, clock(point.at))];
    const items = this.lines.map((line, which) =>
      element("li", {}, element("i", { class: `key ${line.className}` }), `${line.label}${line.label ? " " : ""}${point.values[which] === null ? "–" : this.format(point.values[which])}`));
    this.legend.replaceChildren(...when, ...items);
    this.svg.setAttribute("aria-label", `${this.title}. ${items.map((item) => item.textContent).join(", ")}`);
  }

  #moveTo(event) {
    if (!this.plot) return;
    const share = (event.clientX - this.svg.getBoundingClientRect().left - MARGIN.left) / this.plot.plotWidth;
    this.#setCursor(Math.max(0, Math.min(this.spanS - 1, Math.round(share * (this.spanS - 1)))));
  }

  #key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30 };
    if (!(event.key in moves)) return;
    this.#setCursor(Math.max(0, Math.min(this.spanS - 1, (this.cursor ?? this.spanS - 1) + moves[event.key])));
    event.preventDefault();
  }

  #setCursor(index) {
    this.cursor = index;
    this.#draw();
  }
}

// A round number above `most`, and the distance of its grid lines.
function scale(most) {
  if (most <= 0) return [1, 1];
  const rough = most / 3;
  const magnitude = 10 ** Math.floor(Math.log10(rough));
  const tick = [1, 2, 2.5, 5, 10].map((factor) => factor * magnitude).find((value) => value >= rough);
  return [Math.ceil(most / tick) * tick, tick];
}
