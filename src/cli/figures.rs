//! Sizes and bits of tensors and blocks, as tables and documents show them.

use df11::{
    Block, Dtype, Encoding, Result, Tensor,
    hazmat::{huffman::Histogram, tile::FloatSplit},
};
use serde_json::{Value, json};

use super::text;

/// Figures of a tensor, or sums over several. Aliases count as tensors and elements;
/// their bytes are those of another tensor.
#[derive(Default)]
pub(super) struct Figures {
    pub(super) name: String,
    pub(super) tensors: u64,
    elements: u64,
    /// Decoded bytes of all tensors whose dtype is known.
    pub(super) decoded_bytes: u64,
    stored_bytes: u64,
    /// Elements of BF16 tensors that are no aliases, and their stored bytes.
    pub(super) weights: u64,
    weight_bytes: u64,
    /// Their bits that are stored as they are.
    kept_bits: u64,
    /// Entropy of each tensor times its weights, if it was measured.
    entropy_bits: Option<f64>,
}

impl Figures {
    pub(super) fn sum<'a>(
        name: impl Into<String>,
        parts: impl IntoIterator<Item = &'a Self>,
    ) -> Self {
        let none = Self { name: name.into(), entropy_bits: Some(0.0), ..Self::default() };
        parts.into_iter().fold(none, |sum, one| Self {
            name: sum.name,
            tensors: sum.tensors + one.tensors,
            elements: sum.elements.saturating_add(one.elements),
            decoded_bytes: sum.decoded_bytes.saturating_add(one.decoded_bytes),
            stored_bytes: sum.stored_bytes.saturating_add(one.stored_bytes),
            weights: sum.weights.saturating_add(one.weights),
            weight_bytes: sum.weight_bytes.saturating_add(one.weight_bytes),
            kept_bits: sum.kept_bits.saturating_add(one.kept_bits),
            entropy_bits: sum.entropy_bits.zip(one.entropy_bits).map(|(a, b)| a + b),
        })
    }

    /// Without a histogram the entropy is unknown, unless there are no weights.
    fn of_tensor(tensor: &Tensor<'_>, histogram: Option<&Histogram>) -> Self {
        let weights = if has_weights(tensor) { tensor.elements() } else { 0 };
        Self {
            name: tensor.name().to_owned(),
            tensors: 1,
            elements: tensor.elements(),
            decoded_bytes: tensor.byte_length().unwrap_or(0),
            stored_bytes: tensor.stored_bytes(),
            weights,
            weight_bytes: if weights > 0 { tensor.stored_bytes() } else { 0 },
            kept_bits: weights.saturating_mul(kept_bits(tensor).into()),
            entropy_bits: match histogram {
                Some(histogram) => Some(histogram.entropy() * histogram.total() as f64),
                None => (weights == 0).then_some(0.0),
            },
        }
    }

    pub(super) fn bits_per_weight(&self) -> Option<f64> {
        (self.weights > 0).then(|| 8.0 * self.weight_bytes as f64 / self.weights as f64)
    }

    /// The fewest bits that a weight can take: sign and mantissa, and the entropy of the exponents
    /// of its tensor.
    pub(super) fn information(&self) -> Option<f64> {
        self.entropy().zip(self.kept_bits()).map(|(entropy, kept)| entropy + kept)
    }

    /// Bits of a weight that are stored as they are, sign and mantissa: 8, or 4 of what was FP8.
    pub(super) fn kept_bits(&self) -> Option<f64> {
        (self.weights > 0).then(|| self.kept_bits as f64 / self.weights as f64)
    }

    /// Entropy of exponents in bits per weight, each tensor's own.
    pub(super) fn entropy(&self) -> Option<f64> {
        self.entropy_bits.filter(|_| self.weights > 0).map(|bits| bits / self.weights as f64)
    }

    /// Cells of a table: stored bytes, bits per weight, and the entropy limit; a dash if there are
    /// no weights or none were measured.
    pub(super) fn cells(&self) -> [String; 3] {
        let bits = |bits: Option<f64>| bits.map_or("–".to_owned(), |bits| format!("{bits:.3}"));
        [text::bytes(self.stored_bytes), bits(self.bits_per_weight()), bits(self.information())]
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "elements": self.elements,
            // At its largest value a sum may be more.
            "saturated": self.elements == u64::MAX || self.decoded_bytes == u64::MAX,
            "decoded_bytes": self.decoded_bytes,
            "stored_bytes": self.stored_bytes,
            "weights": self.weights,
            "bits_per_weight": self.bits_per_weight(),
            "kept_bits_per_weight": self.kept_bits(),
            "entropy_bits_per_weight": self.entropy(),
        })
    }
}

/// A block, and its tensors.
pub(super) struct BlockFigures {
    pub(super) total: Figures,
    pub(super) tensors: Vec<Figures>,
}

impl BlockFigures {
    /// `measure` gives a tensor's histogram, if it is wanted.
    pub(super) fn new<'m>(
        block: Block<'m>,
        mut measure: impl FnMut(&Tensor<'m>) -> Result<Option<Histogram>>,
    ) -> Result<Self> {
        let figures = |tensor| Ok(Figures::of_tensor(&tensor, measure(&tensor)?.as_ref()));
        let tensors: Vec<_> = block.tensors().map(figures).collect::<Result<_>>()?;
        Ok(Self { total: Figures::sum(block.name(), &tensors), tensors })
    }

    pub(super) fn json(&self) -> Value {
        let mut value = self.total.json();
        value["name"] = json!(self.total.name);
        value["tensor_count"] = json!(self.total.tensors);
        value
    }
}

/// The sum of all blocks.
pub(super) fn total(blocks: &[BlockFigures]) -> Figures {
    Figures::sum("total", blocks.iter().map(|block| &block.total))
}

/// Whether a tensor has weights of its own, stored in a way that is known and without another
/// model.
pub(super) fn has_weights(tensor: &Tensor<'_>) -> bool {
    tensor.dtype() == Some(Dtype::BF16)
        && !matches!(tensor.encoding(), Encoding::Alias | Encoding::Delta | Encoding::Unknown(_))
        && tensor.elements() > 0
}

/// Bits of a BF16 weight that are stored as they are.
fn kept_bits(tensor: &Tensor<'_>) -> u32 {
    let split = match tensor.encoding() {
        // The only one of BF16.
        Encoding::Float => FloatSplit::all_of(Dtype::BF16)[0],
        _ => FloatSplit::BF16,
    };
    split.kept_bits()
}

/// A table of blocks with their sum.
pub(super) fn table(blocks: &[BlockFigures], total: &Figures) -> String {
    let header =
        ["block", "tensors", "elements", "decoded", "stored", "bits/weight", "entropy limit"];
    let row = |figures: &Figures| {
        let [stored, bits, information] = figures.cells();
        [
            text::printable(&figures.name),
            figures.tensors.to_string(),
            count(figures.elements),
            text::bytes(figures.decoded_bytes),
            stored,
            bits,
            information,
        ]
    };
    text::table(header, blocks.iter().map(|block| &block.total).chain([total]).map(row))
}

/// A count that is exact below 2^64 − 1.
fn count(number: u64) -> String {
    if number == u64::MAX { format!("more than {}", u64::MAX - 1) } else { number.to_string() }
}
