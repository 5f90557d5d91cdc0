// The map of magnitudes and the curves over steps, drawn as SVG from the data embedded in the page.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const FEW = 36, MARGIN = 14, MOST_DOTS = 120, NAME = 17;

  function make(name, attributes = {}, text) {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }
  const html = (name, properties = {}) => Object.assign(document.createElement(name), properties);
  const round = (x) => Math.round(x * 100) / 100;
  const superscript = (n) => String(n).replace("-", "⁻").replace(/\d/g, (d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d]);

  function percent(part) {
    if (!part) return "0%";
    if (part < 1e-4) return "<0.01%";
    if (part > 0.999 && part < 1) return ">99.9%";
    return `${Number((100 * part).toFixed(part < 0.01 ? 2 : 1))}%`;
  }

  function short(name, most) {
    if (name.length <= most) return name;
    const tail = Math.ceil((most - 1) * 0.62);
    return `${name.slice(0, most - 1 - tail)}…${name.slice(-tail)}`;
  }

  // A row's name: left of its cells, or on a narrow page, where it would be cut, above them.
  function label(group, name, y, narrow, edge, width, attributes = {}) {
    const font = { fill: "var(--ink)", "font-family": "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace", ...attributes };
    if (narrow) write(group, 0, y + NAME - 3, short(name, Math.floor(width / 6.1)), { "font-size": 10, stroke: "var(--card)", "stroke-width": 3, "paint-order": "stroke", ...font });
    else write(group, edge - 8, y, short(name, 38), { "text-anchor": "end", "font-size": 11, ...font });
  }

  function canvas(width, height, words) {
    return make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": words,
      "font-family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif" });
  }

  function write(svg, x, y, text, attributes = {}) {
    const element = make("text", { x: round(x), y: round(y), fill: "var(--soft)", "font-size": 11, ...attributes }, text);
    svg.append(element);
    return element;
  }

  // A copy that stands alone: the page's colours as they are now, and its paper.
  function save(svg, name) {
    const copy = svg.cloneNode(true);
    const style = getComputedStyle(document.documentElement);
    const used = new Set(svg.outerHTML.match(/--[\w-]+/g));
    const colours = [...used].map((key) => `${key}:${style.getPropertyValue(key).trim()}`).join(";");
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    copy.setAttribute("viewBox", `${-MARGIN} ${-MARGIN} ${width + 2 * MARGIN} ${height + 2 * MARGIN}`);
    copy.setAttribute("width", width + 2 * MARGIN);
    copy.setAttribute("height", height + 2 * MARGIN);
    copy.setAttribute("xmlns", NS);
    copy.prepend(make("style", {}, `svg{${colours};background:${style.getPropertyValue("--card")}} .hit{fill:none}`));
    const link = html("a", { download: name });
    link.href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // Draws again when the width changes.
  function drawn(box, draw) {
    let last = 0;
    const again = () => { last = box.clientWidth; if (last) draw(last); };
    new ResizeObserver(() => { if (box.clientWidth && Math.abs(box.clientWidth - last) > 1) again(); }).observe(box);
    again();
    return again;
  }

  // The map -----------------------------------------------------------------------------------------------------

  // What a format makes of a row at scale 2^power, from the counts by power of two.
  function counted(row, format, power) {
    const found = { elements: row.sampled, zero: 0, subnormal: 0, over: 0 };
    for (const [bin, many] of row.bins) {
      const at = bin + power;
      if (at < format.zero) found.zero += many;
      else if (at < format.normal) found.subnormal += many;
      else if (at + 1 > format.over) found.over += many * Math.min(1, at + 1 - format.over);
    }
    found.over = row.dtype === format.name && !power ? 0 : Math.round(found.over);  // what it stores is not beyond it
    return found;
  }

  // The power of two that loses least of a row, in the middle of those that lose the same.
  function centred(row, format) {
    let least = Infinity, powers = [];
    for (let power = -48; power <= 48; power++) {
      const at = counted(row, format, power);
      const loss = at.zero + at.over + 0.25 * at.subnormal;
      if (loss < least - 1e-9) { least = loss; powers = [power]; } else if (loss <= least + 1e-9) powers.push(power);
    }
    return powers[(powers.length - 1) >> 1];
  }

  function startMap() {
    const card = document.getElementById("map");
    if (!card) return;
    const { tensors, formats, roles } = data;
    const box = card.querySelector(".figure"), said = card.querySelector(".said");
    const field = (name) => card.querySelector(`[name=${name}]`);
    const more = card.querySelector(".under .more");
    const state = { role: data.role, power: 0, chosen: "", all: false, format: "" };
    const format = () => formats[Number(field("format").value)];

    roles.forEach((role) => {
      const label = html("label"), input = html("input", { type: "radio", name: "role", value: role, checked: role === state.role });
      input.addEventListener("change", () => { state.role = role; state.chosen = ""; state.all = false; fill(); update(); });
      label.append(input, role);
      card.querySelector(".segments").append(label);
    });
    field("format").addEventListener("change", () => { state.format = format().name; if (state.chosen) centre(); update(); });
    field("scale").addEventListener("input", () => { state.power = Number(field("scale").value); state.chosen = ""; update(); });
    field("centre").addEventListener("change", () => { state.chosen = field("centre").value; centre(); update(); });
    field("order").value = data.order;
    field("order").addEventListener("change", update);
    more.addEventListener("click", () => { state.all = !state.all; update(); });
    card.querySelector(".save").addEventListener("click", () =>
      save(box.firstChild, `${state.role.replaceAll(" ", "-")}-${format().name}.svg`));

    // A format's title, and whether the tensors of this role are stored in it.
    function chosen(one) {
      if (one.name !== data.stored[state.role]) return `if this were ${one.title}`;
      const many = inRole(), own = many.filter((row) => row.dtype === one.name).length;
      return own === many.length ? `stored in ${one.title}` : `${one.title}, which stores ${own} of ${many.length}`;
    }
    const inRole = () => tensors.filter((row) => row.role === state.role);
    function fill() {
      const options = [html("option", { value: "", textContent: "no tensor" })];
      for (const row of inRole()) options.push(html("option", { value: row.name, textContent: row.name || "(model)" }));
      field("centre").replaceChildren(...options);
      // The format that was chosen stays; else each role opens in the one that stores it.
      const names = formats.map((one) => one.name), stored = data.stored[state.role];
      const words = (name) => (name === stored ? `${name}, as stored` : `if this were ${name}`);
      field("format").replaceChildren(...names.map((name, index) => html("option", { value: index, textContent: words(name), label: words(name) })));
      field("format").value = Math.max(0, names.indexOf(state.format || stored));
    }
    function centre() {
      const row = inRole().find((one) => one.name === state.chosen);
      state.power = row ? centred(row, format()) : 0;
    }

    function rows() {
      const lost = (row) => { if (row.lost) return row.lost[1] / row.lost[0]; const at = counted(row, format(), state.power); return (at.zero + at.over + at.subnormal / 1e3) / (at.elements || 1); };
      const found = inRole();
      return field("order").value === "lost" ? found.map((row) => [lost(row), row]).sort((a, b) => b[1].found - a[1].found || b[0] - a[0]).map((pair) => pair[1]) : found;
    }

    // From the data to the format's limits where those are near, the same at every scale.
    function range(found) {
      const bins = found.flatMap((row) => row.bins.map((pair) => pair[0]));
      for (const row of found) for (const edge of [row.amin, row.amax]) if (edge) bins.push(Math.floor(Math.log2(edge)));
      let low = -1, high = 1;
      if (bins.length) { low = bins.reduce((a, b) => Math.min(a, b)); high = bins.reduce((a, b) => Math.max(a, b)) + 1; }
      let [left, right] = [low - 2, high + 2];
      if (format().zero - 4 > low - 28) left = Math.min(left, format().zero - 4);
      if (format().over + 4 < high + 28) right = Math.max(right, Math.ceil(format().over) + 4);
      return [left, right];
    }

    function draw(width) {
      const found = rows(), shown = state.all ? found : found.slice(0, FEW);
      const narrow = width < 620, above = narrow ? NAME : 0, deep = shown.length > 60 ? 13 : 17, tall = above + deep, top = 40, bottom = 26;
      const longest = Math.max(...shown.map((row) => Math.min(38, (row.name || "(model)").length)), 6);
      const left = narrow ? 2 : longest * 6.5 + 12, columns = narrow ? [["zero", "zero"], ["over", "over"]] : [["zero", "zero"], ["subnormal", "subnormal"], ["over", "overflow"]];
      if (inRole().some((row) => row.lost)) columns.unshift(["lost", "lost"]);
      if (narrow && columns.length > 2) columns.splice(1, 1);
      if (inRole().some((row) => row.nonfinite)) columns.push(["broken", narrow ? "NaN" : "NaN, inf"]);
      const each = narrow ? 42 : 66, right = columns.length * each + 4;
      const plot = width - left - right, height = top + shown.length * tall + bottom;
      const [low, high] = range(found), power = state.power, one = format();
      const x = (bin) => left + ((Math.min(Math.max(bin, low), high) - low) / (high - low)) * plot;
      const svg = canvas(width, height, `Magnitudes of every ${state.role}. ${said.textContent} The table below has the numbers.`);
      const end = top + shown.length * tall;
      const hatch = make("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
      hatch.append(make("rect", { width: 5, height: 5, fill: "var(--lost-bg)" }), make("line", { x1: 0, y1: 0, x2: 0, y2: 5, stroke: "var(--hatch)", "stroke-width": 1.4 }));
      const defs = make("defs");
      defs.append(hatch);
      svg.append(defs);

      const edges = [["zero", -Infinity, one.zero], ["subnormal", one.zero, one.normal], ["normal", one.normal, one.over], ["overflow", one.over, Infinity]];
      for (const [name, from, to] of edges) {
        const start = x(from - power), stop = x(to - power), wide = stop - start;
        if (wide < 0.5) continue;
        const paint = { zero: "url(#hatch)", overflow: "url(#hatch)", subnormal: "var(--sub-bg)" }[name];
        if (paint) svg.append(make("rect", { x: round(start), y: top, width: round(wide), height: end - top, fill: paint }));
        const size = narrow ? 10 : 11;
        if (wide > name.length * size * 0.56) write(svg, (start + stop) / 2, top - 7, name, { "text-anchor": "middle", "font-size": size, "font-weight": name === "normal" ? 400 : 600, fill: { subnormal: "var(--open)", normal: "var(--soft)" }[name] ?? "var(--lost)" });
        if (start > left + 0.5) svg.append(make("line", { x1: round(start), y1: top - 3, x2: round(start), y2: end, stroke: name === "normal" ? "var(--subnormal)" : "var(--lost)", "stroke-width": 1 }));
      }
      write(svg, left, 13, narrow ? chosen(one).split(":")[0] : `${state.role} · ${chosen(one)}${power ? ` · times 2${superscript(power)}` : ""}`, { fill: "var(--ink)", "font-weight": 650, "font-size": narrow ? 11.5 : 13 });
      columns.forEach(([, title], index) => write(svg, width - right + (index + 1) * each, top - 7, title, { "text-anchor": "end" }));

      const step = [1, 2, 4, 5, 10, 20, 40].find((gap) => ((high - low) / gap) * (narrow ? 34 : 40) <= plot) ?? 80;
      for (let bin = Math.ceil(low / step) * step; bin <= high; bin += step) {
        svg.append(make("line", { x1: round(x(bin)), y1: top, x2: round(x(bin)), y2: end + 4, stroke: "var(--line)", "stroke-width": bin === 0 ? 1.2 : 0.6 }));
        write(svg, x(bin), end + 17, `2${superscript(bin)}`, { "text-anchor": "middle" });
      }

      const bin = plot / (high - low);
      shown.forEach((row, index) => {
        const start = top + index * tall, y = start + above, group = make("g", { class: row.name === state.chosen && state.chosen !== "" ? "row chosen" : "row" });
        group.append(make("rect", { class: "hit", x: 0, y: start, width, height: tall }));
        label(group, row.name || "(model)", narrow ? start : y + deep / 2 + 4, narrow, left, width, { "font-weight": row.found ? 700 : 400 });
        const whole = row.bins.reduce((sum, pair) => sum + pair[1], 0) || 1;
        for (const [at, many] of row.bins) {
          const place = at + power;
          const kind = place < one.zero || place + 1 > Math.ceil(one.over) ? "lost" : place < one.normal ? "subnormal" : "kept";
          const faintest = kind === "kept" ? 0.14 : 0.4;
          const depth = faintest + (1 - faintest) * Math.min(1, Math.max(0, (Math.log10(many / whole) + 4) / 3.5));
          group.append(make("rect", { x: round(x(at)), y: y + 1.5, width: round(Math.max(bin - (bin > 5 ? 1 : 0), 0.8)), height: deep - 3, rx: bin > 5 ? 1.5 : 0, fill: `var(--${kind})`, "fill-opacity": round(depth) }));
        }
        for (const edge of [row.amin, row.amax]) {
          if (!edge) continue;
          const place = round(x(Math.log2(edge)));
          group.append(make("line", { x1: place, y1: y + 2, x2: place, y2: y + deep - 2, stroke: "var(--ink)", "stroke-width": 1.3 }));
        }
        const at = counted(row, one, power);
        columns.forEach(([key], column) => {
          const own = key === "broken" || (key === "lost" && row.lost !== undefined);
          const part = key === "lost" ? (row.lost ? row.lost[1] / row.lost[0] : 0) : own ? row.nonfinite / (row.elements || 1) : at && at.elements ? at[key] / at.elements : 0;
          const text = write(group, width - right + (column + 1) * each, y + deep / 2 + 4, at || own ? percent(part) : "–", { "text-anchor": "end", "font-size": narrow ? 10 : 11.5, fill: part >= 0.0005 ? (key === "subnormal" ? "var(--open)" : "var(--lost)") : "var(--soft)", "font-weight": part >= 0.01 ? 650 : 400 });
          text.setAttribute("class", key);
        });
        const words = [`${row.name || "(model)"} · ${row.kind} · ${row.dtype}`];
        if (row.amax) words.push(`largest ${row.amax.toPrecision(3)}, smallest ${row.amin.toPrecision(3)}`);
        if (row.lost) words.push(`${row.lost[1].toLocaleString("en")} of ${row.lost[0].toLocaleString("en")} sampled updates lost`);
        if (row.nonfinite) words.push(`${row.nonfinite} NaN or infinite`);
        group.append(make("title", {}, words.join("\n")));
        group.addEventListener("click", () => { state.chosen = state.chosen === row.name ? "" : row.name; centre(); update(); });
        svg.append(group);
      });
      box.replaceChildren(svg);
      more.hidden = found.length <= FEW;
      more.textContent = state.all ? `Show ${FEW}` : `Show all ${found.length}`;
    }

    // Which of this role's tensors are stored in which format: "Only 2 of 9 tensors are bf16 (a, b), the rest fp32."
    function storedWords() {
      const found = inRole(), groups = new Map();
      for (const row of found) groups.set(row.dtype, [...(groups.get(row.dtype) ?? []), row.name || "(model)"]);
      const tensors = found.length === 1 ? "The one tensor is" : `All ${found.length} tensors are`;
      if (groups.size < 2) return `${tensors} ${found[0].dtype}.`;
      const sorted = [...groups].sort((a, b) => a[1].length - b[1].length), [rest] = sorted.pop();
      const named = (names) => (names.length <= 3 ? ` (${names.join(", ")})` : "");
      const parts = sorted.map(([dtype, names], index) => `${names.length}${index ? "" : ` of ${found.length} tensors ${names.length === 1 ? "is" : "are"}`} ${dtype}${named(names)}`);
      return `Only ${parts.join(", ")}, the rest ${rest}.`;
    }

    function tell() {
      const one = format(), power = state.power, sum = { elements: 0, zero: 0, subnormal: 0, over: 0 };
      for (const row of inRole()) { const at = counted(row, one, power); for (const key of Object.keys(sum)) sum[key] += at[key]; }
      const part = (key) => percent(sum[key] / (sum.elements || 1));
      const bold = (text) => html("b", { textContent: text });
      const scale = power ? `times 2${superscript(power)}` : "as they are";
      said.replaceChildren(storedWords(), " ");
      const seen = inRole().filter((row) => row.lost), worst = seen.filter((row) => row.found);
      const share = (rows) => bold(percent(rows.reduce((many, row) => many + row.lost[1], 0) / rows.reduce((many, row) => many + row.lost[0], 0)));
      if (worst.length && worst.length < seen.length) said.append(share(worst), " of the updates of the tensors in bold are lost to rounding, ", share(seen), " of all. ");
      else if (seen.length) said.append(share(seen), " of the updates are lost to rounding. ");
      said.append(`In ${one.name}'s range, ${scale}: `, bold(part("zero")), " become zero, ", bold(part("subnormal")), " subnormal, ", bold(part("over")), ` overflow. Estimated by powers of two.`);
      const total = (key) => inRole().reduce((many, row) => many + row[key], 0);
      if (total("nonfinite")) said.append(" ", bold(percent(total("nonfinite") / total("elements"))), " of the tensors' elements are NaN or infinite, and in no column of the map.");
      field("scale").value = state.power;
      field("scale").setAttribute("aria-valuetext", `2 to the ${state.power}`);
      card.querySelector(".power").innerHTML = `2<sup>${state.power}</sup>`;
      field("centre").value = state.chosen;
    }

    function table() {
      const holder = card.querySelector(".numbers");
      const box = html("div", { className: "data", id: "numbers-table" });
      const titles = ["tensor", "class", "dtype", "sampled", "zero", "subnormal", "overflow", "best scale"];
      const head = titles.map((title, index) => `<th scope="col"${index > 2 ? ' data-numeric class="number"' : index ? ' class="minor"' : ""}><button type="button">${title}</button></th>`).join("");
      box.innerHTML = `<div class="tools"><label><span class="unseen">Filter tensors</span><input type="search" placeholder="filter by name" autocomplete="off"></label><span class="quiet"><output class="count"></output> rows</span></div><div class="scroll" tabindex="0" role="region" aria-label="Numbers of the map"><table data-table><caption class="unseen">What the format makes of each tensor</caption><thead><tr>${head}</tr></thead><tbody></tbody></table></div><button type="button" class="more" hidden></button>`;
      const one = format();
      for (const row of rows()) {
        const at = counted(row, one, state.power), line = html("tr");
        const name = html("th", { scope: "row" });
        name.append(html("code", { textContent: row.name || "(model)" }));
        line.append(name, html("td", { className: "minor", textContent: row.kind }), html("td", { className: "minor", textContent: row.dtype }), html("td", { className: "number", textContent: row.sampled.toLocaleString("en") }));
        line.lastChild.dataset.sort = row.sampled;
        for (const key of ["zero", "subnormal", "over"]) {
          const cell = html("td", { className: `number ${key}`, textContent: percent(at[key] / (at.elements || 1)), title: `${at[key]} of ${at.elements}` });
          cell.dataset.sort = at[key] / (at.elements || 1);
          cell.dataset.count = at[key];
          line.append(cell);
        }
        const best = `2${superscript(centred(row, one))}`;
        line.append(html("td", { className: "number", textContent: best }));
        line.lastChild.dataset.sort = centred(row, one);
        box.querySelector("tbody").append(line);
      }
      holder.replaceChildren(box);
      window.startTable(box);
    }

    const details = card.querySelector("details");
    details.addEventListener("toggle", () => { if (details.open) table(); });
    let again = () => {};
    function update() { tell(); again(); if (details.open) table(); }
    fill();
    tell();
    again = drawn(box, draw);
  }

  // Curves over steps -------------------------------------------------------------------------------------------

  function startHistory() {
    const card = document.getElementById("history");
    if (!card) return;
    const { steps, panels } = data.history;
    const box = card.querySelector(".figure");
    card.querySelector(".save").addEventListener("click", () => save(box.firstChild, "steps.svg"));

    function ticks(low, high, count) {
      const rough = (high - low) / count, base = 10 ** Math.floor(Math.log10(rough));
      const gap = base * [1, 2, 5, 10].find((many) => many * base >= rough);
      const found = [];
      for (let at = Math.ceil(low / gap) * gap; at <= high + gap * 1e-9; at += gap) found.push(Math.abs(at) < gap / 1e6 ? 0 : at);
      return found;
    }
    const words = (value, panel) => (panel.log ? `2${superscript(value)}` : Math.abs(value) < 1e-3 && value ? value.toExponential(0) : String(Number(value.toPrecision(4))));

    drawn(box, (width) => {
      const left = 52, right = 14, each = 116, gap = 46, plot = width - left - right;
      const height = panels.length * (each + gap) + 6;
      const svg = canvas(width, height, data.history.words);
      const first = steps[0], last = Math.max(steps[steps.length - 1], first + 1);
      const x = (step) => left + ((step - first) / (last - first)) * plot;
      panels.forEach((panel, index) => {
        const top = index * (each + gap) + 26;
        const numbers = panel.lines.flatMap((line) => line.points).map((point) => point[1]).filter((value) => value !== null);
        let low = 0, high = 0;
        if (numbers.length) { low = numbers.reduce((a, b) => Math.min(a, b)); high = numbers.reduce((a, b) => Math.max(a, b)); }
        if (panel.zero) low = Math.min(low, 0);
        if (!(high > low)) { const room = panel.log ? 1 : Math.abs(high) * 0.1 || 1; low -= room; high += room; } else if (!panel.zero) { const room = (high - low) * 0.06; low -= room; high += room; }
        const y = (value) => top + each - ((value - low) / (high - low)) * each;
        write(svg, left, top - 9, panel.title, { fill: "var(--ink)", "font-weight": 650, "font-size": 12.5 });
        let marks = numbers.length ? ticks(low, high, 3) : [];
        if (panel.log) marks = [...new Set(marks.map(Math.round))];
        for (const mark of marks) {
          svg.append(make("line", { x1: left, y1: round(y(mark)), x2: left + plot, y2: round(y(mark)), stroke: "var(--faint)" }));
          write(svg, left - 8, y(mark) + 4, words(mark, panel), { "text-anchor": "end" });
        }
        for (const at of panel.crosses ?? []) svg.append(make("path", { d: `M${round(x(at) - 3)} ${top + 1}l6 6m0 -6l-6 6`, stroke: "var(--lost)", "stroke-width": 1.4, fill: "none" }));
        for (const at of panel.marks ?? []) svg.append(make("path", { d: `M${round(x(at))} ${top + each - 1}l-3.4 7h6.8z`, fill: "var(--lost)" }));
        for (const line of panel.lines) {
          let path = "", down = false;
          const dots = line.points.length <= MOST_DOTS && line.points.length < steps.length;
          line.points.forEach(([step, value]) => {
            if (value === null) { down = false; return; }
            const from = [round(x(step)), round(y(value))];
            if (dots) svg.append(make("circle", { cx: from[0], cy: from[1], r: 2.2, fill: `var(${line.colour})` }));
            path += down ? (panel.log ? `H${from[0]}V${from[1]}` : `L${from[0]} ${from[1]}`) : `M${from[0]} ${from[1]}h.01`;
            down = true;
          });
          svg.append(make("path", { d: path, fill: "none", stroke: `var(${line.colour})`, "stroke-width": 1.6, "stroke-linejoin": "round", "stroke-linecap": "round", ...(line.dash ? { "stroke-dasharray": "5 3" } : {}) }));
          if (line.name) {
            write(svg, left + plot, y(line.points[line.points.length - 1][1]) - 6, line.name, { "text-anchor": "end", fill: `var(${line.colour})` });
          }
        }
        if (panel.note) write(svg, left + plot, top - 9, panel.note, { "text-anchor": "end" });
        svg.append(make("line", { x1: left, y1: top + each, x2: left + plot, y2: top + each, stroke: "var(--line)" }));
      });
      const end = (panels.length - 1) * (each + gap) + 26 + each;
      for (const step of ticks(first, last, Math.max(2, Math.floor(plot / 90))).filter(Number.isInteger)) write(svg, x(step), end + 17, String(step), { "text-anchor": "middle" });
      write(svg, left - 8, end + 17, "step", { "text-anchor": "end" });
      box.replaceChildren(svg);
    });
  }

  // Rows of shares along one axis: changes in ulps, updates lost by step ----------------------------------------

  // The curve above the rows, on their axis.
  function drawCurve(svg, curve, x, top, tall, width) {
    const most = Math.max(...curve.points.map((point) => point[1])) || 1;
    const y = (value) => top + tall - (value / most) * tall;
    write(svg, x(curve.points[0][0]), top - 8, curve.title, { fill: "var(--ink)", "font-weight": 650 });
    write(svg, width, top - 8, `up to ${Number(most.toPrecision(3))}`, { "text-anchor": "end" });
    const path = curve.points.map(([at, value], index) => `${index ? "L" : "M"}${round(x(at))} ${round(y(value))}`).join("");
    svg.append(make("line", { x1: round(x(curve.points[0][0])), y1: top + tall, x2: width, y2: top + tall, stroke: "var(--line)" }));
    svg.append(make("path", { d: path, fill: "none", stroke: "var(--c0)", "stroke-width": 1.6, "stroke-linejoin": "round" }));
  }

  function startShares() {
    const card = document.getElementById("shares");
    if (!card) return;
    const { rows, low, high, ticks, columns, title, words, curve, file } = data.shares;
    const box = card.querySelector(".figure"), more = card.querySelector(".more");
    let all = false;

    function draw(width) {
      const shown = all ? rows : rows.slice(0, FEW);
      const narrow = width < 620, above = narrow ? NAME : 0, deep = 18, tall = above + deep, top = curve ? 118 : 28;
      const left = narrow ? 2 : Math.max(6, ...shown.map((row) => Math.min(38, row.name.length))) * 6.5 + 12;
      const titles = narrow ? columns.slice(0, 1) : columns, each = narrow ? 56 : 92, right = titles.length * each + 4;
      const plot = width - left - right, end = top + shown.length * tall;
      const x = (value) => left + ((value - low) / (high - low)) * plot;
      const svg = canvas(width, end + 26, words);
      if (curve) drawCurve(svg, curve, x, 22, 60, left + plot);
      write(svg, left, top - 9, title, { fill: "var(--ink)", "font-weight": 650 });
      titles.forEach((one, index) => write(svg, width - right + (index + 1) * each, top - 9, one, { "text-anchor": "end" }));
      let last = -Infinity;
      for (const [at, text] of ticks) {
        if (at < low || at > high) continue;
        svg.append(make("line", { x1: round(x(at)), y1: top, x2: round(x(at)), y2: end + 4, stroke: "var(--line)", "stroke-width": 0.7 }));
        if (x(at) - last > 7 * String(text).length + 12) { write(svg, x(at), end + 17, text, { "text-anchor": "middle" }); last = x(at); }
      }
      shown.forEach((row, index) => {
        const start = top + index * tall, y = start + above, group = make("g");
        label(group, row.name, narrow ? start : y + deep / 2 + 4, narrow, left, width);
        for (const [from, to, depth, kind] of row.cells) {
          const wide = x(to) - x(from);
          group.append(make("rect", { x: round(x(from)), y: y + 1.5, width: round(Math.max(wide - (wide > 5 ? 1 : 0), 0.8)), height: deep - 3, rx: wide > 5 ? 1.5 : 0, fill: `var(--${kind})`, "fill-opacity": depth }));
        }
        if (row.mark !== undefined) group.append(make("path", { d: `M${round(x(row.mark))} ${y + 1}V${y + deep - 1}`, stroke: "var(--ink)", "stroke-width": 2.2 }));
        row.texts.slice(0, titles.length).forEach((text, column) => write(group, width - right + (column + 1) * each, y + deep / 2 + 4, text, { "text-anchor": "end", "font-size": narrow ? 10 : 11.5, fill: row.bad && column === 0 ? "var(--lost)" : "var(--soft)", "font-weight": row.bad && column === 0 ? 650 : 400 }));
        group.append(make("title", {}, [row.name, ...columns.map((one, column) => `${one}: ${row.texts[column]}`)].join("\n")));
        svg.append(group);
      });
      box.replaceChildren(svg);
      more.hidden = rows.length <= FEW;
      more.textContent = all ? `Show ${FEW}` : `Show all ${rows.length}`;
    }

    const again = drawn(box, draw);
    more.addEventListener("click", () => { all = !all; again(); });
    card.querySelector(".save").addEventListener("click", () => save(box.firstChild, file));
  }

  if (data.shares) startShares();
  if (data.tensors) startMap();
  if (data.history) startHistory();
})();
