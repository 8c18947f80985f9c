//! `df11 inspect`: what is in a container.

mod picture;
mod report;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use df11::{
    Error, Model, Models, Observer, OpenOptions, Stage, Tensor, huffman::Histogram, source::Component,
    write::write_file,
};
use serde_json::{Value, json};

use super::{
    Answer, Failure, Session,
    figures::{Figures, Row, has_weights, tensor_rows},
    session::Threads,
    sizes::OTHER_FILES,
    text::printable,
};

/// Weights are decoded without being asked for where they take a fraction of a second.
const AUTO_BYTES: u64 = 256 << 20;

const AFTER_HELP: &str = "\
Examples:
  df11 inspect Llama-3.1-8B.df11
  df11 inspect Llama-3.1-8B.df11 --entropy --histogram
  df11 inspect Llama-3.1-8B.df11 --picture llama.svg
  df11 inspect Llama-3.1-8B.df11 --tensors --json | jq '.blocks[0].tensors'";

/// Show what a container holds: blocks, tensors, bits, exponents
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub(super) struct Inspect {
    /// A container, or the folder of a model or a pipeline
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// List the tensors of each block
    #[arg(long)]
    tensors: bool,
    /// Measure the entropy of exponents, which decodes all weights; auto does it up to 256 MiB
    #[arg(
        long, value_enum, value_name = "WHEN", default_value_t = When::Auto, num_args = 0..=1,
        default_missing_value = "always", require_equals = true
    )]
    entropy: When,
    /// Show how often each exponent occurs (decodes all weights)
    #[arg(long)]
    histogram: bool,
    /// Draw exponents, and bits a weight by block, as SVG (decodes all weights)
    #[arg(long, value_name = "FILE.svg")]
    picture: Option<PathBuf>,
    /// Replace an earlier picture
    #[arg(long, requires = "picture")]
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

/// What was found out about a model.
struct Findings<'m> {
    model: &'m Model,
    total: Figures,
    blocks: Vec<Row>,
    /// The rows of each block's tensors.
    tensors: Vec<Vec<Row>>,
    /// Exponents of all weights, if they were decoded.
    exponents: Option<Histogram>,
}

impl Inspect {
    pub(super) fn run(&self, session: &Session) -> Result<Answer, Failure> {
        self.check_picture()?;
        let models = OpenOptions::new().open_all(&self.source)?;
        if self.picture.is_some() && models.is_pipeline() {
            let problem = "--picture draws one model, and this is a pipeline";
            return Err(Error::parameter(problem, "name a component of it").into());
        }
        let mut parts = Vec::new();
        for Component { folder, model, .. } in models.components() {
            parts.push((folder.as_str(), self.threads.run(|| self.examine(model, session))?));
        }
        // A form that nobody sees is not made: of many tensors it takes far more memory than they do.
        let (mut text, mut json) = (String::new(), Value::Null);
        if session.wants().text {
            text = self.text_of_all(&models, &parts);
        }
        if session.wants().json {
            json = self.json_of_all(&models, &parts);
        }
        if let Some(path) = &self.picture {
            let title = self.source.file_name().unwrap_or_default().to_string_lossy();
            write_file(path, picture::draw(&parts[0].1, &title).as_bytes(), self.force)?;
            text.push_str("\n\npicture   ");
            text.push_str(&printable(&path.display().to_string()));
            json["picture"] = path.to_string_lossy().into();
        }
        Ok(Answer { text, json })
    }

    /// Component by component, and their sum.
    fn text_of_all(&self, models: &Models, parts: &[(&str, Findings<'_>)]) -> String {
        if !models.is_pipeline() {
            return self.text(&parts[0].1);
        }
        let mut texts = Vec::new();
        for (folder, findings) in parts {
            let name = if folder.is_empty() { OTHER_FILES } else { folder };
            texts.push(format!("[{}]\n{}", printable(name), self.text(findings)));
        }
        texts.push(format!("[total]\n{}", report::totals(parts)));
        for folder in models.missing() {
            texts.push(format!("[{}]\nmissing   this component is not here", printable(folder)));
        }
        texts.join("\n\n")
    }

    fn json_of_all(&self, models: &Models, parts: &[(&str, Findings<'_>)]) -> Value {
        let of = |findings| report::json(findings, &self.source, self.tensors);
        if !models.is_pipeline() {
            return of(&parts[0].1);
        }
        let components: Vec<Value> = parts
            .iter()
            .map(|(folder, findings)| {
                let mut json = of(findings);
                json["component"] = json!(folder);
                json
            })
            .collect();
        json!({
            "command": "inspect",
            "source": self.source.to_string_lossy(),
            "complete": models.missing().is_empty()
                && parts.iter().all(|(_, findings)| findings.model.is_complete()),
            "missing_components": models.missing(),
            "container_bytes": report::stored_bytes(parts),
            "total": sum_of_all(parts).json(),
            "components": components,
        })
    }

    fn text(&self, findings: &Findings<'_>) -> String {
        let text = report::text(findings, self.tensors);
        match findings.exponents.as_ref().filter(|_| self.histogram) {
            Some(exponents) => format!("{text}\n\n{}", report::histogram(exponents)),
            None => text,
        }
    }

    /// A picture replaces a picture, if told to, and nothing else.
    fn check_picture(&self) -> Result<(), Failure> {
        match &self.picture {
            Some(path) if path.extension().is_none_or(|extension| extension != "svg") => {
                let problem = format!("{} is no name of an SVG file", path.display());
                Err(Error::parameter(problem, "end it in .svg").into())
            }
            Some(path)
                if path.canonicalize().is_ok_and(|path| self.source.canonicalize().ok() == Some(path)) =>
            {
                let problem = format!("{} is the source", path.display());
                Err(Error::parameter(problem, "choose another name for the picture").into())
            }
            _ => Ok(()),
        }
    }

    fn decodes(&self, weight_bytes: u64) -> bool {
        let auto = weight_bytes <= AUTO_BYTES && self.entropy == When::Auto;
        self.histogram || self.picture.is_some() || self.entropy == When::Always || auto
    }

    fn examine<'m>(&self, model: &'m Model, session: &Session) -> Result<Findings<'m>, Failure> {
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
            let Some(sum) = exponents.as_mut().filter(|_| has_weights(tensor)) else { return Ok(None) };
            let histogram = tensor.histogram()?;
            sum.merge(&histogram);
            progress.advance(2 * tensor.elements());
            Ok(Some(histogram))
        };
        let tensors: Vec<Vec<Row>> =
            model.blocks().map(|block| tensor_rows(block, &mut measure)).collect::<df11::Result<_>>()?;

        let blocks: Vec<Row> = model
            .blocks()
            .zip(&tensors)
            .map(|(block, rows)| Row { name: block.name().to_owned(), figures: sum_of(rows) })
            .collect();
        Ok(Findings { model, total: sum_of(&blocks), blocks, tensors, exponents })
    }
}

/// Figures of all components.
fn sum_of_all(parts: &[(&str, Findings<'_>)]) -> Figures {
    Figures::of(parts.iter().map(|(_, findings)| findings.total.clone()))
}

fn sum_of(rows: &[Row]) -> Figures {
    Figures::of(rows.iter().map(|row| row.figures.clone()))
}
