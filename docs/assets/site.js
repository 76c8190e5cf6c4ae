// What the theme draws late is named and can be reached by keyboard: copy buttons, and whatever scrolls sideways.
function mend() {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) box.tabIndex = 0;
  for (const [i, nav] of document.querySelectorAll("nav.md-code__nav").entries()) nav.setAttribute("aria-label", `code ${i + 1}`);
}
new MutationObserver(mend).observe(document.body, {childList: true, subtree: true});
mend();
