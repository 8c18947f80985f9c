//! Writes the containers of `open_structured` as seeds of `open_raw`: `cargo run --example seeds FOLDER`.

use std::{env, fs, path::PathBuf};

use df11_fuzz::samples::CONTAINERS;

fn main() {
    let folder = PathBuf::from(env::args_os().nth(1).expect("the folder to write to"));
    for (index, container) in CONTAINERS.iter().enumerate() {
        fs::write(folder.join(format!("container-{index}")), container).expect("a writable folder");
    }
}
