"use strict";
// Only <main> is drawn anew, so that the place of reading stays.
const EVERY_MS = 2000;
async function refresh() {
  try {
    if (!document.hidden) {
      const answer = await fetch("/");
      if (!answer.ok)
        throw new Error(answer.status === 403 ? "access refused: open the URL of `asyncflow web` again" : `error ${answer.status}`);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      document.title = page.title;
      document.querySelector("main").replaceWith(page.querySelector("main"));
    }
  } catch (error) {
    const pill = document.querySelector(".pill");
    pill.textContent = error instanceof TypeError ? "`asyncflow web` does not answer" : error.message;
    pill.className = "pill warn";
  }
  setTimeout(refresh, EVERY_MS);
}
setTimeout(refresh, EVERY_MS);
