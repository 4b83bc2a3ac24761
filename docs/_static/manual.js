// Small conveniences; every page is complete without them.

// Search finds a line that was pasted whole. Sphinx shows only pages that have every word; a line has names, paths and
// numbers that no page has. So if no page has every word, the words are used that the best page has.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const parse = Search._parseQuery;
  const pagesWith = (term) => {
    const pages = new Set();
    for (const index of [Search._index.terms, Search._index.titleterms]) {
      for (const word of Object.keys(index)) {
        if (word === term || (term.length > 2 && word.includes(term))) {
          [index[word]].flat().forEach((page) => pages.add(page));
        }
      }
    }
    return pages;
  };
  Search._parseQuery = (query) => {
    const parsed = parse(query);
    const terms = [...parsed[1]].map((term) => [term, pagesWith(term)]);
    const counts = new Map();
    terms.forEach(([, pages]) => pages.forEach((page) => counts.set(page, 1 + (counts.get(page) || 0))));
    const [best, most] = [...counts].reduce((a, b) => (b[1] > a[1] ? b : a), [-1, 0]);
    if (most >= 3 && most < terms.length) {
      parsed[1] = new Set(terms.filter(([, pages]) => pages.has(best)).map(([term]) => term));
    }
    return parsed;
  };
});

// On a narrow screen a table's rows are stacked (manual.css); each cell then shows the head of its column.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    if (heads.length < 3) continue;
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.children].forEach((cell, column) => {
        const head = heads[column];
        if (column > 0) cell.dataset.head = head.endsWith("?") ? head : head + ":";
      });
    }
  }
});

// Lines of a text block are told apart when they wrap.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll(".highlight-text pre")) {
    const lines = block.textContent.replace(/\n$/, "").split("\n");
    block.replaceChildren(
      ...lines.map((text) => {
        const line = document.createElement("span");
        line.className = "line";
        line.textContent = text;
        return line;
      }),
    );
  }
});

// Long names in tables may be broken behind a slash, a dot or an underscore.
document.addEventListener("DOMContentLoaded", () => {
  for (const name of document.querySelectorAll("table.docutils code span.pre")) {
    if (name.textContent.length <= 24) continue;
    const parts = name.textContent.split(/(?<=[/._])/);
    name.replaceChildren(...parts.flatMap((part, at) => (at ? [document.createElement("wbr"), part] : [part])));
  }
});
