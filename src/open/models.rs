//! All models at a path: one, or the components of a compressed pipeline.
//!
//! `pipeline.df11` has no weights. It records the files of the pipeline that belong to no
//! component, and in its metadata it lists the components with their identities, so that none is
//! lost unnoticed.

use std::{collections::BTreeMap, path::Path};

use super::{Model, OpenOptions, containers};
use crate::{
    Error, Result,
    format::Directory,
    paths::{PIPELINE, check_path},
    source::Component,
};

/// The key of the metadata under which the components are listed: a JSON object of folders and
/// identities in hexadecimal digits.
const COMPONENTS: &str = "df11.components";

/// All models at a path.
#[derive(Debug)]
pub struct Models {
    components: Vec<Component<Model>>,
    missing: Vec<String>,
}

impl OpenOptions {
    /// Opens a container, the folder of a model, or the folder of a pipeline with all its
    /// components. A component that is not there is no error: see [`Models::missing`].
    ///
    /// # Errors
    /// As [`OpenOptions::open`], and [`Error::Parameter`] if a component is another model than
    /// the pipeline's container says.
    ///
    /// ```
    /// # fn main() -> df11::Result<()> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = df11::hazmat::demo::tiny_container(folder.path())?;
    /// let models = df11::OpenOptions::new().open_all(&path)?;
    /// models.check_complete()?;
    /// for component in models.components() {
    ///     println!("{}: {} blocks", component.folder, component.model.blocks().len());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn open_all(&self, path: impl AsRef<Path>) -> Result<Models> {
        let root = path.as_ref();
        let list = root.join(PIPELINE);
        if !list.is_file() {
            let alone = Component::new("", self.open(root)?);
            return Ok(Models { components: vec![alone], missing: Vec::new() });
        }
        let rest = Model::new(vec![self.shard(&list)?], Some(root.to_owned()))?;
        let listed = listed_components(rest.shards()[0].directory())
            .map_err(|error| error.in_file(&list))?
            .ok_or_else(|| {
                Error::corrupt("metadata", 0, "no components are listed").in_file(&list)
            })?;
        let (mut components, mut missing) = (Vec::new(), Vec::new());
        for (folder, identity) in &listed {
            let place = root.join(folder);
            if !place.is_dir() || containers(&place)?.is_empty() {
                missing.push(folder.clone());
                continue;
            }
            let model = self.open(&place)?;
            if model.identity().to_hex().as_str() != identity {
                let problem = format!("{} is another model than {PIPELINE} lists", place.display());
                return Err(Error::parameter(problem, "fetch the whole pipeline again"));
            }
            components.push(Component::new(folder, model));
        }
        components.push(Component::new("", rest.beside(listed.into_keys())));
        Ok(Models { components, missing })
    }
}

impl Models {
    /// The components that are there, ascending by folder, and the files that belong to none of
    /// them; or the one model.
    pub fn components(&self) -> &[Component<Model>] {
        &self.components
    }

    /// Folders of components that are not there, ascending.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Whether this is a pipeline.
    pub fn is_pipeline(&self) -> bool {
        self.components.len() > 1 || !self.missing.is_empty()
    }

    /// Refuses a pipeline that lacks components.
    ///
    /// # Errors
    /// [`Error::Parameter`].
    pub fn check_complete(&self) -> Result<()> {
        if self.missing.is_empty() {
            return Ok(());
        }
        let problem =
            format!("components of the pipeline are missing: {}", self.missing.join(", "));
        Err(Error::parameter(problem, "fetch the rest"))
    }

    /// The only model, for what takes no pipeline.
    ///
    /// # Errors
    /// [`Error::Parameter`] if this is one; `what` says who asks.
    pub fn single(mut self, what: &str) -> Result<Model> {
        match self.components.pop() {
            Some(component) if self.components.is_empty() && self.missing.is_empty() => {
                Ok(component.model)
            }
            _ => {
                let problem = format!("{what} takes one model, and this is a pipeline");
                Err(Error::parameter(problem, "name a component of it"))
            }
        }
    }
}

/// The value of the metadata that lists components, by their folders.
pub(crate) fn list_of_components(identities: &BTreeMap<String, String>) -> (String, String) {
    (COMPONENTS.to_owned(), serde_json::json!(identities).to_string())
}

/// Folders and identities that a directory lists, if it does.
///
/// # Errors
/// [`Error::Corrupt`] if they are no such list.
pub(crate) fn listed_components(directory: &Directory) -> Result<Option<BTreeMap<String, String>>> {
    let mut metadata = directory.metadata();
    let Some((_, list)) = metadata.find(|(key, _)| *key == COMPONENTS) else { return Ok(None) };
    let invalid =
        |problem: String| Error::corrupt("metadata", 0, format!("{COMPONENTS}: {problem}"));
    let listed: BTreeMap<String, String> =
        serde_json::from_str(list).map_err(|error| invalid(error.to_string()))?;
    match listed.keys().find(|folder| check_path(folder).is_err() || folder.contains('/')) {
        Some(folder) => Err(invalid(format!("{folder:?} is no name of a folder"))),
        None => Ok(Some(listed)),
    }
}
