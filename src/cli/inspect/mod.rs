//! `df11 inspect`: shows what is in a container.

mod html;
mod picture;
mod report;

use std::{
    iter,
    path::{Path, PathBuf},
};

use clap::{ArgGroup, Args, ValueEnum};
use df11::{
    Error, Model, Models, Observer, OpenOptions, Stage, Tensor,
    hazmat::{histogram, huffman::Histogram, write_file},
    source::Component,
};
use serde_json::Value;

use super::{
    answer::{Answer, Failure},
    figures::{self, BlockFigures, Figures, has_weights},
    session::{Session, Threads},
    text::printable,
};

/// Weights are decoded without a request if that takes a fraction of a second.
const AUTO_BYTES: u64 = 256 << 20;

const AFTER_HELP: &str = "\
Examples:
  df11 inspect Llama-3.1-8B.df11
  df11 inspect Llama-3.1-8B.df11 --entropy --histogram
  df11 inspect Llama-3.1-8B.df11 --picture llama.svg
  df11 inspect Llama-3.1-8B.df11 --html llama.html    a page with a search
  df11 inspect gap.df11 tile.df11 --html both.html    two containers compared
  df11 inspect Llama-3.1-8B.df11 --tensors --json | jq '.blocks[0].tensors'

The entropy limit is the fewest bits that a weight can take with one code per tensor: 8 for sign \
and mantissa (4 in BF16 that was FP8), and the entropy of the tensor's exponents.";

/// Show what a container holds: blocks, tensors, bits, exponents
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
#[command(group = ArgGroup::new("outputs").args(["picture", "html"]).multiple(true))]
pub(super) struct Inspect {
    /// A container, or the folder of a model or pipeline
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// A second container or folder, to compare with the first on the page of --html
    #[arg(value_name = "OTHER", requires = "html")]
    other: Option<PathBuf>,
    /// List the tensors of each block
    #[arg(long)]
    tensors: bool,
    /// Measure the entropy of the exponents, which decodes all weights: always if no WHEN is given;
    /// auto stands for models of up to 256 MiB
    #[arg(
        long, value_enum, value_name = "WHEN", default_value_t = When::Auto, num_args = 0..=1,
        default_missing_value = "always", require_equals = true
    )]
    entropy: When,
    /// Show how often each exponent occurs (decodes all weights)
    #[arg(long)]
    histogram: bool,
    /// Draw exponents, and bits per weight by block, as SVG (decodes all weights)
    #[arg(long, value_name = "FILE.svg")]
    picture: Option<PathBuf>,
    /// Write a self-contained page for a browser (decodes all weights, unless --entropy=never)
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Replace an earlier picture or page
    #[arg(long, requires = "outputs")]
    force: bool,
    #[command(flatten)]
    threads: Threads,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum When {
    Auto,
    Always,
    Never,
}

/// Findings on all models at a path.
struct Findings<'m> {
    path: &'m Path,
    models: &'m Models,
    parts: Vec<Part<'m>>,
}

/// Findings on a model.
struct Part<'m> {
    model: &'m Model,
    /// Its folder in a pipeline; otherwise empty.
    folder: &'m str,
    total: Figures,
    blocks: Vec<BlockFigures>,
    /// Exponents of all weights, if they were decoded.
    exponents: Option<Histogram>,
}

/// The JSON of `df11 inspect` on a model, whose weights it does not read.
///
/// # Errors
/// [`Error::Corrupt`] if the model's directory is damaged.
pub fn describe(model: &Model, source: &Path, tensors: bool) -> df11::Result<String> {
    let blocks = model.blocks().map(|block| BlockFigures::new(block, |_| Ok(None)));
    let blocks = blocks.collect::<df11::Result<Vec<_>>>()?;
    let total = figures::total(&blocks);
    let part = Part { model, folder: "", total, blocks, exponents: None };
    Ok(report::part_json(&part, source, tensors).to_string())
}

impl Inspect {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        self.check_outputs()?;
        let models = OpenOptions::new().open_all(&self.source)?;
        if self.picture.is_some() && models.is_pipeline() {
            let problem = "--picture draws one model, and this is a pipeline";
            let remedy = "name one of its components, or use --html";
            return Err(Error::parameter(problem, remedy).into());
        }
        let other =
            self.other.as_deref().map(|other| OpenOptions::new().open_all(other)).transpose()?;
        let found = self.find(&self.source, &models, session)?;
        // A form that nobody sees is not made: of many tensors it takes far more memory than they
        // do.
        let (mut text, mut json) = (String::new(), Value::Null);
        if session.wants_text() {
            text = report::text(&found, self.tensors, self.histogram);
        }
        if session.json {
            json = report::json(&found, self.tensors);
        }
        let mut answer = Answer { text, json };
        if let Some(path) = &self.picture {
            let title = self.source.file_name().unwrap_or_default().to_string_lossy();
            self.write("picture", path, &picture::draw(&found.parts[0], &title), &mut answer)?;
        }
        if let Some(path) = &self.html {
            let other = self.other.as_deref().zip(other.as_ref());
            let other = other.map(|(path, models)| self.find(path, models, session)).transpose()?;
            let all: Vec<_> = iter::once(&found).chain(&other).collect();
            self.write("html", path, &html::page(&all), &mut answer)?;
        }
        Ok(answer)
    }

    /// Looks into all components.
    fn find<'m>(
        &self,
        path: &'m Path,
        models: &'m Models,
        session: &Session,
    ) -> Result<Findings<'m>, Failure> {
        let examine = |component| self.threads.run(|| self.examine(component, session));
        let parts = models.components().iter().map(examine).collect::<Result<_, _>>()?;
        Ok(Findings { path, models, parts })
    }

    /// Writes a requested file, and says so in the document.
    fn write(
        &self,
        key: &str,
        path: &Path,
        content: &str,
        answer: &mut Answer,
    ) -> Result<(), Failure> {
        write_file(path, content.as_bytes(), self.force)?;
        let path = path.to_string_lossy();
        let line = format!("\n\n{key:9} {}", printable(&path));
        answer.text.push_str(&line);
        answer.json[key] = path.into();
        Ok(())
    }

    /// With `--force` a picture replaces a picture, and a page a page, and nothing else.
    fn check_outputs(&self) -> Result<(), Failure> {
        for (path, end) in [(&self.picture, "svg"), (&self.html, "html")] {
            let Some(path) = path else { continue };
            if path.extension().is_none_or(|extension| extension != end) {
                let problem =
                    format!("{} is not the name of an {} file", path.display(), end.to_uppercase());
                return Err(Error::parameter(problem, format!("end it in .{end}")).into());
            }
            if path.canonicalize().is_ok_and(|path| self.source.canonicalize().ok() == Some(path)) {
                let problem = format!("{} is the source", path.display());
                return Err(Error::parameter(problem, "choose another name for the output").into());
            }
        }
        Ok(())
    }

    fn decodes(&self, weight_bytes: u64) -> bool {
        let auto = weight_bytes <= AUTO_BYTES && self.entropy == When::Auto;
        let page = self.html.is_some() && self.entropy != When::Never;
        self.histogram || self.picture.is_some() || self.entropy == When::Always || page || auto
    }

    fn examine<'m>(
        &self,
        component: &'m Component<Model>,
        session: &Session,
    ) -> Result<Part<'m>, Failure> {
        let model = &component.model;
        let lengths = model.tensors().filter(has_weights).map(|tensor| 2 * tensor.elements());
        let weight_bytes = lengths.fold(0, u64::saturating_add);
        let mut exponents = self.decodes(weight_bytes).then(Histogram::default);
        let progress = session.progress();
        progress.begin(if exponents.is_some() { weight_bytes } else { 0 });
        progress.enter(Stage::Decode);
        let mut measure = |tensor: &Tensor<'m>| {
            if progress.is_cancelled() {
                return Err(Error::Cancelled);
            }
            let Some(sum) = exponents.as_mut().filter(|_| has_weights(tensor)) else {
                return Ok(None);
            };
            let histogram = histogram(tensor)?;
            sum.merge(&histogram);
            progress.advance(2 * tensor.elements());
            Ok(Some(histogram))
        };
        let blocks: Vec<_> = model
            .blocks()
            .map(|block| BlockFigures::new(block, &mut measure))
            .collect::<df11::Result<_>>()?;
        let (folder, total) = (&*component.folder, figures::total(&blocks));
        Ok(Part { model, folder, total, blocks, exponents })
    }
}
