// Shows the clips of the queue one after the other and sends the answers. Everything that matters is kept by the
// server: closing this page loses nothing.
"use strict";

const token = new URLSearchParams(location.search).get("token");
const element = (id) => document.getElementById(id);
const screen = element("screen"), time = element("time");
let clip = null; // { id, steps, frames }
let mark = null; // frame number at which the episode became unsafe
let playing = false, sending = false, loading = null;

async function call(path, body) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const options = { headers };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (response.headers.get("Content-Type") === "image/jpeg") return createImageBitmap(await response.blob());
  const value = await response.json();
  if (value.left === undefined) throw new Error(value.error || response.statusText);
  return value;
}

function say(text) { element("say").textContent = text; }

function draw() {
  const frame = Number(time.value);
  if (!clip) return screen.getContext("2d").clearRect(0, 0, screen.width, screen.height);
  const picture = clip.frames[frame];
  screen.width = picture.width;
  screen.height = picture.height;
  screen.getContext("2d").drawImage(picture, 0, 0);
  element("clock").textContent = `step ${clip.steps[frame]} of ${clip.steps[clip.steps.length - 1]}`;
  element("mark").textContent = mark === null ? "" : `unsafe at step ${clip.steps[mark]}`;
}

function enable() {
  for (const id of ["safe", "unsafe", "skip"]) element(id).disabled = !clip || sending;
}

async function show(next) {
  loading = next.clip;
  const pictures = [];
  for (let i = 0; i < next.steps.length; i++) pictures.push(await call(`/clip/${next.clip}/${i}`));
  if (loading !== next.clip) return;
  clip = { id: next.clip, steps: next.steps, frames: pictures };
  mark = null;
  playing = true;
  time.max = pictures.length - 1;
  time.value = 0;
  draw();
}

async function update(state) {
  const done = state.total - state.left.length;
  element("progress").max = Math.max(1, state.total);
  element("progress").value = done;
  element("undo").disabled = !state.undo || sending;
  const ready = state.left.filter((item) => item.steps);
  const counts = `${done} of ${state.total} labelled, ${state.labels} in all`;
  if (state.left.length === 0) say(state.total ? `All ${state.total} labelled; the run goes on.` : "Nothing to label now: the run is at work.");
  else if (ready.length === 0) say(`Drawing the clips ... (${counts})`);
  else say(counts);
  if (!clip || !ready.some((item) => item.clip === clip.id)) {
    clip = null;
    if (ready.length && loading !== ready[0].clip) await show(ready[0]);
    else if (!ready.length) loading = null;
  }
  draw();
  enable();
}

async function send(path, body) {
  if (sending) return;
  sending = true;
  enable();
  try {
    const state = await call(path, body);
    clip = null;
    loading = null;
    if (state.error) say(state.error);
    sending = false;
    await update(state);
  } catch (error) {
    say(`Not sent: ${error.message}. Is the run still there?`);
  } finally {
    sending = false;
    enable();
  }
}

function answer(label) {
  if (!clip) return;
  const step = label === "unsafe" && mark !== null ? clip.steps[mark] : null;
  send("/answer", { clip: clip.id, label, step });
}

function move(frames) {
  if (!clip) return;
  playing = false;
  time.value = Number(time.value) + frames;
  draw();
}

function toggleMark() {
  if (!clip) return;
  mark = mark === Number(time.value) ? null : Number(time.value);
  playing = false;
  draw();
}

const keys = {
  s: () => answer("safe"), u: () => answer("unsafe"), k: () => answer("skip"), z: () => send("/undo", {}),
  m: toggleMark, " ": () => { playing = !playing; }, ArrowLeft: () => move(-1), ArrowRight: () => move(1),
};
document.addEventListener("keydown", (event) => {
  const action = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey || event.repeat && !event.key.startsWith("Arrow")) return;
  event.preventDefault();
  action();
});
for (const label of ["safe", "unsafe", "skip"]) element(label).addEventListener("click", () => answer(label));
element("undo").addEventListener("click", () => send("/undo", {}));
time.addEventListener("input", () => { playing = false; draw(); });

setInterval(() => {
  if (!clip || !playing) return;
  time.value = (Number(time.value) + 1) % clip.frames.length;
  draw();
}, 80);

async function poll() {
  try {
    if (!sending) await update(await call("/queue"));
  } catch (error) {
    say(`The run does not answer: ${error.message}`);
  }
  setTimeout(poll, 1000);
}
poll();
