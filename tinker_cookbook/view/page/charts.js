// Line charts as inline SVG.

function smoothed(values, amount) {
  if (!amount) return values;
  // Exponential moving average without the bias towards its first value.
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = amount * sum + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return sum / weight;
  });
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

const tip = make("div", { class: "tip", hidden: true });
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = event.clientY + 14 + "px";
}

/** Draws series [{label, colour, xs, values, onpoint}] as lines. */
function chart(series, title) {
  const W = 420, H = 190, L = 46, R = 8, T = 8, B = 20;
  const log = settings.log && series.every((one) => one.values.every((value) => value > 0));
  const f = log ? Math.log10 : (value) => value;
  const lines = series.map((one) => ({ ...one, smooth: smoothed(one.values, settings.smooth) }));
  const xs = lines.flatMap((one) => one.xs), ys = lines.flatMap((one) => one.values.map(f));
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) x1 = x0 + 1;
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 0.5; y1 += Math.abs(y1) * 0.1 || 0.5; }
  const px = (x) => L + (W - L - R) * (x - x0) / (x1 - x0);
  const py = (value) => T + (H - T - B) * (1 - (f(value) - y0) / (y1 - y0));
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title, class: "live", tabindex: 0 });
  for (const y of ticks(y0, y1, 4)) {
    const value = log ? 10 ** y : y;
    svg.append(make("line", { class: "grid", x1: L, x2: W - R, y1: py(value), y2: py(value) }));
    svg.append(make("text", { x: L - 4, y: py(value) + 3, "text-anchor": "end" }, short(value)));
  }
  for (const x of ticks(x0, x1, 5)) svg.append(make("text", { x: px(x), y: H - 6, "text-anchor": "middle" }, short(x)));
  for (const one of lines) {
    const path = (values) => "M" + values.map((value, i) => `${px(one.xs[i]).toFixed(1)},${py(value).toFixed(1)}`).join("L");
    if (settings.smooth) svg.append(make("path", { class: "raw", d: path(one.values), stroke: one.colour }));
    svg.append(make("path", { class: "line", d: path(one.smooth), stroke: one.colour }));
    if (one.values.length === 1) svg.append(make("circle", { cx: px(one.xs[0]), cy: py(one.values[0]), r: 3, fill: one.colour }));
  }
  const cursor = make("line", { class: "cursor", y1: T, y2: H - B, visibility: "hidden" });
  svg.append(cursor);
  const nearest = (one, x) => {
    let low = 0, high = one.xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (one.xs[middle] < x) low = middle; else high = middle; }
    return Math.abs(one.xs[low] - x) <= Math.abs(one.xs[high] - x) ? low : high;
  };
  const at = (event) => {
    const box = svg.getBoundingClientRect();
    return x0 + (x1 - x0) * ((event.clientX - box.left) / box.width * W - L) / (W - L - R);
  };
  svg.addEventListener("pointermove", (event) => {
    const x = at(event), i = nearest(lines[0], x), where = px(lines[0].xs[i]);
    cursor.setAttribute("x1", where); cursor.setAttribute("x2", where); cursor.setAttribute("visibility", "visible");
    const rows = lines.map((one) => `${lines.length > 1 ? one.label + "  " : ""}${short(one.values[nearest(one, x)])}`);
    showTip(event, `${settings.x} ${short(lines[0].xs[i])}\n${rows.join("\n")}`);
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
  svg.addEventListener("click", (event) => {
    const one = lines[0];
    if (one.onpoint) one.onpoint(one.steps[nearest(one, at(event))]);
  });
  return svg;
}
