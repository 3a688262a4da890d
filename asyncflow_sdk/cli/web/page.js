"use strict";
// Every text of the run is set as text, never as markup.
const EVERY_MS = 2000,
  SVG = "http://www.w3.org/2000/svg";
const KINDS = ["generate", "train", "reward", "load", "publish"];
const STATES = { waiting: "other-1", ready: "load", selected: "other-0", leased: "generate" };
const $ = id => document.getElementById(id);
const put = (id, ...children) =>
  $(id).replaceChildren(...children.flat(Infinity).filter(child => child !== null && child !== ""));

function h(tag, attributes, ...children) {
  const svg = ["svg", "path", "rect", "line", "text", "circle", "title"].includes(tag);
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter(child => child !== null));
  return made;
}

const whole = value => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const short = value => (Math.abs(value) >= 1e4 ? `${+(value / 1e3).toPrecision(3)}k` : `${+value.toPrecision(4)}`);

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.max(Math.round(seconds), 0),
    two = n => String(n).padStart(2, "0");
  if (s >= 3600) return `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  return s >= 60 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${s} s`;
}

const colour = kind => {
  if (kind === "wait" || KINDS.includes(kind)) return `var(--${kind})`;
  let sum = 0;
  for (const letter of kind) sum = (sum * 31 + letter.codePointAt(0)) % 4;
  return `var(--other-${sum})`;
};
const key = (name, fill) => h("span", { class: "key" }, h("i", { style: { background: fill } }), name);

function ticks(low, high, most) {
  const rough = (high - low) / most,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step)
    found.push(+value.toPrecision(6));
  return found;
}

// lines: [{xs, ys, stroke, width, fill}]; the y axis begins at `low`, if given.
function chart(id, lines, low, names) {
  lines = lines.filter(line => line.xs.length);
  const box = $(id),
    width = Math.max(box.clientWidth, 200),
    height = Math.max(box.clientHeight, 120);
  if (!lines.length) return put(id, h("p", {}, "No step is trained yet."));
  const xs = lines.flatMap(line => line.xs),
    ys = lines.flatMap(line => line.ys);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1)];
  let [y0, y1] = [low ?? Math.min(...ys), Math.max(...ys)];
  if (y1 - y0 < 1e-9) y1 = y0 + 1;
  const room = (y1 - y0) * 0.08;
  [y0, y1] = [low ?? y0 - room, y1 + room];
  const left = 44,
    bottom = height - 22,
    top = 8,
    right = width - 10;
  const x = value => left + ((value - x0) / (x1 - x0)) * (right - left),
    y = value => bottom - ((value - y0) / (y1 - y0)) * (bottom - top);
  const drawn = [];
  for (const value of ticks(y0, y1, 5))
    drawn.push(
      h("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }),
      h("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)),
    );
  for (const value of ticks(x0, x1, Math.max(Math.floor(width / 90), 2)).filter(Number.isInteger))
    drawn.push(h("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, short(value)));
  for (const line of lines) {
    const points = line.xs.map((at, i) => `${x(at).toFixed(1)},${y(line.ys[i]).toFixed(1)}`);
    if (line.fill)
      drawn.push(
        h("path", {
          d: `M${x(line.xs[0])},${bottom}L${points.join("L")}L${x(line.xs.at(-1))},${bottom}Z`,
          style: { fill: line.stroke, opacity: 0.15 },
        }),
      );
    drawn.push(
      h("path", {
        d: `M${points.join("L")}`,
        style: {
          fill: "none",
          stroke: line.stroke,
          strokeWidth: line.width,
          opacity: line.opacity ?? 1,
          strokeLinejoin: "round",
        },
      }),
    );
    if (points.length === 1)
      drawn.push(h("circle", { cx: x(line.xs[0]), cy: y(line.ys[0]), r: 3, style: { fill: line.stroke } }));
  }
  put(id, h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": names }, drawn));
}

function lane(worker, window_s) {
  const width = 1000,
    x = ago => (1 - Math.min(ago, window_s) / window_s) * width;
  const bars = worker.lane.map(([start, end, kind, version]) => {
    const text = version >= 0 ? `${kind} v${version}` : kind;
    return h(
      "rect",
      { x: x(start), width: Math.max(x(end) - x(start), 0.7), y: 0, height: 26, style: { fill: colour(kind) } },
      h("title", {}, `${text}, ${(start - end).toFixed(2)} s`),
    );
  });
  return h(
    "div",
    { class: "lane" },
    h("svg", { viewBox: `0 0 ${width} 26`, preserveAspectRatio: "none", style: { height: "26px" } }, bars),
  );
}

function workers(data) {
  const kinds = [...new Set(data.workers.flatMap(worker => worker.lane.map(bar => bar[2])))];
  const rank = kind => (kind === "wait" ? 9 : (KINDS.indexOf(kind) + 9) % 9);
  kinds.sort((a, b) => rank(a) - rank(b));
  put(
    "legend",
    kinds.map(kind => key(kind, colour(kind))),
    kinds.length ? `the last ${data.window_s} seconds, now at the right` : null,
  );
  put(
    "workers",
    data.workers.map(worker => {
      const tone =
        worker.state === "failed"
          ? "bad"
          : ["starting", "restarting"].includes(worker.state)
            ? "busy"
            : worker.state === "stopped" || data.queue === null
              ? "off"
              : "";
      const about = [
        worker.version === null ? null : `weights v${worker.version}`,
        worker.state && worker.state !== "ready" ? worker.state : null,
      ];
      const now = worker.now
        ? worker.now + (worker.since_s === null || worker.now === "idle" ? "" : ` · ${duration(worker.since_s)}`)
        : "";
      return h(
        "div",
        { class: "worker" },
        h(
          "div",
          { class: "name", title: worker.name },
          h("span", { class: `dot ${tone}` }),
          worker.name,
          h("small", {}, about.filter(Boolean).join(" · ")),
        ),
        lane(worker, data.window_s),
        h(
          "div",
          { class: "doing", title: now },
          h("span", worker.waits && worker.since_s >= 1 ? { class: "late" } : {}, now || worker.spends),
          now && worker.spends ? h("small", {}, worker.spends) : null,
        ),
      );
    }),
  );
}

function flow(queue) {
  const tasks = queue === null ? [] : Object.entries(queue.rows);
  $("flow-card").hidden = !tasks.length;
  if (!tasks.length) return;
  const live = counts => Object.keys(STATES).reduce((sum, state) => sum + (counts[state] ?? 0), 0);
  const most = Math.max(...tasks.map(([, counts]) => live(counts)), 1);
  put(
    "flow-legend",
    Object.entries(STATES)
      .filter(([state]) => tasks.some(([, counts]) => counts[state]))
      .map(([state, fill]) => key(state, `var(--${fill})`)),
  );
  put(
    "flow",
    tasks.map(([task, counts]) => {
      const rate = value =>
        value === null || value === undefined ? "–" : value < 10 ? value.toFixed(1) : whole(value);
      const rates = `${rate(queue.per_second.arrived[task])} in, ${rate(queue.per_second.completed[task])} done per second`;
      const bars = Object.entries(STATES).map(([state, fill]) =>
        h("div", {
          title: `${counts[state] ?? 0} ${state}`,
          style: { width: `${(100 * (counts[state] ?? 0)) / most}%`, background: `var(--${fill})` },
        }),
      );
      const text = Object.keys(STATES)
        .filter(state => counts[state])
        .map(state => `${whole(counts[state])} ${state}`)
        .join(" · ");
      return h(
        "div",
        { class: "task" },
        h("div", {}, task),
        h("div", { class: "stack" }, bars),
        h("div", {}, text || "no rows", " ", h("small", {}, rates)),
      );
    }),
  );
}

function samples({ step, rows }) {
  $("samples-card").hidden = !rows.length;
  $("samples-title").textContent = `Samples of step ${step}`;
  put(
    "samples",
    rows.map(row => {
      const texts = Object.entries(row).filter(([, value]) => typeof value === "string");
      const numbers = Object.entries(row).filter(
        ([name, value]) => typeof value === "number" && !["reward", "group"].includes(name),
      );
      const readable = texts.filter(
        ([name]) => !name.endsWith("_ids") || texts.every(([other]) => other.endsWith("_ids")),
      );
      return h(
        "div",
        { class: "sample" },
        typeof row.reward === "number"
          ? h("b", { class: row.reward > 0.5 ? "good" : "bad" }, fixed(row.reward, 2))
          : null,
        h(
          "dl",
          {},
          readable.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
        ),
        h(
          "div",
          { class: "more" },
          [`group ${row.group}`, ...numbers.map(([name, value]) => `${name} ${short(value)}`)].join(" · "),
        ),
      );
    }),
  );
}

function show(data) {
  const { run, queue, curves } = data,
    total = run.total_steps;
  document.title = `${total ? `${run.done}/${total} · ` : ""}${data.title}`;
  $("title").textContent = data.title;
  $("status").textContent = data.status;
  $("status").className = `pill ${data.tone}`;
  const left =
    queue !== null && run.seconds_left !== null && run.done < total
      ? ` · about ${duration(run.seconds_left)} left`
      : "";
  $("clock").textContent = data.elapsed_s === null ? "" : `${duration(data.elapsed_s)} elapsed${left}`;
  put("bar", h("div", { style: { width: `${total ? Math.min((100 * run.done) / total, 100) : 0}%` } }));
  $("lead").textContent = data.error ?? data.sentence;
  const staleness = run.staleness_mean ?? (queue?.ages ? queue.ages.in_flight_mean + queue.ages.in_queue_mean : null);
  const replicas = (queue?.sessions ?? []).filter(session => session.replica && session.loaded !== null);
  const lag =
    queue === null
      ? run.lag
      : replicas.length
        ? Math.max(queue.version - Math.min(...replicas.map(session => session.loaded)), 0)
        : null;
  put(
    "tiles",
    [
      ["Reward", fixed(run.reward_mean, 3), `last step ${fixed(run.reward, 3)}`],
      ["Steps", whole(run.done), total ? `of ${whole(total)}` : "trained"],
      [
        "Staleness",
        fixed(staleness, 2),
        run.staleness_max === null ? "mean of the step" : `mean; at most ${whole(run.staleness_max)}`,
      ],
      ["Generated", whole(run.tokens_per_s), "tokens/s"],
      [
        "Weights",
        queue && queue.version >= 0 ? `v${queue.version}` : run.published === null ? "–" : `v${run.published}`,
        lag === null ? "published" : `slowest replica ${lag} behind`,
      ],
      run.evaluated
        ? [
            "Evaluation",
            fixed(run.evaluated.score, 3),
            run.best ? `best ${fixed(run.best.score, 3)}, version ${run.best.version}` : "",
          ]
        : [
            "Rows",
            queue === null ? whole(Object.values(run.ended).reduce((a, b) => a + b, 0)) : whole(queue.live),
            queue === null ? "ended" : `live; ${whole(queue.put)} put`,
          ],
    ].map(([name, figure, remark]) =>
      h("div", { class: "tile" }, h("span", {}, name), h("b", {}, figure), h("i", {}, remark)),
    ),
  );
  const line = (name, more) => ({ xs: curves[name][0], ys: curves[name][1], stroke: "var(--accent)", ...more });
  chart(
    "reward",
    [line("reward", { width: 1, opacity: 0.5 }), line("reward_mean", { width: 2.2 })],
    null,
    "Reward over steps",
  );
  chart(
    "staleness",
    [line("staleness_max", { stroke: "var(--train)", width: 1.6 }), line("staleness_mean", { width: 2, fill: true })],
    0,
    "Staleness over steps: mean and maximum",
  );
  workers(data);
  flow(queue);
  samples(data.samples);
  $("notes-card").hidden = !data.notes.length;
  put(
    "notes",
    h(
      "table",
      {},
      h(
        "tbody",
        {},
        data.notes.map(([at, worker, text]) =>
          h(
            "tr",
            {},
            h("td", { class: "n" }, duration(at)),
            h("td", { class: "w" }, worker || "run"),
            h("td", {}, text),
          ),
        ),
      ),
    ),
  );
  $("footer").textContent =
    `Read at ${new Date().toLocaleTimeString()}; refreshed every ${EVERY_MS / 1000} s. This page only reads.`;
}

async function refresh() {
  try {
    if (!document.hidden) {
      const answer = await fetch("figures.json");
      if (!answer.ok)
        throw new Error(
          answer.status === 403 ? "access refused: open the URL of `asyncflow web` again" : `error ${answer.status}`,
        );
      show(await answer.json());
    }
  } catch (error) {
    $("status").textContent = error instanceof TypeError ? "`asyncflow web` does not answer" : error.message;
    $("status").className = "pill warn";
  }
  setTimeout(refresh, EVERY_MS);
}
refresh();
