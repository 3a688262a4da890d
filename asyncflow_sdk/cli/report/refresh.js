"use strict";
// Only <main> is drawn anew, so that the place of reading stays.
const EVERY_MS = 2000;
let shown = ""; // a page drawn once is not put twice: what is selected in it stays
async function refresh() {
  try {
    if (!document.hidden) {
      const answer = await fetch("/");
      if (!answer.ok)
        throw new Error(answer.status === 403 ? "access refused: open the URL of `asyncflow web` again" : `error ${answer.status}`);
      const text = await answer.text();
      if (text !== shown) {
        const page = new DOMParser().parseFromString(text, "text/html");
        document.title = page.title;
        document.querySelector("main").replaceWith(page.querySelector("main"));
        shown = text;
      }
    }
  } catch (error) {
    shown = "";
    const pill = document.querySelector(".pill");
    pill.textContent = error instanceof TypeError ? "`asyncflow web` does not answer" : error.message;
    pill.className = "pill warn";
  }
  setTimeout(refresh, EVERY_MS);
}
setTimeout(refresh, EVERY_MS);
