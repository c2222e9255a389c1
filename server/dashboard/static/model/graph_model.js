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
  const explained = model.explanation?.nodes ?? [];
  const links = linksOf(explained, model.explanation?.edges ?? []);
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
  for (const node of model.nodes.values()) // appended later: the explanation does not have them
    if (!boxesOf.has(node.id) && !boxesOf.has(baseOf(node.id)))
      boxes.push({ key: node.id, label: node.id, op: node.op, members: [node.id] });
  return { boxes, edges: edgesOf(links, boxesOf) };
}

/** Edges between nodes of the program: into bodies, through them, and out of them. */
function linksOf(explained, edges) {
  const children = new Map();
  for (const node of explained)
    if (node.inside) children.set(node.inside, [...(children.get(node.inside) ?? []), node.id]);
  const sources = new Set(edges.map((edge) => edge.from));
  const targets = new Map(explained.map((node) => [node.id, false]));
  const places = new Map(explained.map((node) => [node.id, node.inside]));
  for (const edge of edges)
    if (places.get(edge.from) === places.get(edge.to)) targets.set(edge.to, true);
  const exits = (id) => {
    const inner = children.get(id);
    if (!inner) return [id];
    const last = inner.filter((child) => !sources.has(child));
    return (last.length ? last : inner).flatMap(exits);
  };
  const links = [];
  for (const edge of edges) for (const exit of exits(edge.from)) links.push([exit, edge.to]);
  for (const [control, inner] of children)
    for (const child of inner) if (!targets.get(child)) links.push([control, child]);
  return links;
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
    const key = node.inside || (!before.has(node.id) && !after.has(node.id))
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
