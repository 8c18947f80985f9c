//! Parts shared by the verbs that make containers: their arguments, and their output.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use df11::{
    CompressOptions, Error, Layout, Model, Observer, Report, Sources,
    hazmat::{
        Destination, Loading, Located, Shard,
        constants::{GAP_DEFAULT_BYTES_PER_THREAD, GAP_DEFAULT_THREADS_PER_BLOCK},
        gap::GapGeometry,
        is_far, locate, shown,
    },
    is_compressed,
    source::{Component, FetchedSource, WantedFiles},
};
use serde_json::json;

use super::{
    answer::{Answer, Failure},
    reports::{Reports, Task},
    session::{Session, Threads, add_removed, tidy},
    text::{self, printable},
};

/// Which files of a source folder are compressed.
#[derive(Args, Clone, Default)]
pub(super) struct Selection {
    /// Compress this variant of the weights: fp16 stands for model.fp16.safetensors
    #[arg(long, value_name = "NAME", conflicts_with = "all_files")]
    variant: Option<String>,
    /// Keep every file that is not hidden, in one container: also weights that the index does not
    /// name (stored once where tensors are equal) and weights in other formats
    #[arg(long)]
    all_files: bool,
}

/// A source on this machine.
pub(super) struct LocalSource {
    pub(super) place: Located,
    /// A copy from a store, which is removed with this.
    _fetched: Option<FetchedSource>,
}

impl Selection {
    /// Finds a source, and fetches it if it is in a store. None if it is compressed already.
    pub(super) fn find(
        &self,
        source: &Path,
        headers_alone: bool,
        session: &Session,
    ) -> Result<Option<LocalSource>, Failure> {
        let Some(name) = source.to_str().filter(|_| is_far(source)) else {
            let place = locate(source)?;
            let is_compressed = is_compressed(&place.path)?;
            return Ok((!is_compressed).then_some(LocalSource { place, _fetched: None }));
        };
        let wanted = match &self.variant {
            _ if headers_alone => WantedFiles::Headers,
            _ if self.all_files => WantedFiles::AllFiles,
            variant => WantedFiles::Variant(variant.as_deref()),
        };
        let progress = session.progress();
        let fetched = FetchedSource::fetch(name, wanted, &progress);
        drop(progress);
        let Some(fetched) = fetched.map_err(Failure::Other)? else { return Ok(None) };
        fetched.notes().for_each(|note| session.notice(note));
        let place = Located {
            path: fetched.path().to_owned(),
            repository: fetched.repository().map(str::to_owned),
            by_name: true,
        };
        Ok(Some(LocalSource { place, _fetched: Some(fetched) }))
    }

    /// Opens a source, for an output if one is named. Returns the output too.
    pub(super) fn open(
        &self,
        place: &Located,
        out: Option<&PathBuf>,
    ) -> Result<(Sources, PathBuf), Failure> {
        let default = || default_out(place, self.all_files);
        let out = out.cloned().map_or_else(default, Ok)?;
        check_out(&out)?;
        if self.all_files && out.extension().is_none_or(|extension| extension != "df11") {
            let problem = "--all-files writes one container: loaders would read all of a folder's, \
                           also weights that the index does not name";
            return Err(Error::parameter(problem, "give it a name with -o NAME.df11").into());
        }
        let source = if self.all_files {
            Sources::open_all_files(&place.path)
        } else {
            Sources::open(&place.path, self.variant.as_deref())
        };
        Ok((source.map_err(Failure::Other)?, out))
    }

    /// The option that keeps the files that were left out, as the end of a sentence.
    pub(super) fn remedy(&self, source: &Sources) -> &'static str {
        let can_keep = !self.all_files && !source.is_pipeline();
        if can_keep { "; --all-files keeps every file, in one container" } else { "" }
    }
}

/// One run that writes containers.
pub(super) struct WriteRun<'a> {
    pub(super) task: Task<'a>,
    pub(super) destination: Destination,
    pub(super) threads: Threads,
    pub(super) session: &'a Session,
    /// The end of the sentence about files that are not in them.
    pub(super) remedy: &'a str,
}

/// How containers are written.
#[derive(Args)]
pub(super) struct Writing {
    #[command(flatten)]
    pub(super) layout: LayoutArgs,
    /// Decode the output and compare all hashes before it gets its name (the default)
    #[arg(long, overrides_with = "no_verify")]
    verify: bool,
    /// Skip that comparison
    #[arg(long, overrides_with = "verify")]
    no_verify: bool,
    /// Replace an earlier output of df11
    #[arg(long)]
    pub(super) force: bool,
}

impl Writing {
    pub(super) fn options(&self) -> Result<CompressOptions, Failure> {
        let options = CompressOptions::new().layout(self.layout.layout()?);
        Ok(options.overwrite(self.force).verify(!self.no_verify))
    }

    /// Writes containers of models, and answers with their sizes.
    pub(super) fn run<M>(
        &self,
        run: WriteRun<'_>,
        models: &[Component<M>],
        write: impl FnOnce(&Path, &dyn Observer) -> Result<Vec<Report>, Failure> + Send,
    ) -> Result<Answer, Failure> {
        let WriteRun { task, destination, threads, session, remedy } = run;
        let out = destination.path().to_owned();
        let removed = tidy(&out);
        let progress = session.progress();
        let sizes = Reports::new(models, threads.run(|| write(&out, &progress))?);
        destination.publish(&progress)?;
        drop(progress);
        let seconds = task.start.elapsed().as_secs_f64();
        let text = format!(
            "{}\n{}\n  time      {}, {}{}",
            text::path(task.out),
            sizes.text(),
            text::duration(seconds),
            text::rate(sizes.total.source_bytes, seconds),
            if self.no_verify { ", not verified" } else { ", verified bit for bit" }
        );
        let mut json = sizes.json(&task, seconds);
        json["written"] = json!(true);
        json["verified"] = json!(!self.no_verify);
        let mut answer = Answer { text, json };
        add_removed(&mut answer, &removed);
        add_loading(&mut answer, task.out);
        if let Some(lost) = sizes.lost() {
            let sentence = format!("df11 decompress will not bring back {lost}{remedy}");
            session.insist(&sentence);
            answer.text.push_str("\n\n");
            answer.text.push_str(&sentence);
        }
        Ok(answer)
    }
}

#[derive(Args, Clone, Copy, Default)]
pub(super) struct LayoutArgs {
    /// Layout of compressed BF16 tensors [default: tile, or gap if one of its options is given]
    #[arg(long, value_enum, hide_default_value = true)]
    layout: Option<LayoutName>,
    /// Advanced, gap layout: bitstream bytes per thread, 8, 16, 32 or 64 [default: 32]
    #[arg(long, value_name = "N")]
    bytes_per_thread: Option<u32>,
    /// Advanced, gap layout: threads per block, 64, 128, 256, 512 or 1024 [default: 128]
    #[arg(long, value_name = "N")]
    threads_per_block: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum LayoutName {
    /// Tiles of 32 rows and 256 columns, each decoded alone; the smallest, and the fastest on GPUs
    Tile,
    /// One bitstream with a gap array, as in the DFloat11 paper
    Gap,
    /// No compression, for any tensor
    Raw,
}

impl LayoutArgs {
    pub(super) fn layout(self) -> Result<Layout, Failure> {
        let geometry = self.bytes_per_thread.is_some() || self.threads_per_block.is_some();
        let default = if geometry { LayoutName::Gap } else { LayoutName::Tile };
        let name = self.layout.unwrap_or(default);
        if geometry && name != LayoutName::Gap {
            let problem = "only the gap layout has bytes per thread and threads per block";
            return Err(Error::parameter(problem, "leave them out, or add --layout gap").into());
        }
        let geometry = GapGeometry::new(
            self.bytes_per_thread.unwrap_or(GAP_DEFAULT_BYTES_PER_THREAD),
            self.threads_per_block.unwrap_or(GAP_DEFAULT_THREADS_PER_BLOCK),
        )?;
        Ok(match name {
            LayoutName::Gap => Layout::Gap(geometry),
            LayoutName::Tile => Layout::Tile,
            LayoutName::Raw => Layout::Raw,
        })
    }
}

/// Ends an answer with the way to load what was written.
pub(super) fn add_loading(answer: &mut Answer, out: &Path) {
    if is_far(out) {
        let name = json!(shown(out).to_string_lossy());
        let python = format!("import df11\nmodel = df11.open({name})");
        answer.text.push_str("\n\nLoad it with Python:");
        answer.text.extend(python.lines().map(|line| format!("\n  {line}")));
        answer.json["load"] = json!(python);
        return;
    }
    let Loading { python, .. } = Loading::of(out);
    answer.text.push_str("\n\nLoad it with Python:");
    answer.text.extend(python.lines().map(|line| format!("\n  {}", printable(line))));
    if out.is_file() && has_config(out) {
        let mut folder = out.with_extension("").into_os_string();
        folder.push("-df11");
        let (out, folder) = (text::argument(out), text::argument(Path::new(&folder)));
        let hint = format!("\nTransformers and vLLM load folders: df11 convert {out} -o {folder}");
        answer.text.push_str(&hint);
    }
    answer.json["load"] = json!(python);
}

/// Whether a container holds what transformers asks of a folder.
fn has_config(container: &Path) -> bool {
    df11::open(container).is_ok_and(|model| {
        model.shards().iter().map(Shard::directory).any(|directory| {
            directory.files.iter().any(|file| directory.file_path(file) == "config.json")
        })
    })
}

/// The folder `SRC-df11` beside a source that is a folder, or the file `SRC.df11` if one file is
/// wanted; the file `NAME.df11` beside a file `NAME.safetensors`. For a repository named as on the
/// Hub and for the name of a store, in the current folder.
fn default_out(place: &Located, one_file: bool) -> Result<PathBuf, Failure> {
    let source = place.path.as_path();
    let of_folder = if one_file { ".df11" } else { "-df11" };
    if let Some(name) = place.repository.as_ref().filter(|_| place.by_name && source.is_dir()) {
        // In the current folder, and not in the cache.
        let name = name.rsplit('/').next().unwrap_or(name);
        return Ok(PathBuf::from(format!("{name}{of_folder}")));
    }
    let named = named(source)?;
    let (name, end) =
        if named.is_dir() { (named.file_name(), of_folder) } else { (named.file_stem(), ".df11") };
    let mut name = name
        .ok_or_else(|| {
            Error::parameter(format!("{} has no name", source.display()), "name the output with -o")
        })?
        .to_owned();
    name.push(end);
    // A copy from a store lies in a temporary folder.
    Ok(if place.by_name { name.into() } else { named.with_file_name(name) })
}

/// The same path, or the one that it stands for if it ends in `.` or `..` and so has no name.
pub(super) fn named(path: &Path) -> Result<PathBuf, Error> {
    if path.file_name().is_some() {
        return Ok(path.to_owned());
    }
    path.canonicalize().map_err(|error| Error::io("opening", path, error))
}

/// Refuses the name of a file of weights: a folder of containers would get it.
pub(super) fn check_out(out: &Path) -> Result<(), Failure> {
    if out.extension().is_none_or(|extension| extension != "safetensors") {
        return Ok(());
    }
    let problem = format!("{} would be a folder of containers", out.display());
    Err(Error::parameter(problem, "end the name of a file in .df11").into())
}

/// A source that needs no compression.
pub(super) fn compressed_already(path: &Path, remedy: &str) -> Failure {
    Error::parameter(format!("{} is already compressed", shown(path).display()), remedy).into()
}

/// Bytes of the containers of a model.
pub(super) fn container_bytes(model: &Model) -> u64 {
    model.shards().iter().map(Shard::file_length).fold(0, u64::saturating_add)
}
