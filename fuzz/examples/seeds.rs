//! Writes seeds into `FOLDER/open_raw`: the containers that `open_structured` changes; and into
//! `FOLDER/import_raw`: the checkpoints that `import_structured` changes, as far as they fit.
//! `cargo run --example seeds FOLDER`.

use std::{env, fs, path::Path};

use df11_fuzz::{
    bytes::{Bytes, Random},
    import::{
        Folder,
        draft::{Draft, FIXTURES},
    },
    samples::CONTAINERS,
};

/// Checkpoints that are made up.
const CHECKPOINTS: u64 = 64;

fn main() {
    let folder = env::args_os().nth(1).expect("the folder to write to");
    let write = |target: &str, name: String, bytes: &[u8]| {
        let folder = Path::new(&folder).join(target);
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join(name), bytes).expect("a writable folder");
    };
    for (index, container) in CONTAINERS.iter().enumerate() {
        write("open_raw", format!("container-{index}"), container);
    }
    let made_up = (1..=CHECKPOINTS).map(|seed| {
        let mut random = Random(seed);
        let choices: Vec<u8> = (0..256).map(|_| random.draw() as u8).collect();
        Draft::new(&mut Bytes(&choices)).0.render(&mut Bytes(&[]))
    });
    let [plain, llama] = &*FIXTURES;
    let head = Folder { config: llama.config.clone(), files: llama.files[..2].to_vec() };
    for (index, folder) in [plain.clone(), head].into_iter().chain(made_up).enumerate() {
        if let Some(bytes) = raw(&folder) {
            write("import_raw", format!("checkpoint-{index}"), &bytes);
        }
    }
}

/// The input of `import_raw` for a folder of at most two files.
fn raw(folder: &Folder) -> Option<Vec<u8>> {
    let (first, rest) = folder.files.split_first()?;
    let config = folder.config.as_deref().unwrap_or_default();
    let lengths = [config.len(), first.1.len()].map(|length| u16::try_from(length).ok());
    let mut bytes: Vec<u8> = (0..32u8).map(|index| index.wrapping_mul(37)).collect();
    bytes.extend(lengths[0]?.to_le_bytes());
    bytes.extend(config);
    bytes.extend(lengths[1]?.to_le_bytes());
    bytes.extend(&first.1);
    for (_, content) in rest {
        bytes.extend(content);
    }
    (rest.len() < 2).then_some(bytes)
}
