// Formats with units, after a narrow no-break space.
const GAP = "\u202f";

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (size >= 3600) return `${Math.floor(seconds / 3600)}${GAP}h ${Math.floor((seconds % 3600) / 60)}${GAP}min`;
  if (size >= 120) return `${Math.floor(seconds / 60)}${GAP}min ${Math.floor(seconds % 60)}${GAP}s`;
  if (size >= 0.9995) return `${digits(seconds)}${GAP}s`;
  if (size >= 0.0009995) return `${digits(seconds * 1e3)}${GAP}ms`;
  return `${Math.round(seconds * 1e6)}${GAP}µs`;
}

// Three digits.
export function digits(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return grouped(Math.round(value));
  return value.toFixed(size >= 9.995 ? 1 : size >= 0.0005 ? 2 : 0);
}

export function grouped(value) {
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, GAP);
}

export function rate(value) {
  return value === 0 ? "0" : value >= 99.95 ? grouped(value) : digits(value);
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${share > 0 && share < 0.0995 ? (share * 100).toFixed(1) : Math.round(share * 100)}${GAP}%`;
}

export function bytes(size) {
  for (const [factor, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (size >= factor) return `${(size / factor).toFixed(1)}${GAP}${unit}`;
  }
  return `${size}${GAP}B`;
}

// UUIDv7 begin with a timestamp, so ids of concurrent requests differ at the end.
export function shortId(id) {
  return `${id.slice(0, 8)}…${id.slice(-6)}`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toTimeString().slice(0, 8);
}

export function plural(count, word) {
  return `${grouped(count)} ${word}${count === 1 ? "" : "s"}`;
}

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
