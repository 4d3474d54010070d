// Draws one run of the engine: lanes of sequences, curves, and the map of KV cache blocks at a step.
//
// `data` is what recorder.py made: steps, sequences with their spans, and what happened to blocks, in order.
// All state of the page is `step`, the cursor; everything shown is computed from it and drawn again.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

// Columns of a step, a span and a block event, as recorder.py writes them.
const [PREFILL, START, END, HOST, DEVICE, NUM_SEQS, NUM_TOKENS, SPECIAL] = [0, 1, 2, 3, 4, 5, 6, 7];
const [KIND, FIRST, LAST, BEFORE, COMPUTED, CACHED] = [0, 1, 2, 3, 4, 5];
const [AT, EVENT, BLOCK, OWNER, INDEX] = [0, 1, 2, 3, 4];

const steps = data.steps, sequences = data.sequences, events = data.events;
const lastStep = steps.length - 1;
let step = 0; // where the cursor stands
let byTime = true; // the x axis: time, or all steps equally wide
let zoom = 1, from = 0; // what is seen of it: 1 / zoom of the run, from this share on
let chosen = null; // the sequence whose blocks are marked
let timer = null; // of a run that plays

// --- state of the blocks ---

// At a step: what each block holds, and for whom. Kept and moved on, since steps are mostly visited in order.
let blocks = [], applied = 0;

function emptyBlock() {
  return { holders: [], content: null, closed: false };
}

function resetBlocks() {
  blocks = Array.from({ length: data.num_blocks_shown }, emptyBlock);
  applied = 0;
}

function apply([, event, id, owner, index]) {
  const block = blocks[id];
  if (event === "taken") {
    block.holders = [owner];
    block.content = [owner, index];
    block.closed = false;
  } else if (event === "hit") {
    block.holders.push(owner);
  } else if (event === "closed") {
    block.closed = true;
  } else if (event === "freed") {
    block.holders.splice(block.holders.indexOf(owner), 1);
    if (!block.closed && !block.holders.length) block.content = null;
  } else if (event === "forgotten") {
    block.content = block.holders.length ? block.content : null;
    block.closed = false;
  } else if (event === "cleared") {
    blocks = blocks.map(emptyBlock);
  }
}

function moveBlocksTo(target) {
  if (applied && events[applied - 1][AT] > target) resetBlocks();
  while (applied < events.length && events[applied][AT] <= target) apply(events[applied++]);
}

function kindOf(block) {
  if (block.holders.length > 1) return "shared";
  if (block.holders.length) return block.closed ? "closed" : "open";
  return block.content ? "cached" : "free";
}

// How many tokens of a sequence the cache holds after a step.
function numComputed(sequence, at) {
  let count = 0;
  for (const span of sequence.spans) {
    if (span[FIRST] > at) break;
    if (span[KIND] === "waiting") count = 0;
    else if (span[KIND] === "prefill") count = span[BEFORE] + span[COMPUTED];
    else count = span[BEFORE] + Math.min(at, span[LAST]) - span[FIRST] + 1;
  }
  return count;
}

function fillOf(block) {
  if (!block.content) return 0;
  if (block.closed) return data.block_size;
  const [owner, index] = block.content;
  const computed = numComputed(sequences[owner], step) - index * data.block_size;
  return Math.max(0, Math.min(data.block_size, computed));
}

// --- the x axis, which lanes and curves share ---

const GUTTER = 46; // left of it: names of lanes, numbers of curves
let width = 0;

const totalTime = () => Math.max(1e-6, steps[lastStep][END] - steps[0][START]);

function xOf(at, edge = START) {
  let share = (at + (edge === END)) / steps.length;
  if (byTime) share = (steps[at][edge] - steps[0][START]) / totalTime();
  return GUTTER + (share - from) * zoom * (width - GUTTER);
}

// Show 1 / factor of the run, with the cursor in the middle where that is possible.
function zoomTo(factor) {
  zoom = Math.max(1, Math.min(steps.length, factor));
  from = 0;
  const share = (xOf(step) - GUTTER) / zoom / (width - GUTTER);
  from = Math.max(0, Math.min(1 - 1 / zoom, share - 0.5 / zoom));
  drawLanes();
  drawCurves();
}

function changeZoom(factor) {
  zoomTo(zoom * factor);
  show(step);
}

// While zoomed in, the cursor drags the window along.
function follow() {
  if (zoom > 1 && (xOf(step) < GUTTER || xOf(step, END) > width)) zoomTo(zoom);
}

function stepAtX(x) {
  let low = 0, high = lastStep;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xOf(middle, END) < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

function prepare(canvas, wide, high) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(wide * scale));
  canvas.height = Math.max(1, Math.round(high * scale));
  canvas.style.width = wide + "px";
  canvas.style.height = high + "px";
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, wide, high);
  pen.font = "11px system-ui, sans-serif";
  return pen;
}

// --- lanes ---

const laneHeight = () => Math.max(4, Math.min(34, Math.floor(($("lanes-box").clientHeight - 2) / sequences.length)));
const hue = (index) => (index * 137.508) % 360;
const ownerColour = (index, alpha = 1) => `hsl(${hue(index)} 62% ${colour("owner-light")} / ${alpha})`;

// Everything but the cursor, drawn once for each size, axis and theme.
let laneImage = null;

function drawLanes() {
  const box = $("lanes-box"), high = laneHeight(), canvas = $("lanes");
  width = box.clientWidth - 2;
  const pen = prepare(canvas, width, high * sequences.length + 2);
  clipToPlot(pen, canvas);
  const colours = {};
  for (const name of ["waiting", "prefill", "decode", "cached", "preempted", "faint", "line", "text", "ink"]) colours[name] = colour(name);
  const inset = high > 8 ? 2 : high > 5 ? 1 : 0.5;
  sequences.forEach((sequence, row) => {
    const y = row * high;
    const spans = sequence.spans;
    if (spans.length) { // a thin line while it is in the engine
      pen.fillStyle = colours.line;
      const end = spans[spans.length - 1];
      pen.fillRect(xOf(spans[0][FIRST]), y + high / 2 - 0.5, xOf(end[LAST], END) - xOf(spans[0][FIRST]), 1);
    }
    spans.forEach((span) => {
      const left = xOf(span[FIRST]), wide = Math.max(0.7, xOf(span[LAST], END) - left);
      pen.fillStyle = colours[span[KIND]];
      const slim = span[KIND] === "waiting" ? high / 4 : 0;
      pen.fillRect(left, y + inset + slim, wide, high - 2 * inset - 2 * slim);
      if (span[CACHED]) { // the lower part of a prefill: what the cache had
        const share = span[CACHED] / (span[CACHED] + span[COMPUTED]);
        pen.fillStyle = colours.cached;
        pen.fillRect(left, y + high - inset - (high - 2 * inset) * share, wide, (high - 2 * inset) * share);
      }
      if (high >= 18 && span[KIND] !== "waiting") {
        pen.fillStyle = colours.ink;
        drawWords(pen, sequence, span, y + high / 2 + 4);
      }
    });
    pen.fillStyle = colours.preempted;
    for (const at of sequence.preempted) pen.fillRect(xOf(at) - 1, y + inset, 3, high - 2 * inset);
    if (sequence.ended !== null) {
      pen.fillStyle = colours.text;
      pen.fillRect(xOf(sequence.ended, END) - 1, y + inset, 2, high - 2 * inset);
    }
  });
  pen.restore();
  sequences.forEach((sequence, row) => {
    const y = row * high;
    if (high >= 12 || row % Math.ceil(14 / high) === 0) {
      pen.fillStyle = colours.faint;
      pen.fillText(sequence.id, 16, y + high / 2 + 4);
    }
    pen.fillStyle = ownerColour(row);
    pen.fillRect(4, y + inset, 7, high - 2 * inset);
  });
  laneImage = pen.getImageData(0, 0, canvas.width, canvas.height);
}

const withoutBreaks = (word) => word.replaceAll("\n", "\u23ce");

// The token that each step of a span drew, where there is room for it.
function drawWords(pen, sequence, span, y) {
  const isDecode = span[KIND] === "decode";
  for (let at = span[FIRST]; at <= span[LAST]; at++) {
    const left = xOf(at), wide = xOf(at, END) - left;
    if (wide < 24 || left > width || left + wide < GUTTER) continue;
    const place = isDecode ? span[BEFORE] + at - span[FIRST] + 1 : span[BEFORE] + span[COMPUTED];
    if (data.words[sequence.tokens[place]] === undefined || place < sequence.prompt) continue;
    const word = withoutBreaks(data.words[sequence.tokens[place]]).trim();
    const letters = Math.floor((wide - 6) / 6.2);
    pen.fillText(word.slice(0, letters), isDecode ? left + 3 : left + wide - 3 - 6.2 * Math.min(letters, word.length), y);
  }
}

function clipToPlot(pen, canvas) {
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, 0, width - GUTTER, canvas.height);
  pen.clip();
}

function drawLaneCursor() {
  const canvas = $("lanes"), pen = canvas.getContext("2d");
  pen.putImageData(laneImage, 0, 0);
  clipToPlot(pen, canvas);
  const left = xOf(step), wide = Math.max(1, xOf(step, END) - left), high = laneHeight();
  pen.fillStyle = colour("cursor");
  pen.globalAlpha = 0.16;
  pen.fillRect(left, 0, wide, canvas.height);
  pen.globalAlpha = 1;
  pen.fillRect(left + wide - 0.5, 0, 1, canvas.height);
  pen.restore();
  if (chosen !== null) {
    pen.strokeStyle = colour("text");
    pen.strokeRect(0.5, chosen * high + 0.5, width - 1, high - 1);
  }
}

// --- curves ---

const CURVES = [
  { name: "tokens/s", colour: "curve", value: (s) => s[NUM_TOKENS] / Math.max(1e-3, s[END] - s[START]) * 1000 },
  { name: "sequences", colour: "curve", value: (s) => s[NUM_SEQS] },
  { name: "blocks in use", colour: "curve", value: (s, i) => data.blocks_used[i] },
  { name: "ms a step", colour: "curve", value: (s) => s[DEVICE], second: (s) => s[HOST] },
];
const CURVE_HEIGHT = 46;
let curveImage = null;

function short(value) {
  if (value >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (value >= 1e4) return Math.round(value / 1e3) + "k";
  if (value >= 1e3) return (value / 1e3).toFixed(1) + "k";
  return value >= 20 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

// The top of a curve: warm-up and capture would flatten all that matters.
function topOf(curve) {
  const values = steps.map((s, i) => [s, curve.value(s, i), curve.second ? curve.second(s) : 0]);
  const real = values.filter(([s]) => !s[SPECIAL]);
  return Math.max(1e-9, ...(real.length ? real : values).flatMap(([, a, b]) => [a, b]));
}

function drawCurves() {
  const canvas = $("curves"), pen = prepare(canvas, width, CURVES.length * CURVE_HEIGHT + 2);
  CURVES.forEach((curve, row) => {
    const bottom = (row + 1) * CURVE_HEIGHT - 4, top = topOf(curve), high = CURVE_HEIGHT - 18;
    curve.top = top;
    pen.fillStyle = colour("faint");
    pen.fillText(short(top), 2, bottom - high + 9);
    pen.fillText(curve.name + (curve.second ? ": device, and host in front" : ""), GUTTER + 2, bottom - high - 3);
    clipToPlot(pen, canvas);
    for (const [value, name] of [[curve.value, curve.colour], [curve.second, "host"]]) {
      if (!value) continue;
      pen.fillStyle = colour(name);
      steps.forEach((s, i) => {
        const left = xOf(i), share = Math.min(1, value(s, i) / top);
        pen.fillStyle = s[SPECIAL] ? colour("special") : colour(name);
        pen.fillRect(left, bottom - share * high, Math.max(0.6, xOf(i, END) - left), Math.max(0.5, share * high));
      });
    }
    pen.fillStyle = colour("line");
    pen.fillRect(GUTTER, bottom, width - GUTTER, 1);
    pen.restore();
  });
  curveImage = pen.getImageData(0, 0, canvas.width, canvas.height);
}

function drawCurveCursor() {
  const canvas = $("curves"), pen = canvas.getContext("2d");
  pen.putImageData(curveImage, 0, 0);
  pen.fillStyle = colour("cursor");
  if (xOf(step, END) >= GUTTER) pen.fillRect(xOf(step, END) - 0.5, 0, 1, canvas.height);
}

// --- the map of blocks ---

let cell = 0, columns = 1; // size of a cell, cells in a row

function layOutBlocks() {
  const wide = $("right").clientWidth - 40, high = Math.max(140, $("right").clientHeight * 0.5);
  cell = Math.floor(Math.sqrt((wide * high) / Math.max(1, blocks.length)));
  cell = Math.max(7, Math.min(30, cell));
  columns = Math.max(1, Math.floor(wide / cell));
}

function drawBlock(pen, block, id) {
  const x = (id % columns) * cell + 0.5, y = Math.floor(id / columns) * cell + 0.5, size = cell - 2;
  const kind = kindOf(block);
  if (kind === "free") {
    pen.fillStyle = colour("empty");
    pen.fillRect(x, y, size, size);
    return;
  }
  const [owner] = block.content;
  pen.fillStyle = ownerColour(owner, kind === "cached" ? 0.3 : 1);
  const share = kind === "open" ? fillOf(block) / data.block_size : 1;
  pen.fillRect(x, y + size * (1 - share), size, size * share);
  if (kind === "open") {
    pen.strokeStyle = ownerColour(owner);
    pen.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  } else if (kind === "shared") { // a notch for each other holder
    pen.fillStyle = colour("page");
    const notch = Math.max(1.5, size / 6);
    block.holders.slice(1, 5).forEach((_, i) => pen.fillRect(x + 1 + i * (notch + 1), y + 1, notch, notch));
  }
  if (chosen !== null && block.holders.includes(chosen)) {
    pen.strokeStyle = colour("text");
    pen.lineWidth = 2;
    pen.strokeRect(x, y, size, size);
    pen.lineWidth = 1;
  }
}

function drawBlocks() {
  layOutBlocks();
  const pen = prepare($("blocks"), columns * cell, Math.ceil(blocks.length / columns) * cell);
  blocks.forEach((block, id) => drawBlock(pen, block, id));
  const count = { open: 0, closed: 0, shared: 0, cached: 0, free: data.num_blocks - blocks.length };
  for (const block of blocks) count[kindOf(block)] += 1;
  $("blocks-title").replaceChildren(text(`Blocks of ${data.block_size} tokens after step ${step}`, "b"));
  $("blocks-key").replaceChildren(...Object.entries(count).map(([kind, n]) => {
    const entry = text("");
    entry.append(text("", "i", kind), `${kind} ${n}`);
    return entry;
  }));
}

// --- words ---

function text(content, tag = "span", className = "") {
  const element = document.createElement(tag);
  element.textContent = content;
  element.className = className;
  return element;
}

function definitions(rows) {
  const list = document.createElement("dl");
  for (const [name, value] of rows) {
    const place = document.createElement("dd");
    place.append(value);
    list.append(text(name, "dt"), place);
  }
  return list;
}

// Tokens from..to of a sequence as small boxes; those that are not in the cache yet are dashed.
function tokenBoxes(sequence, from, to, computed) {
  const line = text("", "span", "mono");
  for (let i = from; i < Math.min(to, sequence.tokens.length); i++) {
    const id = sequence.tokens[i], word = data.words[id];
    const box = text(word === undefined ? String(id) : withoutBreaks(word), "span", "token");
    if (i >= computed) box.classList.add("pending");
    box.title = `token ${id}, position ${i}`;
    line.append(box);
  }
  if (to > sequence.tokens.length && sequence.num_tokens > sequence.tokens.length) line.append(text(" (not kept)"));
  return line;
}

const name = (index) => `sequence ${sequences[index].id}`;

function describeBlock(id) {
  const block = blocks[id], kind = kindOf(block), rows = [["block", `${id}, ${kind}`]];
  if (block.content) {
    const [owner, index] = block.content, sequence = sequences[owner], size = data.block_size;
    const computed = numComputed(sequence, step);
    rows.push(["written by", `${name(owner)}, its block ${index}`]);
    rows.push(["held by", block.holders.map(name).join(", ") || "nobody: it is found until it is handed out again"]);
    rows.push(["holds", `${fillOf(block)} of ${size} tokens`]);
    const hashes = sequence.hashes.slice(0, index + 1);
    if (block.closed && hashes.length) rows.push(["hash chain", text(hashes.join(" \u2192 "), "span", "mono")]);
    rows.push(["tokens", tokenBoxes(sequence, index * size, (index + 1) * size, block.closed ? Infinity : computed)]);
  }
  $("details").replaceChildren(definitions(rows));
}

function describeSequence(index) {
  const sequence = sequences[index], computed = numComputed(sequence, step);
  const state = sequence.spans.filter((span) => span[FIRST] <= step).pop();
  const rows = [
    ["sequence", `${sequence.id}: ${sequence.prompt} prompt tokens, ${sequence.num_tokens - sequence.prompt} drawn`],
    ["at this step", sequence.ended !== null && step > sequence.ended ? `ended: ${sequence.reason}` : state ? state[KIND] : "not here yet"],
    ["in the cache", `${computed} tokens`],
    ["found there", `${sequence.spans.reduce((sum, span) => sum + (span[CACHED] || 0), 0)} tokens`],
    ["first token", sequence.first === null ? "none" : `${(steps[sequence.first][END] - steps[sequence.arrived][START]).toFixed(1)} ms after it arrived`],
    ["tokens", tokenBoxes(sequence, 0, Math.min(400, sequence.tokens.length), computed)],
  ];
  $("details").replaceChildren(definitions(rows));
}

function describeRun() {
  const busy = steps.filter((s) => !s[SPECIAL]), time = busy.reduce((sum, s) => sum + s[END] - s[START], 0);
  const tokens = busy.reduce((sum, s) => sum + s[NUM_TOKENS], 0);
  $("title").textContent = data.title;
  document.title = data.title;
  $("summary").textContent = `${sequences.length} sequences, ${steps.length} steps, ${data.num_blocks} blocks of ${data.block_size}, `
    + `${(totalTime() / 1000).toFixed(2)} s` + (time ? `, ${short(tokens / time * 1000)} tokens/s` : "") + (data.cut ? `; ${data.cut}` : "");
  const kinds = [["waiting", "waiting"], ["prefill", "prefill"], ["cached", "from the cache"], ["decode", "decode"],
    ["preempted", "preempted"], ["text", "ended"], ["special", "warm-up or capture"]];
  $("legend").replaceChildren(...kinds.map(([variable, word]) => {
    const entry = text(""), mark = document.createElement("i");
    mark.style.background = `var(--${variable})`;
    entry.append(mark, word);
    return entry;
  }));
  const help = text("", "p", "faint");
  help.append("Point at a block or a lane; click a lane to mark its blocks. ");
  for (const [key, what] of [["space", "play"], ["\u2190 \u2192", "step"], ["home end", "first, last"], ["+ \u2212", "zoom"], ["x", "axis"], ["t", "theme"]]) {
    help.append(text(key, "kbd"), ` ${what}  `);
  }
  $("details").replaceChildren(help);
}

// --- the cursor ---

function show(target) {
  step = Math.max(0, Math.min(lastStep, target));
  follow();
  moveBlocksTo(step);
  drawLaneCursor();
  drawCurveCursor();
  drawBlocks();
  const s = steps[step];
  $("position").value = step;
  $("where").textContent = `step ${step} of ${lastStep}: ${s[PREFILL] ? "prefill" : "decode"}, ${s[NUM_SEQS]} sequences, `
    + `${s[NUM_TOKENS]} tokens, ${(s[END] - s[START]).toFixed(1)} ms` + (s[SPECIAL] ? ` (${s[SPECIAL]})` : "");
}

function redraw() {
  drawLanes();
  drawCurves();
  show(step);
}

function play() {
  if (timer === null && step === lastStep) step = -1;
  if (timer === null) timer = setInterval(() => (step < lastStep ? show(step + 1) : play()), Math.max(16, Math.min(300, 12000 / steps.length)));
  else timer = clearInterval(timer) ?? null;
  $("play").textContent = timer === null ? "Play" : "Pause";
}

function switchAxis() {
  byTime = !byTime;
  $("axis").textContent = byTime ? "by time" : "by step";
  redraw();
}

function switchTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  redraw();
}

const KEYS = {
  " ": play, ArrowRight: () => show(step + 1), ArrowLeft: () => show(step - 1), Home: () => show(0), End: () => show(lastStep),
  PageDown: () => show(step + 10), PageUp: () => show(step - 10), x: switchAxis, t: switchTheme,
  "+": () => changeZoom(2), "=": () => changeZoom(2), "-": () => changeZoom(0.5),
};

function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  for (const [id, key] of [["play", " "], ["back", "ArrowLeft"], ["forward", "ArrowRight"], ["axis", "x"], ["theme", "t"]]) {
    $(id).addEventListener("click", () => (KEYS[key](), $(id).blur()));
  }
  $("position").max = lastStep;
  $("position").addEventListener("input", (event) => show(Number(event.target.value)));
  const laneAt = (event) => Math.min(sequences.length - 1, Math.floor(event.offsetY / laneHeight()));
  $("lanes").addEventListener("mousemove", (event) => describeSequence(laneAt(event)));
  $("lanes").addEventListener("click", (event) => {
    chosen = chosen === laneAt(event) ? null : laneAt(event);
    show(event.offsetX < GUTTER ? step : stepAtX(event.offsetX));
  });
  $("curves").addEventListener("click", (event) => show(stepAtX(event.offsetX)));
  $("blocks").addEventListener("mousemove", (event) => {
    const id = Math.floor(event.offsetY / cell) * columns + Math.floor(event.offsetX / cell);
    if (id < blocks.length && event.offsetX < columns * cell) describeBlock(id);
  });
  window.addEventListener("resize", redraw);
}

if (steps.length) {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  resetBlocks();
  describeRun();
  listen();
  redraw();
} else {
  $("title").textContent = "No step was run.";
}

// For tests and for the console: what is shown.
window.timeline = {
  goTo: show,
  step: () => step,
  numLanes: () => sequences.length,
  map: () => blocks.map((block) => [kindOf(block), block.holders.map((index) => sequences[index].id).sort((a, b) => a - b), fillOf(block)]),
};
