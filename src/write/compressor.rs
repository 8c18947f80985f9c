//! One compression: the two passes over each weights file, and the finished containers.

use std::path::Path;

use super::{
    analysis::{self, FileAnalysis},
    blocks::Blocks,
    config, encode,
    folder::ModelFolder,
    input::Input,
    options::{CompressOptions, Layout},
    output::Output,
    plan::{ContainerPlan, Contents},
    replace::check_file,
    report::Report,
    shard_paths::shard_paths,
};
use crate::{
    Error, OpenOptions, Result,
    format::{self, directory::ShardRecord},
    open::{Cpu, Level},
    progress::{Observer, Stage},
};

/// One compression, from the input to the parts of each container.
pub(super) struct Compressor<'a> {
    pub(super) input: &'a Input<'a>,
    layout: Layout,
    observer: &'a dyn Observer,
    blocks: Blocks,
}

impl<'a> Compressor<'a> {
    pub(super) fn new(input: &'a Input<'a>, layout: Layout, observer: &'a dyn Observer) -> Self {
        Self { input, layout, observer, blocks: Blocks::new(input) }
    }

    /// What goes into each container: into one, or into one for each weights file.
    pub(super) fn shards(&self, single: bool) -> Vec<Contents<'_>> {
        let Input { weights, side, metadata, .. } = self.input;
        let Blocks { of_tensors: blocks, names: block_names } = &self.blocks;
        let metadata = Some(metadata);
        let all = Contents { weights, side, beside: &[], metadata, blocks, block_names };
        if single {
            return vec![all];
        }
        // The first one also has what belongs to no weights file.
        let first = Contents { side: &[], beside: side, ..all };
        if weights.is_empty() {
            return vec![first];
        }
        let shard = |file| {
            let (weights, blocks) = (&weights[file..=file], &blocks[file..=file]);
            match file {
                0 => Contents { weights, blocks, ..first },
                _ => Contents { weights, blocks, beside: &[], metadata: None, ..first },
            }
        };
        (0..weights.len()).map(shard).collect()
    }

    pub(super) fn analyse(&self, shard: &Contents<'_>) -> Result<Vec<FileAnalysis>> {
        self.observer.enter(Stage::Analyse);
        let weights = shard.weights.iter();
        weights.map(|file| analysis::analyse(file, self.layout, self.observer)).collect()
    }

    /// Both passes over one shard; the container lacks its directory still.
    fn write(&self, shard: &Contents<'_>, path: &Path, report: &mut Report) -> Result<Output> {
        let analyses = self.analyse(shard)?;
        let mut plan = ContainerPlan::new(shard, &analyses)?;
        report.add(&plan, plan.file_length());
        let output = Output::create(path, &mut plan)?;
        self.observer.enter(Stage::Encode);
        encode::encode(&plan, &output, self.observer)?;
        self.observer.advance(plan.alias_bytes);
        Ok(output)
    }

    pub(super) fn single(&self, out: &Path, options: &CompressOptions) -> Result<Report> {
        check_file(out)?;
        let mut report = Report::new(self.input, true);
        let mut output = self.write(&self.shards(true)[0], out, &mut report)?;
        let identity = format::identity(output.files());
        output.seal(ShardRecord::new(0, 1, identity))?;
        if options.verify {
            self.verify(output.temporary_path(), 1).map_err(|error| error.in_file(out))?;
        }
        output.finish(options.overwrite)?;
        Ok(report)
    }

    /// Fills a folder, or a part of one. Returns the model's identity too.
    pub(super) fn folder(
        &self,
        folder: &ModelFolder<'_>,
        options: &CompressOptions,
        in_pipeline: bool,
    ) -> Result<(Report, [u8; 32])> {
        let paths = shard_paths(self.input, in_pipeline)?;
        let mut report = Report::new(self.input, false);
        let mut outputs = Vec::new();
        for (shard, path) in self.shards(false).iter().zip(&paths) {
            let mut output = self.write(shard, &folder.path_of(path)?, &mut report)?;
            output.close();
            outputs.push(output);
        }
        let identity = format::identity(outputs.iter().flat_map(Output::files));
        let count = outputs.len() as u64;
        for (index, mut output) in (0..).zip(outputs) {
            output.seal(ShardRecord::new(index, count, identity))?;
            output.finish(false)?;
        }
        config::write_side_files(self.input, folder)?;
        if options.verify {
            self.verify(&folder.path(), count)?;
        }
        Ok((report, identity))
    }

    /// Decodes and compares all, and counts what is there against what went in: shards, files and
    /// tensors.
    fn verify(&self, path: &Path, shards: u64) -> Result<()> {
        self.observer.enter(Stage::Verify);
        // Read, not mapped: pages of a mapping would count as this process's memory.
        let models = OpenOptions::new().memory_map(false).open_all(path)?;
        // Of a pipeline, what belongs to no component; the others were verified when they were
        // written.
        let model = &models.components().last().expect("a model").model;
        let found = model.verify_stage(Level::Full, &Cpu, self.observer)?;
        let weights = &self.input.weights;
        let tensors: u64 = weights.iter().map(|weights| weights.file.tensors.len() as u64).sum();
        let files = (weights.len() + self.input.side.len()) as u64;
        let wanted = [shards, files, tensors];
        let there = [model.shards().len() as u64, found.files, found.tensors];
        if there == wanted && found.unchecked.is_empty() {
            return Ok(());
        }
        let problem = format!("{there:?} shards, files and tensors are there, not {wanted:?}");
        Err(Error::corrupt("directory", 0, problem).in_file(path))
    }
}
