//! Copies from device memory to shared memory.

use crate::{
    block::{Delivery, Origin},
    execute::{Result, Step},
    machine::Fault,
    map::TensorMap,
    program::{Address, PARAMETERS, Source, Space},
    warp::{Mask, ThreadCopy, lanes},
};

impl Step<'_, '_> {
    // ---- copies

    pub(crate) fn copy(
        &mut self,
        to: Address,
        from: Address,
        bytes: u32,
        kept: Source,
    ) -> Result<()> {
        let is_late = self.machine.choose(2) == 0;
        for lane in lanes(self.active) {
            let copy = ThreadCopy {
                to: self.shared_address(to, lane),
                from: self.address(from, lane),
                bytes,
                kept: self.value(kept, lane) as u32,
            };
            if is_late {
                self.warp.threads[lane].open_group.push(copy);
            } else {
                self.finish_copies([copy], lane)?;
            }
        }
        Ok(())
    }

    pub(crate) fn finish_copies(
        &mut self,
        copies: impl IntoIterator<Item = ThreadCopy>,
        lane: usize,
    ) -> Result<()> {
        for copy in copies {
            let mut bytes = vec![0; copy.bytes as usize];
            if copy.kept > copy.bytes {
                return Err(Fault(format!("{} bytes of {}", copy.kept, copy.bytes)));
            }
            let kept = copy.kept as usize;
            if kept > 0 {
                bytes[..kept].copy_from_slice(self.machine.global(copy.from, copy.kept.into())?);
            }
            self.bytes(Space::Shared, copy.to, lane, bytes.len())?.copy_from_slice(&bytes);
        }
        self.machine.note_progress();
        Ok(())
    }

    pub(crate) fn copy_bulk(
        &mut self,
        to: Address,
        from: Address,
        bytes: Source,
        barrier: Address,
        blocks: Option<Source>,
    ) -> Result<()> {
        for lane in lanes(self.active) {
            let delivery = Delivery {
                from: Origin::Memory(self.address(from, lane)),
                blocks: self.receivers(blocks, lane),
                to: self.shared_address(to, lane) as u32,
                bytes: self.value(bytes, lane) as u32,
                barrier: self.shared_address(barrier, lane) as u32,
            };
            self.machine.ask(delivery)?;
        }
        Ok(())
    }

    pub(crate) fn copy_box(
        &mut self,
        to: Address,
        map: Address,
        place: &[Source],
        barrier: Address,
        blocks: Option<Source>,
    ) -> Result<()> {
        for lane in lanes(self.active) {
            let map_address = self.address(map, lane);
            let place = place.iter().map(|&at| i64::from(self.value(at, lane) as i32)).collect();
            let found = self.map(map_address)?;
            let delivery = Delivery {
                bytes: found.box_bytes(),
                from: Origin::Box(found, place),
                blocks: self.receivers(blocks, lane),
                to: self.shared_address(to, lane) as u32,
                barrier: self.shared_address(barrier, lane) as u32,
            };
            self.machine.ask(delivery)?;
        }
        Ok(())
    }

    /// The blocks that a copy writes to: those of the cluster in this mask, or the lane's own.
    fn receivers(&self, mask: Option<Source>, lane: usize) -> Vec<usize> {
        let Some(mask) = mask else { return vec![self.block] };
        let ranks = self.value(mask, lane) as Mask;
        lanes(ranks).map(|rank| self.cluster() + rank).collect()
    }

    /// The tensor map there, in the parameters of the launch.
    pub(crate) fn map(&self, address: u64) -> Result<TensorMap> {
        let place = address.wrapping_sub(PARAMETERS) as usize;
        let bytes = self.machine.launch.parameters.get(place..place.wrapping_add(128));
        TensorMap::read(bytes.ok_or_else(|| Fault("a map that is no parameter".into()))?)
    }
}
