// Examples are buttons with nothing but a picture: give them a label for screen readers.
new MutationObserver(() => {
  for (const button of document.querySelectorAll(".gallery-item:not([aria-label])")) {
    const source = button.querySelector("img, video")?.src;
    if (!source) continue;
    button.ariaLabel = decodeURIComponent(source.split("/").pop()).replace(/\.\w+$/, "").replaceAll("_", " ");
    for (const image of button.querySelectorAll("img")) image.alt = button.ariaLabel;
  }
}).observe(document.documentElement, { childList: true, subtree: true });

// Replays both recorded answers side by side, each token at its recorded time. Runs in the page alone: no request is
// sent, so no measurement is disturbed.
window.mmspecReplay = (slower) => {
  const sides = [...document.querySelectorAll("#mm-plain .mm-side, #mm-mmspec .mm-side")].map((side) => ({
    side,
    clock: side.querySelector(".mm-clock"),
    finalTiming: side.querySelector(".mm-clock")?.textContent ?? "",
    tokens: [...side.querySelectorAll(".mm-now [data-t]")],
    numVisible: 0,
  }));
  if (!sides.some((one) => one.tokens.length)) return;
  const run = (window.mmspecRun = (window.mmspecRun ?? 0) + 1); // a second click restarts the replay
  const at = (one, index) => Number(one.tokens[index].dataset.t);
  for (const one of sides) {
    one.side.classList.remove("mm-done");
    one.tokens.forEach((token) => token.classList.add("mm-hidden"));
  }
  const startTime = performance.now();
  const step = () => {
    if (run !== window.mmspecRun || !sides[0].side.isConnected) return;
    const now = (performance.now() - startTime) / 1000 / slower;
    let isRunning = false;
    for (const one of sides) {
      while (one.numVisible < one.tokens.length && at(one, one.numVisible) <= now) {
        one.tokens[one.numVisible++].classList.remove("mm-hidden");
      }
      if (one.numVisible < one.tokens.length) {
        isRunning = true;
        const elapsed = one.numVisible > 1 ? at(one, one.numVisible - 1) - at(one, 0) : 0;
        const rate = elapsed > 0 ? `, ${((one.numVisible - 1) / elapsed).toFixed(1)} tokens/s` : "";
        one.clock.textContent = `${now.toFixed(2)} s, ${one.numVisible} tokens${rate}`;
      } else if (!one.side.classList.contains("mm-done")) {
        one.side.classList.add("mm-done");
        one.clock.textContent = one.finalTiming;
      }
    }
    if (isRunning) requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
};
