/*
 * The graph as it is drawn: which nodes get a box of their own, which share one, and the edges
 * between boxes. Pure functions.
 *
 * A body that was entered many times (a map over 500 items), and nodes with the same readers and the
 * same predecessors, share one box, so that wide programs stay readable.
 */

import { baseOf } from "./program_model.js";

/** Nodes of one kind that are drawn separately; more share a box. */
export const MAX_SEPARATE = 6;

/**
 * Return the boxes and edges of a program.
 *
 * @param {ProgramModel} model
 * @returns {{boxes: {key: string, label: string, op: string, members: string[]}[],
 *     edges: [string, string][]}}
 */
export function graphOf(model) {
  if (model.explanation === null) return { boxes: [], edges: [] };
  const explained = model.explanation.nodes ?? [];
  const links = linksOf(explained, model.explanation.edges ?? []);
  const instances = instancesOf(model, explained);
  const groups = groupsOf(explained, links);
  const boxesOf = new Map();
  const boxes = [];
  for (const members of groups) {
    const made = members.length > 1
      ? [stack(members[0], `${members[0].id} … ${members.at(-1).id}`, members.map(({ id }) => id))]
      : boxesFor(members[0], instances.get(members[0].id) ?? []);
    for (const member of members) boxesOf.set(member.id, made);
    boxes.push(...made);
  }
  boxes.push(...appendedBoxes(model, boxesOf));
  return { boxes, edges: edgesOf(links, boxesOf) };
}

/** Nodes that were appended later, which the explanation does not have. */
function appendedBoxes(model, boxesOf) {
  const appended = new Map();
  for (const node of model.nodes.values())
    if (!boxesOf.has(node.id) && !boxesOf.has(baseOf(node.id)))
      appended.set(node.op, [...(appended.get(node.op) ?? []), node]);
  return [...appended.values()].flatMap((nodes) =>
    nodes.length > MAX_SEPARATE
      ? [stack(nodes[0], `${nodes[0].id} … ${nodes.at(-1).id}`, nodes.map(({ id }) => id))]
      : nodes.map(({ id, op }) => ({ key: id, label: id, op, members: [id] })));
}

/**
 * Edges between nodes of the program. A body hangs between its control node and the readers of the
 * control node: `map -> first node of the body -> ... -> last node -> reader of the map`.
 */
function linksOf(explained, edges) {
  const places = new Map(explained.map((node) => [node.id, node.inside]));
  const known = new Set(edges.map((edge) => `${edge.from} ${edge.to}`));
  const siblings = edges.filter((edge) => places.get(edge.from) === places.get(edge.to));
  const sources = new Set(siblings.map((edge) => edge.from));
  const targets = new Set(siblings.map((edge) => edge.to));
  const children = new Map();
  for (const node of explained)
    if (node.inside) children.set(node.inside, [...(children.get(node.inside) ?? []), node.id]);
  const exits = (id) => {
    const last = (children.get(id) ?? []).filter((child) => !sources.has(child));
    return last.length ? last.flatMap(exits) : [id];
  };
  const links = [];
  for (const { from, to } of edges) {
    const ownPlace = places.get(to);
    const isInherited = ownPlace !== places.get(from) && known.has(`${from} ${ownPlace}`);
    const isOwnBody = ownPlace === from || isInside(from, to, places);
    if (!isInherited && !isOwnBody) for (const exit of exits(from)) links.push([exit, to]);
  }
  for (const [control, inner] of children)
    for (const child of inner) if (!targets.has(child)) links.push([control, child]);
  return links;
}

function isInside(id, control, places) {
  let place = places.get(id);
  while (place && place !== control) place = places.get(place);
  return place === control;
}

function instancesOf(model, explained) {
  const known = new Set(explained.map((node) => node.id));
  const instances = new Map();
  for (const id of model.nodes.keys()) {
    const base = known.has(id) ? id : baseOf(id);
    if (known.has(base)) instances.set(base, [...(instances.get(base) ?? []), id]);
  }
  return instances;
}

/** Nodes outside of bodies with the same kind, predecessors and readers, in groups. */
function groupsOf(explained, links) {
  const before = new Map();
  const after = new Map();
  for (const [from, to] of links) {
    before.set(to, [...(before.get(to) ?? []), from]);
    after.set(from, [...(after.get(from) ?? []), to]);
  }
  const groups = new Map();
  for (const node of explained) {
    const key = node.inside
      ? node.id
      : JSON.stringify([node.op, (before.get(node.id) ?? []).sort(), (after.get(node.id) ?? []).sort()]);
    groups.set(key, [...(groups.get(key) ?? []), node]);
  }
  return [...groups.values()].flatMap((members) =>
    members.length > MAX_SEPARATE ? [members] : members.map((member) => [member]));
}

function boxesFor(node, members) {
  const instances = members.filter((id) => id !== node.id);
  if (!instances.length) return [{ key: node.id, label: node.id, op: node.op, members: [node.id] }];
  if (instances.length > MAX_SEPARATE) return [stack(node, node.id, instances)];
  return instances.map((id) => ({ key: id, label: id, op: node.op, members: [id] }));
}

function stack(node, label, members) {
  return { key: `${node.id} (${label})`, label, op: node.op, members };
}

function edgesOf(links, boxesOf) {
  const edges = new Map();
  for (const [from, to] of links) {
    const sources = boxesOf.get(from) ?? [];
    const targets = boxesOf.get(to) ?? [];
    for (const source of sources)
      for (const target of targets)
        if (source !== target && isLinked(source, target, sources, targets))
          edges.set(`${source.key}\n${target.key}`, [source.key, target.key]);
  }
  return [...edges.values()];
}

/** Instances of one item are linked to each other only. */
function isLinked(source, target, sources, targets) {
  if (sources.length === 1 || targets.length === 1) return true;
  const itemOf = (box) => box.key.slice(baseOf(box.key).length);
  const items = new Set(sources.map(itemOf));
  const isParallel = targets.every((box) => items.has(itemOf(box))) && items.size === sources.length;
  return !isParallel || itemOf(source) === itemOf(target);
}
