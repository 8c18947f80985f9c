//! What compression would make: the way to the plan, and no further.

use std::path::Path;

use super::{
    analysis::{self, FileAnalysis},
    compress::{Compressor, ShardSource, shard_path},
    input::Input,
    options::Layout,
    outline::{self, Draft},
    plan::Plan,
    report::Report,
};
use crate::{Error, Model, Result, paths::is_container, progress::Observer, source::Source};

/// What [`compress`](super::compress()) would make, without making it: the first pass alone, and exact sizes.
///
/// # Errors
/// As [`compress`](super::compress()), but for writing.
pub fn estimate(source: &Source, out: &Path, layout: Layout, observer: &dyn Observer) -> Result<Estimate> {
    let input = Input::of_source(source);
    let compressor = Compressor::new(&input, layout, observer);
    observer.begin(compressor.analysed_bytes());
    Estimate::new(&compressor, out, |shard| compressor.analyse(shard))
}

/// As [`estimate`], but no weight is read, so that the safetensors headers alone need to be there: codes are assumed to take
/// `exponent_bits` bits a weight (2.6 to 2.7 in trained models), and no tensor equals another one. Some milliseconds.
///
/// # Errors
/// As [`estimate`], and [`Error::Parameter`] where the bits are not within 1 to 8.
pub fn estimate_headers(source: &Source, out: &Path, layout: Layout, exponent_bits: f64) -> Result<Estimate> {
    if !(1.0..=8.0).contains(&exponent_bits) {
        let problem = format!("{exponent_bits} bits for the code of an exponent");
        return Err(Error::parameter(problem, "name some from 1 to 8; trained models have 2.6 to 2.7"));
    }
    let input = Input::of_source(source);
    let compressor = Compressor::new(&input, layout, &());
    let mut estimate = Estimate::new(&compressor, out, |shard| {
        let files = shard.weights.iter().map(|&file| &input.weights[file]);
        files.map(|file| analysis::assume(file, layout, exponent_bits)).collect()
    })?;
    let note = format!("no weight was read: codes of {exponent_bits} bits a weight are assumed");
    estimate.report.notes.push(note);
    Ok(estimate)
}

/// What compression would make.
#[derive(Debug)]
pub struct Estimate {
    /// Its sizes.
    pub report: Report,
    drafts: Vec<Draft>,
}

impl Estimate {
    fn new(
        compressor: &Compressor<'_>,
        out: &Path,
        analyse: impl Fn(&ShardSource<'_>) -> Result<Vec<FileAnalysis>>,
    ) -> Result<Self> {
        let single = is_container(out);
        let mut report = Report::new(compressor.input, single);
        let mut drafts = Vec::new();
        for shard in compressor.shards(single) {
            let analyses = analyse(&shard)?;
            let plan = Plan::new(&compressor.contents(&shard, &analyses)?)?;
            report.add(&plan, plan.file_length());
            let file = &compressor.input.weights[shard.weights[0]].file;
            drafts.push(Draft::new(
                if single { out.to_owned() } else { out.join(shard_path(&file.path)) },
                plan,
            ));
        }
        Ok(Self { report, drafts })
    }

    /// What opening the output would give, without arrays: for what asks directories alone, as `gpu::Plan` does. Decoding finds damage. Costs
    /// some microseconds a tensor.
    ///
    /// # Errors
    /// As [`open`](crate::open()), but for reading: where the files together break a rule of the format.
    pub fn outline(&self) -> Result<Model> {
        outline::open(&self.drafts)
    }
}
