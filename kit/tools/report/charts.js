// Shows the values under the pointer, remembers what the reader chose, and loads a live page again.
"use strict";

const AXES = ["step", "tokens", "time"];
const chosenAxis = () => AXES.find((axis) => document.getElementById("x-" + axis)?.checked) ?? "step";
const svgElement = (name) => document.createElementNS("http://www.w3.org/2000/svg", name);

function words(value) {
  const size = Math.abs(value);
  if (size >= 1e4 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return size && size < 1e-3 ? value.toExponential(3) : String(+value.toPrecision(5));
}

function time(seconds) {
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor((seconds % 3600) / 60)];
  return (hours ? hours + " h " : "") + (hours || minutes ? minutes + " min " : "") + Math.floor(seconds % 60) + " s";
}

// The index of the point whose position, in ascending order, is nearest to `wanted`.
function nearest(positions, wanted) {
  let [low, high] = [0, positions.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (positions[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - positions[low] <= positions[high] - wanted ? low : high;
}

function prepare(figure) {
  const data = JSON.parse(figure.dataset.points);
  const [left, top, width, height] = data.box;
  const svg = figure.querySelector("svg");
  const values = [...figure.querySelectorAll(".keys b")];
  const longest = data.lines.reduce((a, b) => (b.y.length > a.y.length ? b : a));
  let chosen = -1;  // the point of the longest line that the keyboard chose
  const last = values.map((element) => element.textContent);
  const at = figure.querySelector(".at");
  const cursor = svg.appendChild(svgElement("g"));

  function leave() {
    cursor.replaceChildren();
    values.forEach((element, i) => (element.textContent = last[i]));
    at.textContent = "";
    chosen = -1;
  }

  function point(event) {
    const box = svg.getBoundingClientRect();
    const pointer = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    show(((pointer - left) / width) * data.ends[chosenAxis()]);
  }

  function press(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!by) return;
    event.preventDefault();
    const positions = longest[chosenAxis()];
    const size = Math.ceil(positions.length / 100);
    chosen = Math.min(Math.max((chosen < 0 ? positions.length - 1 : chosen) + size * by, 0), positions.length - 1);
    show(positions[chosen]);
  }

  function show(wanted) {
    const axis = chosenAxis();
    const scale = Object.keys(data.scales).find((name) => figure.querySelector("." + name)?.checked) ?? "zero";
    const isLog = scale === "log";
    const [low, high] = data.scales[scale].map((value) => (isLog ? Math.log10(value) : value));
    const found = data.lines.map((line) => nearest(line[axis], wanted));
    // The line that has the nearest point says where the reader points at.
    const distance = (i) => Math.abs(data.lines[i][axis][found[i]] - wanted);
    const first = found.map((_, i) => i).reduce((a, b) => (distance(b) < distance(a) ? b : a));
    const position = data.lines[first][axis][found[first]];
    const x = left + (width * position) / data.ends[axis];
    const line = svgElement("path");
    line.setAttribute("class", "cursor");
    line.setAttribute("d", `M${x} ${top}v${height}`);
    cursor.replaceChildren(line);
    data.lines.forEach((each, i) => {
      const value = each.y[found[i]];
      const share = ((isLog ? Math.log10(value) : value) - low) / (high - low);
      values[i].textContent = words(value);
      if (!Number.isFinite(share)) return;
      const dot = svgElement("circle");
      dot.setAttribute("r", 3);
      dot.setAttribute("cx", left + (width * each[axis][found[i]]) / data.ends[axis]);
      dot.setAttribute("cy", top + height * (1 - Math.min(Math.max(share, 0), 1)));
      cursor.append(dot);
    });
    at.textContent = axis === "time" ? "after " + time(position) : axis + " " + words(position);
  }

  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("keydown", press);
  svg.addEventListener("blur", leave);
}

// A browser may refuse to store anything for a local file.
function recall(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name + location.pathname));
  } catch {
    return null;
  }
}

function remember(name, value) {
  try {
    sessionStorage.setItem(name + location.pathname, JSON.stringify(value));
  } catch {}
}

const inputs = () => [...document.querySelectorAll("input")];
// A chart may appear while a run goes on, so its place on the page does not name it.
const nameOf = (input) => (input.closest("figure")?.querySelector(".title").textContent ?? input.name) + " " + input.className;
const details = () => [...document.querySelectorAll("details")];
const asked = new URLSearchParams(location.search);  // ?theme=dark&axis=time

const chosen = recall("inputs") ?? {};
inputs().forEach((input) => (input.checked = chosen[nameOf(input)] ?? input.checked));
(recall("details") ?? []).forEach((isOpen, i) => details()[i] && (details()[i].open = isOpen));
for (const id of ["theme-" + asked.get("theme"), "x-" + asked.get("axis")]) {
  if (document.getElementById(id)) document.getElementById(id).checked = true;
}
document.addEventListener("change", () => remember("inputs", Object.fromEntries(inputs().map((input) => [nameOf(input), input.checked]))));
document.addEventListener("toggle", () => remember("details", details().map((each) => each.open)), true);
document.querySelectorAll("figure[data-points]").forEach(prepare);

const seconds = Number(document.documentElement.dataset.reload);
if (seconds) {
  window.scrollTo(0, recall("scroll") ?? 0);
  setTimeout(() => {
    remember("scroll", window.scrollY);
    location.reload();
  }, 1000 * seconds);
}
