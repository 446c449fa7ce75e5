// Line charts as inline SVG.

const DASHES = ["", "7 3", "2 2", "9 3 2 3"];  // lines differ in more than their colour
const line = (i) => ({ stroke: COLOURS[i % COLOURS.length], "stroke-dasharray": DASHES[i % DASHES.length] });

function smoothed(values, amount) {
  if (!amount) return values;
  // Exponential moving average without the bias towards its first value.
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (!isNumber(value)) return value;
    sum = amount * sum + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return sum / weight;
  });
}

function ticks(low, high, count, log) {
  if (log && high - low <= 1) return ticks(10 ** low, 10 ** high, count).map(Math.log10);
  if (log) {
    const found = [], factors = high - low > 4 ? [1] : [1, 2, 5];
    for (let power = Math.floor(low); power <= high; power++) for (const factor of factors) found.push(power + Math.log10(factor));
    return found.filter((value) => value >= low - 1e-9 && value <= high + 1e-9);
  }
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

const tip = make("div", { class: "tip", hidden: true, role: "status" });
function showTip(x, y, text) {
  tip.textContent = visible(text);
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.min(y + 14, innerHeight - tip.offsetHeight - 4) + "px";
}

function range(values, margin) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  if (low > high) return [0, 1];
  return low < high ? [low, high] : [low - margin(low), high + margin(high)];
}

/**
 * Draws series [{label, i, xs, values, at}] as lines; `at(k)` opens what made point k.
 * `gaps` are the points before which the line has a gap. A value that is a text (nan, inf) is a cross at the edge. The positions on the x axis ascend.
 */
function chart(series, title, { x = settings.x, logX = false, dots = false } = {}) {
  const W = 420, H = 190, L = 46, R = 10, T = 10, B = 20;
  const positive = series.every((one) => one.values.every((value) => !isNumber(value) || value > 0));
  const log = settings.log && positive, f = log ? Math.log10 : (value) => value, g = logX ? Math.log10 : (value) => value;
  const lines = series.map((one) => ({ ...one, smooth: smoothed(one.values, settings.smooth) }));
  const [x0, x1] = range(lines.flatMap((one) => one.xs.map(g)), () => 0.5);
  const [y0, y1] = range(lines.flatMap((one) => one.values.filter(isNumber).map(f)), (value) => Math.abs(value) * 0.1 || 0.5);
  const px = (value) => L + (W - L - R) * (g(value) - x0) / (x1 - x0);
  const py = (value) => isNumber(value) ? T + (H - T - B) * (1 - (f(value) - y0) / (y1 - y0)) : value === "-inf" ? H - B : T;
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title, class: series.some((one) => one.at) ? "live" : null, tabindex: 0 });
  for (const y of ticks(y0, y1, 4, log)) {
    const value = log ? 10 ** y : y;
    svg.append(make("line", { class: "grid", x1: L, x2: W - R, y1: py(value), y2: py(value) }), make("text", { x: L - 4, y: py(value) + 3, "text-anchor": "end" }, short(value)));
  }
  const whole = x === "step" ? (value) => Number.isInteger(value) : () => true;
  for (const at of ticks(x0, x1, 5, logX).filter(whole)) { const value = logX ? 10 ** at : at; svg.append(make("text", { x: px(value), y: H - 6, "text-anchor": "middle" }, short(value))); }
  if (settings.log && !positive) svg.append(make("text", { x: W - R, y: H - B - 4, "text-anchor": "end" }, "not logarithmic: has values ≤ 0"));
  for (const one of lines) {
    const joined = (k) => isNumber(one.values[k - 1]) && isNumber(one.values[k]) && !one.gaps?.includes(k);
    const path = (values) => values.map((value, k) => isNumber(value) ? `${joined(k) ? "L" : "M"}${px(one.xs[k]).toFixed(1)},${py(value).toFixed(1)}` : "").join("");
    if (settings.smooth) svg.append(make("path", { class: "raw", d: path(one.values), ...line(one.i) }));
    svg.append(make("path", { class: "line", d: path(one.smooth), ...line(one.i) }));
    one.values.forEach((value, k) => {
      const alone = !joined(k) && !joined(k + 1);
      if (!isNumber(value)) svg.append(make("text", { class: "odd", x: px(one.xs[k]), y: py(value) + 4, "text-anchor": "middle" }, "✕"));
      else if (dots || alone) svg.append(make("circle", { cx: px(one.xs[k]), cy: py(value), r: 3, fill: COLOURS[one.i % COLOURS.length] }));
    });
  }
  const cursor = make("line", { class: "cursor", y1: T, y2: H - B, visibility: "hidden" });
  svg.append(cursor);
  const nearest = (one, value) => {
    let low = 0, high = one.xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (g(one.xs[middle]) < value) low = middle; else high = middle; }
    return Math.abs(g(one.xs[low]) - value) <= Math.abs(g(one.xs[high]) - value) ? low : high;
  };
  const show = (value, clientX, clientY) => {
    const main = lines.reduce((a, b) => a.xs.length >= b.xs.length ? a : b), k = nearest(main, value), where = px(main.xs[k]);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, where);
    cursor.setAttribute("visibility", "visible");
    const rows = lines.map((one) => `${lines.length > 1 ? one.label + "  " : ""}${short(one.values[nearest(one, value)])}`);
    const box = svg.getBoundingClientRect();
    showTip(clientX ?? box.left + where / W * box.width, clientY ?? box.top, `${x} ${short(main.xs[k])}\n${rows.join("\n")}${main.at ? "" : "\nIts examples are not recorded."}`);
    return [main, k];
  };
  const place = (event) => {
    const box = svg.getBoundingClientRect();
    const [left, top] = [(event.clientX - box.left) / box.width * W, (event.clientY - box.top) / box.height * H];
    const value = x0 + (x1 - x0) * (left - L) / (W - L - R);
    // Of several lines the one that is nearest to the pointer.
    const one = lines.reduce((a, b) => Math.abs(py(a.smooth[nearest(a, value)]) - top) <= Math.abs(py(b.smooth[nearest(b, value)]) - top) ? a : b);
    return [value, one];
  };
  const leave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointermove", (event) => show(place(event)[0], event.clientX, event.clientY));
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("click", (event) => { const [value, one] = place(event); one.at?.(nearest(one, value)); });
  let chosenX = null;
  svg.addEventListener("keydown", (event) => {
    const main = lines.reduce((a, b) => a.xs.length >= b.xs.length ? a : b), move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter" && chosenX !== null) main.at?.(nearest(main, chosenX));
    if (!move) return;
    event.stopPropagation(); event.preventDefault();
    const k = chosenX === null ? main.xs.length - 1 : Math.max(0, Math.min(main.xs.length - 1, nearest(main, chosenX) + move));
    show(chosenX = g(main.xs[k]));
  });
  return svg;
}

/** A line that looks like that of a run in the charts, and its name. */
function legend(i, name) {
  return make("span", { class: "legend" }, make("svg", { viewBox: "0 0 26 8", class: "swatch" }, make("path", { class: "line", d: "M0,4L26,4", ...line(i) })), name);
}
