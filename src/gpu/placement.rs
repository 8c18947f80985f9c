//! Places blocks: decides on which GPU each lies, and whether it is resident there or streamed.

use super::distribution::{Placement, Tally, fill, stream, too_large_to_be_fast};
use super::fault::refuse;
use super::needs::{self, Needs, Residence};
use crate::{Block, Model, Result};

/// The place of each loaded block of a model. Plans are made only from directories, so no GPU is
/// needed to find out what would fit.
///
/// ```
/// # fn main() -> df11::Result<()> {
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
/// use df11::gpu::Plan;
///
/// let model = df11::open(&path)?;
/// let whole = Plan::resident(&model)?;
/// let plan = Plan::fit(&model, &[whole.device_bytes()[0] * 3 / 4])?;
/// assert!(plan.placements().iter().flatten().any(|block| block.streamed));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    placements: Vec<Option<Placement>>,
    residences: Vec<Residence>,
    device_bytes: Vec<u64>,
    host_bytes: u64,
}

impl Plan {
    /// Keeps all blocks resident on one GPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a tensor of a newer version.
    pub fn resident(model: &Model) -> Result<Self> {
        Ok(Self::uniform(&needs::of_blocks(model)?, false))
    }

    /// Streams all blocks through one GPU, which takes the least device memory.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a tensor of a newer version.
    pub fn all_streamed(model: &Model) -> Result<Self> {
        Ok(Self::uniform(&needs::of_blocks(model)?, true))
    }

    /// Places blocks so that no GPU takes more than its number of bytes of `memory`, [room for
    /// outputs](Plan::device_bytes) included.
    ///
    /// If the model fits, all its blocks are resident, in their order; each GPU is filled before
    /// the next one. If it does not, each GPU gets a run of blocks in proportion to its memory, and
    /// as few of them as possible are streamed, spread evenly over its run, so that copies have
    /// time while resident blocks are used. The cost grows with the number of blocks.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if a GPU cannot even hold two slots and two
    /// outputs (the error says how many bytes it needs);
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a tensor of a newer version.
    pub fn fit(model: &Model, memory: &[u64]) -> Result<Self> {
        Self::fit_preferring(model, memory, Preference::Stored)
    }

    /// Places blocks like [`Plan::fit`], with the matrices of resident blocks as the caller
    /// prefers. With [`Preference::Fast`] no block is streamed. With [`Preference::Auto`] all are
    /// fast if they fit, otherwise as many as fit in addition to what [`Plan::fit`] places.
    ///
    /// # Errors
    /// Same as [`Plan::fit`]; [`Error::Parameter`](crate::Error::Parameter) if the model does not
    /// fit in the fast layout, with [`Preference::Fast`].
    pub fn fit_preferring(model: &Model, memory: &[u64], preference: Preference) -> Result<Self> {
        let needs = needs::of_blocks(model)?;
        Self::fit_needs(&needs, [memory; 2], &vec![true; needs.len()], preference)
    }

    /// Places blocks like [`Plan::fit`] if only some of a model's blocks are loaded.
    ///
    /// # Errors
    /// Same as [`Plan::fit`].
    pub fn fit_some(
        model: &Model,
        memory: &[u64],
        mut is_loaded: impl FnMut(Block<'_>) -> bool,
    ) -> Result<Self> {
        let loaded: Vec<bool> = model.blocks().map(&mut is_loaded).collect();
        Self::fit_needs(&needs::of_blocks(model)?, [memory; 2], &loaded, Preference::Stored)
    }

    /// Places each block as the caller says: on which of this many GPUs, resident or streamed.
    /// `None` leaves a block out: it is not loaded, takes no memory, and is not found
    /// ([`GpuModel::block`](super::GpuModel::block)).
    ///
    /// ```
    /// # fn main() -> df11::Result<()> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
    /// use df11::gpu::{Placement, Plan};
    ///
    /// let model = df11::open(&path)?;
    /// // All but the head, on the second of two GPUs.
    /// let plan = Plan::of(&model, 2, |block| {
    ///     (block.name() != "lm_head").then_some(Placement { device: 1, streamed: false })
    /// })?;
    /// assert_eq!(plan.device_bytes()[0], 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if a block is placed on a GPU that does not
    /// exist; [`Error::Unsupported`](crate::Error::Unsupported) for a tensor of a newer version.
    pub fn of(
        model: &Model,
        devices: usize,
        mut place: impl FnMut(Block<'_>) -> Option<Placement>,
    ) -> Result<Self> {
        let placements: Vec<_> = model.blocks().map(&mut place).collect();
        for (block, place) in model.blocks().zip(&placements) {
            if let Some(Placement { device, .. }) = place.filter(|place| place.device >= devices) {
                let problem = format!(
                    "block {:?} is placed on GPU {device} of {devices} in the plan",
                    block.name()
                );
                return refuse(problem, "count GPUs from 0, or plan for more of them");
            }
        }
        Ok(Self::new(&needs::of_blocks(model)?, placements, devices))
    }

    pub(super) fn uniform(blocks: &[Needs], streamed: bool) -> Self {
        Self::new(blocks, vec![Some(Placement { device: 0, streamed }); blocks.len()], 1)
    }

    /// [`Plan::fit`] for blocks with these needs, of which only some are loaded. `fast_memory`: the
    /// bytes of each GPU up to which [`Preference::Auto`] makes blocks fast.
    pub(super) fn fit_needs(
        blocks: &[Needs],
        [memory, fast_memory]: [&[u64]; 2],
        loaded: &[bool],
        preference: Preference,
    ) -> Result<Self> {
        if preference == Preference::Auto {
            let fast = Self::fit_needs(blocks, [fast_memory; 2], loaded, Preference::Fast);
            return fast.or_else(|_| {
                let stored = Self::fit_needs(blocks, [memory; 2], loaded, Preference::Stored)?;
                Ok(stored.lay(blocks, Preference::Auto, fast_memory))
            });
        }
        if memory.is_empty() {
            return refuse("there is no GPU to place blocks on", "name one or more");
        }
        let needs = blocks.iter().zip(loaded).filter_map(|(block, load)| load.then_some(block));
        let needs: Vec<&Needs> = needs.collect();
        let places = if preference == Preference::Fast {
            let fast = fill(&needs, memory, Residence::Fast);
            fast.ok_or_else(|| too_large_to_be_fast(&needs, memory))?
        } else {
            let resident = fill(&needs, memory, Residence::Stored);
            resident.map_or_else(|| stream(&needs, memory), Ok)?
        };
        let mut places = places.into_iter();
        let placements =
            loaded.iter().map(|loaded| if *loaded { places.next() } else { None }).collect();
        Ok(Self::new(blocks, placements, memory.len()).lay(blocks, preference, memory))
    }

    /// Makes a plan with all matrices as stored.
    fn new(blocks: &[Needs], placements: Vec<Option<Placement>>, devices: usize) -> Self {
        let device_bytes = vec![0; devices];
        let plan = Self { placements, residences: Vec::new(), device_bytes, host_bytes: 0 };
        plan.lay(blocks, Preference::Stored, &[])
    }

    /// Lays out the matrices of resident blocks as the caller prefers, whatever this plan said
    /// about them. `memory` has the bytes of each GPU: [`Preference::Auto`] takes the fast layout
    /// for as many blocks as fit, blocks with several matrices first, in the model's order.
    /// [`Preference::Fast`] takes it for all, and ignores `memory`.
    ///
    /// # Errors
    /// [`Error::Parameter`](crate::Error::Parameter) if the model or the number of GPUs is not the
    /// plan's; [`Error::Unsupported`](crate::Error::Unsupported) for a tensor of a newer version.
    pub fn prefer(self, model: &Model, preference: Preference, memory: &[u64]) -> Result<Self> {
        let blocks = needs::of_blocks(model)?;
        let devices = self.device_bytes.len();
        if self.placements.len() != blocks.len()
            || (preference == Preference::Auto && memory.len() != devices)
        {
            let problem = "the plan was made for another model or number of GPUs";
            return refuse(problem, "give the model and the memory that it was made for");
        }
        Ok(self.lay(&blocks, preference, memory))
    }

    /// Chooses the residence of matrices, and adds up the memory. The blocks and GPUs are the
    /// plan's own.
    pub(super) fn lay(mut self, blocks: &[Needs], preference: Preference, memory: &[u64]) -> Self {
        self.residences = vec![Residence::Stored; blocks.len()];
        self.host_bytes = 0;
        let mut tallies = vec![Tally::default(); self.device_bytes.len()];
        for (block, place) in blocks.iter().zip(&self.placements) {
            let &Some(Placement { device, streamed }) = place else { continue };
            tallies[device].add(block, streamed, Residence::Stored);
            self.host_bytes += if streamed { block.stored.bytes } else { 0 };
        }
        // Blocks with several matrices come first: a single matrix is an embedding, of which rows
        // are read, or a head.
        let matrices = |at: usize| blocks[at].fast.as_ref().map_or(0, |fast| fast.matrices.len());
        let mut order: Vec<usize> = (0..blocks.len()).filter(|&at| matrices(at) > 0).collect();
        order.sort_by_key(|&at| matrices(at) < 2);
        for at in order {
            let Some(Placement { device, streamed: false }) = self.placements[at] else { continue };
            let tally = tallies[device].make_fast(&blocks[at]);
            let becomes_fast = match preference {
                Preference::Stored => false,
                Preference::Fast => true,
                Preference::Auto => tally.bytes() <= memory[device],
            };
            if becomes_fast {
                tallies[device] = tally;
                self.residences[at] = Residence::Fast;
            }
        }
        self.device_bytes = tallies.iter().map(Tally::bytes).collect();
        self
    }

    /// The residence of each block's matrices, in the model's order; as stored if the block is not
    /// resident or has no matrix that can be fast.
    pub fn residences(&self) -> &[Residence] {
        &self.residences
    }

    /// The place of each block, in the model's order; `None` if it is not loaded.
    pub fn placements(&self) -> &[Option<Placement>] {
        &self.placements
    }

    /// The blocks of a GPU, resident or streamed, by their index in the model.
    pub(super) fn blocks_on(&self, device: usize, streamed: bool) -> impl Iterator<Item = usize> {
        let wanted = Some(Placement { device, streamed });
        self.placements
            .iter()
            .enumerate()
            .filter(move |(_, place)| **place == wanted)
            .map(|(block, _)| block)
    }

    /// Bytes that each GPU takes: sections, slots, decode tables, tasks, and two outputs of its
    /// largest block, which the caller allocates. Matrices in the fast layout count with the most
    /// bytes that they can take, exceptions included, which is about 1 % more than they usually
    /// take. This does not count what the driver adds (a few hundred MB per process), nor the up to
    /// 256 MB that a load needs to make the fast layout.
    pub fn device_bytes(&self) -> &[u64] {
        &self.device_bytes
    }

    /// Bytes of streamed blocks on the host: pinned page cache if the container's mapping can be
    /// registered, otherwise pinned copies.
    pub fn host_bytes(&self) -> u64 {
        self.host_bytes
    }
}

/// The wanted residence of matrices in resident blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Preference {
    /// As stored, about 10.6 bits per weight: the least memory.
    #[default]
    Stored,
    /// In the fast layout, about 12.1 bits per weight: the least time. A matrix stays as it is
    /// stored if it has too many exceptions, more than 65,536 columns, or 2^32 weights or more;
    /// [`Matrix::residence`](super::Matrix::residence) shows this.
    Fast,
    /// In the fast layout as far as memory allows, otherwise as stored, block by block.
    Auto,
}
