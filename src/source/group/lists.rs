//! Finds siblings with the same structure, which form a list.

use std::collections::{BTreeMap, HashMap};

use super::tree::{Item, NodeId, Tree, components, is_number, stem};

/// The rank from which a module counts as deep as a layer: it has modules in modules.
const LAYER_RANK: u8 = 3;

/// Siblings that repeat one another.
pub(super) struct List {
    members: Vec<NodeId>,
    /// Whether most members are as deep as a layer.
    deep: bool,
    /// Whether the members are told apart by a number at the end of a name, not by a component of
    /// their own.
    glued: bool,
    /// Whether the members are stages, which are divided further.
    pub(super) is_of_stages: bool,
}

/// All lists of a tree, and how much of each subtree they hold.
pub(super) struct Lists {
    all: Vec<List>,
    /// For each node, the list it is a member of.
    member: Vec<Option<usize>>,
    /// For each node, whether a block that is a member, or a lone number, is below it.
    pub(super) blocks_below: Vec<bool>,
    /// For each node, whether it is an only number, as deep as a layer and with no list of such
    /// below it.
    pub(super) lone: Vec<bool>,
    /// For each node, the bytes below it that are in a list of numbers, and in a deep list.
    listed: Vec<u128>,
    layered: Vec<u128>,
    suffixes: Suffixes,
}

impl Lists {
    pub(super) fn find(tree: &Tree, items: &[Item]) -> Self {
        let count = tree.nodes.len();
        let mut lists = Self {
            all: Vec::new(),
            member: vec![None; count],
            blocks_below: vec![false; count],
            lone: vec![false; count],
            listed: vec![0; count],
            layered: vec![0; count],
            suffixes: Suffixes::new(tree, items),
        };
        for node in 0..count {
            lists.find_among_children(tree, node);
        }
        lists.sum(tree);
        for list in 0..lists.all.len() {
            lists.all[list].is_of_stages = lists.holds_lists(tree, &lists.all[list].members);
        }
        lists
    }

    /// The list that a node is a member of.
    pub(super) fn of(&self, node: NodeId) -> Option<&List> {
        self.member[node].map(|list| &self.all[list])
    }

    fn find_among_children(&mut self, tree: &Tree, node: NodeId) {
        let mut numbers = Vec::new();
        let mut stems = BTreeMap::<&str, Vec<NodeId>>::new();
        for child in tree.children(node) {
            let component = tree.nodes[child].component;
            if is_number(component) {
                numbers.push(child);
            } else if let Some(stem) = stem(component) {
                stems.entry(stem).or_default().push(child);
            }
        }
        if let [only] = numbers[..] {
            self.lone[only] = tree.nodes[only].rank >= LAYER_RANK;
        }
        self.add(tree, numbers, false);
        for members in stems.into_values() {
            self.add(tree, members, true);
        }
    }

    fn add(&mut self, tree: &Tree, members: Vec<NodeId>, glued: bool) {
        let most = |test: &dyn Fn(NodeId) -> bool| {
            members.iter().filter(|&&member| test(member)).count() * 2 > members.len()
        };
        let is_composite =
            |member: NodeId| tree.nodes[member].rank >= 2 || tree.matrices(member) >= 2;
        if members.len() < 2 || !most(&is_composite) || !self.suffixes.repeat(tree, &members) {
            return;
        }
        let deep = most(&|member| tree.nodes[member].rank >= LAYER_RANK);
        for &member in &members {
            self.member[member] = Some(self.all.len());
        }
        self.all.push(List { members, deep, glued, is_of_stages: false });
    }

    /// Whether nested lists are what a list consists of: layers by a quarter, since an encoder's
    /// embeddings can outweigh its layers; others, which might be experts, by half and with a
    /// second witness.
    fn holds_lists(&self, tree: &Tree, members: &[NodeId]) -> bool {
        let sum = |parts: &[u128]| members.iter().map(|&member| parts[member]).sum::<u128>();
        let whole: u128 = members.iter().map(|&member| tree.weight(member)).sum();
        sum(&self.layered) * 4 > whole
            || (sum(&self.listed) * 2 > whole && self.suffixes.shapes_differ(tree, members))
    }

    /// Adds up what lists hold, children before their parents; the outermost list of a kind counts.
    fn sum(&mut self, tree: &Tree) {
        for node in (0..tree.nodes.len()).rev() {
            for child in tree.children(node) {
                let list = self.of(child);
                let (numbered, deep) = list.map_or((false, false), |list| (!list.glued, list.deep));
                let is_block = list.is_some() || self.lone[child];
                self.blocks_below[node] |= is_block || self.blocks_below[child];
                let whole = tree.weight(child);
                self.listed[node] += if numbered { whole } else { self.listed[child] };
                self.layered[node] += if deep { whole } else { self.layered[child] };
            }
            self.lone[node] &= self.layered[node] == 0;
        }
    }
}

/// The rest of each tensor's name below each depth, as numbers that are equal where the texts are.
struct Suffixes {
    /// For each tensor in the tree's order, by depth: what follows this many components, and the
    /// same if all numbers were equal, `blocks.0.norm` and `blocks.1.norm`.
    below: Vec<Vec<[u32; 2]>>,
    /// For each tensor in the tree's order, a number for its shape.
    shapes: Vec<u32>,
}

impl Suffixes {
    fn new(tree: &Tree, items: &[Item]) -> Self {
        let (mut parts, mut tails, mut shapes) = (HashMap::new(), HashMap::new(), HashMap::new());
        let mut below = |item: usize| {
            let mut suffixes = vec![[0, 0]];
            let components: Vec<&str> = components(items[item].name).collect();
            for component in components.into_iter().rev() {
                let wild = if is_number(component) { "0" } else { component };
                let [exact, after] = suffixes[suffixes.len() - 1];
                suffixes.push([(component, exact), (wild, after)].map(|(component, tail)| {
                    number(&mut tails, (number(&mut parts, component), tail)) + 1
                }));
            }
            suffixes.reverse();
            suffixes
        };
        let order = || tree.order.iter().copied();
        Self {
            below: order().map(&mut below).collect(),
            shapes: order().map(|item| number(&mut shapes, items[item].shape)).collect(),
        }
    }

    /// Whether most members have more than half of their inner names in common with another one.
    fn repeat(&self, tree: &Tree, members: &[NodeId]) -> bool {
        let mut names = Vec::new();
        for (index, &member) in members.iter().enumerate() {
            let node = &tree.nodes[member];
            names.extend(node.tensors.clone().map(|tensor| {
                let [_, wild] = self.below[tensor][node.depth];
                (wild, index)
            }));
        }
        names.sort_unstable();
        names.dedup();
        let mut shared = vec![(0_usize, 0_usize); members.len()];
        for owners in names.chunk_by(|left, right| left.0 == right.0) {
            for &(_, member) in owners {
                shared[member].0 += usize::from(owners.len() > 1);
                shared[member].1 += 1;
            }
        }
        shared.iter().filter(|(common, all)| common * 2 > *all).count() * 2 > members.len()
    }

    /// Whether tensors of the same inner name mostly differ in shape from member to member.
    fn shapes_differ(&self, tree: &Tree, members: &[NodeId]) -> bool {
        let mut tensors = Vec::new();
        for &member in members {
            let node = &tree.nodes[member];
            tensors.extend(node.tensors.clone().map(|tensor| {
                let [exact, _] = self.below[tensor][node.depth];
                (exact, self.shapes[tensor])
            }));
        }
        tensors.sort_unstable();
        let (mut equal, mut all) = (0, 0);
        for same_name in tensors.chunk_by(|left, right| left.0 == right.0) {
            let same_shape =
                same_name.chunk_by(|left, right| left.1 == right.1).map(<[_]>::len).max();
            equal += same_shape.unwrap_or(1) - 1;
            all += same_name.len() - 1;
        }
        equal * 2 < all
    }
}

/// The number of a key: how many different ones came before it.
fn number<K: std::hash::Hash + Eq>(numbers: &mut HashMap<K, u32>, key: K) -> u32 {
    let next = numbers.len() as u32;
    *numbers.entry(key).or_insert(next)
}
