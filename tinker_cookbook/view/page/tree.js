// What environments and programs logged by logtree: *_logtree.json as text that folds.

const TREE_TAGS = new Set(("section div p pre span b strong em i u code ul ol li table caption thead tbody tr th td details summary " +
  "h1 h2 h3 h4 h5 h6 br hr blockquote").split(" "));

async function treeView(run) {
  const asked = state().file;
  const { files, trees } = await get("tree", isReport || !asked ? { name: run.name } : { name: run.name, file: asked });
  const file = files.includes(asked) ? asked : files.findLast((one) => one.endsWith("/train")) || files[files.length - 1], split = file.split("/")[1];
  const same = files.filter((one) => one.split("/")[1] === split);
  const unfold = (open) => () => { for (const one of document.querySelectorAll(".tree details")) one.open = open; };
  return [bar(beforeAndNext("file", same, file, (next) => ({ file: next }), select(files.map((name) => [name, `step ${stepOfTree(name)} · ${name}`]), file, (event) => { location.hash = link({ file: event.target.value }); }, "file")),
    make("button", { onclick: unfold(true) }, "unfold all"), make("button", { onclick: unfold(false) }, "fold all")),
  asked && asked !== file ? note(`There are no logs of ${asked}. These are of ${file}:`) : null, make("div", { class: "tree" }, trees[file].root.children.map((child) => treeNode(child, 0)))];
}

/** Name of the tree of a step: that of training has the number of updates before it. */
function treeFile({ step, split }) { return `iteration_${String(split === "train" ? step - 1 : step).padStart(6, "0")}/${split}`; }

function stepOfTree(name) { const [number, split] = name.slice(10).split("/"); return Number(number) + (split === "train"); }

/** Returns a node of a tree; tags and attributes that could run or load something are left out. */
function treeNode(node, depth) {
  if (typeof node === "string") return node;
  const { tag, attrs = {}, children = [], data } = node;
  // HTML that a program logged is parsed as data, and what is known of it is shown.
  if (tag === "#html") return children.map((html) => [...new DOMParser().parseFromString(html, "text/html").body.childNodes].map((one) => treeNode(plainNode(one), depth)));
  if (tag === "img") return make("img", { src: /^data:image\//.test(attrs.src) ? attrs.src : null, alt: attrs.alt || "" });
  if (tag === "style" || tag === "script") return [];
  if (data?.type === "conversation") return messages(data.messages);
  const shown = children.map((child) => treeNode(child, depth + (tag === "section")));
  const heading = tag === "section" && children[0]?.tag?.match(/^h[1-6]$/);
  if (heading) return make("details", { open: depth < 2 }, make("summary", {}, shown[0]), shown.slice(1));
  if (data) shown.push(facts(Object.fromEntries(Object.entries(data).filter(([, value]) => typeof value !== "object"))));
  const style = (attrs.class || "").split(" ").filter((name) => name.startsWith("lt-")).join(" ");
  return make(TREE_TAGS.has(tag) ? tag : "div", { class: style || null, open: "open" in attrs, colspan: attrs.colspan, title: attrs.title }, shown);
}

function plainNode(node) {
  if (node.nodeType !== 1) return node.nodeType === 3 ? node.data : "";
  return { tag: node.localName, attrs: Object.fromEntries([...node.attributes].map((one) => [one.name, one.value])), children: [...node.childNodes].map(plainNode) };
}
