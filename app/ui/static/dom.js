// Builds elements. All text of users and models goes through here, as text, never as HTML.
export const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

const SVG = "http://www.w3.org/2000/svg";
export const draw = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

export const byId = (id) => document.getElementById(id);
export const seconds = (value) => `${value < 10 ? value.toFixed(value < 1 ? 2 : 1) : value.toFixed(0)} s`;
export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
