/* Computes positions in a thread of its own, so that the page responds while it does. */

import { Graph, layout } from "../vendor/dagre.js";

const LARGE = 150;

self.onmessage = ({ data: { job, boxes, edges } }) => {
  const graph = new Graph();
  graph.setGraph({
    rankdir: "LR", nodesep: 18, ranksep: 56, marginx: 16, marginy: 16,
    // The exact method takes minutes for large graphs.
    ranker: boxes.length > LARGE ? "tight-tree" : "network-simplex",
  });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const { key, width, height } of boxes) graph.setNode(key, { width, height });
  for (const [from, to] of edges) graph.setEdge(from, to);
  layout(graph);
  const { width, height } = graph.graph();
  const isFlipped = isUpsideDown(boxes.map(({ key }) => graph.node(key)));
  const turn = ({ x, y }) => ({ x, y: isFlipped ? height - y : y });
  self.postMessage({
    job,
    width,
    height,
    boxes: boxes.map(({ key }) => {
      const { x, y } = turn(graph.node(key));
      return [key, x, y];
    }),
    // The first and last points are where an edge meets its boxes, which the view knows better.
    edges: edges.map(([from, to]) => [from, to, graph.edge(from, to).points.slice(1, -1).map(turn)]),
  });
};

/** Whether most neighbours of a column are drawn in the reverse of the order of the program. */
function isUpsideDown(places) {
  const last = new Map();
  let balance = 0;
  for (const { x, y } of places) {
    if (last.has(x)) balance += Math.sign(y - last.get(x));
    last.set(x, y);
  }
  return balance < 0;
}
