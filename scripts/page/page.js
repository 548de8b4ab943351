"use strict";
// Sorting: by data-value where an entry has one, else by the number or the words that it is; what is missing comes last either
// way round.
const valueOf = (cell) => {
  const isNumber = cell.textContent !== "" && !isNaN(cell.textContent);
  return cell.dataset.value ?? (isNumber ? cell.textContent : undefined);
};
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const compare = (a, b) => {
        const [x, y] = [a.cells[column], b.cells[column]];
        const [gone, missing] = [x.hasAttribute("data-missing"), y.hasAttribute("data-missing")];
        if (gone || missing) return gone - missing;
        const [p, q] = [valueOf(x), valueOf(y)];
        const order = p !== undefined && q !== undefined ? Number(p) - Number(q)
          : x.textContent.localeCompare(y.textContent, "en", { numeric: true });
        return down ? -order : order;
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
}
// A schedule: the operators of the stream that is pointed at keep their colour.
for (const picture of document.querySelectorAll("svg.schedule")) {
  const streams = [...picture.querySelectorAll(".stream")];
  picture.addEventListener("mouseover", (event) => {
    const pointed = event.target.closest(".stream");
    picture.classList.toggle("pointed", pointed !== null);
    for (const stream of streams) stream.classList.toggle("same", stream === pointed);
  });
  picture.addEventListener("mouseleave", () => picture.classList.remove("pointed"));
}
