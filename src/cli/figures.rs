//! Sizes and bits of tensors and blocks, as tables show them.

use df11::{Block, Dtype, Encoding, Result, Tensor, hazmat::huffman::Histogram};
use serde_json::{Value, json};

use super::text::{self, Table};

/// Sums over tensors. Aliases count as tensors and elements; their bytes are those of another
/// tensor.
#[derive(Default)]
pub(super) struct Figures {
    pub(super) tensors: u64,
    pub(super) elements: u64,
    /// Decoded bytes of all tensors whose dtype is known.
    pub(super) decoded_bytes: u64,
    pub(super) stored_bytes: u64,
    /// Elements of BF16 tensors that are no aliases, and their stored bytes.
    pub(super) weights: u64,
    weight_bytes: u64,
    /// Entropy of each tensor times its weights, where it was measured.
    entropy_bits: Option<f64>,
}

impl Figures {
    pub(super) fn of<'a>(parts: impl Iterator<Item = &'a Figures>) -> Self {
        parts.fold(Self { entropy_bits: Some(0.0), ..Self::default() }, |sum, one| Self {
            tensors: sum.tensors + one.tensors,
            elements: sum.elements.saturating_add(one.elements),
            decoded_bytes: sum.decoded_bytes.saturating_add(one.decoded_bytes),
            stored_bytes: sum.stored_bytes.saturating_add(one.stored_bytes),
            weights: sum.weights.saturating_add(one.weights),
            weight_bytes: sum.weight_bytes.saturating_add(one.weight_bytes),
            entropy_bits: sum.entropy_bits.zip(one.entropy_bits).map(|(a, b)| a + b),
        })
    }

    /// Without a histogram the entropy is unknown, unless there are no weights.
    pub(super) fn of_tensor(tensor: &Tensor<'_>, histogram: Option<&Histogram>) -> Self {
        let weights = if has_weights(tensor) { tensor.elements() } else { 0 };
        Self {
            tensors: 1,
            elements: tensor.elements(),
            decoded_bytes: tensor.byte_length().unwrap_or(0),
            stored_bytes: tensor.stored_bytes(),
            weights,
            weight_bytes: if weights > 0 { tensor.stored_bytes() } else { 0 },
            entropy_bits: match histogram {
                Some(histogram) => Some(histogram.entropy() * histogram.total() as f64),
                None => (weights == 0).then_some(0.0),
            },
        }
    }

    /// Whether a sum is at its largest value, and may be more.
    pub(super) const fn is_saturated(&self) -> bool {
        self.elements == u64::MAX || self.decoded_bytes == u64::MAX
    }

    pub(super) fn bits_per_weight(&self) -> Option<f64> {
        (self.weights > 0).then(|| 8.0 * self.weight_bytes as f64 / self.weights as f64)
    }

    pub(super) fn entropy(&self) -> Option<f64> {
        self.entropy_bits.filter(|_| self.weights > 0).map(|bits| bits / self.weights as f64)
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "elements": self.elements,
            "saturated": self.is_saturated(),
            "decoded_bytes": self.decoded_bytes,
            "stored_bytes": self.stored_bytes,
            "weights": self.weights,
            "bits_per_weight": self.bits_per_weight(),
            "entropy_bits_per_weight": self.entropy(),
        })
    }
}

/// Whether a tensor has weights of its own, stored in a way that is known.
pub(super) fn has_weights(tensor: &Tensor<'_>) -> bool {
    tensor.dtype() == Some(Dtype::BF16)
        && !matches!(tensor.encoding(), Encoding::Alias | Encoding::Unknown(_))
        && tensor.elements() > 0
}

/// A count that is exact below 2^64 − 1.
fn count(number: u64) -> String {
    if number == u64::MAX { format!("more than {}", u64::MAX - 1) } else { number.to_string() }
}

/// A named line of a table.
pub(super) struct Row {
    pub(super) name: String,
    pub(super) figures: Figures,
}

impl Row {
    /// The row of a block, from those of its tensors.
    pub(super) fn of_block(block: Block<'_>, tensors: &[Self]) -> Self {
        Self { name: block.name().to_owned(), figures: sum_of(tensors) }
    }

    /// The row of a block, for programs.
    pub(super) fn json(&self) -> Value {
        let mut value = self.figures.json();
        value["name"] = json!(self.name);
        value["tensor_count"] = json!(self.figures.tensors);
        value
    }
}

/// The sum of some rows.
pub(super) fn sum_of(rows: &[Row]) -> Figures {
    Figures::of(rows.iter().map(|row| &row.figures))
}

/// The rows of a block's tensors; `measure` gives a tensor's histogram, if it is wanted.
pub(super) fn tensor_rows<'m>(
    block: Block<'m>,
    mut measure: impl FnMut(&Tensor<'m>) -> Result<Option<Histogram>>,
) -> Result<Vec<Row>> {
    block
        .tensors()
        .map(|tensor| {
            let histogram = measure(&tensor)?;
            let figures = Figures::of_tensor(&tensor, histogram.as_ref());
            Ok(Row { name: tensor.name().to_owned(), figures })
        })
        .collect()
}

/// A table of blocks with their sum.
pub(super) fn table(blocks: &[Row], total: &Figures) -> String {
    let mut table = Table::new([
        "block",
        "tensors",
        "elements",
        "decoded",
        "stored",
        "bits a weight",
        "entropy + 8",
    ]);
    let mut add = |name: String, figures: &Figures| {
        table.row([
            name,
            figures.tensors.to_string(),
            count(figures.elements),
            text::bytes(figures.decoded_bytes),
            text::bytes(figures.stored_bytes),
            bits(figures.bits_per_weight()),
            bits(figures.entropy().map(|entropy| entropy + 8.0)),
        ]);
    };
    for block in blocks {
        add(text::printable(&block.name), &block.figures);
    }
    add("total".to_owned(), total);
    table.render()
}

/// Bits, or a dash where there are none or none were measured.
pub(super) fn bits(bits: Option<f64>) -> String {
    bits.map_or_else(|| "–".to_owned(), |bits| format!("{bits:.3}"))
}
