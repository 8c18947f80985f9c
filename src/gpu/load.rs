//! Loading:
//! `directories → plan → device memory → sections through pinned buffers → tables and tasks`.
//!
//! While sections are copied, the host validates codebooks, output offsets and offsets of tiles
//! (`stored`). Sections of codebooks do not go to a GPU: `part::build_tables` copies what it needs
//! to make decode tables, and frees it afterwards. Matrices in the fast layout come last, after
//! validation: `linear::arrival` moves strips through slots, decodes them, and packs them with less
//! than 256 MB of device memory besides the result. The other arrays of such a block are copied one
//! by one, not as sections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{collections::HashMap, num::NonZero, path::Path, thread};

use rayon::prelude::*;

use super::model::{GpuModel, LoadedBlock, LoadedTensor, ModelInner, Names};
use super::needs::{self, Needs, SectionId, TensorId};
use super::part::{DevicePart, build_tables};
use super::placement::{Plan, Preference};
use super::program::{Cut, GpuProgram};
use super::stored::{Stored, Tensors};
use super::upload::{join_all, readers_each, upload};
use super::{
    device::Device, distribution::Placement, fault::refuse, linear::arrival::FastLoad,
    pinned::HostSection,
};
use crate::progress::{Observer, Stage, advance};
use crate::{Encoding, Model, OpenOptions, Result, open::Slice};

/// Bytes of a GPU's free memory that a model may take without a plan; the rest is for its user.
/// Python has this share and the next one, too (`python/df11/_devices.py`).
pub(super) const fn share_of(free: u64) -> u64 {
    free / 100 * 90
}

/// Bytes that it may take after [`Preference::Auto`] makes a block fast. That only saves time, and
/// leaves more room for activations and caches.
const fn fast_share_of(free: u64) -> u64 {
    free / 3 * 2
}

type HostSections = HashMap<SectionId, Arc<HostSection>>;

/// Options for loading a model onto GPUs.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    plan: Option<Plan>,
    preference: Preference,
    is_unchecked: bool,
}

impl LoadOptions {
    /// Defaults: keeps all blocks resident on one GPU; with several GPUs, uses [`Plan::fit`] with
    /// 90 % of the free memory. Keeps matrices as stored.
    pub const fn new() -> Self {
        Self { plan: None, preference: Preference::Stored, is_unchecked: false }
    }

    /// Sets where each block goes, as [`Plan::fit`] or [`Plan::of`] says.
    #[must_use]
    pub fn plan(mut self, plan: Plan) -> Self {
        self.plan = Some(plan);
        self
    }

    /// Sets the residence of matrices in resident blocks, for [`Linear`](super::Linear).
    /// [`Preference::Auto`] makes blocks fast up to two thirds of the free memory. Cannot be used
    /// with [`LoadOptions::plan`]: a plan sets it itself ([`Plan::prefer`]).
    #[must_use]
    pub const fn residence(mut self, preference: Preference) -> Self {
        self.preference = preference;
        self
    }

    /// Skips the host's validation of codebooks, output offsets and offsets of tiles, so that tests
    /// bring hostile streams to the kernels, which must bear them.
    #[doc(hidden)]
    #[must_use]
    pub const fn without_validation(mut self) -> Self {
        self.is_unchecked = true;
        self
    }

    fn plan_for(&self, needs: &[Needs], devices: &[Device]) -> Result<Plan> {
        let Some(plan) = &self.plan else {
            let shares = |share: fn(u64) -> u64| {
                let free = devices.iter().map(|device| Ok(share(device.free_memory()?)));
                free.collect::<Result<Vec<u64>>>()
            };
            let fast_memory = shares(fast_share_of)?;
            if devices.len() == 1 {
                return Ok(Plan::uniform(needs, false).lay(needs, self.preference, &fast_memory));
            }
            let memory = [&shares(share_of)?[..], &fast_memory];
            return Plan::fit_needs(needs, memory, &vec![true; needs.len()], self.preference);
        };
        if self.preference != Preference::Stored {
            let problem = "a plan and a preference of residence are given";
            return refuse(problem, "give the plan alone, as Plan::prefer makes it");
        }
        if plan.placements().len() != needs.len() {
            let problem = "the plan was made for another model";
            return refuse(problem, "make it for this one, with Plan::fit or Plan::of");
        }
        let (planned, given) = (plan.device_bytes().len(), devices.len());
        if planned != given {
            let problem = format!("the plan is for {planned} GPUs, not {given}");
            return refuse(problem, "give as many devices as it was made for");
        }
        Ok(plan.clone())
    }
}

/// Options for opening a model and loading it onto a GPU, in one call. From
/// [`OpenOptions::device`].
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    open: OpenOptions,
    ordinal: usize,
    load: LoadOptions,
}

impl OpenOptions {
    /// Loads the opened model onto the GPU with this number, as in [`devices`](super::devices).
    ///
    /// ```no_run
    /// # fn main() -> df11::Result<()> {
    /// let model = df11::OpenOptions::new().device(0).open("Llama-3.1-8B.df11")?;
    /// let matrix = model.matrix("model.layers.0.mlp.up_proj.weight")?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn device(self, ordinal: usize) -> DeviceOptions {
        DeviceOptions { open: self, ordinal, load: LoadOptions::new() }
    }
}

impl DeviceOptions {
    /// Sets where blocks go and how matrices lie; without it, as [`LoadOptions::new`] says.
    #[must_use]
    pub fn load(mut self, load: LoadOptions) -> Self {
        self.load = load;
        self
    }

    /// Opens a container, or a folder with all its shards, and loads it onto the GPU.
    ///
    /// # Errors
    /// Same as [`OpenOptions::open`], [`Device::open`] and [`Model::load`].
    pub fn open(&self, path: impl AsRef<Path>) -> Result<GpuModel> {
        let model = self.open.open(path)?;
        model.load(&Device::open(self.ordinal)?, &self.load)
    }
}

impl Model {
    /// Loads the blocks onto a GPU, where they stay compressed.
    ///
    /// Validates codebooks, output offsets and offsets of tiles, and checks checksums while the
    /// sections pass through pinned memory, unless the model was [opened
    /// without](crate::OpenOptions::checksums). Returns when everything is in place. Host memory: 8
    /// MiB of pinned buffers per core, for at most 12 cores, which [`Device`] keeps for the next
    /// load; and what [`GpuModel`] holds.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu) if the memory does not suffice or the GPU fails;
    /// [`Error::Corrupt`](crate::Error::Corrupt) if the container is damaged;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a tensor of a newer version;
    /// [`Error::Parameter`](crate::Error::Parameter) for a plan of another model;
    /// [`Error::Io`](crate::Error::Io).
    pub fn load(&self, device: &Device, options: &LoadOptions) -> Result<GpuModel> {
        self.load_on(std::slice::from_ref(device), options, &())
    }

    /// Loads onto several GPUs at once like [`Model::load`], each block where the plan says.
    /// Reports progress in bytes of sections, and can be cancelled.
    ///
    /// # Errors
    /// Same as [`Model::load`], and [`Error::Cancelled`](crate::Error::Cancelled).
    pub fn load_on(
        &self,
        devices: &[Device],
        options: &LoadOptions,
        observer: &dyn Observer,
    ) -> Result<GpuModel> {
        let needs = needs::of_blocks(self)?;
        let plan = options.plan_for(&needs, devices)?;
        let lying = needs.iter().zip(plan.residences()).map(|(block, &at)| block.footprint(at));
        let placed = lying.zip(plan.placements()).filter(|(_, place)| place.is_some());
        observer.begin(placed.map(|(block, _)| block.loaded_bytes).sum());
        observer.enter(Stage::Load);
        let part = |(index, device)| DevicePart::new(&needs, &plan, index, device);
        let mut parts = devices.iter().enumerate().map(part).collect::<Result<Vec<_>>>()?;
        let readers = readers_each(parts.len());
        let loader = Loader { model: self, plan, needs, readers, observer };
        let (stored, host) = loader.fetch(&parts, !options.is_unchecked)?;
        for part in &mut parts {
            build_tables(&part.device, &part.held.tables, &stored)?;
            part.make_streamer(&loader.needs, &host)?;
        }
        // Loads the matrices for the fast layout, on all GPUs at once.
        let load = &FastLoad { model: self, stored: &stored, readers, observer };
        thread::scope(|scope| {
            join_all(parts.iter_mut().map(|part| scope.spawn(|| part.make_fast(load))).collect())
        })?;
        parts.iter().try_for_each(|part| part.check_arrays(self))?;
        loader.finish(parts, &stored, &host)
    }
}

struct Loader<'m> {
    model: &'m Model,
    plan: Plan,
    needs: Vec<Needs>,
    /// Readers per GPU.
    readers: NonZero<usize>,
    observer: &'m dyn Observer,
}

impl Loader<'_> {
    /// Uploads what becomes resident; meanwhile validates, and pins what stays on the host.
    fn fetch(&self, parts: &[DevicePart], validate: bool) -> Result<(Tensors, HostSections)> {
        let stop = AtomicBool::new(false);
        let upload = |part: &DevicePart| {
            let deliveries = part.deliveries(self.model);
            let count = |bytes| advance(self.observer, bytes);
            // SAFETY: the addresses are those of the sections in the part's device memory.
            #[expect(unsafe_code, reason = "device addresses")]
            unsafe {
                upload(&part.device, &deliveries, self.readers, &stop, &count)
            }
        };
        thread::scope(|scope| {
            let uploads = parts.iter().map(|part| scope.spawn(|| upload(part))).collect();
            let here = self.prepare(parts, validate);
            if here.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            let uploaded = join_all(uploads);
            // Nobody else cancels: an upload stops because of the failure here.
            let here = here?;
            uploaded.map(|()| here)
        })
    }

    /// Reads what the host keeps of each tensor, and pins the sections of streamed blocks.
    fn prepare(&self, parts: &[DevicePart], validate: bool) -> Result<(Tensors, HostSections)> {
        let placed = self.model.blocks().zip(self.plan.placements());
        let ids =
            placed.filter(|(_, place)| place.is_some()).flat_map(|(block, _)| block.tensor_ids());
        let is_alias = |&&id: &&TensorId| self.model.tensor_at(id).encoding() == Encoding::Alias;
        let ids: Vec<&TensorId> = ids.filter(|id| !is_alias(id)).collect();
        let read = |&id| Ok((id, Arc::new(Stored::read(self.model, id, validate)?)));
        let tensors = ids.into_par_iter().map(read).collect::<Result<_>>()?;
        let streamed = (0..parts.len()).flat_map(|part| self.plan.blocks_on(part, true));
        let sections: Vec<SectionId> = streamed
            .flat_map(|block| self.needs[block].stored.sections.iter().map(|&(id, _)| id))
            .collect();
        let pin = |id: SectionId| {
            let (context, shard) = (parts[0].device.context(), &self.model.shards()[id.0]);
            let host = HostSection::new(context, shard, id.1)?;
            advance(self.observer, needs::section_length(self.model, id))?;
            Ok((id, Arc::new(host)))
        };
        Ok((tensors, sections.into_par_iter().map(pin).collect::<Result<_>>()?))
    }

    fn finish(
        self,
        parts: Vec<DevicePart>,
        stored: &Tensors,
        host: &HostSections,
    ) -> Result<GpuModel> {
        let Self { model, plan, .. } = self;
        let parts: Vec<Arc<DevicePart>> = parts.into_iter().map(Arc::new).collect();
        let (mut tensors, mut blocks) = (Vec::<LoadedTensor>::new(), Vec::<LoadedBlock>::new());
        let (mut block_names, mut tensor_names) = (Names::new(), Names::new());
        for (index, (block, place)) in model.blocks().zip(plan.placements()).enumerate() {
            let (first, at) = (tensors.len(), blocks.len());
            block_names.insert(block.name().to_owned(), place.map(|_| at));
            let layout = block.layout()?;
            for ((tensor, &id), range) in
                block.tensors().zip(block.tensor_ids()).zip(&layout.tensors)
            {
                let name = tensor.name().to_owned();
                tensor_names.insert(name.clone(), place.map(|_| tensors.len()));
                if place.is_some() {
                    tensors.push(LoadedTensor {
                        name,
                        dtype: tensor.dtype().expect("known, as the needs were"),
                        shape: tensor.shape(),
                        place: range.clone(),
                        block: at,
                        stored: Arc::clone(&stored[&(id.0, tensor.target().index())]),
                    });
                }
            }
            let &Some(Placement { device, .. }) = place else { continue };
            let cuts = tensors[first..].iter().map(|entry| Cut {
                stored: &entry.stored,
                slice: Slice::of_bytes(0..entry.place.end - entry.place.start),
                to: entry.place.start,
            });
            let (part, cuts) = (&parts[device], cuts.collect::<Vec<_>>());
            let program = GpuProgram::new(part, part.turn(index), &cuts)?;
            let (name, tensors) = (block.name().to_owned(), first..tensors.len());
            blocks.push(LoadedBlock { name, tensors, layout, program });
        }
        let copied_bytes = host.values().map(|section| section.copied_bytes()).sum();
        let inner =
            ModelInner { plan, blocks, tensors, block_names, tensor_names, parts, copied_bytes };
        Ok(GpuModel { inner: Arc::new(inner) })
    }
}
