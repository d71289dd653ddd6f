// Shows the values under the pointer.
"use strict";

function words(value) {
  const size = Math.abs(value);
  if (size >= 1e4 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return size && size < 1e-3 ? value.toExponential(3) : String(+value.toPrecision(5));
}

for (const figure of document.querySelectorAll("figure[data-points]")) {
  const svg = figure.querySelector("svg");
  const places = [...svg.querySelectorAll(".line")].map((path) =>
    path.getAttribute("d").slice(1).split("L").map((place) => place.split(" ").map(Number)));
  const points = JSON.parse(figure.dataset.points);  // of each line the points [x, value] that its path joins
  const values = [...figure.querySelectorAll(".keys b")];
  const last = values.map((element) => element.textContent);
  const at = figure.querySelector(".at");
  const cursor = svg.querySelector(".cursor");

  function show(event) {
    const box = svg.getBoundingClientRect();
    const pointer = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const away = (line, i) => Math.abs(line[i][0] - pointer);
    const nearest = places.map((line) => line.reduce((best, _, i) => (away(line, i) < away(line, best) ? i : best), 0));
    const first = nearest.reduce((best, i, n) => (away(places[n], i) < away(places[best], nearest[best]) ? n : best), 0);
    nearest.forEach((i, n) => (values[n].textContent = words(points[n][i][1])));
    at.textContent = "step " + words(points[first][nearest[first]][0]);
    cursor.setAttribute("d", "M" + places[first][nearest[first]][0] + " 8V180");
  }

  function leave() {
    values.forEach((element, n) => (element.textContent = last[n]));
    at.textContent = "";
    cursor.setAttribute("d", "");
  }

  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", leave);
}
