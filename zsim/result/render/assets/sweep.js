"use strict";
// Draws a sweep from its rows: what was varied, and the outcome of each scenario.
const rows = data.rows, fields = data.fields;
const timed = rows.filter((row) => row.step_s !== null), fitting = timed.filter((row) => row.fits);
const show = (value) => (value === null || value === undefined ? "-" : typeof value === "string" && value.includes("/")
  ? value.replace(/\/config\.json$/, "").split("/").pop().replace(/\.ya?ml$/, "") : String(value));
const short = (field) => field.split(".").pop();
const label = (row, without = []) => fields.filter((field) => !without.includes(field))
  .map((field) => `${short(field)} ${show(row.inputs[field])}`).join(", ");
const about = (row) => `${label(row)}<br>${whole(row.tokens_per_s_per_gpu)} tokens/s per GPU, ${seconds(row.step_s)} per step` +
  `<br>${gib(row.needed_bytes)} with cache, ${gib(row.headroom_bytes)} free<br>${row.bottleneck}`;
const faster = (a, b) => (b === undefined || a.fits - b.fits || a.tokens_per_s_per_gpu - b.tokens_per_s_per_gpu) > 0;
const colors = Object.values(data.phases).slice(0, 4).concat(["#CC79A7", "#D55E00", "#7A5195", "#8C8C8C", "#B39B00", "#4D4D4D"]);

function values(field, of = rows) {
  const found = [...new Map(of.map((row) => [show(row.inputs[field]), row.inputs[field]])).entries()];
  if (found.every(([, value]) => typeof value === "number")) found.sort((a, b) => a[1] - b[1]);
  return found.map(([text]) => text);
}
const varied = fields.filter((field) => values(field).length > 1);
function options(id, entries, chosen, draw) {
  $(id).replaceChildren(...entries.map(([value, text]) => element("option", text, { value })));
  $(id).value = chosen;
  $(id).addEventListener("change", draw);
}

function verdict() {
  document.title = $("title").textContent = data.name;
  $("setup").textContent = `${whole(data.total)} scenarios over ${varied.join(", ") || "one setup"}` +
    (data.total > rows.length ? `; the ${whole(rows.length)} fastest are shown` : "");
  const best = fitting.reduce((a, b) => (a === null || b.tokens_per_s > a.tokens_per_s ? b : a), null);
  const text = best ? `Fastest that fits: ${label(best) || data.name}: ${whole(best.tokens_per_s)} tokens/s, ${seconds(best.step_s)} per step, ` +
    `${gib(best.headroom_bytes)} free per GPU` : "None of the scenarios fits";
  const list = element("dl", null, { class: "cards" });
  for (const [name, value] of Object.entries(data.count)) {
    const card = element("div", null, { class: "card" });
    card.append(element("dt", name), element("dd", whole(value)));
    list.append(card);
  }
  $("verdict").append(element("p", text, { class: `banner ${best ? "fits" : "over"}` }), list);
}

function scaling() {
  if (new Set(fitting.map((row) => row.gpus)).size < 2) return;
  $("scaling").hidden = false;
  const machines = ["cluster.nodes", "cluster.topology", "cluster"], lines = new Map();
  for (const row of fitting) {
    const name = label(row, machines) || "tokens/s", line = lines.get(name) || new Map();
    if (faster(row, line.get(row.gpus))) line.set(row.gpus, row);
    lines.set(name, line);
  }
  const top = (line) => Math.max(...[...line.values()].map((row) => row.tokens_per_s));
  const best = [...lines].sort((a, b) => top(b[1]) - top(a[1])).slice(0, colors.length);
  chart("scaling-chart", () => {
    const traces = best.map(([name, line], index) => {
      const points = [...line.values()].sort((a, b) => a.gpus - b.gpus);
      return { type: "scatter", mode: "lines+markers", name, x: points.map((row) => row.gpus), y: points.map((row) => row.tokens_per_s),
        text: points.map((row) => `${row.gpus} GPUs: ${whole(row.tokens_per_s)} tokens/s, ` +
          `${percent(row.tokens_per_s / row.gpus / (points[0].tokens_per_s / points[0].gpus))} of ideal<br>${about(row)}`),
        hovertemplate: "%{text}<extra></extra>", line: { color: colors[index] }, marker: { color: colors[index] } };
    });
    const counts = [...new Set(best.flatMap(([, line]) => [...line.keys()]))].sort((a, b) => a - b), from = traces[0];
    traces.push({ type: "scatter", mode: "lines", name: "ideal", x: counts, y: counts.map((gpus) => from.y[0] / from.x[0] * gpus),
      line: { dash: "dot", color: css("--soft") }, hoverinfo: "skip" });
    return { traces, layout: { hovermode: "closest", xaxis: { type: "log", tickvals: counts, ticktext: counts.map(String), title: { text: "GPUs" } },
      yaxis: { type: "log", title: { text: "tokens/s" } } } };
  });
}

const MEASURES = { tokens_per_s_per_gpu: ["tokens/s per GPU", whole], tokens_per_s: ["tokens/s", whole], step_s: ["step", seconds],
  mfu: ["MFU", percent], needed_bytes: ["memory with cache", gib], headroom_bytes: ["free memory", gib] };

function heat() {
  if (varied.length < 2 || !fitting.length) return;
  $("heat").hidden = false;
  const names = varied.map((field) => [field, field]), draw = () => redraw();
  options("heat-x", names, varied[0], draw);
  options("heat-y", names, varied[1], draw);
  options("heat-z", Object.entries(MEASURES).map(([key, [text]]) => [key, text]), "tokens_per_s_per_gpu", draw);
  const redraw = chart("heat-chart", () => {
    const x = $("heat-x").value, y = $("heat-y").value, z = $("heat-z").value, [title, format] = MEASURES[z];
    const across = values(x), down = values(y), cells = new Map();
    for (const row of fitting) {
      const key = `${across.indexOf(show(row.inputs[x]))} ${down.indexOf(show(row.inputs[y]))}`;
      if (faster(row, cells.get(key))) cells.set(key, row);
    }
    const sizes = [...cells.values()].map((row) => row[z]), low = Math.min(...sizes), high = Math.max(...sizes);
    const at = [...cells.keys()].map((key) => key.split(" ").map(Number)), found = [...cells.values()];
    const traces = [{ type: "bar", x: at.map(([i]) => i), y: at.map(() => 1), base: at.map(([, j]) => j - 0.5), width: 1,
      text: found.map((row) => format(row[z])), textposition: "inside", insidetextanchor: "middle", textangle: 0, showlegend: false,
      customdata: found.map(about), hovertemplate: `${title}: %{text}<br>%{customdata}<extra></extra>`, constraintext: "both",
      insidetextfont: { color: sizes.map((size) => (size - low < 0.6 * (high - low) ? "#ffffff" : "#000000")) },
      marker: { color: sizes, colorscale: "Viridis", showscale: true, line: { width: 1, color: css("--bg") },
        colorbar: { title: { text: title, side: "right" }, thickness: 12 } } }];
    const axis = (list, field) => ({ tickvals: list.map((_, i) => i), ticktext: list, range: [-0.5, list.length - 0.5], title: { text: field },
      showgrid: false, zeroline: false, fixedrange: true });
    return { traces, layout: { barmode: "overlay", hovermode: "closest", xaxis: axis(across, x), yaxis: axis(down, y), plot_bgcolor: css("--card") } };
  });
}

function stages() {
  if (!varied.length || !timed.length) return;
  $("stages").hidden = false;
  const first = ["zero.stage", "framework.name", "framework"].find((field) => varied.includes(field)) || varied[0];
  const redraws = [], draw = () => redraws.forEach((redraw) => redraw());
  options("stages-by", varied.map((field) => [field, field]), first, draw);
  const chosen = () => {
    const by = $("stages-by").value, found = new Map();
    for (const row of timed) if (faster(row, found.get(show(row.inputs[by])))) found.set(show(row.inputs[by]), row);
    return values(by, timed).map((text) => [`${short(by)} ${text}${found.get(text).fits ? "" : "<br>does not fit"}`, found.get(text)]);
  };
  const parts = [["compute", "compute_s", data.phases.forward], ["exposed communication", "exposed_comm_s", data.causes.communication],
    ["waiting for the host", "host_s", data.causes.host], ["other idle", "idle_s", data.causes.other]];
  redraws.push(chart("stages-time", () => {
    const all = chosen();
    return { traces: parts.map(([name, key, color]) => ({ type: "bar", name, x: all.map(([text]) => text), y: all.map(([, row]) => row[key]),
      customdata: all.map(([, row]) => about(row)), marker: { color }, hovertemplate: `${name}: %{y:.4f} s<br>%{customdata}<extra></extra>` })),
    layout: { barmode: "stack", bargap: 0.5, xaxis: { type: "category" }, yaxis: { title: { text: "seconds per step" } } } };
  }));
  redraws.push(chart("stages-memory", () => {
    const all = chosen(), x = all.map(([text]) => text);
    return { traces: [{ type: "bar", name: "allocated at the peak", x, y: all.map(([, row]) => row.peak_allocated_bytes / GIB), marker: { color: data.phases.forward },
      hovertemplate: "allocated %{y:.2f} GiB<extra></extra>" },
    { type: "bar", name: "cached, CUDA, NCCL", x, y: all.map(([, row]) => (row.needed_bytes - row.peak_allocated_bytes) / GIB), marker: { color: "#8C8C8C" },
      hovertemplate: "cached, CUDA, NCCL %{y:.2f} GiB<extra></extra>" },
    { type: "scatter", mode: "markers", name: "capacity", x, y: all.map(([, row]) => (row.needed_bytes + row.headroom_bytes) / GIB),
      marker: { symbol: "line-ew-open", size: 26, color: css("--bad"), line: { width: 3 } }, hovertemplate: "capacity %{y:.2f} GiB<extra></extra>" }],
    layout: { barmode: "stack", bargap: 0.5, xaxis: { type: "category" }, yaxis: { title: { text: "GiB per GPU" } } } };
  }));
}

function front() {
  if (fitting.length < 2) return;
  $("front").hidden = false;
  const sorted = [...fitting].sort((a, b) => a.needed_bytes - b.needed_bytes || b.tokens_per_s_per_gpu - a.tokens_per_s_per_gpu), best = [];
  for (const row of sorted) if (!best.length || row.tokens_per_s_per_gpu > best.at(-1).tokens_per_s_per_gpu) best.push(row);
  const points = (of) => ({ type: "scatter", x: of.map((row) => row.needed_bytes / GIB), y: of.map((row) => row.tokens_per_s_per_gpu),
    text: of.map(about), hovertemplate: "%{text}<extra></extra>" });
  chart("front-chart", () => ({ traces: [
    { ...points(sorted), mode: "markers", name: "fits", marker: { color: css("--soft"), size: 7 } },
    { ...points(best), mode: "lines+markers", name: "Pareto front", line: { color: data.phases.backward }, marker: { color: data.phases.backward, size: 9 } }],
  layout: { hovermode: "closest", xaxis: { title: { text: "memory per GPU with cache, GiB" } }, yaxis: { title: { text: "tokens/s per GPU" }, rangemode: "tozero" } } }));
}

function scenarios() {
  const or = (value, format) => (value === null ? "" : format(value));
  const number = (value) => (value === null ? -Infinity : value);
  const outcome = (row) => (row.status !== "ok" ? row.status : row.fits === null ? "undecided" : row.fits ? "fits" : "does not fit");
  const fill = table($("table"), [...varied.map((field) => [field, (row) => show(row.inputs[field])]), ["Outcome", outcome],
    ["GPUs", (row) => or(row.gpus, whole), (row) => number(row.gpus)],
    ["Tokens/s", (row) => or(row.tokens_per_s, whole), (row) => number(row.tokens_per_s)],
    ["per GPU", (row) => or(row.tokens_per_s_per_gpu, whole), (row) => number(row.tokens_per_s_per_gpu)],
    ["Step", (row) => or(row.step_s, seconds), (row) => number(row.step_s)], ["MFU", (row) => or(row.mfu, percent), (row) => number(row.mfu)],
    ["With cache", (row) => or(row.needed_bytes, gib), (row) => number(row.needed_bytes)],
    ["Free", (row) => or(row.headroom_bytes, gib), (row) => number(row.headroom_bytes)],
    ["Bottleneck, or why it has no outcome", (row) => row.bottleneck || row.error || ""]], rows);
  $("filter").addEventListener("input", (event) => fill(event.target.value));
}

present([verdict, scaling, heat, stages, front, scenarios]);
