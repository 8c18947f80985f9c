//! Device memory is memory of the process. What was allocated is known, and nothing else is read or
//! written.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

static ALLOCATIONS: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

fn allocations() -> MutexGuard<'static, BTreeMap<u64, u64>> {
    ALLOCATIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that kernels may use from now on.
pub(crate) fn note(address: u64, bytes: u64) {
    allocations().insert(address, address + bytes);
}

/// Whether it was noted.
pub(crate) fn forget(address: u64) -> bool {
    allocations().remove(&address).is_some()
}

/// The allocations at the start of a launch: ranges in order.
pub(crate) struct Allocations {
    ranges: Vec<(u64, u64)>,
    last: usize,
}

impl Allocations {
    pub(crate) fn now() -> Self {
        Self { ranges: allocations().iter().map(|(&from, &end)| (from, end)).collect(), last: 0 }
    }

    /// Whether these bytes lie in one allocation.
    pub(crate) fn have(&mut self, address: u64, bytes: u64) -> bool {
        let holds = |&(from, end): &(u64, u64)| {
            from <= address && address.checked_add(bytes).is_some_and(|after| after <= end)
        };
        if self.ranges.get(self.last).is_some_and(holds) {
            return true;
        }
        self.last = self.ranges.partition_point(|&(from, _)| from <= address).saturating_sub(1);
        self.ranges.get(self.last).is_some_and(holds)
    }
}
