//! Weights of every sort of histogram.

use df11::hazmat::{bf16, gap::GapGeometry, tile};

use crate::bytes::{Bytes, Random};

/// A geometry from one byte.
pub fn geometry(bytes: &mut Bytes<'_>) -> GapGeometry {
    geometry_of(bytes.u8())
}

/// A geometry by its number.
pub fn geometry_of(choice: u8) -> GapGeometry {
    let (per_thread, per_block) =
        ([8, 16, 32, 64][usize::from(choice % 4)], 64 << (choice / 4 % 5));
    GapGeometry::new(per_thread, per_block).expect("one of the geometries of the format")
}

/// A geometry of tiles for these weights, the last of which are cut off where need be; none if all
/// would be.
pub fn tile_geometry(choice: u8, weights: &mut Vec<u8>) -> Option<tile::TileGeometry> {
    let geometry = if choice.is_multiple_of(3) {
        tile::TileGeometry::vector(weights.len() as u64 / 2)
    } else {
        let columns = (8 * (1 + u64::from(choice) % 70)).min(weights.len() as u64 / 16 * 8);
        let rows = (weights.len() as u64 / 2).checked_div(columns)?;
        weights.truncate((2 * rows * columns) as usize);
        tile::TileGeometry::new(256, columns, rows * columns)
    };
    Some(geometry.expect("a geometry"))
}

/// Little-endian weights: at least one, and at most `most`.
///
/// The table of the fast decoder is used from 16384 weights on; a third of all inputs has as many,
/// if `most` allows.
pub fn weights(bytes: &mut Bytes<'_>, most: usize) -> Vec<u8> {
    let shape = bytes.u8();
    let count = match shape / 8 % 3 {
        0 => 1 + bytes.index(300),
        1 => 1 + bytes.index(9000),
        _ => 16_000 + bytes.index(8_000),
    }
    .min(most);
    let mut random = Random(bytes.u64());
    let mut exponent: Box<dyn FnMut() -> u8> = match shape % 8 {
        0 => {
            let only = bytes.u8();
            Box::new(move || only)
        }
        1 => {
            // Ever rarer exponents, as in a Fibonacci sequence or a steeper one: codes of 1 to 16
            // bits.
            let (first, steepness) = (bytes.u8(), u64::from(bytes.u8() % 3));
            Box::new(move || {
                let bits =
                    random.draw() & random.draw() | if steepness == 0 { random.draw() } else { 0 };
                first.wrapping_add(bits.leading_ones() as u8 * (1 + steepness as u8))
            })
        }
        2 => Box::new(move || random.draw() as u8),
        3 => {
            let used = 1 + u64::from(bytes.u8());
            Box::new(move || (random.draw() % used) as u8)
        }
        // A bell around 120, as in a trained tensor.
        4 => Box::new(move || 113 + (random.draw().count_ones() / 5) as u8),
        5 => {
            // Runs: one half of the tensor has short codes, the other long ones.
            let (a, b, mut left) = (bytes.u8(), bytes.u8(), bytes.index(count));
            Box::new(move || {
                left = left.saturating_sub(1);
                if left > 0 { a } else { b.wrapping_add(random.draw().leading_zeros() as u8) }
            })
        }
        6 => {
            // A fixed order of exponents from the fuzzer's own bytes, again and again.
            let pattern = bytes.run(64).to_vec();
            let pattern = if pattern.is_empty() { vec![0] } else { pattern };
            let mut next = pattern.into_iter().cycle();
            Box::new(move || next.next().expect("a cycle"))
        }
        _ => {
            // Exponents with counts of 1, 2, 4, ...: the longest codes that a histogram can ask
            // for, in order.
            let first = bytes.u8();
            let mut index = 0u32;
            Box::new(move || {
                index += 1;
                first.wrapping_add(index.trailing_zeros() as u8)
            })
        }
    };
    let mut plane = Random(u64::from(bytes.u8()) + 1);
    (0..count).flat_map(|_| bf16::weight(exponent(), plane.draw() as u8).to_le_bytes()).collect()
}
