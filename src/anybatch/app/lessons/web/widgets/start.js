// Shows the lesson of the address, and brings its widgets to life when it is first shown.
import arms from "ab/arms";
import bench from "ab/bench";
import cards from "ab/cards";
import { readState } from "ab/dom";
import explain from "ab/explain";
import { measure } from "ab/measures";
import memory from "ab/memory";
import parsons from "ab/parsons";
import predict from "ab/predict";
import quiz from "ab/quiz";
import ranks from "ab/ranks";
import scaler from "ab/scaler";
import shares from "ab/shares";
import stepper from "ab/stepper";
import walk from "ab/walk";

const WIDGETS = { arms, bench, cards, explain, memory, parsons, predict, quiz, ranks, scaler, shares, stepper, walk, ward: parsons };
const lessons = [...document.querySelectorAll("article.lesson")];

function show(isFirst) {
  const { page } = readState();
  const current = lessons.find((lesson) => lesson.id === page) ?? lessons[0];
  for (const lesson of lessons) lesson.hidden = lesson !== current;
  document.getElementById("early")?.remove(); // `hidden` says the same from now on
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === current.id) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  settle(current, [...current.querySelectorAll("[data-widget]:not([data-alive])")]);
  if (!isFirst) {
    scrollTo(0, 0);
    current.querySelector("h2").focus({ preventScroll: true });
  }
}

// What is seen first comes to life at once, the rest one by one, so that the page answers in between.
function settle(lesson, figures) {
  figures.splice(0, 1).forEach(bring);
  if (figures.length) later(() => settle(lesson, figures.filter((figure) => !("alive" in figure.dataset))));
  else lesson.dataset.settled = "";
}

// When the browser has nothing else to do; some browsers cannot tell.
const later = (act) => (window.requestIdleCallback ?? setTimeout)(act);

function bring(figure) {
  figure.dataset.alive = "";
  WIDGETS[figure.dataset.widget]?.(figure, JSON.parse(figure.dataset.spec));
}

// Everything is printed, not only the lesson that is shown.
addEventListener("beforeprint", () => {
  document.querySelectorAll("[data-widget]:not([data-alive])").forEach(bring);
  for (const folded of document.querySelectorAll("details")) folded.open = true;
});
addEventListener("hashchange", (event) => {
  const page = (address) => new URL(address).hash.slice(1).split("?")[0];
  const isLesson = lessons.some((lesson) => lesson.id === page(event.newURL));
  if (isLesson && page(event.oldURL) !== page(event.newURL)) show(false);
});
show(true);
window.anybatch = { measure };
document.documentElement.dataset.ready = "";
performance.mark("ready");
