//! Several models in one folder: the components of a pipeline, as diffusers saves one.
//!
//! ```text
//! model_index.json           by which the folder is known; belongs to no component
//! text_encoder/              a component: a folder with weights, and a model by itself
//! unet/                      another one
//! scheduler/, tokenizer/     without weights: their files belong to no component
//! ```

use std::{collections::BTreeSet, mem, path::Path};

use super::{
    folder::{Source, little_to_code, open_files},
    hub_cache, index,
    walk::{Found, LeftOut, check_installed, walk},
};
use crate::{
    Error, Result,
    paths::{MODEL_INDEX, is_safetensors},
};

/// All models at a path: one, or the components of a pipeline.
#[derive(Debug)]
pub struct Sources {
    components: Vec<Component<Source>>,
}

/// A model of several in one folder.
#[derive(Debug)]
#[non_exhaustive]
pub struct Component<M> {
    /// Its folder, relative to that of the pipeline; empty for a model that is alone, and for the
    /// files of a pipeline that belong to no component, which come last and have no weights.
    pub folder: String,
    /// The model.
    pub model: M,
}

impl<M> Component<M> {
    pub(crate) fn new(folder: impl Into<String>, model: M) -> Self {
        Self { folder: folder.into(), model }
    }

    /// A sentence about the model, with its folder before it.
    pub fn sentence(&self, text: &str) -> String {
        if self.folder.is_empty() { text.to_owned() } else { format!("{}: {text}", self.folder) }
    }

    /// The path of a file of the model, relative to the folder of all models.
    pub fn path_of(&self, path: &str) -> String {
        if self.folder.is_empty() { path.to_owned() } else { format!("{}/{path}", self.folder) }
    }
}

impl Sources {
    /// Opens a safetensors file, the folder of a model, or the folder of a pipeline: one with a
    /// `model_index.json` and with safetensors files in subfolders. Each of these is a component,
    /// and opened as by [`Source::open_variant`]; all other files are one source without weights.
    /// Weights that lie beside the components are left out: no component loads them.
    ///
    /// # Errors
    /// Like [`Source::open_variant`], with the component's name.
    pub fn open(path: &Path, variant: Option<&str>) -> Result<Self> {
        if !path.is_dir() {
            return Source::open_variant(path, variant).map(Self::single);
        }
        let (root, note) = hub_cache::snapshot(path)?;
        let (mut found, mut left_out) = walk(&root)?;
        index::check_variant(&found, variant)?;
        let folders = components(&found);
        if folders.is_empty() {
            let source = Source::of_files(&root, found, left_out, variant)?;
            return Ok(Self::single(source.noted(note)));
        }
        let mut open = |folder: &String| {
            let place = root.join(folder);
            let found = take_inside(&mut found, folder, |file| &mut file.path);
            let left_out = take_inside(&mut left_out, folder, |file| &mut file.path);
            let source = check_installed(&place)
                .and_then(|()| Source::of_files(&place, found, left_out, variant));
            let mut component =
                Component::new(folder, source.map_err(|error| named(error, folder))?);
            let notes = mem::take(&mut component.model.notes);
            component.model.notes = notes.iter().map(|note| component.sentence(note)).collect();
            Ok(component)
        };
        let mut components = folders.iter().map(&mut open).collect::<Result<Vec<_>>>()?;
        let mut rest = rest(found, left_out)?.noted(note);
        let weights = components.iter().flat_map(|component| &component.model.weights);
        rest.notes.extend(little_to_code(weights));
        components.push(Component::new("", rest));
        Ok(Self { components })
    }

    /// Like [`Sources::open`], with every file of a model's folder that is not hidden, for a single
    /// container: from a folder, loaders read only the weights that an index names. A safetensors
    /// file with new tensor names becomes one of the weights files; everything else that
    /// [`Sources::open`] leaves out becomes a side file, at its full size.
    ///
    /// # Errors
    /// Like [`Sources::open`], and [`Error::Parameter`] for a pipeline.
    pub fn open_all_files(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Self::open(path, None);
        }
        let (root, note) = hub_cache::snapshot(path)?;
        let (found, left_out) = walk(&root)?;
        if !components(&found).is_empty() {
            let problem = "all files of a folder go into one container, and a pipeline is several \
                           models";
            let remedy = "compress each component's folder by itself, or without --all-files";
            return Err(Error::parameter(problem, remedy));
        }
        let mut source = Source::of_files(&root, found.clone(), left_out, None)?;
        source.take_left_out(found)?;
        Ok(Self::single(source.noted(note)))
    }

    fn single(source: Source) -> Self {
        Self { components: vec![Component::new("", source)] }
    }

    /// The components, ascending by folder, and what belongs to none of them; or the one model.
    pub fn components(&self) -> &[Component<Source>] {
        &self.components
    }

    /// Whether there are several models.
    pub const fn is_pipeline(&self) -> bool {
        self.components.len() > 1
    }

    /// Notes for the user on how the weights were read, a sentence each.
    pub fn notes(&self) -> impl Iterator<Item = &str> {
        self.components
            .iter()
            .flat_map(|component| component.model.notes.iter().map(String::as_str))
    }
}

/// The folders of a pipeline that hold weights; none if this is no pipeline.
fn components(found: &[Found]) -> BTreeSet<String> {
    if found.binary_search_by(|file| file.path.as_str().cmp(MODEL_INDEX)).is_err() {
        return BTreeSet::new();
    }
    let weights = found.iter().filter(|file| is_safetensors(&file.path));
    weights.filter_map(|file| Some(file.path.split_once('/')?.0.to_owned())).collect()
}

/// Takes what lies in a folder out of a list, with its path in that folder.
fn take_inside<T>(all: &mut Vec<T>, folder: &str, path: fn(&mut T) -> &mut String) -> Vec<T> {
    let mut inside = Vec::new();
    for mut one in mem::take(all) {
        let path = path(&mut one);
        if path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/')) {
            path.drain(..=folder.len());
            inside.push(one);
        } else {
            all.push(one);
        }
    }
    inside
}

/// The files that belong to no component, of which they were taken out.
fn rest(found: Vec<Found>, left_out: Vec<LeftOut>) -> Result<Source> {
    let is_weights = |file: &Found| is_safetensors(&file.path) || index::is_index(&file.path);
    let (weights, side): (Vec<_>, Vec<_>) = found.into_iter().partition(is_weights);
    let mut source = open_files(side, left_out, None)?;
    source.left_out.extend(weights.into_iter().map(|file| {
        let reason =
            "weights of no component; compress them by themselves if they are needed".to_owned();
        LeftOut { path: file.path, reason }
    }));
    source.left_out.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(source)
}

/// An error with the component in which it is, if there are several.
pub(crate) fn named(error: Error, folder: &str) -> Error {
    match error {
        error if folder.is_empty() => error,
        Error::Parameter { problem, remedy } => {
            Error::parameter(format!("component {folder}: {problem}"), remedy)
        }
        error => error.within(format_args!("component {folder}")),
    }
}
