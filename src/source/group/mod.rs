//! Groups tensors into blocks, using only names, shapes and sizes.
//!
//! A block is what a runtime decodes at once, just before it runs: a transformer layer with all its
//! experts, an embedding, a head. There is no list of models, and no name has a special meaning: if
//! a component is renamed consistently in all names, except for its digits, blocks stay the same.
//! So new models need no pattern.
//!
//! Names form a tree, split at `.`. A *list* is a set of two or more siblings that are numbers, or
//! that are equal except for a number at their end (`layer1`, `layer2`), where most members are no
//! single layer (two modules or two matrices at least) and share most of their inner names with
//! another member. So the parts of a sequence (`mlp.0`, `mlp.2`) are no list. The rule, from the
//! root down:
//!
//! 1. Each member of a list is a block, with all that is below it, other lists included: an expert
//!    stays in its layer.
//! 2. A list of *stages* is an exception: the rule continues inside each member. A list is one of
//!    stages if nested lists whose members are as deep as a layer (module in module in member:
//!    `stages.1.blocks.2.attn.qkv`) hold more than ¼ of it; or if any nested lists of numbers hold
//!    more than half of it and the stages differ in most shapes (`layer2.0.conv1`). Experts are
//!    shallow, and their layers have equal shapes.
//! 3. A lone number is a block if it is as deep as a layer and no list of layers is below it
//!    (`mtp.layers.0`); otherwise it is a name like any other (`0.auto_model.encoder.layer.3`).
//! 4. The rest concerns modules on the way to a list, and modules with more than ¾ of the model
//!    (and two matrices). Of what is left in them, each child with a matrix and at least 1/1024 of
//!    the model is a block (embedding, head); everything else together is one block (norms,
//!    scalars), named `module.*` if it comes from several children.
//!
//! For example `wte`, `h.0.attn.q`, `h.0.mlp.experts.7.up`, `h.1.…`, `norm`, each with `.weight`,
//! become the blocks `h.0`, `h.1`, `norm`, `wte`. Blocks are in the natural order of the names of
//! their first tensors (`h.2` before `h.10`), because nothing else is known that does not depend on
//! the input's order.

mod lists;
mod tree;

use std::{collections::HashMap, ops::Range};

pub use self::tree::Item;
use self::{
    lists::Lists,
    tree::{NodeId, Tree, components},
};

/// A module alone in its block holds at least one part in this many of the model.
const SMALLEST_ALONE: u128 = 1024;
/// The longest label of a block in bytes, short of room for what makes it unique.
const MAX_LABEL_BYTES: usize = 4096 - 24;

/// Tensors that are decoded together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupedBlock {
    /// A unique label of 1 to 4096 bytes: the path of the module, or `path.*` for several small
    /// ones in it.
    pub name: String,
    /// Indices into the input, in natural order of the names.
    pub tensors: Vec<usize>,
}

/// Divides tensors into blocks: each is in exactly one.
///
/// The result depends on the set of tensors, not on their order. O(n log n) for n tensors, in time
/// and memory, since only the first 32 components of a name are looked at.
pub fn group(items: &[Item]) -> Vec<GroupedBlock> {
    let tree = Tree::new(items);
    let lists = Lists::find(&tree, items);
    let mut grouping = Grouping { tree: &tree, lists: &lists, parts: Vec::new(), open: vec![0] };
    while let Some(module) = grouping.open.pop() {
        grouping.divide(module);
    }
    grouping.parts.sort_by_key(|part| part.tensors[0].start);
    let mut labels = HashMap::new();
    let block = |part: PlannedBlock| {
        let label = unique(part.label(&tree, items), &mut labels);
        let tensors = part.tensors.into_iter().flatten().map(|position| tree.order[position]);
        GroupedBlock { name: label, tensors: tensors.collect() }
    };
    grouping.parts.into_iter().map(block).collect()
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

enum ChildRole {
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
                ChildRole::Open => self.open.push(child),
                ChildRole::Alone => {
                    let tensors = vec![self.tree.nodes[child].tensors.clone()];
                    self.parts.push(PlannedBlock { node: child, is_rest: false, tensors });
                }
                ChildRole::Rest => {
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
            let node = if is_one_child { last } else { module };
            self.parts.push(PlannedBlock { node, is_rest: !is_one_child, tensors: rest });
        }
    }

    fn step(&self, child: NodeId) -> ChildRole {
        let has_blocks = self.lists.blocks_below[child];
        match self.lists.of(child) {
            Some(list) if list.is_of_stages && has_blocks => ChildRole::Open,
            Some(_) => ChildRole::Alone,
            None if self.lists.lone[child] => ChildRole::Alone,
            None if has_blocks || self.is_most(child) => ChildRole::Open,
            None if self.is_large(child) => ChildRole::Alone,
            None => ChildRole::Rest,
        }
    }

    /// The tensor, if any, whose name is that of the module itself.
    fn own_tensors(&self, module: NodeId) -> Range<usize> {
        let Range { start, end } = self.tree.nodes[module].tensors;
        let child = self.tree.children(module).next();
        start..child.map_or(end, |child| self.tree.nodes[child].tensors.start)
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
