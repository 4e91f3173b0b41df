"use strict";
// Fills the page from the data beside it. Text goes in through textContent alone, so that nothing in it is ever markup.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const columns = data.columns;
  const rows = data.rows.map((values, index) => ({ values, index, cell: data.cells[index] }));
  const at = Object.fromEntries(columns.map((column, index) => [column.name, index]));
  const view = { sort: null, down: false, text: "", status: "", open: null };
  const body = document.querySelector("#cells tbody");
  const heads = document.querySelector("#cells thead tr");

  function make(tag, text, attributes) {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    return element;
  }

  function bytes(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let power = 0;
    let number = value;
    while (Math.abs(number) >= 1024 && power < units.length - 1) { number /= 1024; power += 1; }
    return (power ? number.toFixed(2) : String(number)) + " " + units[power];
  }

  function shown(value, kind) {
    if (value === null) return "";
    if (kind === "bytes") return bytes(value);
    if (kind === "number") return Number.isInteger(value) ? value.toLocaleString("en") : value.toLocaleString("en", { maximumSignificantDigits: 6 });
    return String(value);
  }

  function words(row) {
    if (row.words === undefined) row.words = row.values.filter((v) => v !== null).join(" ").toLowerCase();
    return row.words;
  }

  function chosen() {
    const text = view.text.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter((row) =>
      (!view.status || row.values[at.status] === view.status) && text.every((word) => words(row).includes(word)));
    if (view.sort === null) return kept;
    const index = at[view.sort];
    const sign = view.down ? -1 : 1;
    return kept.sort((a, b) => {
      const x = a.values[index], y = b.values[index];
      if (x === null || y === null) return (x === null) - (y === null) || a.index - b.index;
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return sign * order || a.index - b.index;
    });
  }

  const AT_ONCE = 150;
  let drawing = 0;

  // The first rows at once, so that something is there to read, and the others in turns after it.
  function draw() {
    const kept = chosen();
    const turn = ++drawing;
    body.replaceChildren(lines(kept.slice(0, AT_ONCE)));
    function more(from) {
      if (turn !== drawing) return;
      if (from >= kept.length) { document.documentElement.dataset.allMs = Math.round(performance.now()); return; }
      body.append(lines(kept.slice(from, from + AT_ONCE)));
      setTimeout(more, 0, from + AT_ONCE);
    }
    setTimeout(more, 0, AT_ONCE);
    document.getElementById("count").textContent = kept.length + " of " + rows.length;
    for (const head of heads.children) {
      const mine = head.dataset.name === view.sort;
      head.setAttribute("aria-sort", mine ? (view.down ? "descending" : "ascending") : "none");
    }
  }

  function lines(some) {
    const fragment = document.createDocumentFragment();
    for (const row of some) {
      const line = make("tr", null, { "data-id": row.cell.id, class: row.values[at.status] });
      row.values.forEach((value, index) => {
        const kind = columns[index].kind;
        const cell = make("td", shown(value, kind), { class: kind });
        if (value !== null && kind !== "text") { cell.dataset.value = value; cell.title = String(value); }
        line.append(cell);
      });
      fragment.append(line);
    }
    return fragment;
  }

  function table(headings, lines) {
    const made = make("table");
    const top = make("tr");
    headings.forEach((text) => top.append(make("th", text)));
    made.append(top);
    for (const line of lines) {
      const row = make("tr");
      line.forEach((value) => row.append(make("td", value === null ? "" : value)));
      made.append(row);
    }
    return made;
  }

  function timeline(points) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", "0 0 600 160");
    svg.setAttribute("class", "timeline");
    const top = Math.max(...points.map((point) => point[1])) || 1;
    points.forEach(([phase, value], index) => {
      const bar = document.createElementNS(space, "rect");
      const height = value / top * 150;
      bar.setAttribute("class", ["forward", "backward", "optimizer"].includes(phase) ? phase : "p");
      bar.setAttribute("x", (index * 600 / points.length).toFixed(2));
      bar.setAttribute("y", (160 - height).toFixed(2));
      bar.setAttribute("width", (600 / points.length).toFixed(2));
      bar.setAttribute("height", height.toFixed(2));
      const title = document.createElementNS(space, "title");
      title.textContent = phase + ": " + bytes(value);
      bar.append(title);
      svg.append(bar);
    });
    return svg;
  }

  function open(id) {
    const row = rows.find((each) => each.cell.id === id);
    if (!row) return;
    view.open = id;
    const panel = document.getElementById("detail");
    const cell = row.cell;
    panel.replaceChildren(make("h2", cell.label), make("p", cell.status + (cell.reason ? ": " + cell.reason : "")));
    if (cell.settings.length) panel.append(make("h3", "What it sets"), table(["field", "value"], cell.settings));
    const differs = columns.map((column, index) => [column, row.values[index]]).filter(([column]) => column.name.startsWith("config."));
    if (differs.length) {
      panel.append(make("h3", "Where configs differ"));
      panel.append(table(["field", "value"], differs.map(([column, value]) => [column.name.slice(7), value === null ? "" : String(value)])));
    }
    if (cell.peaks.length) panel.append(make("h3", "Peaks"), table(["rank", "peak", "bytes", "measured by", "note"], cell.peaks.map((p) => [p[0], p[1] === null ? "not available" : bytes(p[1]), p[1], p[2], p[3]])));
    if (cell.timeline.length) panel.append(make("h3", "Memory over one step, as predicted"), timeline(cell.timeline));
    if (cell.operators.length) panel.append(make("h3", "Operators of a profiled step"), table(["operator", "module", "phase", "calls", "ms", "bytes allocated"], cell.operators));
    if (cell.attempts.length) panel.append(make("h3", "Attempts"), table(["status", "seconds", "exit code", "reason"], cell.attempts));
    panel.hidden = false;
  }

  for (const column of columns) {
    const head = make("th", column.title, { "data-name": column.name, tabindex: "0" });
    const act = () => {
      view.down = view.sort === column.name ? !view.down : false;
      view.sort = column.name;
      draw();
    };
    head.addEventListener("click", act);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") act(); });
    heads.append(head);
  }
  const filter = document.getElementById("filter");
  const status = document.getElementById("status");
  for (const name of [...new Set(rows.map((row) => row.values[at.status]))].sort()) status.append(make("option", name, { value: name }));
  filter.addEventListener("input", () => { view.text = filter.value; draw(); });
  status.addEventListener("change", () => { view.status = status.value; draw(); });
  body.addEventListener("click", (event) => {
    const line = event.target.closest("tr");
    if (line) { open(line.dataset.id); document.getElementById("detail").scrollIntoView({ block: "nearest" }); }
  });
  document.querySelectorAll("circle[data-id]").forEach((dot) => dot.addEventListener("click", () => open(dot.dataset.id)));

  // A view can be linked to: #sort=peak_bytes&down=1&filter=full&status=ok&open=ID
  const asked = new URLSearchParams(location.hash.slice(1));
  if (asked.get("sort") in at) { view.sort = asked.get("sort"); view.down = asked.get("down") === "1"; }
  view.text = filter.value = asked.get("filter") || "";
  view.status = status.value = asked.get("status") || "";
  draw();
  if (asked.get("open")) open(asked.get("open"));
  document.documentElement.dataset.readyMs = Math.round(performance.now());
})();
