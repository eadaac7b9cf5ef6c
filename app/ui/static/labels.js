// Names for screen readers of what Gradio leaves without one: plots, and examples that are nothing but a picture.
const MM_PLOTS = {
  "mm-lengths": "Line plot: tokens per forward of the model over the answer, a line per lane. The text below gives the means.",
  "mm-histogram": "Bar plot: how many forwards of mmspec gave one, two, three or more tokens.",
  "mm-phases": "Bar plot: milliseconds of each phase of the mmspec call.",
  "mm-learning-curve": "Line plot: tokens per forward of a drafter that learns and of one that does not, over the pictures. The numbers below give both ends.",
  "mm-curve": "Plot: tokens per forward of each captioned file, and their moving mean. The table below gives the numbers.",
};

// Numbers at the x axis that would touch the ones before are hidden: on a phone twenty do not fit.
const thinLabels = (plot) => {
  const labels = [...plot.querySelectorAll('[aria-label^="X-axis"] .role-axis-label text')];
  const placed = labels.map((label) => ({ label, box: label.getBoundingClientRect() }));
  let end = -Infinity;
  for (const { label, box } of placed.sort((one, other) => one.box.left - other.box.left)) {
    const { left, right } = box;
    const isHidden = left < end + 4;
    label.style.opacity = isHidden ? 0 : "";
    if (!isHidden) end = right;
  }
};
const followed = new WeakSet();
const followLabels = (plot) => {
  if (followed.has(plot)) return;
  followed.add(plot);
  let queued = 0;
  const later = () => {
    cancelAnimationFrame(queued);
    queued = requestAnimationFrame(() => thinLabels(plot));
  };
  // Vega moves labels by their transform, some time after the plot has changed its size.
  new MutationObserver(later).observe(plot, { childList: true, subtree: true, attributeFilter: ["transform"] });
};

// Phones convert their HEIC photos to JPEG where a page names the formats that it takes.
const MM_FORMATS = "image/jpeg,image/png,image/webp,image/gif,image/bmp,image/tiff,image/avif";

new MutationObserver(() => {
  for (const input of document.querySelectorAll('#mm-picture input[type="file"]')) {
    if (input.accept !== MM_FORMATS) input.accept = MM_FORMATS;
  }
  for (const button of document.querySelectorAll(".gallery-item:not([aria-label])")) {
    const source = button.querySelector("img, video")?.src;
    if (!source) continue;
    button.ariaLabel = decodeURIComponent(source.split("/").pop()).replace(/\.\w+$/, "").replaceAll("_", " ");
    for (const image of button.querySelectorAll("img")) image.alt = button.ariaLabel;
  }
  for (const [id, text] of Object.entries(MM_PLOTS)) {
    for (const plot of document.querySelectorAll(`#${id} .vega-embed`)) {
      if (plot.ariaLabel === text) continue; // Vega gives every drawing the same name
      plot.role = "img";
      plot.ariaLabel = text;
      followLabels(plot);
    }
  }
}).observe(document.documentElement, { childList: true, subtree: true });
