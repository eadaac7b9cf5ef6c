// Names for screen readers of what Gradio leaves without one: plots, and examples that are nothing but a picture.
const MM_PLOTS = {
  "mm-lengths": "Line plot: tokens per forward of the model over the answer, a line per lane. The text below gives the means.",
  "mm-histogram": "Bar plot: how many forwards of mmspec gave one, two, three or more tokens.",
  "mm-phases": "Bar plot: milliseconds of each phase of the mmspec call.",
  "mm-learning-curve": "Line plot: tokens per forward of a drafter that learns and of one that does not, over the pictures. The numbers below give both ends.",
  "mm-curve": "Plot: tokens per forward of each captioned file, and their moving mean. The table below gives the numbers.",
};
new MutationObserver(() => {
  for (const button of document.querySelectorAll(".gallery-item:not([aria-label])")) {
    const source = button.querySelector("img, video")?.src;
    if (!source) continue;
    button.ariaLabel = decodeURIComponent(source.split("/").pop()).replace(/\.\w+$/, "").replaceAll("_", " ");
    for (const image of button.querySelectorAll("img")) image.alt = button.ariaLabel;
  }
  for (const [id, text] of Object.entries(MM_PLOTS)) {
    for (const plot of document.querySelectorAll(`#${id} .vega-embed:not([role])`)) {
      plot.role = "img";
      plot.ariaLabel = text;
    }
  }
}).observe(document.documentElement, { childList: true, subtree: true });
