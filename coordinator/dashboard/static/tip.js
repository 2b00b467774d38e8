// One tooltip for everything that is pointed at.
const tip = document.getElementById("tip");

export function showTip(x, y, title, lines) {
  const bold = document.createElement("b");
  bold.textContent = title;
  tip.replaceChildren(bold, ...lines.flatMap((line) => [line, document.createElement("br")]));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - height - 4))}px`;
}

export function hideTip() {
  tip.hidden = true;
}

export function notice(text) {
  const place = document.getElementById("notice");
  place.textContent = text;
  place.hidden = false;
  clearTimeout(notice.timer);
  notice.timer = setTimeout(() => { place.hidden = true; }, 6000);
}
