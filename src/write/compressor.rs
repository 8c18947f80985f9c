//! One compression: the two passes over each weights file, and the finished containers.

use std::{collections::BTreeMap, path::Path};

use super::{
    analysis::{self, FileAnalysis},
    blocks::Blocks,
    config, encode,
    folder::ModelFolder,
    input::{Input, Side},
    options::{CompressOptions, Layout},
    output::{ClosedOutput, Output},
    plan::{ContainerPlan, Contents},
    replace::check_file,
    report::Report,
    shard_paths::shard_paths,
};
use crate::{
    Error, OpenOptions, Result, format,
    open::{Cpu, Level},
    progress::{Observer, Stage},
};

/// The weights files, by index, and the side files of one container.
pub(super) struct ShardSource<'a> {
    pub(super) weights: Vec<usize>,
    side: &'a [Side<'a>],
    beside: &'a [Side<'a>],
    metadata: Option<&'a BTreeMap<String, String>>,
}

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

    pub(super) fn shards(&self, single: bool) -> Vec<ShardSource<'a>> {
        let files = 0..self.input.weights.len();
        let (side, metadata) = (&*self.input.side, Some(&self.input.metadata));
        if single {
            return vec![ShardSource { weights: files.collect(), side, beside: &[], metadata }];
        }
        if files.is_empty() {
            return vec![ShardSource { weights: Vec::new(), side: &[], beside: side, metadata }];
        }
        let shard = |file| {
            let weights = vec![file];
            match file {
                0 => ShardSource { weights, side: &[], beside: side, metadata },
                _ => ShardSource { weights, side: &[], beside: &[], metadata: None },
            }
        };
        files.map(shard).collect()
    }

    /// Bytes of the first pass over all files, as the observer counts them.
    pub(super) fn analysed_bytes(&self) -> u64 {
        self.input.weights.iter().map(|file| analysis::bytes(file, self.layout)).sum()
    }

    pub(super) fn analyse(&self, shard: &ShardSource<'_>) -> Result<Vec<FileAnalysis>> {
        self.observer.enter(Stage::Analyse);
        let weights = shard.weights.iter().map(|&file| &self.input.weights[file]);
        weights.map(|file| analysis::analyse(file, self.layout, self.observer)).collect()
    }

    pub(super) fn contents<'b>(
        &'b self,
        shard: &ShardSource<'b>,
        analyses: &'b [FileAnalysis],
    ) -> Result<Contents<'b>> {
        let files = shard.weights.iter().map(|&file| &self.input.weights[file]);
        Ok(Contents {
            weights: files.zip(analyses).collect(),
            side: hashed(shard.side)?,
            beside: hashed(shard.beside)?,
            metadata: shard.metadata,
            blocks: shard
                .weights
                .iter()
                .map(|&file| self.blocks.of_tensors[file].clone())
                .collect(),
            block_names: &self.blocks.names,
        })
    }

    /// Both passes over one shard; the container lacks its directory still.
    fn write(&self, shard: &ShardSource<'_>, path: &Path, report: &mut Report) -> Result<Output> {
        let analyses = self.analyse(shard)?;
        let mut plan = ContainerPlan::new(&self.contents(shard, &analyses)?)?;
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
        output.seal(0, 1, identity)?;
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
            outputs.push(self.write(shard, &folder.path_of(path)?, &mut report)?.close());
        }
        let identity = format::identity(outputs.iter().flat_map(ClosedOutput::files));
        let count = outputs.len() as u64;
        for (index, output) in outputs.into_iter().enumerate() {
            let mut output = output.open()?;
            output.seal(index as u64, count, identity)?;
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

/// Side files, each with its hash.
fn hashed<'a>(files: &'a [Side<'a>]) -> Result<Vec<(&'a Side<'a>, [u8; 32])>> {
    files.iter().map(|file| Ok((file, file.hash()?))).collect()
}
