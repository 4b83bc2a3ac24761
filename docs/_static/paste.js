// Search finds a line that was pasted whole: words that no page has, such as names and paths in it, are ignored.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const parse = Search._parseQuery;
  Search._parseQuery = (query) => {
    const parsed = parse(query);
    const words = [...Object.keys(Search._index.terms), ...Object.keys(Search._index.titleterms)];
    const known = [...parsed[1]].filter((term) => words.some((word) => word.includes(term)));
    if (known.length >= 3) parsed[1] = new Set(known);
    return parsed;
  };
});
