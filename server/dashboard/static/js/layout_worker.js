/* Computes positions in a thread of its own, so that the page responds while it does. */

import { Graph, layout } from "../vendor/dagre.js";

const LARGE = 150;

/** The library keeps boxes as properties of plain objects, which have a `constructor`. */
const nameOf = (key) => `box ${key}`;

self.onmessage = ({ data: { job, boxes, edges } }) => {
  const graph = new Graph();
  graph.setGraph({
    rankdir: "LR", nodesep: 18, ranksep: 56, marginx: 16, marginy: 16,
    // The exact method takes minutes for large graphs.
    ranker: boxes.length > LARGE ? "tight-tree" : "network-simplex",
  });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const { key, width, height } of boxes) graph.setNode(nameOf(key), { width, height });
  for (const [from, to] of edges) graph.setEdge(nameOf(from), nameOf(to));
  layout(graph);
  const { width, height } = graph.graph();
  const places = placesInOrder(graph, boxes);
  self.postMessage({
    job,
    width,
    height,
    boxes: boxes.map(({ key }) => {
      const { x, y } = graph.node(nameOf(places.get(key)));
      return [key, x, y];
    }),
    // The first and last points are where an edge meets its boxes, which the view knows better.
    edges: edges.map(([from, to]) => {
      const { points } = graph.edge(nameOf(places.get(from)), nameOf(places.get(to)));
      return [from, to, points.slice(1, -1)];
    }),
  });
};

/**
 * Let boxes with the same neighbours, which can change places, have the order of the program.
 *
 * @returns {Map<string, string>} by box, the box whose place it takes.
 */
function placesInOrder(graph, boxes) {
  const groups = new Map();
  for (const { key } of boxes) {
    const name = nameOf(key);
    const neighbours = JSON.stringify([graph.predecessors(name).sort(), graph.successors(name).sort()]);
    groups.set(neighbours, [...(groups.get(neighbours) ?? []), key]);
  }
  const places = new Map();
  const box = (key) => graph.node(nameOf(key));
  for (const keys of groups.values()) {
    const byHeight = [...keys].sort((a, b) => box(a).y - box(b).y);
    const isAlike = keys.every((key) => box(key).height === box(keys[0]).height);
    keys.forEach((key, i) => places.set(key, isAlike ? byHeight[i] : key));
  }
  return places;
}
