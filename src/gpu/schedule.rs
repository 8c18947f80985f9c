//! Which slot a streamed block is decoded from, and what is copied ahead: decided on the host,
//! without a GPU.

use super::distribution::SLOTS;

/// What the slots hold, or will hold when the copies that were started are done. Blocks are
/// numbered in the order in which they are used, which starts anew after the last one.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    blocks: usize,
    holds: [Option<usize>; SLOTS],
    /// The slot that was decoded from last.
    last: usize,
}

/// What one use of a block takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// The slot to decode from.
    pub(super) slot: usize,
    /// Whether the block must be copied into it first.
    pub(super) fill: bool,
    /// A slot to copy another block into, after what still reads it, and that block.
    pub(super) ahead: Option<(usize, usize)>,
}

impl Schedule {
    /// For as many blocks, with empty slots.
    pub(super) fn new(blocks: usize) -> Self {
        Self { blocks, holds: [None; SLOTS], last: SLOTS - 1 }
    }

    /// Plans the use of a block.
    pub(super) fn take(&mut self, block: usize) -> Step {
        let held = self.holds.iter().position(|&held| held == Some(block));
        // The block before may still be read from its slot; the one before that is done soonest.
        let slot = held.unwrap_or((self.last + 1) % SLOTS);
        self.holds[slot] = Some(block);
        self.last = slot;
        let next = (block + 1) % self.blocks;
        let ahead = (!self.holds.contains(&Some(next))).then(|| {
            let other = (slot + 1) % SLOTS;
            self.holds[other] = Some(next);
            (other, next)
        });
        Step { slot, fill: held.is_none(), ahead }
    }

    /// Forgets all content, after a failure.
    pub(super) fn forget(&mut self) {
        self.holds = [None; SLOTS];
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{SLOTS, Schedule, Step};

    #[test]
    fn blocks_in_order_are_copied_once_each_and_ahead() {
        let mut schedule = Schedule::new(3);
        assert_eq!(schedule.take(0), Step { slot: 0, fill: true, ahead: Some((1, 1)) });
        assert_eq!(schedule.take(1), Step { slot: 1, fill: false, ahead: Some((0, 2)) });
        assert_eq!(schedule.take(2), Step { slot: 0, fill: false, ahead: Some((1, 0)) });
        assert_eq!(schedule.take(0), Step { slot: 1, fill: false, ahead: Some((0, 1)) });
    }

    #[test]
    fn few_blocks_stay_where_they_are() {
        let mut one = Schedule::new(1);
        assert_eq!(one.take(0), Step { slot: 0, fill: true, ahead: None });
        assert_eq!(one.take(0), Step { slot: 0, fill: false, ahead: None });
        let mut two = Schedule::new(2);
        assert_eq!(two.take(0).ahead, Some((1, 1)));
        (0..6).for_each(|block| {
            assert!(matches!(two.take(block % 2), Step { fill: false, ahead: None, .. }));
        });
    }

    proptest! {
        /// Whatever the order of use: a block is decoded from the slot that was last filled with
        /// it, and what is copied ahead goes into another slot than the one in use.
        #[test]
        fn any_order_reads_what_was_copied(
            count in 1usize..6,
            uses in prop::collection::vec(0usize..6, 1..200),
        ) {
            let mut schedule = Schedule::new(count);
            let mut content = [None; SLOTS];
            for block in uses.into_iter().map(|block| block % count) {
                let step = schedule.take(block);
                if step.fill {
                    content[step.slot] = Some(block);
                }
                prop_assert_eq!(content[step.slot], Some(block));
                if let Some((slot, next)) = step.ahead {
                    prop_assert!(slot != step.slot && next == (block + 1) % count);
                    content[slot] = Some(next);
                }
                prop_assert!(count == 1 || content.contains(&Some((block + 1) % count)));
            }
        }
    }
}
