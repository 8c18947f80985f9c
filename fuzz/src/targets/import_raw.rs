//! Any bytes as a folder with config.json and safetensors files: a typed error, or files that read
//! alike as a whole and in ranges, and hold what `import::judge` finds.

use crate::{
    bytes::Bytes,
    import::{Folder, judge},
};

/// Runs one input; panics if the property does not hold.
pub fn run(data: &[u8]) {
    // 32 bytes that choose ranges; config.json and the first file, each after its length; the
    // second file, if there is more.
    let mut bytes = Bytes(data);
    let ranges = bytes.take::<32>();
    let config = usize::from(bytes.u16());
    let config = bytes.run(config).to_vec();
    let first = usize::from(bytes.u16());
    let mut files = vec![("a.safetensors".to_owned(), bytes.run(first).to_vec())];
    if !bytes.is_empty() {
        files.push(("b.safetensors".to_owned(), bytes.0.to_vec()));
    }
    let folder = Folder { config: Some(config).filter(|config| !config.is_empty()), files };
    if let Ok(imported) = folder.import(&mut Bytes(&ranges)) {
        judge::check(&folder, &imported);
    }
}
