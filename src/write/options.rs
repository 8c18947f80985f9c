//! Choices of compression.

use crate::encoding::gap::Geometry;

/// How BF16 tensors are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// Huffman-coded exponents with a gap array (spec, section 6.3), where that is smaller than raw.
    Gap(Geometry),
    /// Huffman-coded pairs of exponents in tiles (spec, section 6.4), where that is smaller than raw: smaller than `gap`, and faster on a GPU.
    #[default]
    Tile,
    /// As they are.
    Raw,
}

impl Layout {
    /// [`Layout::Gap`] with the geometry that decodes fastest.
    pub fn gap() -> Self {
        Self::Gap(Geometry::default())
    }
}

/// Choices of [`compress`](super::compress()).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CompressOptions {
    /// How BF16 tensors are stored.
    pub layout: Layout,
    /// Replace an output that exists. A folder is replaced only if each file in it has the path of a
    /// new one, is a shard of the one model that lies there, or is a side file that this names.
    pub overwrite: bool,
    /// Decode everything again before the output gets its name, and compare all hashes.
    pub verify: bool,
}

impl Default for CompressOptions {
    fn default() -> Self {
        Self { layout: Layout::default(), overwrite: false, verify: true }
    }
}
