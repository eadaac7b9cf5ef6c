// Plays recorded answers side by side, each token at its recorded time. Runs in the page alone: no request is sent, so
// no measurement is disturbed. The markup is that of `race.py`; shared files use this script, too.
window.mmspecRace = (() => {
  const played = new Set(); // races that have started by themselves
  let current = 0; // number of the newest race; an older one ends when it sees another number

  const readLane = (section) => ({
    section,
    bar: section.querySelector(".mm-rate span"),
    rate: section.querySelector(".mm-rate b"),
    clock: section.querySelector(".mm-clock"),
    ratio: section.querySelector(".mm-lane-ratio"),
    tokens: [...section.querySelectorAll("[data-t]")],
    times: [...section.querySelectorAll("[data-t]")].map((token) => Number(token.dataset.t)),
    finalRate: Number(section.dataset.rate),
    final: {},
    visible: 0,
  });

  // Tokens per second so far; the recorded rate from the last token on.
  const rateOf = (lane) => {
    if (lane.visible === lane.times.length) return lane.finalRate;
    const seconds = lane.visible > 1 ? lane.times[lane.visible - 1] - lane.times[0] : 0;
    return seconds > 0 ? (lane.visible - 1) / seconds : 0;
  };

  const hide = (lane) => {
    for (const name of ["rate", "clock", "ratio"]) lane.final[name] = lane[name]?.textContent ?? "";
    lane.section.classList.remove("mm-done");
    for (const token of lane.tokens) token.classList.add("mm-hidden");
  };

  const finish = (lane) => {
    lane.section.classList.add("mm-done");
    for (const name of ["rate", "clock", "ratio"]) if (lane[name]) lane[name].textContent = lane.final[name];
  };

  const advance = (lane, now, fastest) => {
    while (lane.visible < lane.times.length && lane.times[lane.visible] <= now) {
      lane.tokens[lane.visible++].classList.remove("mm-hidden");
    }
    const rate = rateOf(lane);
    lane.bar.style.width = `${Math.min(100, (100 * rate) / fastest)}%`;
    if (lane.visible === lane.times.length) return finish(lane);
    lane.rate.textContent = rate ? `${rate.toFixed(0)} tokens/s` : "";
    lane.clock.textContent = `${lane.visible} tokens, ${now.toFixed(2)} s`;
    if (lane.ratio) lane.ratio.textContent = "";
  };

  // `slower` divides the speed; 1 is real time.
  const play = (root, slower = 1) => {
    const card = root.querySelector(".mm-race[data-race]");
    const lanes = card ? [...card.querySelectorAll(".mm-lane")].map(readLane) : [];
    if (!lanes.some((lane) => lane.times.length)) return;
    const ratio = card.querySelector(".mm-ratio");
    const plain = lanes[0];
    const ours = lanes.find((lane) => lane.section.id === ratio?.dataset.lane) ?? lanes[1]; // the lane of the headline
    const finalRatio = ratio ? `${Number(ratio.dataset.ratio).toFixed(1)}x` : "";
    const fastest = Math.max(...lanes.map((lane) => lane.finalRate)) || 1;
    const run = ++current;
    restore(card);
    lanes.forEach(hide);
    remember(card, lanes);
    card.classList.remove("mm-settled");
    const start = performance.now();
    const step = () => {
      if (run !== current || !card.isConnected) return;
      const now = (performance.now() - start) / 1000 / slower;
      for (const lane of lanes) if (!lane.section.classList.contains("mm-done")) advance(lane, now, fastest);
      const isDone = lanes.every((lane) => lane.visible === lane.times.length);
      if (ratio) {
        const [a, b] = [rateOf(plain), rateOf(ours)];
        ratio.textContent = isDone ? finalRatio : a && b ? `${(b / a).toFixed(1)}x` : "…";
      }
      if (isDone) card.classList.add("mm-settled");
      else requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  };

  // A race that is restarted before its end first gets its final texts back. Gradio may reuse the elements of an earlier
  // race for the next one, so the texts of another race must not be restored into them.
  const unfinished = new WeakMap();
  const remember = (card, lanes) => unfinished.set(card, { race: card.dataset.race, lanes });
  const restore = (card) => {
    const { race, lanes } = unfinished.get(card) ?? {};
    if (race === card.dataset.race) lanes?.forEach(finish);
  };

  // Start a race that has not been played yet, unless the visitor prefers no motion.
  const autoplay = (root) => {
    const card = root.querySelector(".mm-race[data-race]");
    if (!card || played.has(card.dataset.race)) return;
    played.add(card.dataset.race);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return card.classList.add("mm-settled");
    const { top } = card.getBoundingClientRect();
    const isInView = top >= 0 && top < innerHeight / 2;
    if (played.size > 1 && !isInView) card.scrollIntoView({ behavior: "smooth", block: "start" });
    play(root);
  };

  return { play, autoplay };
})();
