//! Checkpoints of the official DFloat11 package, sound and hostile, and what importing them must
//! give.

pub mod draft;
pub mod encode;
pub mod judge;

use std::{fs, path::Path};

use df11::{Error, Result, Source, source::WeightsFile};

use crate::{bytes::Bytes, model, samples::memory_folder};

/// A checkpoint as files: their names and bytes.
#[derive(Clone, Debug, Default)]
pub struct Folder {
    /// The contents of config.json, if there is one.
    pub config: Option<Vec<u8>>,
    /// The safetensors files.
    pub files: Vec<(String, Vec<u8>)>,
}

/// An imported folder: each file that a container would hold, with its bytes if they can be
/// decoded.
pub type Imported = Vec<(WeightsFile, Option<Vec<u8>>)>;

impl Folder {
    /// Reads a folder of this repository.
    pub fn read(folder: &Path) -> Self {
        let names = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
        let names = names.map(|entry| entry.file_name().into_string().expect("a name"));
        let mut files: Vec<_> = names
            .filter(|name| name.ends_with(".safetensors"))
            .map(|name| (name.clone(), fs::read(folder.join(name)).expect("a file")))
            .collect();
        files.sort();
        Self { config: fs::read(folder.join("config.json")).ok(), files }
    }

    /// Imports the folder, and reads all files as a whole and in ranges that the fuzzer's bytes
    /// name. A file that reads as a whole reads alike in ranges; everything else is a typed error.
    ///
    /// # Errors
    /// The importer refuses the folder, always with a typed error.
    pub fn import(&self, bytes: &mut Bytes<'_>) -> Result<Imported> {
        let folder = memory_folder();
        for (name, content) in &self.files {
            fs::write(folder.path().join(name), content).expect("a temporary file");
        }
        if let Some(config) = &self.config {
            fs::write(folder.path().join("config.json"), config).expect("a temporary file");
        }
        let source = Source::open(folder.path()).inspect_err(assert_typed)?;
        assert!(source.notes.iter().all(|note| !note.is_empty()));
        let read = |file: WeightsFile| {
            let whole = read(&file, 0, file.length as usize);
            for _ in 0..4 {
                let [a, b] = [bytes.u32(), bytes.u32()].map(|cut| u64::from(cut) % file.length);
                let (start, end) = (a.min(b), a.max(b) + 1);
                let part = read(&file, start, (end - start) as usize);
                if let Some(whole) = &whole {
                    let same = part.as_deref() == Some(&whole[start as usize..end as usize]);
                    assert!(same, "{start}..{end} reads otherwise");
                }
            }
            let behind = file.read_exact_at(file.length, &mut [0]);
            assert!(matches!(behind, Err(Error::Io { .. })), "{behind:?}");
            (file, whole)
        };
        Ok(source.weights.into_iter().map(read).collect())
    }
}

fn read(file: &WeightsFile, start: u64, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0xAA; length];
    file.read_exact_at(start, &mut bytes).inspect_err(assert_typed).ok()?;
    Some(bytes)
}

/// A folder is the fault of who made it: its bytes are wrong, or it is not what it is taken for.
/// Nothing is the system's.
fn assert_typed(error: &Error) {
    if !matches!(error, Error::Parameter { .. }) {
        model::assert_typed(error);
    }
}
