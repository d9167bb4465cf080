"""Pages in a real browser."""

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)

# Boxes of all text that can be seen, cut to what the scrolling containers show of it; then the pairs that overlap.
OVERLAPS = """() => {
  const boxes = [];
  const seen = (e) => e.checkVisibility({ visibilityProperty: true }) && !e.closest(".unseen, .skip, option");
  const add = (text, rects, element) => {
    for (const rect of rects) {
      let { left, top, right, bottom } = rect;
      const clip = element.closest(".scroll")?.getBoundingClientRect();
      if (clip) {
        left = Math.max(left, clip.left); right = Math.min(right, clip.right);
        top = Math.max(top, clip.top); bottom = Math.min(bottom, clip.bottom);
      }
      if (right - left > 1 && bottom - top > 1) boxes.push({ text, left, top, right, bottom });
    }
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || element.closest("svg, script, style") || !seen(element)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    add(node.data.trim(), range.getClientRects(), element);
  }
  boxes.sort((a, b) => a.top - b.top);
  const found = [];
  boxes.forEach((a, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].top < a.bottom - 2; j++) {
      const b = boxes[j];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && high > 2) found.push([a.text, b.text]);
    }
  });
  return { count: boxes.length, found };
}"""

OUTSIDE = """() => [...document.querySelectorAll("body *")]
  .filter((e) => e.checkVisibility() && !e.closest(".scroll > *, .skip, .plot svg *, option"))
  .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().left < -1)
  .map((e) => e.tagName)"""


class Opened:
    """A page in the browser, and all that went wrong in it."""

    def __init__(self, browser, page, **options):
        """Open a file, or an address; whatever else the page asks for is wrong."""
        address = page if isinstance(page, str) else page.resolve().as_uri()
        self.wrong, self.allowed = [], (address if isinstance(page, str) else "file:", "data:")
        self.context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.page.on("request", self.asked)
        self.page.goto(address)

    def asked(self, request):
        if not request.url.startswith(self.allowed):
            self.wrong.append(request.url)

    def fits(self, width, texts=100):
        """Check that at this width nothing sticks out and none of more than so many texts lies upon another."""
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.evaluate("scrollTo(0, 0)")
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width
        assert self.page.evaluate(OUTSIDE) == []
        overlaps = self.page.evaluate(OVERLAPS)
        assert overlaps["found"] == []
        assert overlaps["count"] > texts
