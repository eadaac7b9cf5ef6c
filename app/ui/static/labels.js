// Names for screen readers of what Gradio leaves without one, and formats of uploads.

// Phones convert their HEIC photos to JPEG where a page names the formats that it takes.
const MM_FORMATS = "image/jpeg,image/png,image/webp,image/gif,image/bmp,image/tiff,image/avif";

// A name that holds the words that are seen, for those who speak them to choose a button.
const nameUploads = () => {
  for (const zone of document.querySelectorAll(".upload-container[aria-label]")) {
    const words = zone.innerText.replace(/\s+/g, " ").trim();
    if (words && zone.ariaLabel !== words) zone.ariaLabel = words;
  }
  // Gradio 6.31 puts the button that adds files into another button, with a name that is not translated.
  for (const frame of document.querySelectorAll('.icon-button[aria-label="common.upload"]')) {
    frame.role = "group";
    frame.tabIndex = -1;
    frame.ariaLabel = frame.title = "Add files";
  }
};

new MutationObserver(() => {
  nameUploads();
  for (const input of document.querySelectorAll('#mm-picture input[type="file"]')) {
    if (input.accept !== MM_FORMATS) input.accept = MM_FORMATS;
  }
  for (const button of document.querySelectorAll(".gallery-item:not([aria-label])")) {
    const source = button.querySelector("img, video")?.src;
    if (!source) continue;
    button.ariaLabel = decodeURIComponent(source.split("/").pop()).replace(/\.\w+$/, "").replaceAll("_", " ");
    for (const image of button.querySelectorAll("img")) image.alt = button.ariaLabel;
  }
}).observe(document.documentElement, { childList: true, subtree: true });
