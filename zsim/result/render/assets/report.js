"use strict";
// Draws the report of one run. Every figure comes from the data; nothing is computed twice.
const result = data.result, gpu = result.memory.gpu, time = result.time;
const cause = (name) => { const [kind, phase] = name.split("/"); return phase ? `${words(kind)}, ${phase}` : words(kind); };

// ---- sections -----------------------------------------------------------------------------------------------------
function verdict() {
  document.title = $("title").textContent = data.name;
  $("setup").textContent = data.headline;
  const cards = [
    ["Memory with cache", gib(gpu.nvidia_smi_bytes), `of ${gib(gpu.capacity_bytes)} per GPU`],
    ["Step", seconds(time.step_s), result.fits ? "steady state" : "as if it fitted"],
    ["Tokens/s per GPU", whole(result.throughput.tokens_per_s_per_gpu), `${whole(result.throughput.tokens_per_s)} in all`],
    ["MFU", percent(result.throughput.mfu), `with recomputation (HFU) ${percent(result.throughput.hfu)}`],
    ["Bottleneck", percent(result.bottleneck.share), result.bottleneck.name],
  ];
  const list = element("dl", null, { class: "cards" });
  for (const [name, value, note] of cards) {
    const card = element("div", null, { class: "card" }), figure = element("dd", value);
    figure.append(element("small", note));
    card.append(element("dt", name), figure);
    list.append(card);
  }
  $("verdict").append(element("p", data.verdict, { class: `banner ${data.state}` }), list);
}

function memory() {
  const held = data.memory;
  $("memory-words").textContent = `The allocated peak is at ${gpu.peak_at}. Allocated is what tensors hold, reserved what ` +
    "PyTorch's allocator has taken from the device, and nvidia-smi shows reserved plus what lies outside the allocator. " +
    `The last decides about out-of-memory. ${data.strain}`;
  chart("memory-time", () => {
    const traces = Object.entries(held.categories).map(([name, values]) => ({
      x: held.t, y: values, name: data.labels[name] || words(name), type: "scatter", mode: "lines", line: { width: 0, shape: "hv" },
      stackgroup: "all", fillcolor: data.colors[name], hovertemplate: "%{y:.2f} GiB",
    }));
    traces.push({ x: held.t, y: held.total, name: "total", type: "scatter", mode: "lines",
      line: { width: 1, shape: "hv", color: css("--fg") }, text: held.at.map((index) => held.texts[index]),
      hovertemplate: "%{y:.2f} GiB at %{text}" });
    const capacity = gpu.capacity_bytes / GIB;
    return { traces, layout: { hovermode: "x unified", yaxis: { title: { text: "GiB" }, rangemode: "tozero" },
      xaxis: { ticksuffix: " s" },
      shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: capacity, y1: capacity, line: { color: css("--bad"), width: 2, dash: "dash" } }],
      annotations: [{ xref: "paper", x: 1, y: capacity, text: `capacity ${capacity.toFixed(1)} GiB`, showarrow: false,
        xanchor: "right", yanchor: "bottom", font: { color: css("--bad") } }] } };
  });
  const rows = Object.entries(gpu.by_category).map(([name, bytes]) => ({ name: data.labels[name] || words(name), bytes, note: "" }));
  rows.sort((a, b) => b.bytes - a.bytes);
  rows.push({ name: "allocated", bytes: gpu.peak_allocated_bytes, note: "torch.cuda.max_memory_allocated" },
    { name: "reserved", bytes: gpu.peak_reserved_bytes, note: "torch.cuda.max_memory_reserved" },
    { name: "shown by nvidia-smi", bytes: gpu.nvidia_smi_bytes, note: "decides about out-of-memory", decides: true },
    { name: "capacity", bytes: gpu.capacity_bytes, note: "what torch reports as total" },
    { name: "textbook", bytes: result.memory.textbook.per_gpu_bytes, note: `${result.memory.textbook.formula}: model states alone` });
  table($("memory-table"), [["At the peak", (r) => r.name], ["Bytes", (r) => gib(r.bytes), (r) => r.bytes],
    ["Of capacity", (r) => percent(r.bytes / gpu.capacity_bytes), (r) => r.bytes], ["", (r) => r.note]], rows,
    (r) => (r.decides ? "decides" : ""));
}

function holders() {
  table($("holders-table"), [["Category", (r) => data.labels[r.category] || words(r.category)], ["Tensor", (r) => r.tensor],
    ["Number", (r) => whole(r.count), (r) => r.count], ["Bytes", (r) => gib(r.nbytes), (r) => r.nbytes],
    ["Of allocated", (r) => percent(r.nbytes / gpu.peak_allocated_bytes), (r) => r.nbytes]], data.holders);
}

function changes() {
  if (!data.changes.length) return;
  $("changes").hidden = false;
  const rows = [...data.changes].sort((a, b) => b.fits - a.fits || b.gain - a.gain);
  table($("changes-table"), [["Change", (r) => r.name], ["Kind", (r) => r.kind],
    ["Tokens/s", (r) => `${r.gain >= 0 ? "+" : "−"}${percent(Math.abs(r.gain))}`, (r) => r.gain], ["Step", (r) => seconds(r.step_s), (r) => r.step_s],
    ["Fits", (r) => (r.fits ? "yes" : "no")], ["Free per GPU", (r) => gib(r.headroom_bytes), (r) => r.headroom_bytes]], rows);
}

function parts(of) {
  const all = [];
  for (const [phase, value] of Object.entries(of.compute_by_phase)) all.push([`compute, ${phase}`, value, data.phases[phase]]);
  for (const [name, value] of Object.entries(of.exposed_by)) all.push([`exposed ${cause(name)}`, value, data.causes.communication]);
  all.push(["waiting for the host", of.host_s, data.causes.host]);
  for (const [name, value] of Object.entries(of.idle_by)) all.push([`waiting for ${cause(name)}`, value, data.causes.other]);
  const small = all.filter(([, value]) => value < 0.004 * of.step_s), rest = small.reduce((sum, [, value]) => sum + value, 0);
  return [...all.filter((part) => !small.includes(part)), ["the rest", rest, css("--soft")]].filter(([, value]) => value > 0);
}

function step() {
  chart("split", () => ({
    traces: parts(time).map(([name, value, color]) => ({ type: "bar", orientation: "h", y: ["step"], x: [value], name,
      marker: { color, line: { width: 1, color: css("--bg") } }, hovertemplate: `${name}: ${seconds(value)}, ${percent(value / time.step_s)}<extra></extra>` })),
    layout: { barmode: "stack", margin: { t: 5, b: 30 }, yaxis: { visible: false }, xaxis: { ticksuffix: " s" } },
  }));
  $("step-words").textContent = `${seconds(time.step_s)} per step: compute ${percent(time.compute_s / time.step_s)}, exposed communication ` +
    `${percent(time.exposed_comm_s / time.step_s)}, host ${percent(time.host_s / time.step_s)}, other idle ${percent(time.idle_s / time.step_s)}. ` +
    `Collectives run for ${seconds(time.comm_s)}, of which ${seconds(time.overlapped_comm_s)} under compute. Bottleneck: ${result.bottleneck.name}.`;
  chart("lanes", () => {
    const groups = new Map();
    const { names, items, texts, colors } = data.lanes;
    for (const [lane, start, length, color, what, why] of items) {
      const group = colors[color];
      if (!groups.has(group)) groups.set(group, { y: [], base: [], x: [], text: [] });
      const bars = groups.get(group);
      bars.y.push(names[lane]); bars.base.push(start); bars.x.push(length);
      bars.text.push(`${texts[what]}<br>${seconds(length)}${texts[why] ? `, started when ${texts[why]}` : ""}`);
    }
    const traces = [...groups].map(([name, bars]) => ({ type: "bar", orientation: "h", name: words(name), y: bars.y, x: bars.x,
      base: bars.base, customdata: bars.text, marker: { color: data.phases[name] || data.causes[name], line: { width: 0 } },
      hovertemplate: "%{customdata}<br>from %{base:.6f} s<extra></extra>" }));
    return { traces, layout: { barmode: "overlay", bargap: 0.25, hovermode: "closest", xaxis: { ticksuffix: " s" },
      yaxis: { type: "category", categoryorder: "array", categoryarray: [...names].reverse(), fixedrange: true } } };
  });
}

function links() {
  const shape = data.topology, at = Object.fromEntries(shape.nodes.map((node) => [node.id, node]));
  $("links-words").textContent = shape.note;
  const heat = (share) => `hsl(${Math.round(210 - 210 * Math.min(share, 1))}, 75%, 48%)`;
  chart("topology", () => {
    const traces = shape.edges.map((edge) => {
      // The two directions of a wire lie side by side.
      const a = at[edge.src], b = at[edge.dst], long = Math.hypot(b.x - a.x, b.y - a.y) || 1;
      const dx = 0.035 * (b.y - a.y) / long, dy = -0.035 * (b.x - a.x) / long;
      const label = `${edge.id}<br>${edge.kind}, ${(edge.capacity / 1e9).toFixed(1)} GB/s<br>mean ${percent(edge.utilization)}, peak ${percent(edge.peak)}`;
      const middle = [0.25, 0.5, 0.75], line = [0, ...middle, 1];
      return { type: "scatter", mode: "lines", x: line.map((f) => a.x + f * (b.x - a.x) + dx), y: line.map((f) => a.y + f * (b.y - a.y) + dy),
        line: { color: edge.bytes ? heat(edge.utilization) : css("--line"), width: edge.bytes ? 2 + 4 * Math.min(edge.utilization, 1) : 1 },
        text: line.map(() => label), hovertemplate: "%{text}<extra></extra>", showlegend: false };
    });
    traces.push({ type: "scatter", mode: "markers+text", x: shape.nodes.map((n) => n.x), y: shape.nodes.map((n) => n.y),
      text: shape.nodes.map((n) => n.name), textposition: shape.nodes.map((n) => (n.y <= 0 ? "bottom center" : "top center")), hoverinfo: "text", showlegend: false,
      marker: { size: 14, symbol: "square", color: css("--card"), line: { color: css("--fg"), width: 1.5 } } });
    const hidden = { visible: false, showgrid: false, zeroline: false };
    return { traces, layout: { hovermode: "closest", xaxis: hidden, yaxis: hidden, margin: { l: 10, r: 10, t: 30, b: 10 } } };
  });
  table($("links-table"), [["Link", (r) => r.link], ["Kind", (r) => r.kind],
    ["Capacity", (r) => `${(r.capacity_bytes_per_s / 1e9).toFixed(1)} GB/s`, (r) => r.capacity_bytes_per_s],
    ["Carried per step", (r) => `${(r.bytes / 1e9).toFixed(2)} GB`, (r) => r.bytes],
    ["Mean use", (r) => percent(r.utilization), (r) => r.utilization], ["Peak use", (r) => percent(r.peak), (r) => r.peak]], data.links);
}

function ops() {
  const fill = table($("ops-table"), [["Module", (r) => r.module], ["Op", (r) => r.label], ["Phase", (r) => r.phase], ["Lane", (r) => words(r.lane)], ["Kind", (r) => words(r.kind)],
    ["Calls", (r) => whole(r.count), (r) => r.count], ["Time", (r) => seconds(r.seconds), (r) => r.seconds],
    ["Of the step", (r) => percent(r.seconds / time.step_s), (r) => r.seconds],
    ["TFLOP", (r) => (r.flops / 1e12).toFixed(2), (r) => r.flops], ["GB", (r) => (r.bytes / 1e9).toFixed(2), (r) => r.bytes]], data.ops);
  $("filter").addEventListener("input", (event) => fill(event.target.value));
}

function notes() {
  const lists = [["Asked for as well", data.impossible], ["Assumed", result.assumptions], ["Not modeled", result.not_modeled],
    ["Expected error", data.accuracy],
    ["Utilization counts", [result.throughput.formula]],
    ["Simulated by", [`zsim ${result.meta.zsim_version}: ${whole(result.meta.events)} events on ${result.meta.simulated_ranks} of ${result.setup.world_size} ranks`]]];
  for (const [title, texts] of lists) {
    if (!texts.length) continue;
    const list = element("ul");
    for (const text of texts) list.append(element("li", text));
    $("notes-body").append(element("h3", title), list);
  }
}

function compare() {
  if (data.compare.length < 2) return;
  $("compare").hidden = false;
  const names = data.compare.map((other) => other.name);
  const kinds = [["compute", "compute_s", data.phases.forward], ["exposed communication", "exposed_comm_s", data.causes.communication],
    ["host", "host_s", data.causes.host], ["other idle", "idle_s", data.causes.other]];
  chart("compare-time", () => ({ traces: kinds.map(([name, key, color]) => ({ type: "bar", name, x: names, y: data.compare.map((o) => o.result.time[key]),
    marker: { color }, hovertemplate: "%{y:.4f} s" })), layout: { barmode: "stack", yaxis: { title: { text: "seconds per step" } } } }));
  const cached = (of) => of.nvidia_smi_bytes - Object.values(of.by_category).reduce((sum, bytes) => sum + bytes, 0);
  const categories = Object.keys(data.colors).filter((name) => data.compare.some((o) => o.result.memory.gpu.by_category[name]));
  chart("compare-memory", () => ({ traces: [...categories.map((name) => ({ type: "bar", name: data.labels[name] || words(name), x: names,
    y: data.compare.map((o) => (o.result.memory.gpu.by_category[name] || 0) / GIB), marker: { color: data.colors[name] }, hovertemplate: "%{y:.2f} GiB" })),
  { type: "bar", name: "cached by the allocator", x: names, y: data.compare.map((o) => cached(o.result.memory.gpu) / GIB), marker: { color: css("--line") }, hovertemplate: "%{y:.2f} GiB" },
  { type: "scatter", mode: "markers", name: "textbook: states", x: names, y: data.compare.map((o) => o.result.memory.textbook.per_gpu_bytes / GIB),
    marker: { symbol: "line-ew-open", size: 40, color: css("--fg"), line: { width: 2 } }, hovertemplate: "%{y:.2f} GiB" },
  { type: "scatter", mode: "markers", name: "capacity", x: names, y: data.compare.map((o) => o.result.memory.gpu.capacity_bytes / GIB),
    marker: { symbol: "line-ew-open", size: 40, color: css("--bad"), line: { width: 3 } }, hovertemplate: "%{y:.2f} GiB" }],
  layout: { barmode: "stack", yaxis: { title: { text: "GiB per GPU" } } } }));
  table($("compare-table"), [["Setup", (o) => o.name], ["Fits", (o) => (o.result.fits ? "yes" : "no")],
    ["Needs", (o) => gib(o.result.memory.gpu.nvidia_smi_bytes), (o) => o.result.memory.gpu.nvidia_smi_bytes],
    ["Step", (o) => seconds(o.result.time.step_s), (o) => o.result.time.step_s],
    ["Tokens/s per GPU", (o) => whole(o.result.throughput.tokens_per_s_per_gpu), (o) => o.result.throughput.tokens_per_s_per_gpu],
    ["MFU", (o) => percent(o.result.throughput.mfu), (o) => o.result.throughput.mfu], ["Bottleneck", (o) => o.result.bottleneck.name]], data.compare);
}

present([verdict, compare, memory, holders, step, changes, links, ops, notes]);
