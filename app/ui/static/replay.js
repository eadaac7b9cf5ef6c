// Examples are buttons with nothing but a picture: name them for those who cannot see it.
new MutationObserver(() => {
  for (const button of document.querySelectorAll(".gallery-item:not([aria-label])")) {
    const source = button.querySelector("img, video")?.src;
    if (!source) continue;
    button.ariaLabel = decodeURIComponent(source.split("/").pop()).replace(/\.\w+$/, "").replaceAll("_", " ");
    for (const image of button.querySelectorAll("img")) image.alt = button.ariaLabel;
  }
}).observe(document.documentElement, { childList: true, subtree: true });

// Plays both recorded answers again, side by side, each token at its own second. Runs in the page alone: the server
// is not asked, so nothing is measured or disturbed.
window.mmspecReplay = (slower) => {
  const sides = [...document.querySelectorAll("#mm-plain .mm-side, #mm-mmspec .mm-side")].map((side) => ({
    side,
    clock: side.querySelector(".mm-clock"),
    told: side.querySelector(".mm-clock")?.textContent ?? "",
    tokens: [...side.querySelectorAll(".mm-now [data-t]")],
    shown: 0,
  }));
  if (!sides.some((one) => one.tokens.length)) return;
  const run = (window.mmspecRun = (window.mmspecRun ?? 0) + 1); // a second click starts afresh
  const at = (one, place) => Number(one.tokens[place].dataset.t);
  for (const one of sides) {
    one.side.classList.remove("mm-done");
    one.tokens.forEach((token) => token.classList.add("mm-hidden"));
  }
  const began = performance.now();
  const step = () => {
    if (run !== window.mmspecRun || !sides[0].side.isConnected) return;
    const now = (performance.now() - began) / 1000 / slower;
    let going = false;
    for (const one of sides) {
      while (one.shown < one.tokens.length && at(one, one.shown) <= now) {
        one.tokens[one.shown++].classList.remove("mm-hidden");
      }
      if (one.shown < one.tokens.length) {
        going = true;
        const spent = one.shown > 1 ? at(one, one.shown - 1) - at(one, 0) : 0;
        const rate = spent > 0 ? `, ${((one.shown - 1) / spent).toFixed(1)} tokens/s` : "";
        one.clock.textContent = `${now.toFixed(2)} s, ${one.shown} tokens${rate}`;
      } else if (!one.side.classList.contains("mm-done")) {
        one.side.classList.add("mm-done");
        one.clock.textContent = one.told;
      }
    }
    if (going) requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
};
