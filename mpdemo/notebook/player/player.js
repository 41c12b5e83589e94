"use strict";
// One training step, played: what every rank computes, sends and waits for, and what its memory holds.
// A step is data: events with a rank, a lane, a kind, a start and an end, in seconds and bytes. It was recorded, and
// then stands in the page's element "data", or it is modelled here. Everything that is drawn is derived from it.

// ------------------------------------------------------------------------------------------------------------ words
const NAMES = {
  L: "loading", F: "forward", B: "backward", I: "backward, input", W: "backward, weights", O: "optimizer",
  A: "all-reduce", G: "all-gather", R: "reduce-scatter", E: "all-to-all", S: "send", X: "hangs",
  exposed: "exposed communication", wait: "waits for a rank", other: "copies, Python",
};
const MEMORY = ["weights", "optimizer states", "gradients", "activations"];
const SLIDERS = { // label, unit, values, start
  ranks: ["ranks", "", [2, 4, 6, 8], 2],
  layers: ["layers", "", [2, 4, 6, 8, 12, 16], 4],
  compute: ["forward pass of a layer", "ms", [2, 4, 8, 16, 32], 8],
  size: ["weights of a layer", "MB", [2, 4, 8, 16, 32, 64], 16],
  bandwidth: ["bandwidth", "GB/s", [0.5, 1, 2, 4, 8, 25, 100, 400], 2],
  between: ["bandwidth between nodes", "×", [1, 0.5, 0.25, 0.125], 1],
  latency: ["latency", "µs", [1, 10, 50, 200, 1000], 10],
  bucket: ["bucket", "MB", [1, 8, 16, 32, 64, 1000], 16],
  microbatches: ["microbatches", "", [1, 2, 4, 8, 16], 4],
};
const STRATEGIES = { // sliders are those that not every strategy has
  ddp: { tab: "DDP", build: buildDDP, sliders: ["bucket"], breaks: ["overlap", "slow", "sampler", "only0"],
    headline: "Every rank holds the whole model and its own slice of the batch",
    look: "As soon as the backward pass has filled a bucket of gradients, an all-reduce averages it while the "
      + "backward pass continues. Only what sticks out at the end costs time." },
  fsdp: { tab: "FSDP", build: step => buildSharded(step, step.ranks), sliders: ["between"],
    breaks: ["prefetch", "slow", "sampler"],
    headline: "Every rank stores a shard, and fetches each layer just before it computes",
    look: "An all-gather brings a layer's weights, which are freed after use. Its gradients are reduce-scattered as "
      + "soon as they exist. Watch the memory." },
  hsdp: { tab: "HSDP", build: step => buildSharded(step, step.ranks/2), sliders: ["between"], fewest: 4,
    breaks: ["prefetch", "slow", "sampler"],
    headline: "Shards inside a node, copies between nodes",
    look: "Each half of the ranks is a node that holds the whole model in shards. The all-gathers stay inside it, and "
      + "only a shard's gradients cross. Lower the bandwidth between nodes, and compare with FSDP." },
  tp: { tab: "Tensor", build: step => buildTensor(step, false), sliders: [], breaks: ["slow"],
    headline: "Every rank computes a slice of each layer",
    look: "The next layer needs the sum of all slices, so none of these all-reduces can hide." },
  sp: { tab: "Sequence", build: step => buildTensor(step, true), sliders: [], breaks: ["slow"],
    headline: "Tensor parallelism that shards the activations between layers, too",
    look: "Each all-reduce becomes a reduce-scatter and an all-gather: the same bytes, and less memory." },
  gpipe: { tab: "GPipe", build: step => buildPipeline(step, orderGPipe, 1), sliders: ["microbatches"],
    breaks: ["slow", "swapped"],
    headline: "Every rank holds some of the layers, and microbatches flow through them",
    look: "All forward passes come first, so the activations of every microbatch pile up." },
  "1f1b": { tab: "1F1B", build: step => buildPipeline(step, order1F1B, 1), sliders: ["microbatches"],
    breaks: ["slow", "swapped"],
    headline: "Every rank holds some of the layers, and starts backward as early as it can",
    look: "The bubble is GPipe's, but the activations of each microbatch are freed sooner. Compare the memory." },
  interleaved: { tab: "Interleaved", build: step => buildPipeline(step, orderInterleaved, 2),
    sliders: ["microbatches"], breaks: ["slow"], chunks: 2,
    headline: "Two smaller stages on each rank, so the first microbatch arrives sooner",
    look: "The bubble is half of 1F1B's. Twice as many sends are the price." },
  zb: { tab: "Zero bubble", build: step => buildPipeline(step, orderZeroBubble, 2), sliders: ["microbatches"],
    breaks: ["slow"], chunks: 2,
    headline: "The backward pass is split in two, and weight gradients fill the bubble",
    look: "Only the gradient of a stage's input is urgent: the stage before it needs it. Weight gradients wait until "
      + "their rank has nothing better to do." },
  ring: { tab: "Ring context", build: buildRing, sliders: ["bucket"], breaks: ["overlap", "slow"],
    headline: "Every rank holds a slice of each sequence, and keys and values travel around a ring",
    look: "While a rank attends to one block of keys and values, the next block is already on its way." },
  experts: { tab: "Experts", build: buildExperts, sliders: ["bucket"], breaks: ["overlap", "slow"],
    headline: "Every rank holds some of the experts, and tokens travel to them",
    look: "In each layer, one all-to-all takes the tokens to their experts and another one brings them back." },
};
const BREAKS = { // the button, and what happens then
  overlap: ["no overlap", "The result is the same, and the step is longer: what could be sent beside the computing "
    + "is sent after it."],
  prefetch: ["no prefetch", "The result is the same, but each layer is fetched only when its turn comes, so every "
    + "all-gather is exposed."],
  slow: ["one slow rank", "Rank 1 computes 1.6 times as long, and all the others wait for it. On their side, that "
    + "looks like slow communication."],
  sampler: ["drop the sampler", "The picture doesn't change, and no error is raised. All ranks compute the same "
    + "gradients from the same samples, and their mean is what one device had. You pay for all ranks and get one."],
  only0: ["all-reduce on rank 0 only", "It hangs. Rank 0 has joined an all-reduce that no other rank will join. The "
    + "others wait in their next collective, until gloo gives up after 30 minutes, or NCCL after 10."],
  swapped: ["both receive first", "Deadlock. Rank 0 wants to receive a gradient before it sends its activations, and "
    + "rank 1 needs these activations to compute a gradient. No error: each does what its code says."],
};
const PARTS = { backward: 2, update: 0.12 }; // of a layer's forward pass; a recording may have measured others
const SLOWER = 1.6; // what one slow rank takes of the others' time

const scaled = (value, steps) => {
  const [least, unit] = steps.find(([least]) => value >= least) ?? steps[steps.length-1];
  return `${value ? (value/least).toPrecision(3) : 0} ${unit}`;
};
const sizeText = bytes => scaled(bytes, [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
const timeText = seconds => scaled(seconds, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
const percent = share => `${Math.round(100*share)} %`;
const range = n => [...Array(n).keys()];
const sum = list => list.reduce((a, b) => a+b, 0);
const mean = list => sum(list)/list.length;
const total = row => sum(row.slice(1)); // of a row of memory, whose first number is the time

// ---------------------------------------------------------------------------------------------------- the simulation
// Each rank has two queues, computing and communication, and works through both in order. A task begins when the tasks
// before it in its queue and those that it needs have ended. A collective moves its bytes once all members have joined.
function simulate(tasks) {
  const queues = {}, groups = {}, heads = {}, free = {}, queueOf = task => task.rank + task.lane;
  for (const task of tasks) {
    (queues[queueOf(task)] ??= []).push(task);
    if (task.group) (groups[task.group] ??= []).push(task);
  }
  for (const queue in queues) heads[queue] = free[queue] = 0;
  const ready = task => {
    const queue = queueOf(task);
    if (queues[queue][heads[queue]] !== task || task.needs.some(need => need.end === undefined)) return false;
    task.start = Math.max(free[queue], ...task.needs.map(need => need.end));
    return true;
  };
  const finish = (task, begin) => {
    task.end = free[queueOf(task)] = begin + task.seconds;
    heads[queueOf(task)]++;
  };
  const advance = queue => { // end the queue's first task if it can, and say whether it could
    const task = queues[queue][heads[queue]];
    if (!task || !ready(task)) return false;
    if (!task.group) { finish(task, task.start); return true; }
    const members = groups[task.group];
    if (members.length < task.members || !members.every(ready)) return false;
    const joined = Math.max(...members.map(member => member.start));
    for (const member of members) { member.moves = joined; finish(member, joined); }
    return true;
  };
  for (let moved = true; moved;) {
    moved = false;
    for (const queue in queues) while (advance(queue)) moved = true;
  }
  return tasks.filter(task => task.end === undefined && ready(task)); // these wait for a member that never joins
}

class Step { // the tasks of one step, as they are put in the ranks' queues
  constructor(settings) {
    Object.assign(this, settings);
    this.all = range(this.ranks);
    this.bytes = this.size*1e6; // of a layer's weights, and of its gradients
    this.forward = this.compute*1e-3; // of a layer, for the whole batch, on one device
    this.activations = 3*this.bytes; // of a layer, for the whole batch
    this.boundary = this.passed ?? this.activations/8; // bytes that one layer passes to the next
    this.tasks = [];
    this.groups = 0;
    this.held = this.all.map(() => 1); // how many layers' weights a rank holds; set by those that build a step
    this.ends = this.all.map(() => []); // what the optimizer waits for
  }
  add(rank, lane, kind, name, seconds, needs, more) {
    const task = { rank, lane, kind, name, seconds, needs: needs.filter(Boolean), ...more };
    this.tasks.push(task);
    return task;
  }
  work(rank, kind, name, seconds, needs = [], more = {}) {
    const slow = this.broken === "slow" && rank === 1 ? SLOWER : 1;
    return this.add(rank, "compute", kind, name, seconds*slow, needs, more);
  }
  rate(members) { // bytes per second; the first half of the ranks is a node, the second half another one
    const nodes = new Set(members.map(rank => rank < this.ranks/2));
    return this.bandwidth*1e9*(nodes.size > 1 ? this.between : 1);
  }
  collective(kind, name, bytes, members, needs, more = {}) { // around a ring; an all-reduce goes round twice
    const others = members.length-1, group = `g${this.groups++}`, rounds = kind === "A" ? 2 : 1;
    if (!others) return {};
    const seconds = rounds*(others/members.length*bytes/this.rate(members) + others*this.latency*1e-6);
    const task = rank => this.add(rank, "comm", kind, name, seconds, needs(rank),
      { group, members: members.length, bytes, ...more });
    return Object.fromEntries(members.map(rank => [rank, task(rank)]));
  }
  send(from, to, name, bytes, needs, more = {}) {
    const seconds = bytes/this.rate([from, to]) + this.latency*1e-6;
    return this.add(from, "comm", "S", `${name} to rank ${to}`, seconds, needs, { to, bytes, ...more });
  }
  endWith(tasks) {
    for (const rank in tasks) this.ends[rank].push(tasks[rank]);
  }
  downwards() {
    return range(this.layers).reverse();
  }
}

// -------------------------------------------------------------------------------------------------- the strategies
// `mem` lists what a task changes in its rank's memory: when (at its start or end), what, and by how many bytes.
const gains = (what, bytes) => ["start", what, bytes];
const frees = (what, bytes) => ["end", what, -bytes];

// Returns what takes a layer's gradients into a bucket, and starts an all-reduce when it is full, as DDP does.
function bucketsOf(step, backward, bytes) { // `backward` is by rank and layer
  let bucket = [], full = [], number = 0;
  const reduce = (layers, last) => {
    const which = `layer${layers.length > 1 ? "s" : ""} ${layers.join(", ")}`;
    const name = `all-reduce of bucket ${number++}: gradients of ${which}`;
    step.endWith(step.collective("A", name, layers.length*bytes, step.all, rank => [backward[rank][last]]));
  };
  return layer => {
    bucket.push(layer);
    if (bucket.length*bytes < step.bucket*1e6 && layer) return;
    full.push(bucket);
    bucket = [];
    if (step.broken === "overlap" && layer) return; // all of them at the end
    full.forEach(layers => reduce(layers, layer));
    full = [];
  };
}

function buildDDP(step) {
  const own = step.activations/step.ranks, backward = step.all.map(() => []);
  const reduce = bucketsOf(step, backward, step.bytes);
  step.held.fill(step.layers);
  for (const layer of range(step.layers)) for (const rank of step.all) {
    step.work(rank, "F", `forward of layer ${layer}`, step.forward/step.ranks, [],
      { layer, mem: [gains("activations", own)] });
  }
  for (const layer of step.downwards()) {
    for (const rank of step.all) {
      const seconds = step.backward*step.forward/step.ranks;
      backward[rank][layer] = step.work(rank, "B", `backward of layer ${layer}`, seconds, [],
        { layer, mem: [gains("gradients", step.bytes), frees("activations", own)] });
    }
    reduce(layer);
  }
}

function buildSharded(step, shards) { // FSDP: as many shards as ranks; HSDP: as many as a node has ranks
  const teams = range(step.ranks/shards).map(team => range(shards).map(rank => team*shards+rank));
  const copies = range(shards).map(shard => teams.map(team => team[shard])); // the ranks that hold the same shard
  const rest = step.bytes*(shards-1)/shards, own = step.activations/step.ranks, last = step.layers-1;
  const ahead = step.broken === "prefetch" ? 1 : 2; // a gather may begin while the layer before it computes
  const forward = step.all.map(() => []), backward = step.all.map(() => []), gathered = [];
  const inTeams = (kind, name, needs, more) =>
    Object.assign({}, ...teams.map(team => step.collective(kind, name, step.bytes, team, needs, more)));
  const gather = (layer, needs) => inTeams("G", `all-gather of the weights of layer ${layer}`, needs,
    { mem: [gains("weights", rest)] });
  step.held.fill(step.layers/shards);
  for (const layer of range(step.layers)) {
    const weights = gather(layer, rank => [forward[rank][layer-ahead]]);
    const freed = layer < last ? [frees("weights", rest)] : []; // backward begins with the last layer
    for (const rank of step.all) {
      forward[rank][layer] = step.work(rank, "F", `forward of layer ${layer}`, step.forward/step.ranks,
        [weights[rank]], { layer, mem: [gains("activations", own), ...freed] });
    }
  }
  const before = (rank, layer) => backward[rank][layer+ahead] ?? (ahead > 1 ? forward[rank][last] : null);
  const fetch = layer => { if (layer >= 0) gathered[layer] = gather(layer, rank => [before(rank, layer)]); };
  if (ahead === 2) fetch(last-1);
  for (const layer of step.downwards()) {
    for (const rank of step.all) {
      backward[rank][layer] = step.work(rank, "B", `backward of layer ${layer}`, step.backward*step.forward/step.ranks,
        [gathered[layer]?.[rank]],
        { layer, mem: [gains("gradients", step.bytes), frees("activations", own), frees("weights", rest)] });
    }
    const scattered = inTeams("R", `reduce-scatter of the gradients of layer ${layer}`,
      rank => [backward[rank][layer]], { mem: [frees("gradients", rest)] });
    step.endWith(scattered);
    fetch(layer-ahead); // before the all-reduce, which is less urgent
    for (const ranks of copies) {
      step.endWith(step.collective("A", `all-reduce of a shard's gradients of layer ${layer}`, step.bytes/shards,
        ranks, rank => [scattered[rank] ?? backward[rank][layer]]));
    }
  }
}

function buildTensor(step, sharded) { // sharded: between the layers, too, which is sequence parallelism
  const P = step.ranks, own = step.activations/P, whole = step.boundary;
  const held = sharded ? own : whole + (step.activations-whole)/P;
  let last = {};
  step.held.fill(step.layers/P);
  const layerOf = (kind, layer, seconds, mem) => {
    const name = `${NAMES[kind]} of layer ${layer}`, what = kind === "F" ? "output" : "input's gradient", done = {};
    if (sharded) last = step.collective("G", `all-gather before ${name}`, whole, step.all, rank => [last[rank]]);
    for (const rank of step.all) {
      done[rank] = step.work(rank, kind, `${name}, slice ${rank}`, seconds/P, [last[rank]], { layer, mem });
    }
    const [how, verb] = sharded ? ["R", "reduce-scatter"] : ["A", "all-reduce"];
    last = step.collective(how, `${verb} of layer ${layer}'s ${what}`, whole, step.all, rank => [done[rank]]);
  };
  for (const layer of range(step.layers)) layerOf("F", layer, step.forward, [gains("activations", held)]);
  for (const layer of step.downwards()) {
    layerOf("B", layer, step.backward*step.forward, [gains("gradients", step.bytes/P), frees("activations", held)]);
  }
  step.endWith(last);
}

function buildRing(step) { // each block of keys and values visits every rank; backward takes their gradients along
  const P = step.ranks, own = step.activations/P, block = step.boundary/2/P, backward = step.all.map(() => []);
  const reduce = bucketsOf(step, backward, step.bytes);
  step.held.fill(step.layers);
  const layerOf = (kind, layer, seconds, bytes, mem) => {
    let arrived = {}, done = {};
    for (const turn of range(P)) {
      const next = {}, before = done;
      if (turn < P-1 && step.broken !== "overlap") pass(turn, next, arrived);
      done = {};
      for (const rank of step.all) {
        const from = (rank-turn+P) % P, name = `${NAMES[kind]} of layer ${layer}, keys and values of rank ${from}`;
        const changes = turn === (kind === "F" ? 0 : P-1) ? mem : [];
        done[rank] = step.work(rank, kind, name, seconds/P/P, [arrived[rank]], { layer, mem: changes });
      }
      if (turn < P-1 && step.broken === "overlap") pass(turn, next, done);
      arrived = next;
    }
    function pass(turn, next, needs) {
      for (const rank of step.all) {
        const to = (rank+1) % P, name = `keys and values of rank ${(rank-turn+P) % P}, layer ${layer}`;
        next[to] = step.send(rank, to, name, bytes, [needs[rank] ?? step.tasks.findLast(isOwn(rank))]);
      }
    }
    return done;
  };
  const isOwn = rank => task => task.rank === rank && task.lane === "compute"; // the layer before makes its keys
  for (const layer of range(step.layers)) layerOf("F", layer, step.forward, block, [gains("activations", own)]);
  for (const layer of step.downwards()) {
    const mem = [gains("gradients", step.bytes), frees("activations", own)];
    const done = layerOf("B", layer, step.backward*step.forward, 2*block, mem);
    for (const rank of step.all) backward[rank][layer] = done[rank];
    if (layer < step.layers-1) reduce(layer+1); // the next keys and values are more urgent
  }
  reduce(0);
}

function buildExperts(step) { // a quarter of each layer is attention, which every rank holds; the rest are its experts
  const P = step.ranks, dense = 0.25, own = step.activations/P, tokens = step.boundary/P;
  const backward = step.all.map(() => []), reduce = bucketsOf(step, backward, dense*step.bytes);
  step.held.fill(step.layers*(dense + (1-dense)/P));
  const travel = (name, needs) => step.collective("E", name, tokens, step.all, rank => [needs[rank]]);
  const work = (kind, what, layer, seconds, needs, mem) => {
    const name = `${NAMES[kind]} of layer ${layer}, ${what}`;
    const task = rank => step.work(rank, kind, name, seconds/P, [needs[rank]], { layer, mem });
    return Object.fromEntries(step.all.map(rank => [rank, task(rank)]));
  };
  let last = {};
  for (const layer of range(step.layers)) {
    const attention = work("F", "attention", layer, dense*step.forward, last, [gains("activations", own)]);
    const there = travel(`tokens of layer ${layer} to their experts`, attention);
    const done = work("F", "experts", layer, (1-dense)*step.forward, there, []);
    last = travel(`tokens of layer ${layer} back from their experts`, done);
  }
  for (const layer of step.downwards()) {
    const there = travel(`gradients of layer ${layer} to the experts`, last);
    const done = work("B", "experts", layer, step.backward*(1-dense)*step.forward, there,
      [gains("gradients", (1-dense)*step.bytes/P)]);
    const back = travel(`gradients of layer ${layer} back from the experts`, done);
    last = work("B", "attention", layer, step.backward*dense*step.forward, back,
      [gains("gradients", dense*step.bytes), frees("activations", own)]);
    for (const rank of step.all) backward[rank][layer] = last[rank];
    if (layer < step.layers-1) reduce(layer+1); // the next tokens are more urgent
  }
  reduce(0);
}

// ----------------------------------------------------------------------------------------------------- pipelines
// An order is a rank's list of operations: kind, stage, microbatch. These are the lists of PyTorch's schedules.
function orderGPipe(rank, P, M) {
  return ["F", "B"].flatMap(kind => range(M).map(m => [kind, rank, m]));
}

function order1F1B(rank, P, M) {
  const warm = Math.min(M, P-rank), order = range(warm).map(m => ["F", rank, m]);
  for (const m of range(M)) order.push(["B", rank, m], ...(warm+m < M ? [["F", rank, warm+m]] : []));
  return order;
}

function interleave(rank, P, M, hop, delay) { // two stages a rank; `delay` backwards run before a weight gradient does
  const round = M/Math.max(1, Math.floor(M/P)), all = 2*M, warm = Math.min(round + hop*(P-1-rank), all);
  const stage = (number, forward) => {
    const which = Math.floor(number/round) % 2;
    return (forward ? which : 1-which)*P + rank;
  };
  const seen = {}, next = (kind, stage) => [kind, stage, seen[kind+stage] = (seen[kind+stage] ?? -1) + 1];
  const order = [], split = delay !== null;
  let weights = 0;
  for (const number of range(warm+all)) {
    if (number < all) order.push(next("F", stage(number, true)));
    if (number < warm) continue;
    order.push(next(split ? "I" : "B", stage(number-warm, false)));
    if (split && number-warm >= delay) order.push(next("W", stage(weights++, false)));
  }
  while (split && weights < all) order.push(next("W", stage(weights++, false)));
  return order;
}
const orderInterleaved = (rank, P, M) => interleave(rank, P, M, 2, null);
const orderZeroBubble = (rank, P, M) => interleave(rank, P, M, 1, rank);

function buildPipeline(step, orderOf, chunks) {
  const { ranks: P, microbatches: M, layers: L } = step, stages = P*chunks, sent = {};
  const layersOf = stage => Math.floor(L*(stage+1)/stages) - Math.floor(L*stage/stages);
  step.held = step.all.map(rank => sum(range(chunks).map(chunk => layersOf(chunk*P+rank))));
  if (step.broken === "swapped") { receiveFirst(step); return; }
  const half = step.backward/2; // of a backward pass; the first stage has no gradient of its input
  const shares = stage => ({ F: 1, B: 2*half, I: stage ? half : 0, W: stage ? half : 2*half });
  const todo = step.all.map(rank => orderOf(rank, P, M));
  const begin = (rank, [kind, stage, microbatch]) => { // add an operation, and what it sends
    const ahead = kind === "F" ? 1 : -1, held = layersOf(stage), source = stage-ahead, target = stage+ahead;
    const inside = number => number >= 0 && number < stages, mem = [];
    const from = kind !== "W" && inside(source) ? sent[[kind === "F" ? "F" : "B", source, microbatch]] : null;
    if (from === undefined) return false; // what it needs has not been added yet
    if (kind === "F") mem.push(gains("activations", held*step.activations/M));
    else if (kind !== "I") mem.push(frees("activations", held*step.activations/M));
    if (kind !== "F" && !microbatch && kind !== "W") mem.push(gains("gradients", held*step.bytes));
    const name = `${NAMES[kind]} of microbatch ${microbatch}` + (chunks > 1 ? `, stage ${stage}` : "");
    const task = step.work(rank, kind, name, shares(stage)[kind]*held*step.forward/M, [from],
      { microbatch, stage, mem });
    const what = kind === "F" ? "activations" : "gradient";
    if (kind !== "W" && inside(target)) {
      sent[[kind === "F" ? "F" : "B", stage, microbatch]] =
        step.send(rank, target % P, `${what} of microbatch ${microbatch}`, step.boundary/M, [task]);
    }
    return true;
  };
  for (let moved = true; moved;) {
    moved = false;
    for (const rank of step.all) {
      for (; todo[rank].length && begin(rank, todo[rank][0]); moved = true) todo[rank].shift();
    }
  }
}

function receiveFirst(step) { // rank 0 receives before it sends; all others receive first anyway
  const held = step.held[0], mem = [gains("activations", held*step.activations/step.microbatches)];
  const first = step.work(0, "F", "forward of microbatch 0", held*step.forward/step.microbatches, [],
    { microbatch: 0, mem });
  for (const rank of step.all) {
    const name = rank ? `activations from rank ${rank-1}` : "a gradient from rank 1, before its own send";
    step.work(rank, "X", `recv of ${name}`, 0, [rank ? null : first], { group: `x${rank}`, members: 2 });
  }
}

// ------------------------------------------------------------------------------------------------- the whole step
const stagesOf = settings => (STRATEGIES[settings.strategy].chunks ?? 1)*settings.ranks;
const isPipeline = strategy => STRATEGIES[strategy].sliders.includes("microbatches");

function model(settings) { // returns a step as a recording has it
  const layers = isPipeline(settings.strategy) ? Math.max(stagesOf(settings), settings.layers) : settings.layers;
  const step = new Step({ ...settings, layers }), { broken, strategy } = step;
  const update = step.update*layers*step.forward; // of all weights on one device
  STRATEGIES[strategy].build(step);
  if (broken === "only0") {
    const name = "all_reduce of the loss, which only rank 0 calls", group = { group: "x", members: step.ranks };
    step.ends[0].push(step.work(0, "X", name, 0, step.ends[0], group));
  }
  if (broken !== "swapped") for (const rank of step.all) {
    step.work(rank, "O", "the optimizer's step", update*step.held[rank]/layers, step.ends[rank],
      { mem: [["end", "gradients", null]] });
  }
  if (broken === "only0") for (const rank of step.all.slice(1)) {
    step.work(rank, "X", "the first all-reduce of the next step", 0, [], { group: "y", members: step.ranks });
  }
  const stuck = simulate(step.tasks), events = step.tasks.filter(task => task.end !== undefined);
  let end = Math.max(...events.map(task => task.end)), hang = null;
  if (stuck.length) {
    hang = { at: Math.max(...stuck.map(task => task.start)), stuck: [...new Set(stuck.map(task => task.rank))] };
    end = Math.max(end, hang.at)*1.3; // some room to show that it hangs
    for (const task of stuck) events.push(Object.assign(task, { end, moves: end, stuck: true }));
  }
  const sampled = STRATEGIES[strategy].breaks.includes("sampler");
  const samples = sampled ? step.all.map(rank => [0, 1].map(i => broken === "sampler" ? i : i*step.ranks+rank)) : null;
  return { source: "modelled", strategy, ranks: step.ranks, layers, end, hang, samples,
    single: (1+step.backward)*layers*step.forward + update, // seconds of the step on one device
    events: events.filter(task => task.end > task.start), memory: step.all.map(rank => memoryOf(step, rank, events)) };
}

function memoryOf(step, rank, events) { // rows of the time and the bytes of each kind of memory
  const weights = step.held[rank]*step.bytes; // and Adam keeps two numbers for each
  const now = { weights, optimizer: 2*weights, gradients: 0, activations: 0 };
  const own = events.filter(task => task.rank === rank && !task.stuck);
  const changes = own.flatMap(task => (task.mem ?? []).map(([when, what, bytes]) => [task[when], what, bytes]));
  const rows = [[0, ...Object.values(now)]];
  for (const [at, what, bytes] of changes.sort((a, b) => a[0]-b[0])) {
    now[what] = bytes === null ? 0 : Math.max(0, now[what]+bytes);
    rows.push([at, ...Object.values(now)]);
  }
  return rows;
}

// ------------------------------------------------------------------------------------------- what the events say
// Where a rank computes nothing, it waits for bytes that are moving, or for a rank that has not joined or not sent yet.
function gapsOf(step, rank) {
  const works = step.events.filter(e => e.rank === rank && e.lane === "compute" && e.kind !== "X");
  const own = step.events.filter(e => e.lane === "comm" && !e.stuck && (e.rank === rank || e.to === rank)), gaps = [];
  const stops = [...works.sort((a, b) => a.start-b.start), { start: step.end, end: step.end, last: true }];
  let at = 0;
  for (const stop of stops) {
    const within = time => time >= at && time <= stop.start;
    const moments = own.flatMap(c => [c.posted ?? c.start, c.start, c.moves ?? c.start, c.end]).filter(within);
    const cuts = [at, ...moments, stop.start].sort((a, b) => a-b);
    for (let i = 0; i+1 < cuts.length; i++) {
      const [start, end] = [cuts[i], cuts[i+1]], before = gaps[gaps.length-1];
      if (end-start < 1e-4*step.end) continue;
      const [kind, name] = why(step, rank, own, (start+end)/2, stop.last, works.length);
      if (before?.name === name && Math.abs(before.end-start) < 1e-9) before.end = end;
      else gaps.push({ rank, lane: "gap", kind, name, start, end });
    }
    at = Math.max(at, stop.end);
  }
  return gaps;
}

function why(step, rank, own, moment, last, works) { // the kind of a gap, and what to call it
  const during = own.filter(c => c.start <= moment && moment < c.end);
  const moving = during.find(c => (c.moves ?? c.start) <= moment);
  if (moving) return ["exposed", `waits for the ${NAMES[moving.kind]}${moving.kind === "S" ? "'s bytes" : ""}`];
  const joined = during.find(c => c.rank === rank);
  if (joined) return ["wait", `has joined the ${NAMES[joined.kind]}, waits for ${latest(step, joined)}`];
  const posted = own.find(c => c.to === rank && c.posted <= moment && moment < c.start);
  if (posted) return ["wait", `waits for rank ${posted.rank} to send`];
  if (last) return ["wait", works && !step.hang ? "has finished this step" : "waits"];
  if (step.source === "modelled") return ["wait", "waits for another rank's result"];
  return ["other", "copies, Python, or has no core"];
}

function latest(step, joined) { // the rank that joined a collective last, or that a send goes to
  if (joined.to !== undefined) return `rank ${joined.to}`;
  const members = step.events.filter(e => e.group && e.group === joined.group);
  return `rank ${members.reduce((a, b) => b.start > a.start ? b : a).rank}`;
}

function summarise(step) {
  const ranks = range(step.ranks), gaps = ranks.map(rank => gapsOf(step, rank));
  const shares = kinds => gaps.map(own =>
    sum(own.filter(g => kinds.includes(g.kind)).map(g => g.end-g.start))/step.end);
  const idles = shares(["exposed", "wait"]), most = Math.max(...idles);
  const [exposed, wait, other] = ["exposed", "wait", "other"].map(kind => mean(shares([kind])));
  return { gaps, idles, exposed, wait, other,
    longest: most-Math.min(...idles) < 0.03 ? -1 : idles.indexOf(most),
    peak: Math.max(0, ...(step.memory ?? []).flat().map(total)) };
}

function lineUp(steps, names) { // several steps below each other on one axis, as one step whose ranks are teams
  const parts = steps.map(summarise), firsts = steps.map((_, i) => sum(steps.slice(0, i).map(s => s.ranks)));
  const shift = (e, by) => ({ ...e, rank: e.rank+by, ...(e.to === undefined ? {} : { to: e.to+by }),
    ...(e.group ? { group: `${by} ${e.group}` } : {}) });
  const figures = ({ exposed, wait, peak }) => [`exposed communication ${percent(exposed)}`, `waits ${percent(wait)}`,
    ...(peak ? [`peak memory ${sizeText(peak)}`] : [])];
  const took = ({ end, plain }) => timeText(end) + (plain ? ` (${timeText(plain)} without the profiler)` : "");
  const teams = steps.map((step, i) => ({ name: names[i], first: firsts[i], ranks: step.ranks, end: step.end,
    line: [took(step), ...figures(parts[i])].join(" · ") }));
  const whole = { source: steps[0].source, title: "All strategies", layers: steps[0].layers, hang: null, teams,
    ranks: sum(steps.map(step => step.ranks)), end: Math.max(...steps.map(step => step.end)),
    events: steps.flatMap((step, i) => step.events.map(e => shift(e, firsts[i]))) };
  const gaps = parts.flatMap((part, i) => part.gaps.map(own => own.map(gap => shift(gap, firsts[i]))));
  return [whole, { gaps, idles: parts.flatMap(part => part.idles), parts, peak: 0, longest: -1 }];
}

// ---------------------------------------------------------------------------------------------------- the picture
const SVG = new Set(["svg", "g", "rect", "path", "line", "text", "circle", "pattern", "defs", "title"]);
function make(tag, attributes = {}, ...children) {
  const space = SVG.has(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}
const label = (x, y, text, more = {}) => make("text", { x, y, ...more }, String(text));

const given = JSON.parse(document.getElementById("data").textContent); // options and recordings
const recordings = given.recordings, app = document.getElementById("app");
const still = matchMedia("(prefers-reduced-motion: reduce)");
const start = Object.fromEntries(Object.entries(SLIDERS).map(([key, row]) => [key, row[3]]));
const state = { // what the reader has chosen; `all` shows every strategy, `which` is the number of a recording
  ...start, source: "modelled", which: 0, strategy: "ddp", all: false, broken: null, predict: false, guess: null,
  speed: 1, at: Infinity, playing: false, ...PARTS, ...given.options,
};
let step, figures, view = {}, timer = 0;
const hidden = () => state.predict && !state.guess?.locked;

function fill(kind) {
  if (kind === "exposed" || kind === "wait") return `url(#hatch-${kind})`;
  return kind === "other" ? "var(--lane)" : `var(--${kind})`;
}

function hatches() {
  const hatch = (kind, width, colour) => make("pattern",
    { id: `hatch-${kind}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    make("rect", { width: 6, height: 6, fill: "var(--lane)" }), make("rect", { width, height: 6, fill: colour }));
  return make("defs", {}, hatch("wait", 1.1, "var(--soft)"), hatch("exposed", 2.4, "var(--A)"));
}

function layOut(width) { // where everything stands, in pixels
  const wide = width > 640, few = step.ranks <= 4 && !step.teams, dense = Boolean(step.teams);
  const heights = few ? [28, 13, 36, 17] : dense ? [15, 6, -4, 3] : [19, 9, 20, 10];
  const [compute, comm, memory, gap] = step.memory || dense ? heights : [heights[0], heights[1], -4, heights[3]];
  const teams = step.teams ?? [{ first: 0, ranks: step.ranks, end: step.end }], head = dense ? 21 : 0, top = 22;
  const left = few && wide ? 92 : step.samples && wide ? 92 : 58, right = wide ? 128 : 12;
  const block = compute+3+comm+4+memory, height = top + step.ranks*(block+gap) + teams.length*head + 16;
  const teamOf = rank => teams.findLast(team => team.first <= rank);
  return { width, height, wide, few, compute, comm, memory, teams, teamOf, left, right, top,
    x: time => left + (width-left-right)*time/step.end,
    y: rank => top + rank*(block+gap) + (teams.indexOf(teamOf(rank))+1)*head,
    time: x => Math.min(1, Math.max(0, (x-left)/(width-left-right)))*step.end };
}

function draw() {
  const place = layOut(Math.max(320, view.box.clientWidth)), { width, height, left, right, top } = place;
  const layer = name => [name, make("g", { class: name })];
  const layers = Object.fromEntries(["under", "links", "shown", "arrows"].map(layer)); // the last one is on top
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": alt() }, hatches());
  Object.assign(view, { bars: [], place, svg });
  drawAxis(place, layers.under);
  for (const team of step.teams ?? []) drawHead(place, team, layers.shown);
  for (const rank of range(step.ranks)) drawRank(place, rank, layers);
  view.veil = make("rect", { y: top-4, height: height-top-10, class: "veil" });
  view.cursor = make("g", { class: "cursor", "pointer-events": "none" },
    make("line", { y1: 8, y2: height-14, stroke: "var(--ink)", "stroke-width": 1.6 }),
    make("rect", { x: -30, y: 0, width: 60, height: 17, rx: 8, fill: "var(--ink)" }),
    label(0, 12.5, "", { class: "clock", "text-anchor": "middle" }));
  view.packets = make("g", { "pointer-events": "none" });
  view.now = make("g");
  svg.append(...Object.values(layers), view.veil, view.packets, view.cursor, view.now);
  if (hidden()) {
    const middle = { "text-anchor": "middle" };
    svg.append(label((left+width-right)/2, place.y(0)+place.compute/2+4, "your guess first", middle));
  }
  svg.addEventListener("pointermove", hover);
  svg.addEventListener("pointerleave", () => { view.tip.hidden = true; });
  svg.addEventListener("pointerdown", event => {
    const x = event.offsetX*width/svg.clientWidth;
    if (!hidden() && x > left && x < width-right) { stop(); seek(place.time(x)); }
  });
  view.box.replaceChildren(svg);
  seek(Math.min(state.at, step.end));
}

function drawAxis({ x, top, height, wide }, under) {
  const rough = step.end/(wide ? 7 : 4), power = 10**Math.floor(Math.log10(rough)), n = rough/power;
  const tick = power*(n < 1.5 ? 1 : n < 3.5 ? 2 : n < 7.5 ? 5 : 10);
  for (let time = 0; time < step.end*0.999; time += tick) {
    const text = step.end < 1 ? `${+(time*1e3).toPrecision(3)} ms` : `${+time.toPrecision(3)} s`;
    under.append(make("line", { x1: x(time), x2: x(time), y1: top-4, y2: height-14, stroke: "var(--line)" }),
      label(x(time), height-2, time ? text : "0", { "text-anchor": "middle", class: "small" }));
  }
}

function drawHead({ wide, y }, team, shown) {
  shown.append(label(0, y(team.first)-6, team.name, { class: "head" }));
  shown.append(label(142, y(team.first)-6, wide ? team.line : timeText(team.end), { class: "small" }));
}

function drawRank(place, rank, layers) {
  const { x, y, left, compute, comm, memory, few, wide } = place, { under, shown } = layers;
  const top = y(rank), low = top+compute+3, floor = low+comm+4+memory, team = place.teamOf(rank);
  const lane = (y, height) => make("rect", { x: left, y, width: x(team.end)-left, height, fill: "var(--lane)" });
  shown.append(label(0, top+compute/2+4, `rank ${rank-team.first}`, { class: step.teams ? null : "head" }));
  if (few && wide) {
    shown.append(label(0, low+comm-2, "network", { class: "small" }));
    if (step.memory) shown.append(label(0, floor-memory/2+4, "memory", { class: "small" }));
  }
  if (step.samples && wide) shown.append(samplesOf(rank, top+compute/2));
  under.append(lane(top, compute), lane(low, comm));
  if (hidden()) return;
  for (const gap of figures.gaps[rank]) {
    if (gap.kind !== "other") shown.append(bar(gap, gap.start, gap.end, top, compute, gap.kind));
  }
  for (const event of step.events.filter(event => event.rank === rank)) {
    if (event.lane === "compute") drawWork(place, event, top, shown);
    else drawCommunication(place, event, low, layers);
  }
  if (step.memory?.[rank]) drawMemory(place, step.memory[rank], floor, shown);
}

function samplesOf(rank, middle) { // little squares: which samples of the batch this rank takes
  const P = step.ranks, size = Math.min(6, 40/P), own = step.samples[rank];
  const colour = i => own.includes(i) ? (state.broken === "sampler" ? "var(--X)" : "var(--accent)") : "var(--line)";
  const square = i => make("rect", { x: 50+(i % P)*size, y: middle+(i < P ? -size : 0), width: size-1, height: size-1,
    fill: colour(i) });
  return make("g", {}, make("title", {}, `samples ${own.join(" and ")} of ${2*P}`), range(2*P).map(square));
}

function bar(event, from, to, y, height, kind) {
  const { x } = view.place, width = Math.max(1, x(to)-x(from));
  const rect = make("rect", { class: "event", x: x(from), y, width, height, rx: 2, fill: fill(kind) });
  rect.event = event;
  view.bars.push(rect);
  return rect;
}

function drawWork({ x, compute }, event, top, shown) {
  shown.append(bar(event, event.start, event.end, top, compute, event.kind));
  const room = x(event.end)-x(event.start), number = event.kind === "O" ? undefined : event.microbatch ?? event.layer;
  const name = NAMES[event.kind];
  let text = number !== undefined && room > 14 ? number : "";
  if (event.kind === "X") text = room > 7*event.name.length+60 ? `hangs: ${event.name}` : "hangs";
  else if (room > 7*name.length+24) text = number === undefined ? name : `${name} ${number}`;
  const look = { "text-anchor": "middle", class: event.kind === "X" ? "on-bad" : "on" };
  if (text !== "") shown.append(label((x(event.start)+x(event.end))/2, top+compute/2+4, text, look));
}

function drawCommunication({ x, y, comm, compute }, event, low, { shown, links, arrows }) {
  const moves = event.moves ?? event.start, colour = fill(event.kind), rank = event.rank;
  if (moves > event.start) shown.append(bar(event, event.start, moves, low, comm, event.stuck ? "X" : "wait"));
  if (event.stuck) return;
  shown.append(bar(event, moves, event.end, low, comm, event.kind));
  if (event.to !== undefined) {
    const end = y(event.to)+(event.to > rank ? 0 : compute), x2 = x(event.end);
    arrows.append(make("line", { x1: x(moves), y1: low+comm/2, x2, y2: end, stroke: colour, "stroke-width": 1.4 }),
      make("circle", { cx: x2, cy: end, r: 2.2, fill: colour }));
  } else if (event.group) {
    const members = step.events.filter(other => other.group === event.group).map(other => other.rank);
    if (rank !== Math.min(...members)) return;
    const last = y(Math.max(...members)), width = Math.max(1, x(event.end)-x(moves));
    links.append(make("rect", { x: x(moves), y: low, width, height: last-y(rank), fill: colour, opacity: 0.2 }),
      make("line", { x1: x(moves), x2: x(moves), y1: low, y2: last+compute+3, stroke: colour, "stroke-width": 1.4 }));
  }
}

function drawMemory({ x, left, right, width, memory }, rows, floor, shown) { // areas on top of each other
  const y = bytes => (floor - memory*bytes/(figures.peak || 1)).toFixed(1), until = i => rows[i+1]?.[0] ?? step.end;
  let below = rows.map(() => 0);
  MEMORY.forEach((name, kind) => {
    const above = rows.map((row, i) => below[i]+row[kind+1]);
    const there = rows.map((row, i) => `V${y(above[i])}H${x(until(i)).toFixed(1)}`).join("");
    const back = rows.map((row, i) => `V${y(below[i])}H${x(row[0]).toFixed(1)}`).reverse().join("");
    const d = `M${x(rows[0][0]).toFixed(1)} ${y(below[0])}${there}${back}Z`;
    shown.append(make("path", { d, fill: `var(--m${kind})` }));
    below = above;
  });
  shown.append(make("line", { x1: left, x2: width-right, y1: floor+0.5, y2: floor+0.5, stroke: "var(--soft)" }));
}

// ------------------------------------------------------------------------------------------------- one moment of it
function seek(time) {
  state.at = time;
  const { place, cursor, veil } = view, { x, right, width } = place;
  const over = time >= step.end, at = Math.min(time, step.end);
  cursor.setAttribute("transform", `translate(${x(at)} 0)`);
  cursor.lastChild.textContent = over && step.hang ? "∞" : timeText(at);
  const inside = Math.min(0, width-30-x(at)); // the clock may not leave the picture
  for (const part of [...cursor.children].slice(1)) part.setAttribute("transform", `translate(${inside} 0)`);
  cursor.style.display = hidden() ? "none" : "";
  veil.setAttribute("x", x(at));
  veil.setAttribute("width", Math.max(0, width-right-x(at)));
  const moving = event => event.lane === "comm" && !event.stuck && (event.moves ?? event.start) <= at && at < event.end;
  view.packets.replaceChildren(...step.events.filter(moving).map(event => packet(event, at)));
  const told = place.wide && !hidden() ? range(step.ranks) : [];
  view.now.replaceChildren(...told.flatMap(rank => nowOf(rank, at, over)));
  for (const { classList, event } of view.bars) {
    classList.toggle("now", !over && event.lane !== "gap" && event.start <= at && at < event.end);
  }
  view.scrub.value = Math.round(1000*at/step.end);
  view.scrub.setAttribute("aria-valuetext", hidden() ? "hidden" : spoken(at));
}

function packet(event, at) { // a dot between the ranks, or between a rank and the next one of its group
  const { x, y, compute, comm } = view.place, moves = event.moves ?? event.start, team = view.place.teamOf(event.rank);
  const to = event.to ?? (event.rank+1 < team.first+team.ranks ? event.rank+1 : team.first);
  const from = y(event.rank)+compute+3+comm/2, share = (at-moves)/(event.end-moves);
  const end = event.to === undefined ? y(to)+compute+3+comm/2 : y(to)+(to > event.rank ? 0 : compute);
  return make("circle", { cx: x(at), cy: from+share*(end-from), r: 4, fill: fill(event.kind), stroke: "var(--ink)" });
}

function doing(rank, at) { // the event or the gap of a rank at a moment
  const here = event => event.rank === rank && event.start <= at && at < event.end;
  return step.events.find(event => event.lane === "compute" && here(event)) ?? figures.gaps[rank].find(here);
}

function nowOf(rank, at, over) { // at the right of a rank: what it does now, and its memory
  const { y, width, right, compute, comm, memory, teamOf } = view.place, left = width-right+10, team = teamOf(rank);
  const done = over || at >= team.end, now = doing(rank, at), rows = step.memory?.[rank];
  let kind = now?.kind, text = now ? NAMES[now.kind] : "";
  if (done) [kind, text] = step.hang ? ["X", "hangs"] : ["wait", `idle ${percent(figures.idles[rank])}`];
  else if ("FBIW".includes(kind)) text += ` ${now.microbatch ?? now.layer ?? ""}`;
  const look = { x: left, y: y(rank)+compute/2-5, width: 10, height: 10, rx: 2, fill: kind ? fill(kind) : "none" };
  const held = rows && sizeText(total(rows.findLast(row => row[0] <= at) ?? rows[0]));
  const most = rows && `peak ${sizeText(Math.max(...rows.map(total)))}`;
  const low = y(rank)+compute+comm+memory;
  const bytes = rows ? [label(left+15, low, over ? most : held, { class: "small" })] : [];
  return [make("rect", look), label(left+15, y(rank)+compute/2+4, text), ...bytes];
}

function spoken(at) {
  const sentence = rank => {
    const now = doing(rank, Math.min(at, step.end*0.9999)), team = view.place?.teamOf(rank);
    const during = step.events.find(e => e.rank === rank && e.lane === "comm" && e.start <= at && at < e.end);
    const beside = during && now?.lane === "compute" ? `, while its ${NAMES[during.kind]} is under way` : "";
    const who = step.teams ? `${team.name}, rank ${rank-team.first}` : `Rank ${rank}`;
    return `${who}: ${now ? now.name : "between two events"}${beside}.`;
  };
  return `${timeText(at)}. ${range(step.ranks).map(sentence).join(" ")}`;
}

function titleOf() {
  return step.source === "recorded" || step.teams ? step.title : `${STRATEGIES[state.strategy].tab}, modelled`;
}

function alt() { // the picture in words, with its numbers
  if (hidden()) return "The step is hidden until you have guessed.";
  if (step.teams) {
    return `One step of each strategy on one axis. ${step.teams.map(team => `${team.name}: ${team.line}`).join(". ")}.`;
  }
  const parts = [`${titleOf()}: one step of ${step.ranks} ranks in ${timeText(step.end)}, of which on average`,
    `${percent(figures.exposed)} are exposed communication and ${percent(figures.wait)} waiting for a rank.`,
    ...figures.idles.map((share, rank) => `Rank ${rank} computes nothing for ${percent(share)}.`)];
  if (step.hang) return `${titleOf()}: the ranks hang after ${timeText(step.hang.at)}.`;
  return [...parts, ...(figures.peak ? [`Peak memory ${sizeText(figures.peak)}.`] : [])].join(" ");
}

function describe(event) { // a bar in words, for the box under the pointer
  const team = view.place.teamOf(event.rank), moves = event.moves ?? event.start, seconds = event.end-event.start;
  const lines = [`rank ${event.rank-team.first}: ${event.name}`];
  if (event.stuck) return [...lines, `since ${timeText(event.start)}, and it hangs`];
  lines.push(`${timeText(seconds)}, from ${timeText(event.start)} to ${timeText(event.end)}`);
  if (event.bytes) lines.push(`${sizeText(event.bytes)}, ${sizeText(event.bytes/Math.max(1e-9, event.end-moves))}/s`);
  const waited = moves-event.start;
  if (waited > 0.01*step.end) lines.push(`of which ${timeText(waited)} until the last rank joined`);
  return lines;
}

function hover({ target, clientX, clientY }) {
  view.tip.hidden = !target.event;
  if (!target.event) return;
  const [head, ...rest] = describe(target.event);
  view.tip.replaceChildren(make("b", {}, head), ...rest.map(line => make("div", {}, line)));
  const { style, offsetWidth, offsetHeight } = view.tip, fits = clientY+offsetHeight+24 < innerHeight;
  style.left = `${Math.max(4, Math.min(clientX+14, innerWidth-offsetWidth-8))}px`;
  style.top = `${fits ? clientY+16 : clientY-offsetHeight-10}px`;
}

// ---------------------------------------------------------------------------------------------------------- playing
function moments() { // when something begins or ends; what is too close to see is one moment
  const times = [0, ...step.events.flatMap(event => [event.start, event.end]), step.end].sort((a, b) => a-b);
  return times.filter((time, i) => !i || time === step.end || time-times[i-1] > step.end*0.002);
}

function go(way) { // to the next or the previous moment
  stop();
  const near = step.end*1e-6, list = moments();
  const next = way > 0 ? list.find(time => time > state.at+near) : list.findLast(time => time < state.at-near);
  seek(next ?? (way > 0 ? step.end : 0));
  view.say.textContent = spoken(state.at);
}

function stop() {
  state.playing = false;
  clearTimeout(timer);
  cancelAnimationFrame(timer);
  view.play.textContent = "▶ Play";
}

function play() {
  if (hidden()) return;
  if (state.playing) { stop(); view.say.textContent = spoken(state.at); return; }
  if (state.at >= step.end*0.999) seek(0);
  state.playing = true;
  view.play.textContent = "❚❚ Pause";
  view.say.textContent = ""; // a screen reader would not keep up
  let before = performance.now();
  const again = () => { timer = still.matches ? setTimeout(tick, 900/state.speed) : requestAnimationFrame(tick); };
  const tick = () => {
    if (!state.playing) return;
    const now = performance.now(), passed = (now-before)/12000*state.speed*step.end; // 12 s for a step
    const next = still.matches ? moments().find(time => time > state.at+step.end*1e-6) : state.at+passed;
    before = now;
    seek(Math.min(step.end, next ?? step.end));
    if (state.at < step.end) again();
    else { stop(); finish(); }
  };
  again();
}

function finish() {
  view.say.textContent = alt();
  if (state.guess?.locked) view.card.replaceChildren(...answer());
}

// ------------------------------------------------------------------------------------------------------ predict first
const longestText = rank => rank < 0 ? "all about the same" : `rank ${rank}`;

function ask() {
  const share = make("output", {}, "?"), lock = make("button", { class: "play", onclick: lockIn }, "Lock in and play");
  const guess = state.guess = { share: null, rank: null };
  const enable = () => { lock.disabled = guess.share === null || guess.rank === null; };
  const choice = rank => make("label", {}, make("input", { type: "radio", name: "rank",
    onchange: () => { guess.rank = rank; enable(); } }), " ", longestText(rank));
  const slider = make("input", { type: "range", min: 0, max: 100, value: 0,
    "aria-label": "share of the step without computing, in percent",
    oninput: event => { guess.share = event.target.value/100; share.textContent = percent(guess.share); enable(); } });
  function lockIn() { guess.locked = true; state.at = 0; show(); play(); }
  enable();
  return [make("fieldset", {}, make("legend", {}, "Before you play it: which rank computes nothing for longest?"),
    make("div", { class: "row" }, [...range(step.ranks), -1].map(choice))),
  make("fieldset", {}, make("legend", {}, "And for what share of the step does a rank compute nothing, on average?"),
    make("div", { class: "row" }, slider, share, lock))];
}

function answer() {
  const guess = state.guess, real = figures.exposed+figures.wait, off = Math.abs(guess.share-real);
  const rank = `Idle longest: you said ${longestText(guess.rank)}; it is ${longestText(figures.longest)}.`;
  if (step.hang) return [make("b", {}, "It never ends, so no share is right.")];
  const share = `Idle share: you said ${percent(guess.share)}; it is ${percent(real)}: ${percent(figures.exposed)} `
    + `exposed communication and ${percent(figures.wait)} waiting for a rank.`;
  const right = guess.rank === figures.longest && off < 0.06;
  const head = right ? "You saw it coming." : off < 0.12 ? "Close." : "A surprise: play it again, and see why.";
  return [make("b", {}, head), make("div", {}, rank), make("div", {}, share)];
}

// --------------------------------------------------------------------------------------------------- the whole page
function set(changes) {
  stop();
  Object.assign(state, { broken: null, at: Infinity, guess: null }, changes);
  show();
}

function choose() { // the step that is shown, from the state
  if (!state.all) {
    step = state.source === "recorded" ? recordings[state.which] : model(state);
    state.strategy = step.strategy;
    figures = summarise(step);
    return;
  }
  if (state.broken !== "slow") state.broken = null; // the only one that every strategy has
  state.predict = false;
  if (state.source === "recorded") [step, figures] = lineUp(recordings, recordings.map(each => each.tab));
  else {
    const shown = Object.keys(STRATEGIES).filter(key => (STRATEGIES[key].fewest ?? 0) <= state.ranks);
    const layers = Math.max(...shown.map(strategy => model({ ...state, strategy }).layers)); // the same model for all
    [step, figures] = lineUp(shown.map(strategy => model({ ...state, strategy, layers })),
      shown.map(strategy => STRATEGIES[strategy].tab));
  }
}

const button = (key, text, pressed, onclick, look = null) =>
  make("button", { "aria-pressed": String(pressed), "data-key": key, class: look, onclick }, text);

function tabs() {
  const modelled = state.source === "modelled";
  const own = modelled ? Object.keys(STRATEGIES) : recordings.map((_, number) => number);
  const tab = key => {
    const [which, text] = modelled ? ["strategy", STRATEGIES[key].tab] : ["which", recordings[key].tab];
    return button(`${which} ${key}`, text, !state.all && key === state[which], () => set({ [which]: key, all: false }));
  };
  const all = button("all", "All", state.all, () => set({ all: true }));
  const sources = recordings.length && !given.only ? [
    button("recorded", "Recorded", !modelled, () => set({ source: "recorded" })),
    button("modelled", "Modelled", modelled, () => set({ source: "modelled" }))] : [];
  const predict = button("predict", "Predict first", state.predict,
    () => set({ predict: !state.predict, all: false, broken: state.broken }));
  return make("nav", {}, make("div", { class: "row", role: "group", "aria-label": "strategy" },
    own.length > 1 ? [all, own.map(tab)].flat() : []), make("div", { class: "row" }, sources, predict));
}

function words() { // headline and what to look for
  const { headline, look } = STRATEGIES[state.strategy] ?? { headline: "A step of your own run" };
  if (state.all) {
    const said = recordings[0]?.note.replace(/ Without it[^.]*\./, ""); // that is each strategy's own
    const what = step.source === "recorded" ? said : "The same model and the same batch.";
    return [make("h1", {}, "One training step, and many ways to share it"),
      make("p", {}, `${what} Hatched: a rank computes nothing. The low bars are its communication.`)];
  }
  const text = step.source === "recorded" ? `${step.title}. ${step.note ?? ""}` : look;
  return [make("h1", {}, headline), make("p", {}, text)];
}

function stats() {
  const stat = (value, text, look = "") => make("div", { class: `stat ${look}` }, make("b", {}, value), " ",
    make("span", {}, text));
  const { exposed, wait, other, peak, parts } = figures;
  if (hidden()) return [stat("?", "your guess first")];
  if (state.all) {
    const least = values => step.teams[values.indexOf(Math.min(...values))].name;
    return [stat(least(step.teams.map(team => team.end)), "has the shortest step"),
      step.source === "modelled" ? stat(least(parts.map(part => part.peak)), "needs the least memory") : null,
      stat(least(parts.map(part => part.exposed+part.wait)), "idles least")];
  }
  const memory = peak ? stat(sizeText(peak), "peak memory") : null;
  if (step.hang) return [stat("never ends", `stuck after ${timeText(step.hang.at)}`), memory];
  const before = state.broken && step.source === "modelled" ? model({ ...state, broken: null }).end : null;
  const useful = step.single/step.end/(state.broken === "sampler" ? step.ranks : 1);
  return [stat(timeText(step.end), before ? `a step, ${timeText(before)} before` : "a step"),
    step.single ? stat(`${useful.toFixed(2)} times`, `as fast as one device, at most ${step.ranks}`) : null,
    stat(percent(exposed), NAMES.exposed, "exposed"), stat(percent(wait), NAMES.wait, "wait"),
    other > 0.005 ? stat(percent(other), NAMES.other) : null, memory];
}

function controls() {
  view.play = make("button", { class: "play", "data-key": "play", onclick: play }, "▶ Play");
  view.scrub = make("input", { type: "range", min: 0, max: 1000, "aria-label": "time in the step", "data-key": "scrub",
    oninput: event => { stop(); seek(event.target.value/1000*step.end); } });
  const jump = (key, name, way, text) =>
    make("button", { "aria-label": name, "data-key": key, onclick: () => go(way) }, text);
  const back = jump("back", "previous event", -1, "◀ event"), forth = jump("forth", "next event", 1, "event ▶");
  const speed = make("select", { "aria-label": "speed", onchange: event => { state.speed = +event.target.value; } },
    [0.25, 0.5, 1, 2].map(s => make("option", { value: s, selected: s === state.speed ? "" : null }, `× ${s}`)));
  for (const control of [view.play, view.scrub, back, forth]) control.disabled = hidden();
  return make("div", { class: "row controls" }, view.play, back, forth, view.scrub, speed);
}

function legend() {
  const box = fill => make("svg", { viewBox: "0 0 16 12", "aria-hidden": "true" },
    make("rect", { width: 16, height: 12, rx: 2, fill }));
  const swatch = (look, text) => make("span", {}, box(look), text);
  const used = new Set(step.events.map(event => event.kind));
  const kinds = [...[..."LFBIWOAGRES"].filter(kind => used.has(kind)), "exposed", "wait"];
  const memory = (step.parts ?? MEMORY).map((name, kind) => name ? swatch(`var(--m${kind})`, name) : null);
  return make("div", { class: "row legend" }, kinds.map(kind => swatch(fill(kind), NAMES[kind])),
    step.memory ? [make("b", {}, "Memory:"), ...memory] : []);
}

function workshop() { // what can be broken, and the sliders
  const { breaks, sliders } = STRATEGIES[state.strategy], special = ["bucket", "microbatches", "between"];
  const broken = (state.all ? ["slow"] : breaks).map(key => button(`b${key}`, BREAKS[key][0], state.broken === key,
    () => set({ broken: state.broken === key ? null : key, at: 0 }), "bad"));
  const slider = key => {
    const [text, unit, values] = SLIDERS[key], value = key === "layers" ? step.layers : state[key];
    const now = `${value} ${unit}`.trim(); // a pipeline has at least one layer in each stage
    const move = event => set({ [key]: values[event.target.value], broken: state.broken });
    return make("label", {}, text, make("output", {}, now), make("input", { type: "range", min: 0, max: values.length-1,
      value: Math.max(0, values.indexOf(state[key])), "data-key": key, "aria-valuetext": now, oninput: move }));
  };
  const shown = Object.keys(SLIDERS).filter(key => state.all || !special.includes(key) || sliders.includes(key));
  return make("div", { class: "card" }, make("div", { class: "row break" }, make("b", {}, "Break it:"), broken),
    make("div", { class: "sliders" }, shown.map(slider)));
}

function table() { // every event, for those who would rather read, or cannot see the picture
  const heads = [...(step.teams ? ["strategy"] : []), "rank", "what", "begins", "lasts", "bytes"];
  const row = event => {
    const team = view.place?.teamOf(event.rank) ?? { first: 0 }, own = step.teams ? [team.name] : [];
    const seconds = event.stuck ? "hangs" : timeText(event.end-event.start);
    const bytes = event.bytes ? sizeText(event.bytes) : "";
    return [...own, event.rank-team.first, event.name, timeText(event.start), seconds, bytes];
  };
  const fillIn = ({ target }) => { // when it is opened: it may have thousands of rows
    const events = [...step.events, ...figures.gaps.flat().filter(gap => gap.kind !== "other")];
    const rows = events.sort((a, b) => a.start-b.start || a.rank-b.rank).map(row);
    const cells = row => make("tr", {}, row.map(text => make("td", {}, String(text))));
    target.querySelector("tbody").replaceChildren(...(target.open ? rows.map(cells) : []));
    fit();
  };
  const head = make("thead", {}, make("tr", {}, heads.map(text => make("th", { scope: "col" }, text))));
  return make("details", { ontoggle: fillIn }, make("summary", {}, "The same as a table"),
    make("div", { class: "scrolls" }, make("table", {}, head, make("tbody"))));
}

function show() { // build the page anew from the state; a learner's focus stays where it was
  const focused = document.activeElement?.dataset?.key;
  choose();
  const hint = "Press Play, drag the cursor, or go from event to event with ← and →. Point at a bar to read it.";
  view.box = make("div");
  view.tip = make("div", { class: "tip", hidden: "" });
  view.say = make("div", { class: "say", "aria-live": "polite" }, hidden() ? "" : hint);
  view.card = make("div", { class: "card", role: "group", "aria-label": "your guess" });
  if (hidden()) view.card.append(...ask());
  else if (state.guess) view.card.append(...(state.at >= step.end ? answer() : ["Now watch."]));
  const parts = [tabs(), ...words(), make("div", { class: "stats" }, stats())];
  if (state.predict) parts.push(view.card);
  if (step.source === "modelled") parts.push(workshop()); // above the picture, so that a slider and its answer are seen
  if (state.broken && !hidden()) parts.push(make("div", { class: "verdict", role: "status" }, BREAKS[state.broken][1]));
  parts.push(view.box, controls(), view.say, legend());
  if (!hidden()) parts.push(table());
  app.replaceChildren(...parts, view.tip);
  draw();
  if (focused) app.querySelector(`[data-key="${focused}"]`)?.focus();
  fit();
}

// ------------------------------------------------------------------------------------------------ the page around it
function around() { // the document that holds this frame, if it lets us see it
  try { return parent === window ? null : parent.document.body; } catch { return null; }
}

function theme() { // JupyterLab's or the site's, else the system's
  const body = around(), lab = body?.dataset.jpThemeLight, site = body?.dataset.theme;
  let dark = matchMedia("(prefers-color-scheme: dark)").matches;
  if (lab) dark = lab === "false";
  else if (site === "dark" || site === "light") dark = site === "dark";
  document.documentElement.classList.toggle("dark", state.theme ? state.theme === "dark" : dark);
}

function fit() { // the frame is as high as its page, and the still picture before it goes
  if (!around()) return;
  frameElement.parentElement.querySelector("[data-still]")?.remove();
  frameElement.style.height = `${document.querySelector("main").offsetHeight+4}px`;
}

function keys(event) {
  if (["INPUT", "SELECT", "BUTTON", "SUMMARY"].includes(event.target.tagName) || hidden()) return;
  const [first, last] = [() => seek(0), () => seek(step.end)];
  const acts = { " ": play, ArrowRight: () => go(1), ArrowLeft: () => go(-1), Home: first, End: last };
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
}

theme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
if (around()) {
  const watched = { attributes: true, attributeFilter: ["data-theme", "data-jp-theme-light"] };
  new MutationObserver(theme).observe(around(), watched);
}
addEventListener("keydown", keys);
document.getElementById("fallback").remove();
show();
let lastWidth = view.box.clientWidth;
new ResizeObserver(() => {
  if (view.box.clientWidth === lastWidth) return;
  lastWidth = view.box.clientWidth;
  draw();
  fit();
}).observe(app);
