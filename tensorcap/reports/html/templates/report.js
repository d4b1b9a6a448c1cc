"use strict";
// Sorts and filters the table; without this script all of the page is there, in execution order.
(() => {
  const table = document.getElementById("pairs"), body = table.tBodies[0], rows = [...body.rows];
  const filters = document.getElementById("filters"), shown = document.getElementById("shown");
  const [text, status, component] = ["text", "status", "component"].map((id) => document.getElementById(id));
  const content = rows.map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
  const place = new Map(rows.map((row, at) => [row, at]));

  function filter() {
    const words = text.value.toLowerCase();
    let count = 0;
    rows.forEach((row, at) => {
      const cells = content[at];
      const fits = (!words || `${cells[2]} ${cells[4]}`.toLowerCase().includes(words))
        && (!status.value || (status.value === "!" ? row.classList.contains("bad") : cells[1] === status.value))
        && (!component.value || cells[3] === component.value);
      row.hidden = !fits;
      count += fits;
    });
    shown.textContent = `${count} of ${rows.length} rows`;
  }

  // What is not finite is the largest, and a cell without a number comes last either way.
  const number = (cell) => (cell === "" ? null : cell === "not finite" ? Infinity : Number(cell));

  function sort(column, head) {
    const down = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : "number" in head.dataset && column > 0;
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => ("number" in head.dataset ? number(content[place.get(row)][column]) : content[place.get(row)][column]);
    const order = (one, other) => {
      const a = value(one), b = value(other);
      if (a === null || b === null) return (a === null) - (b === null);
      const sign = typeof a === "number" ? (a > b) - (a < b) : a.localeCompare(b, undefined, { numeric: true });
      return (down ? -sign : sign) || place.get(one) - place.get(other);
    };
    body.append(...[...rows].sort(order));
  }

  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    button.onclick = () => sort(column, head);
    head.replaceChildren(button);
  });
  filters.hidden = false;
  filters.onsubmit = (event) => event.preventDefault();
  filters.oninput = filter;
  filter();
})();
