"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const words = data.words, map = data.map;
  const media = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;

  // Elements are built of text alone: nothing that came from a model or a file is ever read as markup.
  const make = (tag, about, ...children) => {
    const found = document.createElement(tag);
    for (const [name, value] of Object.entries(about || {})) {
      if (value === false || value === null || value === undefined) continue;
      found.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat()) {
      if (child !== null && child !== undefined) found.append(child);
    }
    return found;
  };
  const drawn = (tag, about) => {
    const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(about)) found.setAttribute(name, String(value));
    return found;
  };
  const number = (value) => {
    if (value === null || value === undefined) return "–";
    if (typeof value === "string") return value === "inf" ? "∞" : value;
    return Number.isInteger(value) && Math.abs(value) < 1e6 ? String(value) : Number(value.toPrecision(4)).toString();
  };
  const asNumber = (value) => (typeof value === "string" ? (value === "inf" ? Infinity : NaN) : value);

  // ------------------------------------------------------------------------------------------------------- charts

  const charts = [];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const draw = (entry) => {
    if (entry.plot) entry.plot.destroy();
    entry.host.replaceChildren();
    const ink = printing ? "#1b1f24" : colour("--soft"), grid = printing ? "#d5d9dd" : colour("--line");
    const width = Math.max(240, entry.host.clientWidth);
    entry.plot = new uPlot(entry.options({ width, ink, grid, printing }), entry.values, entry.host);
  };
  const chart = (host, values, options) => {
    const entry = { host, values, options, plot: null };
    charts.push(entry);
    draw(entry);
    return entry;
  };
  const forget = (inside) => {
    for (let at = charts.length - 1; at >= 0; at--) {
      if (inside.contains(charts[at].host)) { charts[at].plot.destroy(); charts.splice(at, 1); }
    }
  };
  const again = () => charts.forEach(draw);
  media.addEventListener("change", again);
  // On paper nothing can be unfolded.
  let unfolded = [];
  addEventListener("beforeprint", () => {
    unfolded = [...document.querySelectorAll("details:not([open])")];
    unfolded.forEach((one) => { one.open = true; });
    printing = true;
    again();
  });
  addEventListener("afterprint", () => {
    unfolded.forEach((one) => { one.open = false; });
    printing = false;
    again();
  });
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(again, 120); });

  const axes = (look, across, along) => [
    { stroke: look.ink, grid: { stroke: look.grid, width: 1 }, ticks: { stroke: look.grid, width: 1 }, label: across,
      labelSize: 22, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) },
    { stroke: look.ink, grid: { stroke: look.grid, width: 1 }, ticks: { stroke: look.grid, width: 1 }, label: along,
      labelSize: 22, size: 64, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) },
  ];
  const positive = (values) => values.map((value) => (Number.isFinite(value) && value > 0 ? value : null));
  const shown = (_, value) => (value === null || value === undefined ? "–" : number(value));
  const line = (label, stroke, dash, points) => ({ label, stroke, width: 2, dash, points: { show: points, size: 6 }, value: shown });

  const drift = data.drift, driftHost = document.getElementById("drift-chart");
  if (drift && driftHost) {
    const values = [drift.layers, positive(drift.error), positive(drift.predicted), positive(drift.bound)];
    chart(driftHost, values, (look) => ({
      width: look.width, height: 260, scales: { x: { time: false }, y: { distr: 3 } },
      axes: axes(look, words.layer, words.relative), cursor: { y: false },
      series: [
        { label: words.layer, value: shown },
        line(words.drift_error, colour("--line1"), undefined, true),
        line(words.drift_predicted, colour("--line2"), [3, 4], false),
        line(words.drift_bound, colour("--line3"), [8, 5], false),
      ],
      hooks: {
        draw: [(plot) => {
          if (drift.bend === null) return;
          const left = Math.round(plot.valToPos(drift.bend, "x", true));
          const context = plot.ctx;
          context.save();
          context.strokeStyle = context.fillStyle = colour("--line3");
          context.lineWidth = 2 * devicePixelRatio;
          context.setLineDash([]);
          context.textAlign = "left";
          context.beginPath();
          context.moveTo(left, plot.bbox.top);
          context.lineTo(left, plot.bbox.top + plot.bbox.height);
          context.stroke();
          context.font = `${13 * devicePixelRatio}px sans-serif`;
          const text = `↗ ${words.layer} ${drift.bend}`, room = context.measureText(text).width + 8;
          const right = left + room < plot.bbox.left + plot.bbox.width;
          context.fillText(text, right ? left + 6 : left - room, plot.bbox.top + 16 * devicePixelRatio);
          context.restore();
        }],
      },
    }));
  }

  // ---------------------------------------------------------------------------------------------------------- map

  const panel = document.getElementById("detail");
  if (!map || !panel) return;
  const buttons = new Map();
  document.querySelectorAll("button.cell").forEach((one) => buttons.set(Number(one.dataset.at), one));
  let chosen = null, view = "between";

  const look = (name) => {
    view = name;
    for (const [at, button] of buttons) {
      const cell = map.cells[at], [shade, text, verdict] = cell.views[name] || ["none", "–", "not observable"];
      button.className = `cell s-${shade}${cell.accused.length ? " accused" : ""}`;
      button.textContent = text;
      const said = [cell.name, words[`verdict_${verdict}`], text];
      if (cell.accused.length) said.push(`${words.accused} ${cell.accused.join(", ")}`);
      button.setAttribute("aria-label", said.join(", "));
    }
  };
  const views = document.querySelector(".views");
  if (views) {
    views.hidden = false;
    views.addEventListener("change", (event) => look(event.target.value));
  }

  // Arrow keys move over the cells as they stand; one of them is in the order of Tab.
  const rows = [map.single, ...map.layers.map((one) => one.cells)].filter((row) => row.length);
  const neighbour = (at, across, along) => {
    let row = rows.findIndex((one) => one.includes(at)), column = rows[row].indexOf(at);
    for (;;) {
      row += along; column += across;
      if (!rows[row]) return null;
      if (along && rows[row].length <= column) column = rows[row].length - 1;
      if (column < 0 || column >= rows[row].length) return null;
      if (rows[row][column] !== null) return rows[row][column];
    }
  };
  const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const only = (at) => buttons.forEach((one, other) => one.setAttribute("tabindex", other === at ? "0" : "-1"));
  document.getElementById("map").addEventListener("keydown", (event) => {
    const button = event.target.closest("button.cell"), move = MOVES[event.key];
    if (!button || !move) return;
    const to = neighbour(Number(button.dataset.at), ...move);
    event.preventDefault();
    if (to === null) return;
    only(to);
    buttons.get(to).focus();
  });
  document.getElementById("map").addEventListener("click", (event) => {
    const link = event.target.closest("button[data-open]");
    if (link) {
      only(Number(link.dataset.open));
      open(Number(link.dataset.open), true);
    }
    const button = event.target.closest("button.cell");
    if (!button) return;
    only(Number(button.dataset.at));
    open(Number(button.dataset.at), true);
  });

  const heading = (text) => make("h4", {}, text);
  const table = (head, body, name, numeric) => make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": name },
    make("table", { class: head.length === 6 ? "numbers" : null },
      make("thead", {}, make("tr", {}, head.map((text, at) => make("th", { scope: "col", class: numeric.includes(at) ? "n" : null }, text)))),
      make("tbody", {}, body)));

  const scale = (cell) => table(
    [words.measured, words.error, words.floor, words.bound, words.ratio, words.source],
    cell.numbers.map(([what, error, floor, bound, ratio, state, source]) => make("tr", { class: `is-${state}` },
      make("th", { scope: "row" }, map.texts[what]),
      make("td", { class: "n", "data-label": words.error }, error), make("td", { class: "n", "data-label": words.floor }, floor),
      make("td", { class: "n", "data-label": words.bound }, bound),
      make("td", { class: "n", "data-label": words.ratio }, make("span", { class: "ratio" }, ratio)), make("td", {}, map.texts[source]))),
    words.measured, [1, 2, 3, 4]);

  // A quantile as a bar: its length is its share of the largest, with the bound where it would end.
  const bars = (spread, bound) => {
    const largest = Math.max(bound, ...spread.quantiles.map(asNumber).filter(Number.isFinite), 1e-300);
    const found = make("div", { class: "bars" });
    map.shares.forEach((share, at) => {
      const value = asNumber(spread.quantiles[at]);
      const svg = drawn("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
      const width = Number.isFinite(value) ? (100 * value) / largest : 100;
      svg.append(drawn("rect", { width: 100, height: 8, class: "all" }), drawn("rect", { width, height: 8, class: "part" }),
        drawn("rect", { x: Math.min(99, (100 * bound) / largest), width: 1, height: 8, class: "limit" }));
      found.append(make("span", {}, `${Math.round(100 * share)} %`), svg, make("span", { class: "n" }, number(spread.quantiles[at])));
    });
    return found;
  };
  const worst = (title, entries, name) => entries.length === 0 ? null : make("div", {}, heading(title),
    make("ul", {}, entries.map((entry) => make("li", {}, `${name(entry)}: ${number(entry[entry.length - 1])}`))));
  const spreadOf = (cell) => {
    const spread = cell.spread;
    if (!spread) return [make("p", { class: "muted" }, words.no_spread)];
    return [
      make("div", {}, heading(words.distribution), make("p", { class: "muted" }, `${words.share} · ${words.at_most} · ${words.bound} ${number(cell.bound)}`), bars(spread, cell.bound)),
      worst(words.worst_rows, spread.rows, (one) => `${one[0]}, ${words.row} ${one[1]}`),
      worst(words.worst_channels, spread.channels, (one) => `${words.channel} ${one[0]}`),
      worst(words.worst_heads, spread.heads, (one) => `${words.head} ${one[0]}`),
    ];
  };
  const siteOf = (cell, side) => {
    const found = data.sites.find((one) => one.side === side && one.kinds.includes(cell.kind) && one.layers.includes(cell.layer));
    const title = words[`side_${side}`];
    if (!found) return make("div", {}, heading(title), make("p", { class: "muted" }, words.no_site));
    const entry = (name, ...value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
    const lines = (texts) => texts.map((text) => make("div", {}, make("code", {}, text)));
    return make("div", {}, heading(title), make("dl", { class: "pairs" },
      entry(words.function, make("code", {}, found.function)),
      found.place ? entry(words.place, make("code", {}, found.place)) : null,
      found.operators.length ? entry(words.operators, ...lines(found.operators.map(([name, at]) => (at ? `${name} ← ${at}` : name)))) : null,
      found.tensors.length ? entry(words.tensors, ...lines(found.tensors.map(([name, dtype, shape]) => `${name}: ${dtype}[${shape}]`))) : null,
      entry(words.phases, found.phases.join(", "))));
  };

  const open = (at, show) => {
    const cell = map.cells[at];
    forget(panel);
    if (chosen !== null && buttons.get(chosen)) buttons.get(chosen).removeAttribute("aria-pressed");
    chosen = at;
    if (buttons.get(at)) buttons.get(at).setAttribute("aria-pressed", "true");
    const facts = [
      `${cell.rows} ${words.rows}`,
      cell.shape.length ? `${words.shape} ${cell.shape.join("×")}` : null,
      cell.dtypes[0] || cell.dtypes[1] ? `${words.dtypes} ${cell.dtypes.join(" / ")}` : null,
      `${words.inputs}: ${words[`inputs_${cell.inputs}`]}`,
      cell.estimated ? words.estimated : null,
    ].filter((one) => one !== null);
    const said = cell.accused.length ? [" ", make("span", { class: "tag" }, `◆ ${words.accused} ${cell.accused.join(", ")}`)] : [];
    const steps = make("div", {});
    panel.replaceChildren(
      make("h3", {}, make("code", {}, cell.name), " ", make("span", { class: "tag" }, words[`verdict_${cell.verdict}`]), ...said),
      make("p", {}, cell.why),
      make("p", { class: "muted" }, facts.join(" · ")),
      ...(cell.numbers.length ? [scale(cell)] : []),
      make("div", { class: "panes" }, spreadOf(cell)),
      steps,
      ...(cell.others.length ? [heading(words.seeds), make("p", {}, cell.others.map(([name, value]) => `${words[name]} ${value}`).join(" · "))] : []),
      heading(words.sites),
      make("div", { class: "panes" }, siteOf(cell, "candidate"), siteOf(cell, "reference")),
      valuesOf(cell),
    );
    panel.hidden = false;
    const [atSteps, measured] = cell.spread ? cell.spread.steps : [[], []];
    if (measured.length > 1) {
      const host = make("div", { class: "chart", role: "img", "aria-label": words.steps });
      steps.append(heading(words.steps), host);
      const values = [atSteps, positive(measured.map(asNumber)), measured.map(() => cell.bound)];
      chart(host, values, (style) => ({
        width: style.width, height: 190, scales: { x: { time: false }, y: { distr: 3 } }, axes: axes(style, words.step, words.relative),
        cursor: { y: false },
        series: [{ label: words.step, value: shown }, line(words.error, colour("--line1"), undefined, true), line(words.bound, colour("--line3"), [8, 5], false)],
      }));
    }
    if (show) panel.scrollIntoView({ block: "nearest" });
  };

  // -------------------------------------------------------------------------------------------------------- values

  const served = document.body.dataset.values;
  const hinted = (text) => text.split("`").map((part, at) => (at % 2 ? make("code", {}, part) : part));
  const valuesOf = (cell) => {
    const found = make("div", { class: "values" }, heading(words.values));
    if (!served) {
      found.append(make("p", { class: "muted" }, hinted(words.values_hint)));
      return found;
    }
    const steps = make("select", { "aria-label": words.values_step });
    const result = make("div", { "aria-live": "polite" });
    const button = make("button", { type: "button", class: "plain" }, words.values_load);
    const load = async () => {
      result.replaceChildren(words.values_loading);
      const asked = new URLSearchParams({ name: cell.name });
      if (steps.value) asked.set("step", steps.value);
      try {
        const answer = await fetch(`${served}?${asked}`, { credentials: "omit" });
        const told = await answer.json();
        if (!answer.ok) throw new Error(told.error || String(answer.status));
        forget(result);
        result.replaceChildren();
        steps.replaceChildren(...told.steps.map((step) => make("option", { value: step, selected: step === told.step }, `${words.values_step} ${step}`)));
        showValues(result, told);
      } catch (error) {
        result.replaceChildren(make("p", { class: "note" }, `${words.values_failed}: ${error.message}`));
      }
    };
    button.addEventListener("click", load);
    steps.addEventListener("change", load);
    found.append(make("p", {}, button, " ", steps), result);
    return found;
  };
  const showValues = (host, told) => {
    if (told.note) host.append(make("p", { class: "muted" }, told.note));
    const sides = ["candidate", "reference", "difference"];
    const names = { candidate: words.side_candidate, reference: words.side_reference, difference: words.values_difference };
    for (const side of sides) {
      const one = told[side];
      if (!one) continue;
      host.append(make("h5", {}, `${names[side]}: ${one.dtype}[${one.shape.join("×")}] · ${words.values_range} ${number(one.low)} … ${number(one.high)}`));
      host.append(table([words.values_row, ...told.channels.map((channel) => `${words.channel} ${channel}`)],
        one.slice.map((row, at) => make("tr", {}, make("th", { scope: "row" }, told.rows[at]), row.map((value) => make("td", {}, number(value))))),
        names[side], told.channels.map((_, at) => at + 1)));
    }
    if (!told.histogram) return;
    const plot = make("div", { class: "chart", role: "img", "aria-label": words.values_histogram });
    host.append(heading(words.values_histogram), plot);
    const { edges, candidate, reference } = told.histogram;
    chart(plot, [edges.slice(0, -1), candidate, reference], (style) => ({
      width: style.width, height: 200, scales: { x: { time: false } }, cursor: { y: false },
      axes: axes(style, "", words.values_count).map((axis) => ({ ...axis, values: (_, ticks) => ticks.map((tick) => number(tick)) })),
      series: [{ label: words.values_range, value: shown },
        { ...line(words.side_candidate, colour("--line1"), undefined, false), paths: uPlot.paths.stepped({ align: 1 }) },
        { ...line(words.side_reference, colour("--line3"), [6, 4], false), paths: uPlot.paths.stepped({ align: 1 }) }],
    }));
  };

  // The first cell to look at is in sight, also of a large map; the page itself stays at its top.
  const start = buttons.get(map.first), box = start && start.closest(".tall");
  if (box) {
    const cell = start.getBoundingClientRect(), frame = box.getBoundingClientRect();
    if (cell.bottom > frame.bottom) box.scrollTop = cell.top - frame.top - box.clientHeight / 2;
    if (cell.right > frame.right) box.scrollLeft = cell.left - frame.left - box.clientWidth / 2;
  }
  open(map.first, false);
})();
