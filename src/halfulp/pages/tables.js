// Tables that sort by a column and filter by words: every <table data-table> inside a .data element.
(() => {
  "use strict";
  const LIMIT = 24;
  const textOf = (cell) => cell.dataset.sort ?? cell.textContent.trim();

  function compare(a, b) {
    const x = Number(a), y = Number(b);
    if (a !== "" && b !== "" && !Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    return a.localeCompare(b, "en", { numeric: true });
  }

  function start(box) {
    const table = box.querySelector("table[data-table]");
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const field = box.querySelector("input[type=search]");
    const said = box.querySelector(".count");
    const more = box.querySelector("button.more");
    let all = false, column = -1, direction = 1;

    function show() {
      const words = (field?.value ?? "").toLowerCase().split(/\s+/).filter(Boolean);
      const kept = rows.filter((row) => {
        const text = row.textContent.toLowerCase();
        return words.every((word) => text.includes(word));
      });
      if (column >= 0) {
        // What is not known stands last in both directions.
        const missing = (row) => textOf(row.cells[column]) === "";
        kept.sort((a, b) => missing(a) - missing(b)
          || direction * compare(textOf(a.cells[column]), textOf(b.cells[column])));
      }
      const shown = all ? kept : kept.slice(0, LIMIT);
      body.replaceChildren(...shown);
      if (said) said.textContent = words.length ? `${kept.length} of ${rows.length}` : `${rows.length}`;
      if (more) {
        more.hidden = kept.length <= LIMIT;
        more.textContent = all ? `Show ${LIMIT}` : `Show all ${kept.length}`;
        more.setAttribute("aria-expanded", String(all));
      }
    }

    heads.forEach((head, index) => {
      const button = head.querySelector("button");
      button?.addEventListener("click", () => {
        const first = head.dataset.numeric === undefined ? 1 : -1;
        direction = column === index ? -direction : first;
        column = index;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
        show();
      });
    });
    field?.addEventListener("input", show);
    more?.addEventListener("click", () => { all = !all; show(); });
    show();
  }

  document.querySelectorAll(".data").forEach(start);
  window.startTable = start;
})();
