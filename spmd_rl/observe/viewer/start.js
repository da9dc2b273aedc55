// The data leaves the document as soon as it is read: only what is shown stays there.

function take(id) {
  const node = byId(id);
  const text = node.textContent;
  node.remove();
  return text;
}

addEventListener("error", (event) => {
  document.body.prepend(el("p.notice.broken", `This page's script failed: ${event.message}`));
});

window.viewer = new App(JSON.parse(take("run")), take("episodes").split("\n"));
