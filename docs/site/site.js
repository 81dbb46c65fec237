// Blocks and tables that scroll sideways can be scrolled by keys, and the dialogue of the search has a name.
function scrollable() {
  for (const element of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    if (element.scrollWidth > element.clientWidth || element.scrollHeight > element.clientHeight) element.tabIndex = 0;
  }
}
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
scrollable();
for (const event of ["load", "resize"]) addEventListener(event, scrollable);
