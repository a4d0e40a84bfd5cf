"use strict";
// Asks /status.json again and again and draws what it says. Names in it come from clients: they
// get into the page as text nodes alone, never as markup.

const POLL_MS = 2000;
const ANSWER_MS = 8000; // more than the exporter waits for the daemon
const MAX_SAMPLES = 900; // half an hour
const CHART_HEIGHT = 180;
const STATES = ["sealed", "reserved", "quarantined", "poisoned", "free", "unallocated"];

const byId = (id) => document.getElementById(id);

// ---- text

const shown = (value) => String(value).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "\uFFFD");

const put = (id, text) => { byId(id).textContent = shown(text); };

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit++) count /= 1024;
  return `${count.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function seconds(count) {
  if (count < 60) return `${count.toFixed(0)} s`;
  const parts = [
    [Math.floor(count / 86400), "d"],
    [Math.floor(count / 3600) % 24, "h"],
    [Math.floor(count / 60) % 60, "m"],
    [Math.floor(count) % 60, "s"],
  ];
  const first = parts.findIndex(([n]) => n);
  return parts.slice(first, first + 2).map(([n, unit]) => `${n} ${unit}`).join(" ");
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

const yes = (value) => (value ? "yes" : "");

// ---- tables

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = shown(text);
  return made;
}

// Cells are texts (or nodes); numbers are given as {n: text} and stand to the right.
function table(id, columns, rows) {
  if (!rows.length) {
    byId(id).replaceChildren(element("p", "none", "none"));
    return;
  }
  const isNumber = rows[0].map((cell) => cell.n !== undefined);
  const head = element("tr");
  columns.forEach((name, i) => head.append(element("th", isNumber[i] ? "number" : "", name)));
  const body = element("tbody");
  for (const row of rows) {
    const line = element("tr");
    for (const cell of row) {
      if (cell instanceof Node) {
        const holder = element("td");
        holder.append(cell);
        line.append(holder);
      } else if (cell.n !== undefined) {
        line.append(element("td", "number", cell.n));
      } else {
        line.append(element("td", "", cell));
      }
    }
    body.append(line);
  }
  const made = element("table");
  const top = element("thead");
  top.append(head);
  made.append(top, body);
  byId(id).replaceChildren(made);
}

// ---- parts

function drawPool(pool) {
  const unallocated = Math.max(0, pool.pool_bytes - pool.committed_bytes);
  const sizes = { ...pool.bytes, unallocated };
  const states = [...new Set([...STATES, ...Object.keys(sizes)])].filter((state) => sizes[state]);
  const className = (state) => (STATES.includes(state) ? state : "other");
  byId("pool-bar").replaceChildren(...states.map((state) => {
    const part = element("div", className(state));
    part.style.flexGrow = sizes[state] / pool.pool_bytes;
    part.title = `${shown(state)}: ${bytes(sizes[state])}`;
    return part;
  }));
  table("pool", ["state", "blocks", "size", "share"], states.map((state) => {
    const name = element("span");
    name.append(element("span", `swatch ${className(state)}`), shown(state));
    const count = pool.blocks[state];
    return [
      name,
      { n: count === undefined ? "" : count },
      { n: bytes(sizes[state]) },
      { n: percent(sizes[state] / pool.pool_bytes) },
    ];
  }));
  const locked = pool.locked ? "locked" : "not locked";
  put("pool-line", `${bytes(pool.pool_bytes)}, ${bytes(pool.committed_bytes)} allocated `
    + `(${bytes(pool.huge_bytes)} on huge pages, ${locked}), `
    + `${pool.num_extents_free} of ${pool.num_extents} extents unused`);
}

function filesOf(model) {
  if (!model.files_present) return "missing";
  return model.files_changed ? "changed" : "present";
}

function weightsOf(job) {
  const told = job.weights;
  if (told.already_warm) return "already warm";
  if (told.done) return `loaded ${bytes(told.total_bytes)}`;
  if (!told.phase) return "waiting";
  return `${told.phase} ${bytes(told.done_bytes)} of ${bytes(told.total_bytes)}`;
}

function drawTables(told) {
  table(
    "models",
    ["name", "version", "sha256", "plan", "files", "superseded", "size", "huge", "clients"],
    told.models.map((m) => [
      m.model_name, m.version, m.weights_sha256.slice(0, 16), m.plan, filesOf(m),
      yes(m.superseded), { n: bytes(m.segment_bytes) }, { n: bytes(m.huge_bytes) },
      { n: m.num_clients },
    ]),
  );
  table(
    "stamps",
    ["stamp", "description", "superseded", "slot", "tokens", "blocks"],
    told.stamps.map((s) => [
      s.stamp.slice(0, 12), s.description, yes(s.superseded), { n: bytes(s.slot_bytes) },
      { n: s.block_size }, { n: s.num_blocks },
    ]),
  );
  table(
    "jobs",
    ["job", "model", "state", "weights", "error", "prompts"],
    told.jobs.map((j) => [
      String(j.job_id), j.model_name, j.state, weightsOf(j), j.error,
      { n: `${j.prompts.ended} of ${j.prompts.total}` },
    ]),
  );
  table(
    "clients",
    ["client", "name", "role", "provides", "pid", "uid", "leases", "holds"],
    told.clients.map((c) => [
      String(c.client_id), c.name, c.role, yes(c.is_provider), { n: c.pid }, { n: c.uid },
      { n: c.num_leases }, { n: bytes(c.held_bytes) },
    ]),
  );
}

// ---- charts: [when, hit ratio, lookups/s, hits/s], of each two answers of one daemon

const samples = [[], [], [], []];
const charts = [];
let before = null;

function remember(rates) {
  const when = Date.now() / 1000;
  // uPlot wants times that grow; with a clock that was set back it begins anew.
  if (when <= samples[0].at(-1)) samples.forEach((column) => column.splice(0));
  [when, ...rates].forEach((value, i) => samples[i].push(value));
  if (samples[0].length > MAX_SAMPLES) samples.forEach((column) => column.shift());
}

const GAP = [null, null, null]; // another daemon's counters, or none before

function sample(told) {
  const { lookup_hit: hits = 0, lookup_miss: misses = 0 } = told.counters;
  const now = { epoch: told.epoch, pid: told.pid, uptime: told.uptime_s, hits, misses };
  let rates = GAP;
  if (before && before.epoch === now.epoch && before.pid === now.pid) {
    const spent = now.uptime - before.uptime;
    const found = now.hits - before.hits;
    const asked = found + now.misses - before.misses;
    if (spent > 0) rates = [asked ? found / asked : null, asked / spent, found / spent];
  }
  before = now;
  remember(rates);

  const all = hits + misses;
  put("hit-line", all
    ? `${percent(hits / all)} of ${all} lookups since the daemon began`
    : "no lookup yet");
  put("lookup-line", rates[1] === null
    ? "waiting for a second answer"
    : `${rates[1].toFixed(1)} /s, of which ${rates[2].toFixed(1)} /s found a block`);
  drawCharts();
}

const width = (id) => Math.max(200, byId(id).clientWidth);

function chart(id, columns, series, range, format) {
  const options = {
    width: width(id),
    height: CHART_HEIGHT,
    legend: { show: series.length > 1 },
    scales: { y: { range } },
    axes: [{}, { size: 60, values: (_, ticks) => ticks.map(format) }],
    series: [{}, ...series.map((one) => ({ width: 2, points: { size: 4 }, ...one }))],
  };
  const data = () => columns.map((i) => samples[i]);
  const plot = new uPlot(options, data(), byId(id));
  charts.push({ id, plot, data });
}

function drawCharts() {
  if (!charts.length) {
    chart("hit-chart", [0, 1], [{ label: "hit ratio", stroke: "#2f7ed8" }], [0, 1],
      (tick) => `${Math.round(100 * tick)} %`);
    chart(
      "lookup-chart",
      [0, 2, 3],
      [{ label: "lookups/s", stroke: "#1d2733" }, { label: "hits/s", stroke: "#2f7ed8" }],
      (_, low, high) => [0, Math.max(1, 1.1 * (high ?? 0))],
      (tick) => String(tick),
    );
  }
  charts.forEach(({ plot, data }) => plot.setData(data()));
}

addEventListener("resize", () => {
  charts.forEach(({ id, plot }) => plot.setSize({ width: width(id), height: CHART_HEIGHT }));
});

// ---- what is asked, and how it went

function draw(told) {
  byId("trouble").hidden = true;
  byId("told").hidden = false;
  byId("told").classList.remove("stale");
  put("daemon", `${told.version}, pid ${told.pid}, epoch ${told.epoch}, `
    + `up ${seconds(told.uptime_s)}, ${told.num_jobs_active} jobs active, ${told.socket}`);
  drawPool(told.pool);
  drawTables(told);
  put("lease-line", `${told.counters.leases} leases; the exporter is a client too`);
  put("pin-line", `${told.num_pins} in all, keeping ${bytes(told.pinned_bytes)} `
    + `of at most ${bytes(told.max_pinned_bytes)}`);
  sample(told);
}

function trouble(text) {
  put("trouble", text);
  byId("trouble").hidden = false;
  byId("told").classList.add("stale"); // what was told last
  put("daemon", "");
  before = null;
  if (charts.length) remember(GAP);
}

async function ask() {
  let answer;
  let told;
  try {
    answer = await fetch("status.json", { signal: AbortSignal.timeout(ANSWER_MS) });
    told = await answer.json();
  } catch (error) {
    trouble(`cachewarmd-ctl serve does not answer: ${error.message}`);
    return;
  }
  if (answer.ok) draw(told);
  else trouble(`no daemon answers: ${told.error?.message ?? answer.status}`);
}

async function poll() {
  try {
    await ask();
  } finally {
    setTimeout(poll, POLL_MS); // after the answer: a slow daemon is not asked more
  }
}

poll();
