//! A tree of the components of names, in natural order, which answers the rule's questions about
//! subtrees.

use std::ops::Range;

use crate::source::safetensors::SourceTensor;

/// The properties of a tensor by which it is grouped.
#[derive(Clone, Copy, Debug)]
pub struct Item<'a> {
    /// The name; names should be unique.
    pub name: &'a str,
    /// The dimensions.
    pub shape: &'a [u64],
    /// The size in bytes.
    pub bytes: u64,
}

impl<'a> From<&'a SourceTensor> for Item<'a> {
    fn from(tensor: &'a SourceTensor) -> Self {
        Self { name: &tensor.name, shape: &tensor.shape, bytes: tensor.length }
    }
}

/// Most components into which a name is split; the last one takes all that follows.
const MAX_DEPTH: usize = 32;

/// The components of a name: one at least, [`MAX_DEPTH`] at most.
pub(super) fn components(name: &str) -> impl Iterator<Item = &str> {
    name.splitn(MAX_DEPTH, '.')
}

/// Key that sorts names in natural order: component by component, runs of digits by their value,
/// and components that are equal in this sense (`01`, `1`) by their bytes.
fn natural_key(name: &str) -> Vec<u8> {
    let mut key = Vec::new();
    for component in components(name) {
        let bytes = component.as_bytes();
        for run in bytes.chunk_by(|a, b| a.is_ascii_digit() && b.is_ascii_digit()) {
            if run[0].is_ascii_digit() {
                let zeros = run.iter().take_while(|&&digit| digit == b'0').count();
                key.push(b'0');
                key.extend((run.len() - zeros).to_be_bytes());
                key.extend(&run[zeros..]);
            } else {
                key.push(run[0]);
            }
        }
        // Names have no NUL.
        key.extend([&[0], bytes, &[0]].concat());
    }
    key
}

/// Whether a component is an index.
pub(super) fn is_number(component: &str) -> bool {
    !component.is_empty() && component.bytes().all(|byte| byte.is_ascii_digit())
}

/// The text before the number at the end of a component, if there are both.
pub(super) fn stem(component: &str) -> Option<&str> {
    let stem = component.trim_end_matches(|c: char| c.is_ascii_digit());
    (!stem.is_empty() && stem.len() < component.len()).then_some(stem)
}

/// Where a node is in [`Tree::nodes`]; the root is 0.
pub(super) type NodeId = usize;

/// A component of a name, with all tensors below it.
pub(super) struct Node<'a> {
    pub(super) component: &'a str,
    /// How many components lead here.
    pub(super) depth: usize,
    /// The node after the last one below this one.
    pub(super) stop: NodeId,
    /// Positions in [`Tree::order`].
    pub(super) tensors: Range<usize>,
    /// How deep modules are nested in this one, which is 0 for a tensor and 1 for a module with
    /// tensors only. Modules with a single child do not count. A linear layer is 1, an attention 2,
    /// a transformer layer 3.
    pub(super) rank: u8,
}

/// All names as a tree. Built in O(n log n); at most 32 nodes a tensor.
pub(super) struct Tree<'a> {
    pub(super) nodes: Vec<Node<'a>>,
    /// Indices of the items, in natural order of their names.
    pub(super) order: Vec<usize>,
    /// Sums over `order`, one longer: weights and matrices before each position.
    weights: Vec<u128>,
    matrices: Vec<usize>,
}

impl<'a> Tree<'a> {
    pub(super) fn new(items: &[Item<'a>]) -> Self {
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_by_cached_key(|&index| natural_key(items[index].name));
        let sorted = || order.iter().map(|&index| &items[index]);
        // An empty tensor weighs a byte, so that a list of them is a list all the same.
        let weights = running_sums(sorted().map(|item| u128::from(item.bytes.max(1))));
        let matrices = running_sums(sorted().map(|item| usize::from(is_matrix(item.shape))));
        let nodes = build(sorted().map(|item| item.name));
        let mut tree = Self { nodes, order, weights, matrices };
        tree.rank();
        tree
    }

    /// Fills in the ranks, children before their parents.
    fn rank(&mut self) {
        for node in (0..self.nodes.len()).rev() {
            let (mut children, mut modules, mut highest) = (0, 0, 0);
            for child in self.children(node) {
                children += 1;
                modules += usize::from(self.nodes[child].stop > child + 1);
                highest = highest.max(self.nodes[child].rank);
            }
            self.nodes[node].rank = match (children, modules) {
                (0, _) => 0,
                (1, 1) => highest,
                _ => highest + 1,
            };
        }
    }

    /// The nodes directly below a node, in natural order.
    pub(super) fn children(&self, node: NodeId) -> impl Iterator<Item = NodeId> {
        let stop = self.nodes[node].stop;
        let first = Some(node + 1).filter(|&child| child < stop);
        std::iter::successors(first, move |&child| {
            Some(self.nodes[child].stop).filter(|&next| next < stop)
        })
    }

    /// The bytes below a node.
    pub(super) fn weight(&self, node: NodeId) -> u128 {
        let Range { start, end } = self.nodes[node].tensors;
        self.weights[end] - self.weights[start]
    }

    /// The number of tensors below a node that are matrices.
    pub(super) fn matrices(&self, node: NodeId) -> usize {
        let Range { start, end } = self.nodes[node].tensors;
        self.matrices[end] - self.matrices[start]
    }
}

fn running_sums<T: Copy + Default + std::ops::Add<Output = T>>(
    values: impl Iterator<Item = T>,
) -> Vec<T> {
    let sums = values.scan(T::default(), |sum, value| {
        *sum = *sum + value;
        Some(*sum)
    });
    std::iter::once(T::default()).chain(sums).collect()
}

/// Whether two dimensions are more than one: `[1, 1, 768]` is a vector.
fn is_matrix(shape: &[u64]) -> bool {
    shape.iter().filter(|&&dimension| dimension > 1).count() >= 2
}

/// The nodes in preorder of sorted names, each of which shares a path with the one before it.
fn build<'a>(names: impl Iterator<Item = &'a str>) -> Vec<Node<'a>> {
    let new =
        |component, depth, start| Node { component, depth, stop: 0, tensors: start..0, rank: 0 };
    let mut nodes = vec![new("", 0, 0)];
    let mut path = vec![0];
    let close = |nodes: &mut Vec<Node>, closed: &[NodeId], end: usize| {
        for &node in closed {
            nodes[node].stop = nodes.len();
            nodes[node].tensors.end = end;
        }
    };
    let mut count = 0;
    for name in names {
        let shared = path[1..]
            .iter()
            .zip(components(name))
            .take_while(|&(&node, part)| nodes[node].component == part);
        let depth = 1 + shared.count();
        close(&mut nodes, &path[depth..], count);
        path.truncate(depth);
        for part in components(name).skip(depth - 1) {
            nodes.push(new(part, path.len(), count));
            path.push(nodes.len() - 1);
        }
        count += 1;
    }
    close(&mut nodes, &path, count);
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_count_modules_in_modules() {
        let names = [
            "l.0.attn.q.weight",
            "l.0.attn.o.weight",
            "l.0.norm.weight",
            "l.0.mlp.wrap.up.weight",
            "l.0.mlp.wrap.up.weight.scale",
            "head.weight",
            "head.bias",
            "scale",
        ];
        let items: Vec<_> =
            names.iter().map(|name| Item { name, shape: &[2, 2], bytes: 8 }).collect();
        let tree = Tree::new(&items);
        let rank =
            |component| tree.nodes.iter().find(|node| node.component == component).unwrap().rank;
        assert_eq!(
            (rank("scale"), rank("head"), rank("attn"), rank("0"), rank("l")),
            (0, 1, 2, 3, 3)
        );
        assert_eq!((rank("wrap"), rank("up")), (1, 1));
        let children: Vec<_> = tree.children(0).map(|node| tree.nodes[node].component).collect();
        assert_eq!(children, ["head", "l", "scale"]);
        assert_eq!((tree.weight(0), tree.matrices(0)), (64, 8));
    }

    #[test]
    fn numbers_compare_by_value() {
        let compare = |left: &str, right: &str| natural_key(left).cmp(&natural_key(right));
        let long = format!("a.{}", "9".repeat(4000));
        let names = [
            "", ".", "..", "0", "00", "1", "2.x", "10", "a", "a.2", "a.b", "a2", "a2.b", "a10",
            "a10b", "b",
        ];
        for (i, left) in names.iter().enumerate() {
            for (j, right) in names.iter().enumerate() {
                assert_eq!(compare(left, right), i.cmp(&j), "{left:?} {right:?}");
            }
        }
        assert!(compare(&long, "a.18446744073709551616").is_gt());
    }

    #[test]
    fn stems_end_before_the_number() {
        assert_eq!(stem("layer12"), Some("layer"));
        assert_eq!(stem("encoder_layer_0"), Some("encoder_layer_"));
        for component in ["12", "layer", "conv1d", ""] {
            assert_eq!(stem(component), None, "{component}");
        }
        assert!(is_number("007") && !is_number("") && !is_number("1a") && !is_number("٣"));
    }
}
