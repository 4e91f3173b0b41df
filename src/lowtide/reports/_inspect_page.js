"use strict";
// Sorts and filters the rows that stand in the page; makes no markup.
(function () {
  const table = document.getElementById("rows");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows).map((row, index) => ({ row, index, words: row.textContent.toLowerCase() }));
  const heads = Array.from(table.tHead.rows[0].cells);
  const view = { column: -1, down: false, words: [] };

  function key(entry) {
    const cell = entry.row.cells[view.column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  }

  function compare(a, b) {
    const x = key(a), y = key(b);
    const order = typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true });
    return (view.down ? -order : order) || a.index - b.index;
  }

  function draw() {
    const kept = rows.filter((entry) => view.words.every((word) => entry.words.includes(word)));
    if (view.column >= 0) kept.sort(compare);
    body.replaceChildren(...kept.map((entry) => entry.row));
    document.getElementById("count").textContent = kept.length + " of " + rows.length + " rows";
    heads.forEach((head, index) => {
      if (index === view.column) head.setAttribute("aria-sort", view.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }

  heads.forEach((head, index) => head.addEventListener("click", () => {
    view.down = view.column === index ? !view.down : head.dataset.kind === "number";
    view.column = index;
    draw();
  }));
  document.getElementById("filter").addEventListener("input", (event) => {
    view.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    draw();
  });
  draw();
})();
