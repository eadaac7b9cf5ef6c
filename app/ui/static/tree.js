// Zoom of a drawn tree: buttons, ctrl and wheel, two fingers, and the keys + - 0 while it has the focus.
(() => {
  const SMALLEST = 0.3, LARGEST = 3; // a whole tree fits a phone; the list below it can be read there

  const zoomTo = (canvas, scale) => {
    const svg = canvas.querySelector("svg");
    const width = Number(svg.dataset.width);
    const clamped = Math.min(LARGEST, Math.max(SMALLEST, scale || (canvas.clientWidth - 4) / width));
    const middle = (canvas.scrollLeft + canvas.clientWidth / 2) / canvas.scrollWidth;
    canvas.dataset.scale = clamped;
    svg.style.width = `${width * clamped}px`;
    svg.style.height = "auto";
    canvas.scrollLeft = middle * canvas.scrollWidth - canvas.clientWidth / 2;
  };
  const fit = (canvas) => {
    const width = Number(canvas.querySelector("svg").dataset.width);
    zoomTo(canvas, Math.min(1, (canvas.clientWidth - 4) / width)); // a small tree keeps its size
    canvas.scrollLeft = 0;
  };
  const zoomBy = (canvas, factor) => (factor ? zoomTo(canvas, Number(canvas.dataset.scale) * factor) : fit(canvas));

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.(".mm-zoom [data-zoom]");
    if (button) zoomBy(button.closest(".mm-tree").querySelector(".mm-canvas"), Number(button.dataset.zoom));
  });
  document.addEventListener("keydown", (event) => {
    const factor = { "+": 1.25, "=": 1.25, "-": 0.8, 0: 0 }[event.key];
    if (factor === undefined || !event.target.matches?.(".mm-canvas")) return;
    event.preventDefault();
    zoomBy(event.target, factor);
  });
  document.addEventListener("wheel", (event) => {
    const canvas = event.ctrlKey && event.target.closest?.(".mm-canvas");
    if (!canvas) return;
    event.preventDefault();
    zoomBy(canvas, event.deltaY < 0 ? 1.1 : 1 / 1.1);
  }, { passive: false });

  let distance = 0;
  const spread = ([a, b]) => Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
  document.addEventListener("touchstart", (event) => {
    if (event.touches.length === 2 && event.target.closest?.(".mm-canvas")) distance = spread(event.touches);
  });
  document.addEventListener("touchmove", (event) => {
    const canvas = event.touches.length === 2 && event.target.closest?.(".mm-canvas");
    if (!canvas || !distance) return;
    event.preventDefault();
    zoomBy(canvas, spread(event.touches) / distance);
    distance = spread(event.touches);
  }, { passive: false });

  new MutationObserver(() => {
    for (const canvas of document.querySelectorAll(".mm-canvas:not([data-scale])")) if (canvas.clientWidth) {
      fit(canvas);
      if (innerWidth < 600) canvas.parentElement.querySelector("details").open = true; // the list needs no zoom
    }
  }).observe(document.documentElement, { childList: true, subtree: true });
})();
