//! Loading:
//! `directories → plan → device memory → sections through pinned buffers → tables and tasks`, and
//! beside the sections validation.
//! Matrices that are to be in the fast layout come last, once they are validated.

use std::{
    collections::HashMap,
    num::NonZero,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use rayon::prelude::*;

use super::{
    Device, GpuModel, Placement, Plan, Preference,
    host_section::HostSection,
    linear::FastLoad,
    loaded::{BlockEntry, Inner, Names, TensorEntry},
    memory::Buffer,
    needs::{self, Needs, SectionId, target_of},
    part::Part,
    route::{Cut, Route},
    stored::{self, Tensors},
    task::Task,
    upload::{self, default_readers, first_cause},
};
use crate::{
    Error, Model, Result,
    open::Slice,
    progress::{Observer, Stage, advance},
};

/// Of the free memory of several GPUs, what a model may take unless a plan says otherwise; the rest
/// is for what runs it.
const SHARE_PERCENT: u64 = 90;

type HostSections = HashMap<SectionId, Arc<HostSection>>;

/// How a model is loaded onto GPUs.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    readers: Option<NonZero<usize>>,
    plan: Option<Plan>,
    preference: Preference,
    validate: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl LoadOptions {
    /// A reader for each core, up to 12; all blocks resident where there is one GPU, and what
    /// [`Plan::fit`] makes of 90 % of the free memory where there are several; matrices as they are
    /// stored.
    pub const fn new() -> Self {
        Self { readers: None, plan: None, preference: Preference::Stored, validate: true }
    }

    /// How many threads read the containers, each with 8 MiB of pinned memory that the [`Device`]
    /// keeps for the next load.
    #[must_use]
    pub const fn readers(mut self, readers: NonZero<usize>) -> Self {
        self.readers = Some(readers);
        self
    }

    /// Where each block goes, as [`Plan::fit`] or [`Plan::of`] says.
    #[must_use]
    pub fn plan(mut self, plan: Plan) -> Self {
        self.plan = Some(plan);
        self
    }

    /// How the matrices of resident blocks shall lie on the GPU, for [`Linear`](super::Linear).
    /// With [`Preference::Auto`] 90 % of the free memory is made use of. Not with
    /// [`LoadOptions::plan`]: a plan says it itself ([`Plan::prefer`]).
    #[must_use]
    pub const fn residence(mut self, preference: Preference) -> Self {
        self.preference = preference;
        self
    }

    /// Leaves out the host's validation of codebooks, output offsets and offsets of tiles, so that
    /// tests bring hostile streams to the kernels, which must bear them.
    #[doc(hidden)]
    #[must_use]
    pub const fn without_validation(mut self) -> Self {
        self.validate = false;
        self
    }

    fn plan_for(&self, needs: &[Needs], devices: &[Device]) -> Result<Plan> {
        let plan = match &self.plan {
            Some(_) if self.preference != Preference::Stored => {
                let problem = "a plan and a preference of residence are given";
                return Err(Error::parameter(
                    problem,
                    "give the plan alone, as Plan::prefer makes it",
                ));
            }
            Some(plan) => plan.clone(),
            None => self.make_plan(needs, devices)?,
        };
        if plan.placements().len() != needs.len() {
            let problem = "the plan was made for another model";
            return Err(Error::parameter(
                problem,
                "make it for this one, with Plan::fit or Plan::of",
            ));
        }
        if plan.device_bytes().len() != devices.len() {
            let problem = format!(
                "the plan is for {} GPUs, not {}",
                plan.device_bytes().len(),
                devices.len()
            );
            return Err(Error::parameter(problem, "give as many devices as it was made for"));
        }
        Ok(plan)
    }

    fn make_plan(&self, needs: &[Needs], devices: &[Device]) -> Result<Plan> {
        let is_asked = devices.len() > 1 || self.preference == Preference::Auto;
        let share = |device: &Device| Ok(device.free_memory()? / 100 * SHARE_PERCENT);
        let free =
            if is_asked { devices.iter().map(share).collect::<Result<_>>()? } else { Vec::new() };
        match devices {
            [_] => Plan::uniform(needs, false).prefer_needs(needs, self.preference, &free),
            _ => Plan::fit_needs(needs, &free, &vec![true; needs.len()], self.preference),
        }
    }
}

impl Model {
    /// Loads the blocks onto a GPU, where they stay compressed.
    ///
    /// Codebooks, output offsets and offsets of tiles are validated; checksums are checked while
    /// the sections pass through pinned memory, unless the model was [opened
    /// without](crate::OpenOptions::checksums). Returns when everything is in place. Host memory:
    /// the pinned buffers of [`LoadOptions::readers`], and what [`GpuModel`] holds.
    ///
    /// # Errors
    /// [`Error::Gpu`] if the memory does not suffice or the GPU fails; [`Error::Corrupt`] if the
    /// container is damaged; [`Error::Unsupported`] for a tensor of a newer version;
    /// [`Error::Parameter`] for a plan of another model; [`Error::Io`].
    pub fn load(&self, device: &Device, options: &LoadOptions) -> Result<GpuModel> {
        self.load_on(std::slice::from_ref(device), options, &())
    }

    /// As [`Model::load`], onto several GPUs at once, block by block where the plan says; with
    /// progress, in bytes of sections, and it can be cancelled.
    ///
    /// # Errors
    /// As [`Model::load`], and [`Error::Cancelled`].
    pub fn load_on(
        &self,
        devices: &[Device],
        options: &LoadOptions,
        observer: &dyn Observer,
    ) -> Result<GpuModel> {
        let needs = needs::of_blocks(self)?;
        let plan = options.plan_for(&needs, devices)?;
        let loaded = (0..needs.len()).filter(|&block| plan.placements()[block].is_some());
        observer.begin(
            loaded.map(|block| needs[block].loaded_bytes(self, plan.residences()[block])).sum(),
        );
        observer.enter(Stage::Load);
        Loader::new(self, plan, needs, devices, observer)?.load(options)
    }
}

/// A load under way.
struct Loader<'m> {
    model: &'m Model,
    plan: Plan,
    needs: Vec<Needs>,
    parts: Vec<Part>,
    observer: &'m dyn Observer,
}

impl<'m> Loader<'m> {
    /// Allocates device memory.
    fn new(
        model: &'m Model,
        plan: Plan,
        needs: Vec<Needs>,
        devices: &[Device],
        observer: &'m dyn Observer,
    ) -> Result<Self> {
        let part = |(index, device)| Part::new(model, &needs, &plan, index, device);
        let parts = devices.iter().enumerate().map(part).collect::<Result<_>>()?;
        Ok(Self { model, plan, needs, parts, observer })
    }

    fn load(mut self, options: &LoadOptions) -> Result<GpuModel> {
        let (tensors, host) = self.fetch(options)?;
        for part in &mut self.parts {
            part.build_tables(&tensors)?;
            part.make_streamer(&host)?;
        }
        self.make_fast(options, &tensors)?;
        self.parts.iter().try_for_each(|part| part.check_arrays(self.model))?;
        self.finish(&tensors, &host)
    }

    fn readers(&self, options: &LoadOptions) -> NonZero<usize> {
        let readers =
            options.readers.unwrap_or_else(default_readers).get() / self.parts.len().max(1);
        NonZero::new(readers).unwrap_or(NonZero::<usize>::MIN)
    }

    /// Loads the matrices that are to be in the fast layout, on all GPUs at once.
    fn make_fast(&mut self, options: &LoadOptions, stored: &Tensors) -> Result<()> {
        let load = FastLoad {
            model: self.model,
            stored,
            readers: self.readers(options),
            observer: self.observer,
        };
        thread::scope(|scope| {
            let load = &load;
            let parts = self.parts.iter_mut();
            let threads: Vec<_> = parts.map(|part| scope.spawn(|| part.make_fast(load))).collect();
            first_cause(
                threads.into_iter().map(|thread| thread.join().expect("a load does not panic")),
            )
        })
    }

    /// Uploads what becomes resident; beside that, validates what the host can and pins what stays
    /// there.
    fn fetch(&self, options: &LoadOptions) -> Result<(Tensors, HostSections)> {
        let stop = AtomicBool::new(false);
        let readers = self.readers(options);
        thread::scope(|scope| {
            let upload = |part: &Part| {
                let deliveries = part.deliveries(self.model);
                // SAFETY: the addresses are those of the sections in the part's device memory.
                #[expect(unsafe_code, reason = "device addresses")]
                unsafe {
                    upload::upload(&part.device, &deliveries, readers, &stop, self.observer)
                }
            };
            let uploads: Vec<_> =
                self.parts.iter().map(|part| scope.spawn(move || upload(part))).collect();
            let here = self.prepare(options.validate);
            if here.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            let uploaded =
                uploads.into_iter().map(|thread| thread.join().expect("an upload does not panic"));
            let uploaded = first_cause(uploaded);
            // Nobody else cancels: an upload that was stopped is the consequence of the failure
            // here.
            let here = here?;
            uploaded.map(|()| here)
        })
    }

    fn prepare(&self, validate: bool) -> Result<(Tensors, HostSections)> {
        let blocks =
            self.model.blocks().zip(self.plan.placements()).filter(|(_, place)| place.is_some());
        let tensors = blocks.flat_map(|(block, _)| block.tensor_ids()).copied();
        let tensors = stored::read_all(self.model, tensors, validate)?;
        Ok((tensors, self.pin_streamed()?))
    }

    /// Pins the sections of streamed blocks.
    fn pin_streamed(&self) -> Result<HostSections> {
        let streamed = (0..self.parts.len()).flat_map(|part| self.plan.blocks_on(part, true));
        let sections: Vec<SectionId> =
            streamed.flat_map(|block| self.needs[block].sections.iter().copied()).collect();
        let pin = |(shard, section): SectionId| {
            let host =
                HostSection::new(&self.parts[0].device, &self.model.shards()[shard], section)?;
            advance(self.observer, needs::section_length(self.model, (shard, section)))?;
            Ok(((shard, section), Arc::new(host)))
        };
        sections.into_par_iter().map(pin).collect()
    }

    fn finish(self, tensors: &Tensors, host: &HostSections) -> Result<GpuModel> {
        let mut tasks: Vec<Vec<Task>> = vec![Vec::new(); self.parts.len()];
        let mut blocks = Vec::with_capacity(self.needs.len());
        let (mut block_names, mut entries) = (Names::new(), Names::new());
        for (index, (block, place)) in self.model.blocks().zip(self.plan.placements()).enumerate() {
            block_names.insert(block.name().to_owned(), place.map(|_| blocks.len()));
            let &Some(Placement { device: part, .. }) = place else {
                entries.extend(block.tensors().map(|tensor| (tensor.name().to_owned(), None)));
                continue;
            };
            let names = block.tensors().map(|tensor| tensor.name().to_owned()).collect();
            let layout = block.layout()?;
            let ids = block.tensor_ids().iter();
            let stored: Vec<_> = ids.map(|&id| &tensors[&target_of(self.model, id)]).collect();
            let cuts = stored.iter().zip(&layout.tensors).map(|(stored, range)| Cut {
                stored,
                slice: Slice::of_bytes(0..range.end - range.start),
                to: range.start,
            });
            let cuts: Vec<Cut<'_>> = cuts.collect();
            let on = &self.parts[part];
            let route = Route::new(on, on.turn(index), &cuts, &mut tasks[part])?;
            for (stored, tensor) in stored.into_iter().zip(block.tensors()) {
                let entry = TensorEntry {
                    dtype: tensor.dtype().expect("known, as the needs were"),
                    shape: tensor.shape(),
                    bytes: tensor.byte_length()?,
                    block: blocks.len(),
                    stored: Arc::clone(stored),
                };
                entries.insert(tensor.name().to_owned(), Some(entry));
            }
            blocks.push(BlockEntry {
                name: block.name().to_owned(),
                tensors: names,
                layout,
                part,
                route,
            });
        }
        let streams = self.parts.iter().map(|part| part.device.copies());
        let tasks = streams.zip(&tasks).map(|(stream, tasks)| Buffer::of(stream, tasks));
        let tasks = tasks.collect::<Result<_>>()?;
        let copied = host.values().filter(|section| !section.is_mapped());
        let copied_bytes = copied.map(|section| section.bytes().len() as u64).sum();
        let (plan, parts) = (self.plan, self.parts);
        Ok(GpuModel::new(Inner {
            plan,
            blocks,
            block_names,
            tensors: entries,
            parts,
            tasks,
            copied_bytes,
        }))
    }
}
