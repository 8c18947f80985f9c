//! Grouping of tensors into blocks, from names, shapes and sizes alone.
//!
//! A block is what a runtime decodes at once, just before it runs: a transformer layer with all its
//! experts, an embedding, a head. There is no list of models and no name that means anything here:
//! renaming a component of all names consistently, except for its digits, changes no block. New
//! models therefore need no pattern.
//!
//! Names form a tree, split at `.`. A *list* is a set of two or more siblings that are numbers, or
//! that are equal except for a number at their end (`layer1`, `layer2`), where most members are no
//! single layer (two modules or two matrices at least) and share most of their inner names with
//! another member. So the parts of a sequence (`mlp.0`, `mlp.2`) are no list. The rule, from the
//! root down:
//!
//! 1. Each member of a list is a block, with all that is below it, other lists included: an expert
//!    stays in its layer.
//! 2. Unless the list is one of *stages*. It is where nested lists whose members are as deep as a
//!    layer (module in module in member: `stages.1.blocks.2.attn.qkv`) hold more than ¼ of it; and
//!    where any nested lists of numbers hold more than half of it and the stages differ in most
//!    shapes (`layer2.0.conv1`). Then the rule goes on inside each member. Experts are shallow, and
//!    their layers have equal shapes.
//! 3. A lone number is a block where it is as deep as a layer and no list of such is below it
//!    (`mtp.layers.0`); otherwise it is a name like any other (`0.auto_model.encoder.layer.3`).
//! 4. What is left in a module on the way to a list, or in one with more than ¾ of the model (and
//!    two matrices): each child with a matrix and at least 1/1024 of the model is a block
//!    (embedding, head); the rest is one block together (norms, scalars), named `module.*` where it
//!    comes from several children.
//!
//! For example `wte`, `h.0.attn.q`, `h.0.mlp.experts.7.up`, `h.1.…`, `norm`, each with `.weight`,
//! become the blocks `h.0`, `h.1`, `norm`, `wte`: the order is the natural one of names (`h.2`
//! before `h.10`), of blocks by their first tensor, since nothing else is known that does not
//! depend on the order of the input.

mod lists;
mod natural;
mod plan;
mod tree;

use super::SourceTensor;

/// What grouping needs to know of a tensor.
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
    let tree = tree::Tree::new(items);
    let lists = lists::Lists::find(&tree, items);
    plan::blocks(&tree, &lists, items)
}
