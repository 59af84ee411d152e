"use strict";
// Draws the charts of a page with Chart.js, from the data that jfl.report.charts left in it, in
// place of the still pictures: those stay for paper, and where this script does not run.

addEventListener("DOMContentLoaded", () => {
  const WIDE = 620;  // pixels of a plot that has room for long names beside its rows
  const ROW = 24;    // pixels
  const make = (tag, properties = {}, ...inside) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...inside);
    return element;
  };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let theme;
  const readTheme = () => {
    const names = ["ink", "quiet", "paper", "line"];
    theme = Object.fromEntries(names.map((name) => [name, style(`--${name}`)]));
    theme.palette = [0, 1, 2, 3, 4, 5, 6, 7].map((i) => style(`--c${i}`));
  };
  readTheme();
  const all = [];

  // --- numbers in words
  const words = (value) => {
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
    const rounded = Number(value.toPrecision(4));
    return Math.abs(rounded) >= 1e6 || Math.abs(rounded) < 1e-4 ? rounded.toExponential() : String(rounded);
  };
  const short = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);
  const described = (chart, at) => {
    const { line, chart: drawn, panel } = chart.jfl;
    const entry = drawn.legend[line[at.datasetIndex].of];
    const [x, y, low, high, more] = line[at.datasetIndex].points[at.dataIndex ?? at.index];
    const around = low != null && drawn.spread ? [`${words(low)} to ${words(high)}, ${drawn.spread}`] : [];
    const { rows, right } = panel.y;
    if (rows) return { title: rows[y], lines: [`${entry.name || panel.x.title}: ${words(x)}`, ...around], end: right[y] };
    const lines = [entry.name];
    if (y !== panel.y.top) lines.push(`${panel.y.title}: ${words(y)}`);
    return { title: `${panel.x.title}: ${words(x === panel.x.zero ? 0 : x)}`, lines: [...lines, ...around, ...(more ? [more] : [])] };
  };

  // --- bands and bars, which the library does not have
  const spread = {
    id: "spread",
    beforeDatasetsDraw(chart) {
      const { ctx, chartArea: area, scales: { x, y } } = chart;
      ctx.save();
      ctx.beginPath();
      ctx.rect(area.left, area.top, area.width, area.height);
      ctx.clip();
      chart.jfl.line.forEach((line, i) => {
        if (!chart.isDatasetVisible(i)) return;
        const entry = chart.jfl.chart.legend[line.of];
        const around = line.points.filter((p) => p[2] != null && p[3] != null);
        ctx.strokeStyle = ctx.fillStyle = theme.palette[entry.colour];
        if (line.spread === "band") {
          ctx.globalAlpha = 0.16;
          ctx.beginPath();
          around.forEach((p) => ctx.lineTo(x.getPixelForValue(p[0]), y.getPixelForValue(p[3])));
          around.toReversed().forEach((p) => ctx.lineTo(x.getPixelForValue(p[0]), y.getPixelForValue(p[2])));
          ctx.fill();
        } else if (line.spread === "bars") {
          const rows = Boolean(chart.jfl.panel.y.rows);
          ctx.globalAlpha = 1;
          ctx.lineWidth = 1.5;
          ctx.setLineDash(rows ? entry.dash ?? [] : []);
          for (const p of around) bar(ctx, x, y, p, rows);
        }
      });
      ctx.restore();
    },
  };
  const bar = (ctx, x, y, [at, of, low, high], across) => {
    ctx.beginPath();
    if (across) {
      const height = y.getPixelForValue(of);
      ctx.moveTo(x.getPixelForValue(low), height);
      ctx.lineTo(x.getPixelForValue(high), height);
    } else {
      const place = x.getPixelForValue(at);
      const [bottom, top] = [y.getPixelForValue(low), y.getPixelForValue(high)];
      for (const [x0, y0, x1, y1] of [[0, bottom, 0, top], [-4, bottom, 4, bottom], [-4, top, 4, top]]) {
        ctx.moveTo(place + x0, y0);
        ctx.lineTo(place + x1, y1);
      }
    }
    ctx.stroke();
  };

  // --- one panel
  const dataset = (line, entry) => {
    const colour = () => theme.palette[entry.colour];
    const hollow = (context) => (line.hollow?.[context.dataIndex] ? theme.paper : colour());
    const mark = line.mark ?? entry.mark ?? "";
    const shown = line.marks || mark || line.points.length === 1;
    return {
      data: line.points.map(([x, y]) => ({ x, y })),
      showLine: line.marks ? line.points.length > 1 : line.line ?? entry.line ?? false,
      borderColor: colour,
      borderWidth: line.marks ? 1.2 : 2,
      borderDash: line.dash ?? entry.dash ?? [],
      pointBackgroundColor: hollow,
      pointBorderColor: colour,
      pointBorderWidth: mark === "line" || mark.startsWith("cross") ? 2.4 : 1.6,
      pointStyle: line.marks ?? (mark || "circle"),
      pointRotation: entry.upright ? 90 : 0,
      pointRadius: shown ? (entry.upright ? 8 : entry.dash?.length && mark === "line" ? 1 : 5) : 0,
      pointHoverRadius: 6,
      pointHoverBorderWidth: 2.5,
    };
  };
  const titled = (text) => ({ display: Boolean(text), text, color: () => theme.ink });
  const number = (axis, panel) => {
    const scale = {
      type: axis.log ? "logarithmic" : "linear",
      title: titled(axis.title === panel.title ? "" : axis.title),
      grid: { color: () => theme.line, tickLength: 4 },
      border: { color: () => theme.ink },
      ticks: { color: () => theme.ink, maxRotation: 0, autoSkipPadding: 12 },
    };
    if (axis.whole) scale.ticks.precision = 0;
    if (axis.low != null) {
      Object.assign(scale, { min: axis.low, max: axis.high });
      if (!axis.log) scale.ticks.includeBounds = false;
    } else if (axis === (panel.y.rows ? panel.x : panel.y)) {  // where bands and bars have to fit in
      const ends = panel.lines.flatMap((line) => line.points.flatMap((p) => [p[2], p[3]]));
      const known = ends.filter((end) => end != null && (end > 0 || !axis.log));
      if (known.length) Object.assign(scale, { suggestedMin: Math.min(...known), suggestedMax: Math.max(...known) });
    }
    if (!axis.log) return scale;
    scale.afterBuildTicks = (built) => {  // 1, 2, 5 of each decade, or decades alone where many
      const decades = Math.log10(built.max / built.min);
      const firsts = decades > 6 ? [1] : [1, 2, 5];
      const step = Math.max(1, Math.ceil(decades / 10));
      const low = Math.floor(Math.log10(built.min)), high = Math.ceil(Math.log10(built.max));
      const ticks = [];
      for (let decade = low; decade <= high; decade += step) {
        for (const first of firsts) ticks.push(Number(`${first}e${decade}`));
      }
      const from = axis.zero == null ? built.min : axis.zero * 1.5;
      const inside = ticks.filter((t) => t >= from && t <= built.max);
      if (inside.length < 2) {  // in less than a decade: at the points themselves
        const places = new Set(panel.lines.flatMap((line) => line.points.map((p) => p[axis === panel.x ? 0 : 1])));
        inside.splice(0, inside.length, ...[...places].filter((v) => v > from * 1.02 && v < built.max / 1.02).sort((a, b) => a - b));
      }
      built.ticks = [...(axis.zero == null ? [] : [axis.zero]), ...inside].map((value) => ({ value }));
    };
    scale.ticks.callback = (value) => (value === axis.zero ? "0" : words(value));
    return scale;
  };
  const pen = document.createElement("canvas").getContext("2d");
  const length = (text, bold) => {
    pen.font = `${bold ? "bold " : ""}12px ${Chart.defaults.font.family}`;
    return pen.measureText(text).width;
  };
  const fitted = (text, bold, room) => {
    let cut = text;
    while (cut.length > 4 && length(cut, bold) > room) cut = short(cut, cut.length - 1);
    return cut;
  };
  const rowed = (axis, side, texts, room) => {
    const bold = (i) => axis.headings?.includes(i) ?? false;
    const labels = texts.map((text, i) => fitted(text, bold(i), room));
    return {
      type: "linear",
      position: side,
      reverse: true,
      min: -0.6,
      max: texts.length - 0.4,
      grid: { display: side === "left", color: () => theme.line, drawTicks: false },
      border: { display: side === "left", color: () => theme.ink },
      afterBuildTicks: (built) => { built.ticks = texts.map((_, value) => ({ value })); },
      afterFit: (built) => { built.width = Math.max(...labels.map((text, i) => length(text, bold(i)))) + 14; },
      ticks: {
        autoSkip: false,
        padding: 6,
        color: () => theme.ink,
        font: (context) => (bold(context.index) ? { weight: "bold" } : {}),
        callback: (value) => labels[value],
      },
    };
  };
  const scales = (panel, width) => {
    if (!panel.y.rows) return { x: number(panel.x, panel), y: number(panel.y, panel) };
    const found = { x: number(panel.x, panel), y: rowed(panel.y, "left", panel.y.rows, (width > WIDE ? 0.36 : 0.46) * width) };
    if (width > WIDE && panel.y.right.some(Boolean)) {
      found.right = rowed(panel.y, "right", panel.y.right, 0.3 * width);
    }
    return found;
  };
  const draw = (chart, panel, canvas, width) => {
    const line = panel.lines;
    const drawn = new Chart(canvas, {
      type: "scatter",
      data: { datasets: line.map((l) => dataset(l, chart.legend[l.of])) },
      options: {
        animation: false,
        maintainAspectRatio: false,
        normalized: true,
        scales: scales(panel, width),
        interaction: { mode: "nearest", intersect: false, axis: panel.y.rows ? "y" : "xy" },
        plugins: {
          legend: { display: false },
          tooltip: {
            backgroundColor: () => theme.paper,
            borderColor: () => theme.quiet,
            borderWidth: 1,
            titleColor: () => theme.ink,
            bodyColor: () => theme.ink,
            padding: 10,
            displayColors: false,
            callbacks: {
              title: ([at]) => (at ? short(described(drawn, at).title, 60) : ""),
              label: (at) => described(drawn, at).lines.map((text) => short(text, 60)),
              afterBody: ([at]) => (at && described(drawn, at).end) || [],
            },
          },
        },
      },
      plugins: [{ id: "ours", beforeInit: (made) => { made.jfl = { line, chart, panel }; } }, spread],
    });
    return drawn;
  };

  // --- keys walk along the points, and say what they are
  const walk = (chart, canvas, spoken) => {
    let at = -1;
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step && event.key !== "Escape") return;
      const points = chart.jfl.line.flatMap((line, datasetIndex) => chart.isDatasetVisible(datasetIndex)
        ? line.points.map((p, index) => ({ datasetIndex, index })).filter(({ index }) => line.points[index][1] != null)
        : []);
      if (event.key === "Escape" || !points.length) {
        at = -1;
        chart.setActiveElements([]);
        chart.tooltip.setActiveElements([], { x: 0, y: 0 });
      } else {
        at = (at + step + points.length) % points.length;
        const element = chart.getDatasetMeta(points[at].datasetIndex).data[points[at].index];
        chart.setActiveElements([points[at]]);
        chart.tooltip.setActiveElements([points[at]], { x: element.x, y: element.y });
        const { title, lines, end } = described(chart, points[at]);
        spoken.textContent = [title, ...lines, end].filter(Boolean).join(", ");
      }
      chart.update();
      event.preventDefault();
    });
  };

  // --- one legend for all panels of a figure
  const SHAPES = {
    circle: "M8.5 6a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0", rect: "M9 2h8v8h-8z", rectRot: "M13 0l6 6-6 6-6-6z",
    triangle: "M13 1l6 10H7z", dash: "M13 6h6", star: "M13 0v12M7 6h12M9 2l8 8M9 10l8-8", cross: "M13 0v12M7 6h12",
    crossRot: "M9 2l8 8M9 10l8-8",
  };
  const vector = (tag, attributes, ...inside) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...inside);
    return element;
  };
  const sample = (entry) => {
    const colour = `var(--c${entry.colour})`;
    const level = entry.line || (entry.mark === "line" && !entry.upright);
    const parts = level ? [vector("path", { d: "M0 6h26", "stroke-dasharray": (entry.dash ?? []).join(" ") })] : [];
    const shape = entry.upright ? "M13 0v12" : SHAPES[entry.mark];
    if (shape) parts.push(vector("path", { d: shape }));
    const look = { viewBox: "0 0 26 12", "aria-hidden": "true", fill: colour, stroke: colour, "stroke-width": 2 };
    return vector("svg", look, ...parts);
  };
  const legend = (chart, panels) => {
    const list = make("ul", { className: "legend", ariaLabel: "lines" });
    chart.legend.forEach((entry, of) => {
      if (!entry.name) return;
      const name = make("span", { textContent: entry.name });
      const button = make("button", { type: "button", ariaPressed: "true" }, sample(entry), name);
      button.addEventListener("click", () => {
        const on = button.ariaPressed !== "true";
        button.ariaPressed = String(on);
        for (const panel of panels) {
          panel.jfl.line.forEach((line, i) => { if (line.of === of) panel.setDatasetVisibility(i, on); });
          panel.update();
        }
      });
      list.append(make("li", {}, button));
    });
    return list;
  };

  // --- a figure, once it comes into sight
  const build = (figure, chart) => {
    const panels = make("div", { className: chart.panels.length === 1 ? "panels one" : "panels" });
    const spoken = make("div", { className: "spoken", ariaLive: "polite" });
    const still = figure.querySelector(".still");
    const label = still.firstElementChild.getAttribute("aria-label") ?? "plot";
    still.before(panels, spoken);
    const drawn = chart.panels.map((panel) => {
      const canvas = make("canvas", { tabIndex: 0 });
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${panel.title || label}. Arrow keys read its points.`);
      const around = make("div", { className: "canvas" }, canvas);
      if (panel.y.rows) around.style.height = `${panel.y.rows.length * ROW + 70}px`;
      const box = make("div", { className: "panel" });
      if (panel.title) box.append(make("p", { textContent: panel.title }));
      box.append(around);
      panels.append(box);
      const made = draw(chart, panel, canvas, around.clientWidth);
      walk(made, canvas, spoken);
      return made;
    });
    panels.after(legend(chart, drawn));
    figure.classList.add("drawn");
    all.push(...drawn);
  };
  Object.assign(Chart.defaults.font, { family: getComputedStyle(document.body).fontFamily, size: 12 });
  const sight = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      sight.unobserve(target);
      build(target, JSON.parse(target.querySelector('script[type="application/json"]').textContent));
    }
  }, { rootMargin: "400px" });
  for (const data of document.querySelectorAll('figure > script[type="application/json"]')) {
    sight.observe(data.parentElement);
  }
  addEventListener("jfl-theme", () => {
    readTheme();
    for (const chart of all) chart.update();
  });
});
