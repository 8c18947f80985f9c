//! The rule itself, from the root down.

use std::{collections::HashMap, ops::Range};

use super::{
    GroupedBlock, Item,
    lists::Lists,
    natural::components,
    tree::{NodeId, Tree},
};

/// A module alone in its block holds at least one part in this many of the model.
const SMALLEST_ALONE: u128 = 1024;
/// The longest label of a block in bytes, short of room for what makes it unique.
const MAX_LABEL_BYTES: usize = 4096 - 24;

/// The blocks of a tree, in natural order of their first tensors.
pub(super) fn blocks(tree: &Tree, lists: &Lists, items: &[Item]) -> Vec<GroupedBlock> {
    let mut plan = Grouping { tree, lists, parts: Vec::new(), open: vec![0] };
    while let Some(module) = plan.open.pop() {
        plan.divide(module);
    }
    plan.parts.sort_by_key(|part| part.tensors[0].start);
    let mut labels = HashMap::new();
    let block = |part: PlannedBlock| {
        let label = unique(part.label(tree, items), &mut labels);
        let tensors = part.tensors.into_iter().flatten().map(|position| tree.order[position]);
        GroupedBlock { name: label, tensors: tensors.collect() }
    };
    plan.parts.into_iter().map(block).collect()
}

/// A block: a whole node, or several small ones in a module.
struct PlannedBlock {
    node: NodeId,
    is_rest: bool,
    /// Positions in the tree's order.
    tensors: Vec<Range<usize>>,
}

struct Grouping<'a> {
    tree: &'a Tree<'a>,
    lists: &'a Lists,
    parts: Vec<PlannedBlock>,
    /// Modules that are yet to be divided.
    open: Vec<NodeId>,
}

enum Step {
    Open,
    Alone,
    Rest,
}

impl Grouping<'_> {
    fn divide(&mut self, module: NodeId) {
        let mut rest = Vec::new();
        let mut last = module;
        for child in self.tree.children(module) {
            match self.step(child) {
                Step::Open => self.open.push(child),
                Step::Alone => self.add(child, false, vec![self.tree.nodes[child].tensors.clone()]),
                Step::Rest => {
                    rest.push(self.tree.nodes[child].tensors.clone());
                    last = child;
                }
            }
        }
        let own = self.own_tensors(module);
        let is_one_child = own.is_empty() && rest.len() == 1;
        if !own.is_empty() {
            rest.insert(0, own);
        }
        if !rest.is_empty() {
            self.add(if is_one_child { last } else { module }, !is_one_child, rest);
        }
    }

    fn step(&self, child: NodeId) -> Step {
        let has_blocks = self.lists.has_blocks_below(child);
        match self.lists.of(child) {
            Some(list) if list.is_of_stages && has_blocks => Step::Open,
            Some(_) => Step::Alone,
            None if self.lists.is_lone_layer(child) => Step::Alone,
            None if has_blocks || self.is_most(child) => Step::Open,
            None if self.is_large(child) => Step::Alone,
            None => Step::Rest,
        }
    }

    fn add(&mut self, node: NodeId, is_rest: bool, tensors: Vec<Range<usize>>) {
        self.parts.push(PlannedBlock { node, is_rest, tensors });
    }

    /// The tensor, if any, whose name is that of the module itself.
    fn own_tensors(&self, module: NodeId) -> Range<usize> {
        let Range { start, end } = self.tree.nodes[module].tensors;
        start
            ..self
                .tree
                .children(module)
                .next()
                .map_or(end, |child| self.tree.nodes[child].tensors.start)
    }

    /// Whether a node is most of the model, and there is something in it to divide.
    fn is_most(&self, node: NodeId) -> bool {
        self.tree.matrices(node) >= 2 && self.tree.weight(node) * 4 > self.tree.weight(0) * 3
    }

    fn is_large(&self, node: NodeId) -> bool {
        self.tree.matrices(node) > 0
            && self.tree.weight(node) * SMALLEST_ALONE >= self.tree.weight(0)
    }
}

impl PlannedBlock {
    fn label(&self, tree: &Tree, items: &[Item]) -> String {
        let node = &tree.nodes[self.node];
        let name = items[tree.order[node.tensors.start]].name;
        let length: usize =
            components(name).take(node.depth).map(|component| component.len() + 1).sum();
        let mut end = length.saturating_sub(1).min(MAX_LABEL_BYTES);
        while !name.is_char_boundary(end) {
            end -= 1;
        }
        match (&name[..end], self.is_rest) {
            ("", _) => "*".to_owned(),
            (path, true) => format!("{path}.*"),
            (path, false) => path.to_owned(),
        }
    }
}

/// Labels coincide only where names are odd: cut off, or like `*` and `.x`. Remembering the last
/// number of each keeps this linear.
fn unique(label: String, uses: &mut HashMap<String, u64>) -> String {
    let mut count = uses.get(&label).copied().unwrap_or(0);
    let mut candidate = label.clone();
    while uses.contains_key(&candidate) {
        count += 1;
        candidate = format!("{label}~{count}");
    }
    uses.insert(label, count.max(1));
    uses.entry(candidate.clone()).or_insert(1);
    candidate
}
