//! Optimal code lengths under a limit (L. L. Larmore, D. S. Hirschberg, "A fast algorithm for
//! optimal length-limited Huffman codes", J. ACM 37(3), 1990).
//!
//! Each level's list holds the symbols, by ascending count, merged with the packages: pairs of
//! neighbours in the list of the level below. The `2n − 2` lightest items of the top list,
//! unpacked, hold each symbol as often as its code has bits.
//!
//! Ties: symbols of equal count stand in ascending order (so the lower symbol gets the longer
//! code), and a symbol stands before a package of equal weight. With that the lengths are a
//! function of the counts alone.

use std::ops::Add;

/// The code lengths for these counts; 0 for symbols that do not occur, 1 for a symbol that occurs
/// alone.
///
/// `2^limit` must be at least the number of symbols that occur, and `limit` times the sum of all
/// counts must fit their type. Costs O(symbols × limit): some microseconds for 256 symbols, some
/// 100 for 4096.
pub(crate) fn code_lengths<T: Copy + Ord + Default + Add<Output = T>>(
    counts: &[T],
    limit: u8,
) -> Vec<u8> {
    let mut lengths = vec![0; counts.len()];
    let mut symbols: Vec<usize> =
        (0..counts.len()).filter(|&symbol| counts[symbol] > T::default()).collect();
    symbols.sort_by_key(|&symbol| counts[symbol]);
    if let [only] = symbols[..] {
        lengths[only] = 1;
    }
    if symbols.len() < 2 {
        return lengths;
    }
    let leaves: Vec<T> = symbols.iter().map(|&symbol| counts[symbol]).collect();
    let levels = levels(&leaves, limit);
    let mut wanted = 2 * symbols.len() - 2;
    for is_leaf in levels.iter().rev() {
        let chosen = is_leaf[..wanted].iter().filter(|&&leaf| leaf).count();
        for &symbol in &symbols[..chosen] {
            lengths[symbol] += 1;
        }
        wanted = 2 * (wanted - chosen);
    }
    lengths
}

/// For each level, from the longest codes up: which items of its list are symbols (the others are
/// packages).
fn levels<T: Copy + Ord + Add<Output = T>>(leaves: &[T], limit: u8) -> Vec<Vec<bool>> {
    let mut list = leaves.to_vec();
    let mut levels = vec![vec![true; leaves.len()]];
    for _ in 1..limit {
        let packages = list.as_chunks::<2>().0.iter().map(|&[a, b]| a + b);
        let (merged, is_leaf) = merge(leaves, packages);
        levels.push(is_leaf);
        list = merged;
    }
    levels
}

/// Merges two ascending lists, leaves first among equals, and says which items are leaves.
fn merge<T: Copy + Ord>(leaves: &[T], packages: impl Iterator<Item = T>) -> (Vec<T>, Vec<bool>) {
    let (mut list, mut is_leaf) =
        (Vec::with_capacity(2 * leaves.len()), Vec::with_capacity(2 * leaves.len()));
    let mut leaves = leaves.iter().copied().peekable();
    for package in packages {
        while let Some(leaf) = leaves.next_if(|&leaf| leaf <= package) {
            list.push(leaf);
            is_leaf.push(true);
        }
        list.push(package);
        is_leaf.push(false);
    }
    is_leaf.resize(is_leaf.len() + leaves.len(), true);
    list.extend(leaves);
    (list, is_leaf)
}
