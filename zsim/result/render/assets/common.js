"use strict";
// What every page shares: the JSON in #data, words and numbers, tables, charts that follow the theme.
const data = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const gib = (bytes) => `${(bytes / GIB).toFixed(2)} GiB`;
const percent = (share) => share === null ? "unknown" : `${(100 * share).toFixed(1)} %`;
const whole = (value) => Math.round(value).toLocaleString("en");
function seconds(value) {
  if (value >= 1) return `${value.toFixed(3)} s`;
  return value >= 1e-3 ? `${(1e3 * value).toFixed(2)} ms` : `${(1e6 * value).toFixed(1)} µs`;
}
const words = (name) => name.replaceAll("_", " ");

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== null && text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// ---- tables -------------------------------------------------------------------------------------------------------
// columns: [title, row -> cell text, row -> sort key (omitted: text)]
function table(target, columns, rows, rowClass = () => "") {
  const shown = [...rows];
  const made = element("table"), head = element("tr"), body = element("tbody");
  let sorted = null, down = true;
  columns.forEach(([title, , key], index) => {
    const cell = element("th", null, { scope: "col", class: key ? "number" : "" });
    const button = element("button", title, { type: "button" });
    button.addEventListener("click", () => {
      down = sorted === index ? !down : true;
      sorted = index;
      const value = key || columns[index][1];
      shown.sort((a, b) => { const x = value(a), y = value(b); return (x < y ? 1 : x > y ? -1 : 0) * (down ? 1 : -1); });
      for (const other of head.children) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      fill();
    });
    cell.append(button);
    head.append(cell);
  });
  function fill(wanted = "") {
    const parts = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    body.replaceChildren(...shown.filter((row) => {
      const text = columns.map((column) => column[1](row)).join(" ").toLowerCase();
      return parts.every((part) => text.includes(part));
    }).map((row) => {
      const line = element("tr", null, { class: rowClass(row) });
      columns.forEach(([, cell, key]) => line.append(element("td", cell(row), { class: key ? "number" : "" })));
      return line;
    }));
  }
  const top = element("thead");
  top.append(head);
  made.append(top, body);
  fill();
  target.replaceChildren(made);
  return fill;
}

// ---- charts -------------------------------------------------------------------------------------------------------
const charts = [];
function chart(id, build) {
  const box = $(id);
  const draw = () => {
    const { traces, layout } = build();
    return Plotly.react(box, traces, merge(base(), layout), { responsive: true, displaylogo: false, scrollZoom: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
  };
  charts.push(draw);
  draw();
  legend(box);
  if (box.tabIndex === 0) box.addEventListener("keydown", (event) => keyboard(box, event));
  return draw;
}
// A legend of buttons: it wraps on a phone and works from the keyboard.
function legend(box) {
  const list = element("div", null, { class: "legend", role: "group", "aria-label": "Legend" });
  box.data.forEach((trace, index) => {
    if (!trace.name || trace.showlegend === false) return;
    const button = element("button", null, { type: "button", "aria-pressed": "true" });
    const color = trace.fillcolor || (trace.marker && trace.marker.color) || (trace.line && trace.line.color);
    button.append(element("span", null, { class: "swatch", style: `background:${color}` }), trace.name);
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!shown));
      Plotly.restyle(box, { visible: !shown }, [index]);
    });
    list.append(button);
  });
  if (list.children.length > 1) box.after(list);
}
function merge(a, b) {
  const out = { ...a };
  for (const [key, value] of Object.entries(b)) {
    const nested = value && typeof value === "object" && !Array.isArray(value) && out[key];
    out[key] = nested ? merge(out[key], value) : value;
  }
  return out;
}
function base() {
  const axis = { gridcolor: css("--grid"), zerolinecolor: css("--line"), automargin: true };
  return { paper_bgcolor: css("--bg"), plot_bgcolor: css("--bg"), font: { color: css("--fg"), family: "inherit" },
    margin: { l: 60, r: 20, t: 20, b: 45 }, xaxis: { ...axis }, yaxis: { ...axis }, dragmode: "zoom",
    showlegend: false, hoverlabel: { align: "left", namelength: -1 } };
}
function keyboard(box, event) {
  const [left, right] = box.layout.xaxis.range, width = right - left, middle = (left + right) / 2;
  const to = { ArrowLeft: [left - width / 5, right - width / 5], ArrowRight: [left + width / 5, right + width / 5],
    "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4],
    "-": [middle - width, middle + width] }[event.key];
  if (to) Plotly.relayout(box, { "xaxis.range": to });
  else if (event.key === "0" || event.key === "Home") Plotly.relayout(box, { "xaxis.autorange": true });
  else return;
  event.preventDefault();
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
function theme(name) {
  document.documentElement.dataset.theme = name;
  for (const draw of charts) draw();
}
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
function present(sections) {
  theme(dark.matches ? "dark" : "light");
  for (const section of sections) section();
  document.documentElement.dataset.ready = "true";
}
