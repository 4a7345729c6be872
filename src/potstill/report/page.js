"use strict";
// Draws the curves from the JSON in #data. Everything else is in the page already.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const HEIGHT = 212, RIGHT = 10, TOP = 8, BOTTOM = 24, COLOURS = 6;
  const state = { smoothing: 0.01, hidden: new Set(), step: null, active: null };

  function make(name, attributes, parent, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }

  // ── numbers ──
  function digits(value, most, exact) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e7) return value.toExponential(most - 1).replace(exact ? /e\+?/ : /\.?0*e\+?/, "e");
    const places = Math.max(most, Math.ceil(Math.log10(size)));
    return value.toLocaleString("en", { maximumSignificantDigits: places, minimumSignificantDigits: exact ? places : 1 });
  }
  const short = (value) => {
    for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(value) >= size) return digits(value / size, 4) + unit;
    return digits(value, 4);
  };
  const size = (value, most) => {
    for (const [power, unit] of [[30, "GiB"], [20, "MiB"], [10, "KiB"]])
      if (value >= 2 ** power) return `${digits(value / 2 ** power, most)} ${unit}`;
    return digits(value, most) + " B";
  };
  const UNITS = {
    number: { tick: (v) => digits(v, 3), say: (v) => digits(v, 5, true) },
    percent: { tick: (v) => digits(v * 100, 3) + "%", say: (v) => (v * 100).toFixed(2) + "%" },
    seconds: { tick: (v) => digits(v, 3) + " s", say: (v) => digits(v, 4, true) + " s" },
    count: { tick: short, say: (v) => digits(v, 5, true) },
    bytes: { tick: (v) => size(v, 3), say: (v) => size(v, 4) },
  };

  // ── curves ──
  function curvesOf(panel) {
    const found = [];
    data.runs.forEach((run, number) => {
      if (state.hidden.has(number)) return;
      panel.lines.forEach((line, place) => {
        const log = run[panel.source], column = log.columns[line.key];
        if (!column || column.value.every((v) => v === null)) return;
        const dash = place ? " dots" : number >= COLOURS ? ` dash${Math.min(Math.floor(number / COLOURS), 2)}` : "";
        found.push({
          run: number, key: line.key, label: line.name ? `${run.label}, ${line.name}` : run.label,
          style: `s${number % COLOURS}${dash}`, steps: log.steps, count: log.count,
          value: column.value, mean: column.mean || column.value, low: column.low, high: column.high,
        });
      });
    });
    return found;
  }

  // A mean whose weights fade by e over `reach` steps. Dividing by the sum of the weights removes the bias at the start.
  function smoothed(curve, reach) {
    let sum = 0, weight = 0, last = 0;
    return curve.steps.map((step, i) => {
      if (curve.mean[i] === null) return null;
      const kept = Math.exp((last - step) / reach);
      sum = kept * sum + curve.count[i] * curve.mean[i];
      weight = kept * weight + curve.count[i];
      last = step;
      return sum / weight;
    });
  }

  const there = (values) => (values || []).filter((v) => v !== null);

  // The whole range, unless a few outliers would flatten all the rest: then the middle 98%, and the outliers are counted.
  function range(view, curves) {
    const all = curves.flatMap((c) => there(c.value)).sort((a, b) => a - b);
    let usable = curves.flatMap((c) => [...there(c.value), ...there(c.low), ...there(c.high)]);
    const unseen = view.log ? usable.filter((v) => v <= 0).length : 0;
    if (view.log) usable = usable.filter((v) => v > 0);
    if (!usable.length) return { low: view.log ? 0.1 : 0, high: 1, unseen, outliers: 0 };
    let low = Infinity, high = -Infinity, outliers = 0;
    for (const v of usable) { low = Math.min(low, v); high = Math.max(high, v); }
    const first = all[Math.floor(all.length * 0.01)], last = all[Math.ceil(all.length * 0.99) - 1];
    const margin = (last - first) * 0.25;
    const wild = !view.log && all.length >= 50 && last > first && high - low > 5 * (last - first);
    if (wild && !view.full) {
      low = Math.max(low, first - margin);
      high = Math.min(high, last + margin);
      outliers = usable.filter((v) => v < low || v > high).length;
    }
    if (view.log) {
      const pad = Math.max(1.02, (high / low) ** 0.04);
      return { low: low / pad, high: high * pad, unseen, outliers, wild };
    }
    if (low >= 0 && low < 0.15 * high) low = 0;
    const pad = (high - low || Math.abs(high) * 0.2 || 1) * 0.05;
    return { low: low === 0 ? 0 : low - pad, high: high + pad, unseen, outliers, wild };
  }

  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(Number((at * step).toPrecision(12)));
    return found;
  }

  function logTicks(low, high) {
    const decades = Math.log10(high / low);
    if (decades < 1) return ticks(low, high, 7).filter((v) => v > 0);
    const every = Math.ceil(decades / 6), found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const m of decades < 2.5 ? [1, 2, 5] : [1])
        if (power % every === 0 && m * 10 ** power >= low && m * 10 ** power <= high) found.push(m * 10 ** power);
    return found;
  }

  // ── drawing ──
  function path(steps, values, x, y, log) {
    let text = "", pen = 0;
    values.forEach((value, i) => {
      if (value === null || (log && value <= 0)) {
        if (pen === 1) text += "h0";
        pen = 0;
        return;
      }
      text += `${pen ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen += 1;
    });
    return pen === 1 ? text + "h0" : text; // a point alone is drawn by its round cap
  }

  function band(curve, x, y, log) {
    const at = curve.steps.map((_, i) => i).filter((i) => curve.low[i] !== null && (!log || curve.low[i] > 0));
    const point = (i, v) => `${x(curve.steps[i]).toFixed(1)} ${y(v).toFixed(1)}`;
    if (at.length < 2) return "";
    return `M${at.map((i) => point(i, curve.high[i])).join("L")}L${at.reverse().map((i) => point(i, curve.low[i])).join("L")}Z`;
  }

  // The steps of all the runs shown, so that the panels' axes and crosshairs line up.
  function span() {
    const runs = data.runs.filter((_, number) => !state.hidden.has(number));
    const steps = runs.flatMap((run) => [run.metrics.steps, run.evals.steps]).filter((s) => s.length);
    const last = Math.max(1, ...steps.map((s) => s[s.length - 1]));
    return [Math.min(last - 1, ...steps.map((s) => s[0])), last];
  }

  function draw(view) {
    const { panel, svg } = view, width = view.width;
    const curves = (view.curves = curvesOf(panel));
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.setAttribute("height", HEIGHT);
    const [first, last] = span();
    const reach = (last - first) * state.smoothing, soft = panel.smooth && reach > 0;
    const bounds = range(view, curves), scale = view.log ? Math.log : (v) => v;
    const bottom = scale(bounds.low), top = scale(bounds.high);
    const x = (view.x = (step) => left + ((step - first) / (last - first)) * (width - left - RIGHT));
    const y = (view.y = (v) => HEIGHT - BOTTOM - ((scale(v) - bottom) / (top - bottom)) * (HEIGHT - TOP - BOTTOM));
    const marks = view.log ? logTicks(bounds.low, bounds.high) : ticks(bounds.low, bounds.high, 6);
    const marked = marks.map(UNITS[panel.unit].tick);
    const left = (view.left = Math.max(34, 12 + 6.6 * Math.max(0, ...marked.map((text) => text.length))));
    view.domain = [first, last];
    const grid = make("g", { class: "grid" }, svg), names = make("g", { class: "ticks" }, svg);
    marks.forEach((v, i) => {
      make("path", { d: `M${left} ${y(v).toFixed(1)}H${width - RIGHT}` }, grid);
      make("text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" }, names, marked[i]);
    });
    for (const v of ticks(first, last, width / 70).filter(Number.isInteger)) {
      const edge = x(v) > width - 24 ? "end" : "middle";
      make("text", { x: edge === "end" ? width - 2 : x(v), y: HEIGHT - 6, "text-anchor": edge }, names, short(v));
    }
    make("path", { class: "axis", d: `M${left} ${HEIGHT - BOTTOM}H${width - RIGHT}` }, svg);
    const id = `clip-${view.number}`;
    make("rect", { x: left - 2, y: TOP - 4, width: width - left - RIGHT + 6, height: HEIGHT - TOP - BOTTOM + 7 },
      make("clipPath", { id }, svg));
    const body = make("g", { "clip-path": `url(#${id})` }, svg);
    for (const curve of curves) if (curve.low) make("path", { class: `band ${curve.style}`, d: band(curve, x, y, view.log) }, body);
    const line = (kind, curve, values) => make("path", {
      class: `${kind} ${curve.style}`, "data-run": curve.run, "data-key": curve.key, d: path(curve.steps, values, x, y, view.log),
    }, body);
    if (soft) for (const curve of curves) line("raw", curve, curve.value);
    for (const curve of curves) {
      curve.shown = soft ? smoothed(curve, reach) : curve.value;
      line("line", curve, curve.shown);
      if (panel.source !== "evals" || curve.steps.length > 60) continue;
      curve.steps.forEach((step, i) => {
        if (curve.value[i] !== null && (!view.log || curve.value[i] > 0))
          make("circle", { class: `dot ${curve.style}`, cx: x(step), cy: y(curve.value[i]), r: 3.5 }, body);
      });
    }
    view.cursor = make("g", { class: "cursor" }, svg);
    svg.setAttribute("aria-label", describe(view));
    note(view, bounds);
    point(view);
  }

  function describe(view) {
    const say = UNITS[view.panel.unit].say;
    const parts = view.curves.map((c) => { const v = there(c.value); return `${c.label}: from ${say(v[0])} to ${say(v[v.length - 1])}`; });
    return `${view.panel.title} over the steps. ${parts.join("; ")}. Arrow keys move the read-out.`;
  }

  function note(view, bounds) {
    view.fullButton.hidden = !bounds.wild;
    view.notes.querySelectorAll(".live").forEach((n) => n.remove());
    const say = (text) => {
      const item = document.createElement("li");
      item.className = "live";
      item.textContent = text;
      view.notes.append(item);
    };
    if (bounds.outliers) say(`${bounds.outliers.toLocaleString("en")} outliers lie beyond the axis; “full range” shows them`);
    if (bounds.unseen) say(`${bounds.unseen.toLocaleString("en")} values at or below 0 have no place on a log scale`);
  }

  // ── read-out ──
  function nearest(steps, step) {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
  }

  function point(view) {
    view.cursor.replaceChildren();
    view.readout.hidden = true;
    const [first, last] = view.domain, step = state.step;
    if (step === null || step < first || step > last || !view.curves.length) return;
    make("path", { class: "cross", d: `M${view.x(step).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}` }, view.cursor);
    const slack = (last - first) * 0.005, say = UNITS[view.panel.unit].say, rows = [];
    for (const curve of view.curves) {
      const i = nearest(curve.steps, step), at = curve.steps[i];
      const outside = step > curve.steps[curve.steps.length - 1] + slack || step < curve.steps[0] - slack;
      const value = outside ? null : curve.value[i], shown = outside ? null : curve.shown[i];
      if (shown !== null && (!view.log || shown > 0))
        make("circle", { class: `dot ${curve.style}`, cx: view.x(at), cy: view.y(shown), r: 4 }, view.cursor);
      rows.push([
        curve, value === null ? "–" : say(value), shown === null ? "" : say(shown),
        value === null || at === step ? "" : `at ${at.toLocaleString("en")}`,
      ]);
    }
    if (view === state.active) read(view, step, rows);
  }

  function read(view, step, rows) {
    const table = document.createElement("table"), body = table.createTBody();
    const soft = view.curves.some((curve) => curve.shown !== curve.value), apart = rows.some((row) => row[3]);
    const cell = (row, scope, text) => {
      const head = document.createElement("th");
      head.scope = scope;
      head.append(text);
      row.append(head);
      return head;
    };
    const top = table.createTHead().insertRow();
    cell(top, "col", `step ${step.toLocaleString("en")}`).className = "step";
    for (const name of soft ? ["value", "smooth"] : ["value"]) cell(top, "col", name);
    for (const [curve, value, shown, at] of rows) {
      const row = body.insertRow(), name = document.createElement("span"), head = cell(row, "row", name);
      name.className = "label";
      name.textContent = curve.label;
      const swatch = make("svg", { class: "swatch", viewBox: "0 0 22 10", "aria-hidden": "true" });
      make("path", { class: `line ${curve.style}`, d: "M1 5H21" }, swatch);
      head.prepend(swatch);
      for (const text of [value, ...(soft ? [shown] : []), ...(apart ? [at] : [])]) row.insertCell().textContent = text;
    }
    view.readout.replaceChildren(table);
    view.readout.hidden = false;
    const right = view.x(step) > (view.width + view.left) / 2;
    view.readout.style.left = right ? "auto" : `${view.x(step) + 10}px`;
    view.readout.style.right = right ? `${view.width - view.x(step) + 10}px` : "auto";
    // Where the box does not fit beside the crosshair, it stays inside the plot.
    if (view.readout.offsetLeft < 0) Object.assign(view.readout.style, { left: "0", right: "auto" });
    if (view.readout.offsetLeft + view.readout.offsetWidth > view.width) Object.assign(view.readout.style, { left: "auto", right: "0" });
  }

  function moveTo(view, step) {
    state.step = step;
    state.active = view;
    views.forEach(point);
  }

  function snap(view, wish) {
    let best = null;
    for (const curve of view.curves) {
      const at = curve.steps[nearest(curve.steps, wish)];
      if (best === null || Math.abs(at - wish) < Math.abs(best - wish)) best = at;
    }
    return best;
  }

  function onPointer(view, event) {
    if (!view.curves.length) return;
    const at = event.clientX - view.svg.getBoundingClientRect().left, [first, last] = view.domain;
    view.readout.setAttribute("aria-live", "off");
    moveTo(view, snap(view, first + ((at - view.left) / (view.width - view.left - RIGHT)) * (last - first)));
  }

  function onKey(view, event) {
    const steps = [...new Set(view.curves.flatMap((c) => c.steps))].sort((a, b) => a - b);
    if (!steps.length) return;
    const here = state.step === null ? steps.length - 1 : nearest(steps, state.step), jump = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: here - jump, ArrowRight: here + jump, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Escape") return moveTo(null, null);
    if (to === undefined) return;
    event.preventDefault();
    view.readout.setAttribute("aria-live", "polite");
    moveTo(view, steps[Math.max(0, Math.min(steps.length - 1, to))]);
  }

  // ── the page ──
  const views = [...document.querySelectorAll(".panel")].map((figure) => {
    const number = Number(figure.dataset.panel), plot = figure.querySelector(".plot");
    const svg = make("svg", { role: "img", tabindex: "0" }, plot), readout = document.createElement("div");
    readout.className = "readout";
    readout.hidden = true;
    plot.append(readout);
    const view = {
      number, panel: data.panels[number], svg, plot, readout, log: false, full: false, width: 0,
      notes: figure.querySelector(".notes"), fullButton: figure.querySelector(".full"),
    };
    for (const name of ["log", "full"])
      figure.querySelector(`.${name}`).addEventListener("click", (event) => {
        view[name] = !view[name];
        event.currentTarget.setAttribute("aria-pressed", view[name]);
        draw(view);
      });
    svg.addEventListener("pointermove", (event) => onPointer(view, event));
    svg.addEventListener("pointerdown", (event) => onPointer(view, event));
    svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") moveTo(null, null); // after a tap the read-out stays
    });
    svg.addEventListener("keydown", (event) => onKey(view, event));
    svg.addEventListener("blur", () => moveTo(null, null));
    return view;
  });

  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; views.forEach(draw); });
  }

  const slider = document.getElementById("smoothing"), said = document.getElementById("smoothing-said");
  const readSlider = () => {
    state.smoothing = Number(slider.value) / 100;
    said.textContent = state.smoothing ? `${slider.value}% of the steps` : "off";
  };
  slider.addEventListener("input", () => { readSlider(); redraw(); });
  readSlider(); // a browser may have kept the slider where it was before a reload
  for (const box of document.querySelectorAll("[data-run][type=checkbox]")) {
    const apply = () => state.hidden[box.checked ? "delete" : "add"](Number(box.dataset.run));
    box.addEventListener("change", () => { apply(); redraw(); });
    apply();
  }
  new ResizeObserver(() => {
    for (const view of views) {
      const width = Math.round(view.plot.clientWidth);
      if (width && width !== view.width) { view.width = width; draw(view); }
    }
  }).observe(document.body);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => (d.open = true)));
})();
